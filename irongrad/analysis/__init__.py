"""What a compiled step does, as the compiler recorded it: operators, kernels, passes, memory, and their sums."""
