"""Weights of a frozen base stored in 4, 8 or 16 bits, and models and files that come with such weights."""
