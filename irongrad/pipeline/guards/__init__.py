"""Checks of the values of a call: the range of each index, and the functions that check it."""
