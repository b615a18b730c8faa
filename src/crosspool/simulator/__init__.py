"""Discrete events that drive the real control plane; only durations are modelled. Pure CPU."""
