"""TrainStep -> CapturedStep: export the model and the loss with torch.export."""
