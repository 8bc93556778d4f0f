"""Where this package lies, and its version: what other rooms would otherwise import `irongrad` itself for."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"

# The folder `irongrad`, with the sources of every room in it.
PACKAGE = Path(__file__).parent.parent
