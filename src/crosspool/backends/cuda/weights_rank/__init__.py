"""The weights pool's worker and its half of steps and chunks, by graphs or by the resident server."""
