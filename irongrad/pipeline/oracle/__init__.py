"""The expected values of a step, from eager PyTorch in float64."""
