"""Small tables of HTML, as notebooks show objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_MOST = 20


def notebook_table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """A table of HTML with every text escaped; it ends after 20 rows, and then says how many are left out."""
    rows = list(rows)
    body = [_row("td", row) for row in rows[:_MOST]]
    if len(rows) > _MOST:
        body.append(_row("td", [f"and {len(rows) - _MOST:,} more"]))
    head = f"<thead>{_row('th', header)}</thead>" if header else ""
    return f"<table><caption>{escape(title)}</caption>{head}<tbody>{''.join(body)}</tbody></table>"


def _row(cell: str, values: Sequence[object]) -> str:
    cells = "".join(f"<{cell} style='text-align: left'>{escape(str(value))}</{cell}>" for value in values)
    return f"<tr>{cells}</tr>"
