"""Sizes that vary: dimensions, buckets, relations, and expressions of them."""
