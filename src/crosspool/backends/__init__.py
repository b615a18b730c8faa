"""Backends execute the two halves of a step: `numpy` on any CPU (the reference), `cuda` on GPUs."""
