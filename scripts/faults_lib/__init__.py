"""What `scripts/faults` is made of."""
