"""StepGraph -> ImportedStep: torch-mlir takes the graphs to linalg or StableHLO."""
