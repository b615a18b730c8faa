"""A deployment: from settings to ranks, configurations, prepared models and a running engine."""
