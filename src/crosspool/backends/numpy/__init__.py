"""The reference backend: plain arrays, float32 math, no torch. It runs the demo and CI and judges the others."""
