"""StepGraph -> PlacedStep: cut every entry point into segments, each for the device of one part of the model."""
