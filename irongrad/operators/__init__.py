"""Rewrites of PyTorch's operators before import: decompositions, random numbers and legalisation."""
