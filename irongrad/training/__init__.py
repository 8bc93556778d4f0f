"""Training from the command line: the data that it reads. Needs no torch."""
