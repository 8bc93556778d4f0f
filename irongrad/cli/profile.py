"""`irongrad profile`: measure the kernels of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from irongrad.analysis.file import read_analysis
from irongrad.analysis.machine import Machine
from irongrad.analysis.other_work import said
from irongrad.cli.common import (
    base_option,
    console,
    device_option,
    directory_argument,
    json_option,
    numbers,
    print_json,
    refuse_unwritable,
    target_option,
)
from irongrad.reports.peaks import machine
from irongrad.reports.perfetto import slices_of, write_trace
from irongrad.reports.profile import Profile, write_profile
from irongrad.reports.profiler import Run, gaps, profile
from irongrad.reports.summary import entries_of
from irongrad.runtime import load
from irongrad.runtime.errors import UserError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.manifest import TICKET, EntryPoint, Manifest, golden_file
from irongrad.runtime.manifest_file import read_manifest
from irongrad.training.inputs import check_samples
from irongrad.training.numpy_files import read_npz

if TYPE_CHECKING:
    from irongrad.runtime.arrays import Array

_SHOWN = 10

# The fewest columns of a terminal with a column of its own for where a kernel comes from.
_WIDE = 110


@click.command(
    epilog="""\b
Example:
  irongrad profile build/gpt -o profile.json --trace profile.trace.json
  irongrad profile build/gpt --entry predict --data batch.npz
"""
)
@directory_argument
@click.option("--data", type=click.Path(path_type=Path), help="An .npz file with a batch; the example's by default.")
@click.option("--entry", help="The entry point to profile; the training step by default.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A hyperparameter; repeatable.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True, help="How many calls to measure.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the profile to this JSON file.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a trace for ui.perfetto.dev to this file.")
@base_option
@target_option
@device_option
@json_option
def command(
    directory: Path,
    data: Path | None,
    entry: str | None,
    settings: tuple[str, ...],
    steps: int,
    output: Path | None,
    trace: Path | None,
    base: Path | None,
    target: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Measure the time of every kernel of a step of the artifact in DIRECTORY, and of the gaps between them.

    IREE's own tools run the step and record it. Nothing else should run on the machine.
    """
    for path, option in ((output, "--output"), (trace, "--trace")):
        if path is not None:
            refuse_unwritable(path, option)
    manifest = read_manifest(directory)
    if manifest.placement is not None:
        raise UserError(
            f"{directory} is compiled with place, and a profile is of one module: compile the step without place"
        )
    analysis = read_analysis(directory, manifest)
    hypers = numbers(settings, "--set")
    with load(directory, target=target, device=device, base=base) as session:
        chosen, uri = session.target, device or session.target.device
        point = _entry(manifest, entries_of(analysis, chosen.name), entry)
        inputs = _inputs(directory, manifest, point, data)
        session.call(point.symbol, {**inputs, **hypers})  # refuses what does not fit, in the session's words
    found = profile(Run(directory, manifest, point, chosen, uri, inputs, hypers, base, steps), analysis)
    if output is not None:
        write_profile(found, output)
    if trace is not None:
        write_trace(slices_of(found), trace, f"{directory.name}: one {point.symbol} on {uri}")
    peaks = machine() if chosen.architecture else None
    if as_json:
        print_json(as_dict(found, peaks))
        return
    _print(found, peaks)
    for path in (output, trace):
        if path is not None:
            console.print(f"-> {path}", highlight=False)


def as_dict(found: Profile, peaks: Machine | None) -> dict[str, Any]:
    """The JSON that `--json` prints."""
    kernels = [
        {**asdict(k), "least_seconds": k.least(peaks) if peaks else None, "reason": k.reason(peaks) if peaks else None}
        for k in found.kernels
    ]
    about = {"overhead": found.overhead, "host_seconds": found.host_seconds}
    return {**asdict(found), **about, "machine_peaks": asdict(peaks) if peaks else None, "kernels": kernels}


