"""This package's location and version, so that other modules need not import `irongrad` itself for them."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"

# The folder `irongrad`, which holds all sources of the package.
PACKAGE = Path(__file__).parent.parent
