"""FFN weights: slices, placement, loading."""
