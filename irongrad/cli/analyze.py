"""`irongrad analyze`: the work and memory traffic of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from irongrad.analysis.machine import Machine
from irongrad.analysis.other_work import said
from irongrad.analysis.totals import COPY, Work
from irongrad.cli.common import console, directory_argument, json_option, print_json, refuse_unwritable
from irongrad.reports.amounts import amount
from irongrad.reports.model_explorer import write_graph
from irongrad.reports.peaks import is_of_cpu, machine
from irongrad.reports.placed import read_record
from irongrad.reports.summary import Summary, entries_of, summary_of
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest_file import read_manifest

GROUPS = ("phases", "operators", "modules", "lines", "kernels", "kernel_modules")
_SHOWN = ("phases", "modules", "operators", "kernels")

# The fewest columns of a terminal that shows every column of a table, and leaves room for names.
_WIDE = 100


@click.command(
    epilog="""\b
Example:
  irongrad analyze build/gpt
  irongrad analyze build/gpt --entry predict --by lines --top 0
"""
)
@directory_argument
@click.option("--entry", help="The entry point to analyze; the training step by default.")
@click.option("--target", help="Which of the artifact's targets; the first by default.")
@click.option("--by", "groups", multiple=True, type=click.Choice(GROUPS), help="Only these tables. Repeatable.")
@click.option("--top", type=click.IntRange(0), default=10, show_default=True, help="Rows of a table; 0 for all.")
@click.option("--graph", type=click.Path(path_type=Path), help="Write the captured step for Model Explorer (JSON).")
@json_option
def command(
    directory: Path,
    entry: str | None,
    target: str | None,
    groups: tuple[str, ...],
    top: int,
    graph: Path | None,
    as_json: bool,
) -> None:
    """Show what a step of the artifact in DIRECTORY computes, and what it moves through memory.

    Operators are counted as captured, kernels as compiled. A step of `train_steps` is that of `train_step`.
    """
    if graph is not None:
        refuse_unwritable(graph, "--graph")
    manifest = read_manifest(directory)
    analysis = read_record(directory, manifest)
    chosen = target or next(iter(analysis.targets))
    known = entries_of(analysis, chosen)
    if not known:
        raise UserError(f"{directory} has no entry point that computes something")
    summary = summary_of(analysis, chosen, entry or known[0])
    if graph is not None:
        write_graph(analysis, directory.resolve().name, graph)
    peaks = machine() if is_of_cpu(manifest, chosen) else None
    if as_json:
        print_json(as_dict(summary, peaks))
        return
    _print_totals(summary, peaks)
    for group in groups or _SHOWN:
        if rows := getattr(summary, group):
            _print_group(group, rows, summary, peaks, top)


def as_dict(summary: Summary, peaks: Machine | None) -> dict[str, Any]:
    """The JSON that `--json` prints."""
    fields = {name: [_row(work, peaks) for work in getattr(summary, name)] for name in GROUPS}
    totals = {"captured": _row(summary.captured, peaks), "compiled": _row(summary.compiled, peaks)}
    about = {"entry": summary.entry, "target": summary.target, "machine": asdict(peaks) if peaks else None}
    return {**about, **totals, **fields}


def _row(work: Work, peaks: Machine | None) -> dict[str, Any]:
    least = peaks.seconds(work.flops or 0, work.nbytes) if peaks else None
    return {**asdict(work), "intensity": work.intensity, "least_seconds": least}


def _print_totals(summary: Summary, peaks: Machine | None) -> None:
    console.print(f"one step of {summary.entry} on {summary.target}", style="bold", highlight=False)
    captured, compiled = summary.captured, summary.compiled
    kernels = sum(work.name != COPY for work in summary.kernels)
    if captured.count:
        console.print(
            f"captured: {captured.count:,} operators, {amount(captured.flops, 'FLOP')} in products and convolutions, "
            f"{readable(captured.nbytes)} read and written if each operator ran alone",
            highlight=False,
        )
    console.print(
        f"compiled: {compiled.count:,} launches of {kernels:,} kernels, {amount(compiled.flops, 'OP')} of "
        f"any kind, {readable(compiled.nbytes)} read and written, {_intensity(compiled)} operations a byte",
        highlight=False,
    )
    if compiled.flops is None:
        console.print("kernels of any size count no operations, and only the bytes of tensors of fixed sizes")
    if peaks is not None:
        least = sum(peaks.seconds(work.flops or 0, work.nbytes) for work in summary.kernels)
        console.print(
            f"least time on this machine: {1e3 * least:,.2f} ms, each kernel at {peaks.flops / 1e9:,.0f} GFLOP/s or "
            f"with all its bytes from memory at {peaks.bandwidth / 1e9:,.1f} GB/s. What stays in a cache is faster",
            highlight=False,
        )
        if busy := said(peaks.others):
            console.print(f"these peaks may be too low, {busy}: 'irongrad machine --again' measures them anew")


def _print_group(name: str, rows: Sequence[Work], summary: Summary, peaks: Machine | None, top: int) -> None:
    of_kernels = name.startswith("kernel")
    whole = summary.compiled if of_kernels else summary.captured
    title = {"kernel_modules": "modules, as compiled"}.get(name, name)
    is_wide = console.width >= _WIDE
    table = Table(title, box=None)
    table.columns[0].overflow = "fold"
    numbers = ("count", "operations" if of_kernels else "FLOP", "", "bytes", "", "a byte")
    for column in numbers if is_wide else filter(None, numbers[:-1]):
        table.add_column(column, justify="right")
    if peaks is not None:
        table.add_column("least, ms", justify="right")
        table.add_column("bound by")
    shown = rows[: top or None]
    for work in shown:
        shares = _share(work.flops, whole.flops), _share(work.nbytes, whole.nbytes)
        cells = [work.name, f"{work.count:,}", amount(work.flops), readable(work.nbytes)]
        if is_wide:
            cells = [*cells[:-1], shares[0], cells[-1], shares[1], _intensity(work)]
        table.add_row(*cells, *(_bound(work, peaks) if peaks is not None else ()))
    console.print()
    console.print(table)
    if len(shown) < len(rows):
        console.print(f"and {len(rows) - len(shown):,} more; --top 0 shows all", style="dim", highlight=False)


def _bound(work: Work, peaks: Machine) -> tuple[str, str]:
    operations, nbytes = work.flops or 0, work.nbytes
    return f"{1e3 * peaks.seconds(operations, nbytes):,.3f}", peaks.bound(operations, nbytes)


def _share(part: int | None, whole: int | None) -> str:
    return f"{part / whole:.0%}" if part is not None and whole else ""


def _intensity(work: Work) -> str:
    return "unknown" if work.intensity is None else f"{work.intensity:,.1f}"
