"""What is read off a compiled module: kernels, their operations and bytes, and peak memory."""
