"""The sources that locations of a module name."""

from __future__ import annotations

import re
from typing import Any

from irongrad.analysis.records import Source

# A location's name. MLIR prints a file in quotes, too, with its line behind it. It escapes bytes as two hexadecimal
# digits.
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"(?!:\d)')
_ESCAPED = re.compile(r"\\([0-9A-F]{2})")


def sources_of(operation: Any) -> list[Source]:
    """The sources in the location of an operation, which the importer wrote; several if MLIR fused operations."""
    names = _NAME.findall(str(operation.location))
    found = (Source.of(_plain(name)) for name in dict.fromkeys(names))
    return [source for source in found if source is not None]


def _plain(name: str) -> str:
    """`name` without MLIR's escapes, which stand for the bytes of its UTF-8."""
    bytes_ = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), name.replace("\\\\", "\\5C"))
    return bytes_.encode("latin-1", "replace").decode(errors="replace") if bytes_ != name else name
