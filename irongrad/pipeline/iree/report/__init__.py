"""Reports on a compiled module: its kernels, their operations and memory traffic, and its peak memory."""
