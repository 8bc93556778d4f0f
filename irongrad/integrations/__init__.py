"""Bridges to other tools. Each needs its tool, which is imported on first use."""
