"""AssembledModule -> .vmfb: IREE's phases with our passes between them."""
