"""The command line: `irongrad VERB`, one thin file per verb."""
