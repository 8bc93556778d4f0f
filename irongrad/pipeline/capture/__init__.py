"""TrainStep -> CapturedStep: what torch.export sees of the model and the loss."""
