"""exl3kit: from a recipe to a verified vLLM deployment of an EXL3-quantised model."""

__version__ = "0.1.0"
