"""Passes over the step graph, one file each."""
