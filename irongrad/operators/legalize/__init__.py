"""Graphs rewritten to the operators, dtypes and values that the importer takes."""
