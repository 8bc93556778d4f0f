"""Rewrites of a graph to the operators, dtypes and values that the importer accepts."""
