"""Find the first pass that changes the numbers."""
