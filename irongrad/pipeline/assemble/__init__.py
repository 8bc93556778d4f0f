"""ImportedStep -> AssembledModule: adds state, guards, buckets and entry points to the functions."""
