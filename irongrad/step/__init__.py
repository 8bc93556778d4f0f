"""The compiler's input from the user: `TrainStep`, its checks, and its checkpoints."""
