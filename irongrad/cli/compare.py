"""`irongrad compare`: what IronGrad, Inductor and XLA make of one training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from irongrad.cli.common import (
    console,
    error_console,
    json_option,
    precision_option,
    print_json,
    step_argument,
    step_option,
)
from irongrad.cli.compile import load_one_step
from irongrad.runtime.byte_sizes import readable

if TYPE_CHECKING:
    from irongrad.peers.comparison import Column, Comparison, Difference
    from irongrad.peers.kernels import Totals

_PEERS = ("irongrad", "inductor", "xla")
_SHOWN = 12
_UNKNOWN = "unknown"


@click.command(
    epilog="""\b
Example:
  irongrad compare examples/mlp.py:make_step
  irongrad compare examples/resnet18.py:make_step --with inductor --json
"""
)
@step_argument
@step_option
@precision_option
@click.option("--with", "others", multiple=True, type=click.Choice(_PEERS[1:]), help="Only this one. Repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="How often each is timed.")
@click.option("--one-thread", is_flag=True, help="Give each compiler's step one thread.")
@json_option
def command(
    source: str,
    step_name: str | None,
    precision: str | None,
    others: tuple[str, ...],
    rounds: int,
    one_thread: bool,
    as_json: bool,
) -> None:
    """Compare IronGrad with torch.compile (Inductor) and XLA, on the step that FUNCTION in FILE returns.

    Each compiles in a process of its own, with empty caches. Then their steps are timed in turn. Nothing else should
    run on the machine; else --one-thread helps, with the CPU time of a step.
    """
    from irongrad.peers.comparison import compare, differences
    from irongrad.peers.torch_steps import check_comparable

    load = partial(load_one_step, source, step_name, precision=precision)
    check_comparable(load())
    with error_console.status("") as status:
        peers = (_PEERS[0], *(others or _PEERS[1:]))
        found = compare(load, peers, one_thread=one_thread, rounds=rounds, say=status.update)
    rows = differences(found)
    if as_json:
        print_json(as_dict(found, rows))
        return
    _print(found)
    _print_differences(found, rows)


def as_dict(found: Comparison, rows: list[Difference]) -> dict[str, Any]:
    """The JSON that `--json` prints."""
    columns = [{**asdict(c), "totals": _totals(c.compiled.totals)} for c in found.columns]
    layers = [{"phase": r.phase, "layer": r.layer, **{p: _totals(t) for p, t in r.totals.items()}} for r in rows]
    return {**asdict(found), "columns": columns, "layers": layers}


def _totals(totals: Totals) -> dict[str, Any]:
    return {**asdict(totals), "count": totals.count, "bytes": totals.nbytes}


_ROWS: tuple[tuple[str, Callable[[Column], str]], ...] = (
    ("kernels that it generated", lambda c: f"{c.compiled.totals.generated:,}"),
    ("calls of libraries", lambda c: f"{c.compiled.totals.library:,}"),
    ("bytes read", lambda c: readable(c.compiled.totals.read)),
    ("bytes written", lambda c: readable(c.compiled.totals.written)),
    ("intermediates in memory", lambda c: f"{c.compiled.totals.intermediates:,}"),
    ("their bytes", lambda c: readable(c.compiled.totals.intermediate_bytes)),
    ("most of them at a time", lambda c: readable(c.compiled.peak_bytes)),
    ("MFLOP", lambda c: f"{c.compiled.flops / 1e6:,.1f}"),
    ("of", lambda c: c.compiled.counted),
    ("step, least ms", lambda c: f"{1e3 * c.least_seconds:,.3f}"),
    ("step, median ms", lambda c: f"{1e3 * c.median_seconds:,.3f}"),
    ("step, least ms of CPU time", lambda c: f"{1e3 * c.cpu_seconds:,.3f}"),
    ("step, of IronGrad's", lambda c: "" if c.ratio is None else f"{c.ratio:.2f}"),
    ("to the first step, s", lambda c: f"{c.compiled.compile_seconds:.1f}"),
    ("loss of the first step", lambda c: f"{c.compiled.loss:.6g}"),
)


def _print(found: Comparison) -> None:
    console.print(
        f"one training step on {found.machine}, {found.threads} threads; load average {found.load[0]:.1f} to "
        f"{found.load[1]:.1f}",
        style="bold",
        highlight=False,
    )
    table = Table("", *(f"{c.compiled.peer} {c.compiled.version}" for c in found.columns), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, cell in _ROWS:
        table.add_row(label, *(cell(c) for c in found.columns))
    console.print(table)
    for name, why in found.missing.items():
        console.print(f"{name}: {why}", style="yellow", highlight=False, soft_wrap=True)


def _print_differences(found: Comparison, rows: list[Difference]) -> None:
    peers = [c.compiled.peer for c in found.columns]
    table = Table("phase", "layers", *peers, box=None)
    table.columns[1].overflow = "fold"
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows[:_SHOWN]:
        cells = [_cell(row.totals.get(p)) for p in peers]
        table.add_row(row.phase or _UNKNOWN, row.layer or _UNKNOWN, *cells)
    console.print()
    console.print("kernels, and the bytes that they read and write, where they differ most", highlight=False)
    console.print(table)


def _cell(totals: Totals | None) -> str:
    return f"{totals.count:,}, {readable(totals.nbytes)}" if totals is not None else ""
