"""Varying sizes: named dimensions, buckets, constraints on sizes, and size expressions."""
