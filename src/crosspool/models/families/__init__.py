"""One file per family: config to spec, and the names of its tensors."""
