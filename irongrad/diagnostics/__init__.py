"""Errors that name the user's line and the way out."""
