"""Passes over IREE's module between its phases, one file each."""
