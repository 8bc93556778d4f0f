"""Checks of the values of inputs: the range of each index, and the functions that check it."""
