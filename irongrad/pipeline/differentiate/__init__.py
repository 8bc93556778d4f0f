"""CapturedStep -> JointStep: forward and backward as one graph, for each bucket."""
