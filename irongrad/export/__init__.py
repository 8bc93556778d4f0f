"""Take a trained model out of an artifact, in the forms that other tools read. Needs no torch."""
