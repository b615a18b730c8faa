"""Offline planning: how much KV memory the models need together, where everything goes, and why."""
