"""What PyTorch's operators become before import."""
