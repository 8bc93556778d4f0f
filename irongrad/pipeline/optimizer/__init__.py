"""JointStep -> StepGraph: the traced update of the real optimizer."""
