"""The IR between stages: `StepGraph`, its nodes, dtypes and purity."""
