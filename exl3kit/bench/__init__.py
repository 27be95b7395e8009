"""Measuring a served model: observations that prove themselves, campaigns of them, and what follows."""