def _entry(manifest: Manifest, computing: Sequence[str], asked: str | None) -> EntryPoint:
    """The entry point `asked`, or else the first of those that compute something."""
    name = asked or next(iter(computing), "")
    point = manifest.exported(name)
    if point is None or name not in computing:
        what = "there is no entry point" if point is None else "no kernels run in the entry point"
        raise UserError(f"{what} {name!r}; those that compute something are {', '.join(computing)}")
    if point.name == "apply_step":
        raise UserError(f"a profile begins with the initial state, and {name} needs gradients: profile train_step")
    if point.is_stacked:
        raise UserError(f"{name} runs several steps in one call; profile {name.replace(point.name, 'train_step')}")
    return point


def _inputs(directory: Path, manifest: Manifest, entry: EntryPoint, data: Path | None) -> dict[str, Array]:
    """A batch from the file `data`, its first samples; the example's without a file."""
    if data is None:
        path = directory / golden_file(entry.step)
        if not path.exists():
            raise UserError(f"{directory} has no {path.name} with example inputs; give --data")
        golden = read_golden(path)
        if any(entry.key(spec.name) not in golden.inputs for spec in entry.inputs if spec.name != TICKET):
            raise UserError(f"{path.name} has no example of what {entry.symbol} takes; give --data")
        return golden.inputs_of(entry)
    arrays = read_npz(data, [spec.name for spec in entry.inputs])
    check_samples(arrays, entry, str(data))
    wanted = {spec.name: spec.shape[0] for spec in entry.inputs}
    for name, size in wanted.items():
        if isinstance(size, int) and len(arrays[name]) < size:
            raise UserError(f"{data}: {name} has {len(arrays[name])} samples, a step takes {size}")
    return {n: a[: wanted[n]] if isinstance(wanted[n], int) else a for n, a in arrays.items()}


def _print(found: Profile, peaks: Machine | None) -> None:
    console.print(f"one {found.entry} on {found.device}, {found.machine}", style="bold", highlight=False)
    console.print(
        f"{_ms(found.seconds)} ms a call, {_ms(found.profiled_seconds)} ms with profiling ({found.overhead:+.0%}), in "
        f"{found.steps} calls",
        highlight=False,
    )
    if found.overhead < 0:
        console.print("calls with profiling were faster, so the machine's speed changed between the two measurements")
    if busy := said(found.others):
        console.print(f"{busy}: the times may be too long", highlight=False)
    console.print(
        f"kernels run for {_ms(found.active_seconds)} ms, nothing runs between them for {_ms(found.gap_seconds)} ms, "
        f"the host takes {_ms(found.host_seconds)} ms before and after",
        highlight=False,
    )
    if peaks is None:
        _print_kernels(f"the {_SHOWN} longest kernels", found.kernels[:_SHOWN], found, None)
        return
    _print_kernels(f"the {_SHOWN} kernels farthest from the roofline", found.farthest(peaks, _SHOWN), found, peaks)
    if longest := gaps(found.spans)[:3]:
        text = "; ".join(f"{1e6 * idle:,.0f} µs before {after.kernel}" for idle, _, after in longest)
        console.print(f"the longest gaps: {text}", highlight=False)


def _print_kernels(title: str, kernels: Any, found: Profile, peaks: Machine | None) -> None:
    whole = sum(k.seconds for k in found.kernels)
    table = Table(title, "launches", "ms", "", box=None)
    if peaks is not None:
        table.add_column("least, ms", justify="right")
        table.add_column("bound by")
    is_wide = console.width >= _WIDE
    if is_wide:
        table.add_column("where", overflow="fold")
    for column in (table.columns[1], table.columns[2], table.columns[3]):
        column.justify = "right"
    table.columns[0].overflow = "fold"
    for k in kernels:
        cells = [k.name, str(k.launches), _ms(k.seconds), f"{k.seconds / whole:.0%}"]
        limits = [_ms(k.least(peaks)), k.reason(peaks)] if peaks is not None else []
        where = _where(k.modules, k.lines)
        if is_wide:
            limits.append(where)
        elif where:
            cells[0] += f"\n  {where}"
        table.add_row(*cells, *limits)
    console.print()
    console.print(table)


def _where(modules: tuple[str, ...], lines: tuple[str, ...]) -> str:
    shown = ", ".join(modules[:2]) + (f" and {len(modules) - 2} more" if len(modules) > 2 else "")
    return f"{shown} ({lines[0]})" if shown and lines else shown or ", ".join(lines[:1])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}"
