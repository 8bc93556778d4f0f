"""Which pass first changes the numbers."""
