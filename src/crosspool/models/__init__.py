"""Models as data: specs, families, canonical tensors."""
