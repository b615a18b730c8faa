"""Named ranks and what joins them: workers in threads or processes, their channels, supervision and recovery."""
