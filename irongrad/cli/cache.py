"""`irongrad cache`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from irongrad.cache.store import SIZE_VARIABLE, Entry, Store, default_directory, size_limit
from irongrad.cli.common import console, json_option, print_json
from irongrad.runtime.byte_sizes import readable


@click.command(
    epilog="""\b
Example:
  irongrad cache
  irongrad cache clear
  IRONGRAD_CACHE_DIR=/shared/irongrad IRONGRAD_CACHE_SIZE=50GiB irongrad compile step.py:make_step -o build/net
"""
)
@click.argument("action", type=click.Choice(["show", "clear"]), default="show")
@click.option("--path", "only_path", is_flag=True, help="Print the directory alone.")
@json_option
def command(action: str, only_path: bool, as_json: bool) -> None:
    """Show what the compile cache holds, or clear it.

    Its directory is IRONGRAD_CACHE_DIR, or the user's cache directory; its size is IRONGRAD_CACHE_SIZE, 10GiB unless
    given. A size of 0 turns it off.
    """
    directory, limit = default_directory(), size_limit()
    if only_path:
        print(directory)
        return
    store = Store(directory, limit)
    removed = store.clear() if action == "clear" else None
    entries = store.entries()
    kinds = {kind: _summary([e for e in entries if e.kind == kind]) for kind in sorted({e.kind for e in entries})}
    if as_json:
        print_json({"directory": directory, "limit": limit, "kinds": kinds, "removed": removed})
        return
    console.print(f"directory: {directory}", highlight=False, soft_wrap=True)
    if removed is not None:
        console.print(f"removed {removed} entries", highlight=False)
    _print(kinds)
    state = f"of {readable(limit)}" if limit else f"kept; it is turned off by {SIZE_VARIABLE}"
    console.print(f"{readable(sum(e.size for e in entries))} {state}", highlight=False)


def _summary(entries: Sequence[Entry]) -> dict[str, Any]:
    return {"entries": len(entries), "bytes": sum(e.size for e in entries), "last_used": max(e.used for e in entries)}


def _print(kinds: dict[str, dict[str, Any]]) -> None:
    table = Table("kind", "entries", "size", "last used", box=None)
    for kind, about in kinds.items():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(about["last_used"]))
        table.add_row(kind, str(about["entries"]), readable(about["bytes"]), used)
    console.print(table)
