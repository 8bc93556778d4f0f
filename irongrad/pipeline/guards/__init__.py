"""Checks of the values of inputs: which indices are allowed, and where the module refuses others."""
