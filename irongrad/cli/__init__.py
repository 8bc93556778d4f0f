"""The command line: `irongrad VERB`, one thin file a verb."""
