"""ImportedStep -> AssembledModule: state, guards, buckets and entry points around the functions."""
