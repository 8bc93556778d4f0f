"""A model of the memory of a step: which values are in memory, when, and what recomputing them costs."""
