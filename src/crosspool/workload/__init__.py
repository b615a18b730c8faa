"""Requests over time: recorded traces, arrivals and lengths. Planner, simulator and bench share it."""
