"""The picture in docs/memory.md shows the figures of its tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_point_of_the_picture_is_a_row_of_a_table():
    lines = (DOCS / "memory.md").read_text().splitlines()
    for row in json.loads((DOCS / "memory.json").read_text()):
        megabytes = f"{row['compiler'] / 1e6:.1f}"
        found = rf"\| (?:[^|]+ )?\| {row['budget'].replace('%', ' %')} \|.*\b{megabytes}\b.*\| {row['ratio']:.2f} \|"
        assert any(re.match(found, line) for line in lines), row
