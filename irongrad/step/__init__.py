"""What the user hands over: `TrainStep`, its checks, and its checkpoints."""
