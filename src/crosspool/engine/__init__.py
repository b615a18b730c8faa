"""Queues, admission, batching, and the engine that wires them to a cluster."""
