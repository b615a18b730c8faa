"""What a step is and in which order a worker takes ready segments. Shared by engine, workers and simulator."""
