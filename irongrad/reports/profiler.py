"""Profile an entry point with IREE's own tools: iree-benchmark-module runs it, iree-profile reads what it wrote."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from irongrad.analysis.kernel_names import recorded_name
from irongrad.analysis.machine import cpu_name, threads
from irongrad.analysis.other_work import OtherWork
from irongrad.analysis.records import Analysis, Launch, Source, TargetRecord
from irongrad.analysis.totals import executed, kernel_name, source_of_launch
from irongrad.reports.profile import FORMAT_VERSION, KernelTime, Profile, Span
from irongrad.runtime.arrays import Array
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import ToolchainError, UserError
from irongrad.runtime.manifest import EntryPoint, Manifest, TargetSpec

# The data that IREE's CPU drivers give, and those that drivers of other devices give.
_OF_HOST = "queue-events,host-execution"
_OF_DEVICE = "queue-events,device-queue-events,dispatch-events"

# IREE 3.13.0's drivers keep 4,096 events, and drop what comes after. Each flush makes room.
_FLUSH = "--device_profiling_flush_interval_ms=1"

# How often a call is timed without profiling, each time as the mean of several calls.
_REPETITIONS = 5

_WITHOUT_THREADS = "with threads the record may end before the last call does: add --device local-sync"

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class _Event:
    """A launch that IREE recorded: the name of its kernel, and when it ran, in seconds."""

    kernel: str
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """What to profile.

    Attributes:
        directory: the artifact.
        manifest: its manifest.
        entry: the entry point.
        target: the target.
        device: an IREE device URI.
        inputs: the inputs of the entry point by name, as it takes them.
        hypers: hyperparameters by name; all others have their defaults.
        base: the base file, if not where it was when the artifact was compiled.
        steps: how many calls to measure.
    """

    directory: Path
    manifest: Manifest
    entry: EntryPoint
    target: TargetSpec
    device: str
    inputs: Mapping[str, Array]
    hypers: Mapping[str, float]
    base: Path | None
    steps: int


def profile(run: Run, analysis: Analysis) -> Profile:
    """Run an entry point without profiling and with it, each in a process of its own.

    The state goes on from call to call, from the artifact's initial state.

    Raises:
        ToolchainError: one of IREE's tools failed, or its drivers dropped events.
        UserError: one of IREE's tools is missing, or the device's driver cannot be profiled.
    """
    record = analysis.targets[run.target.name]
    others = OtherWork()
    with tempfile.TemporaryDirectory() as folder:
        command = _command(run, Path(folder))
        each = max(1, run.steps // _REPETITIONS)
        plain = _seconds([*command, f"--benchmark_min_time={each}x", f"--benchmark_repetitions={_REPETITIONS}"])
        bundle = Path(folder) / "run.ireeprof"
        mode = _OF_HOST if run.device.startswith("local") else _OF_DEVICE
        recorded = (f"--device_profiling_mode={mode}", f"--device_profiling_output={bundle}", _FLUSH)
        _run([*command, f"--benchmark_min_time={run.steps + 1}x", *recorded])
        share = others.share()
        events = _events(bundle)
    steps = _by_step(events, run)
    middle = _median_step(steps)
    return Profile(
        FORMAT_VERSION,
        run.manifest.digest,
        run.entry.symbol,
        run.target.name,
        run.device,
        cpu_name(),
        threads(),
        len(steps),
        plain,
        statistics.median(_periods(steps)),
        statistics.median(_active(step) for step in steps),
        statistics.median(_length(step) - _active(step) for step in steps),
        tuple(_kernel_times(steps, record, run.entry.symbol)),
        tuple(_spans(middle, record, run.entry.symbol)),
        share,
    )


def _command(run: Run, folder: Path) -> list[str]:
    files = {name: _write(folder, name, array) for name, array in run.inputs.items()}
    command = run_module(
        run.manifest,
        run.directory,
        run.entry.symbol,
        inputs=files,
        hypers=run.hypers,
        base=run.base,
        target=run.target.name,
        device=run.device,
    )
    return [_tool("iree-benchmark-module"), *command[1:], "--benchmark_format=json"]


def _write(folder: Path, name: str, array: Array) -> Path:
    """Write an input to a file whose name does not depend on what the user calls it; bfloat16 has no .npy format."""
    number = len(list(folder.iterdir()))
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        path = folder / f"{number}.bin"
        path.write_bytes(array.tobytes())
        return path
    path = folder / f"{number}.npy"
    np.save(path, array)
    return path


def _tool(name: str) -> str:
    """The path of a tool of IREE's runtime: that of this environment, else the one on the path.

    Raises:
        UserError: there is none.
    """
    own = Path(sysconfig.get_path("scripts")) / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise UserError(f"{name} is missing; it comes with the package iree-base-runtime")
    return found


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = result.stderr.strip().splitlines()
        first = next((line for line in said if re.search(r"[A-Z_]+;|error|Error", line)), said[-1] if said else "")
        wayout = f"; {_WITHOUT_THREADS}" if "DATA_LOSS" in first else ""
        raise ToolchainError(f"{Path(command[0]).name} failed with status {result.returncode}: {first}{wayout}")
    return result.stdout


def _seconds(command: Sequence[str]) -> float:
    """The least mean time of a call of all repetitions, as iree-benchmark-module measures it."""
    found = [row for row in json.loads(_run(command))["benchmarks"] if row["run_type"] == "iteration"]
    return min(float(row["real_time"]) * _UNITS[row["time_unit"]] for row in found)


def _events(bundle: Path) -> list[_Event]:
    """The launches that IREE recorded, in the order in which they began."""
    text = _run([_tool("iree-profile"), "export", "--format=ireeperf-jsonl", str(bundle)])
    rows = [json.loads(line) for line in text.splitlines()]
    dropped = sum(int(row.get("dropped_records", 0)) for row in rows if row["record_type"] == "diagnostic")
    if dropped:
        raise ToolchainError(f"IREE's driver dropped {dropped} events of the profile. Profile fewer steps")
    found = [event for row in rows if (event := _event(row)) is not None]
    return sorted(found, key=lambda event: event.start)


def _event(row: Mapping[str, Any]) -> _Event | None:
    if row["record_type"] == "host_execution_event" and row["op"] == "dispatch":
        return _Event(recorded_name(row["key"]), 1e-9 * row["start_host_time_ns"], 1e-9 * row["end_host_time_ns"])
    if row["record_type"] == "dispatch_event" and row["valid"] and row["derived_time_available"]:
        start = 1e-9 * row["start_driver_host_cpu_time_ns"]
        return _Event(recorded_name(row["key"]), start, start + 1e-9 * row["duration_ns"])
    return None


def _by_step(events: Sequence[_Event], run: Run) -> list[list[_Event]]:
    """The launches of each call; those of the first call, which warms up caches, are left out.

    A call may return when the loss is there, before the update has ended. IREE 3.13.0 ends its record when the last
    call returns, so launches of that call are missing, and iree-profile may not be able to read the record.
    """
    calls = run.steps + 1
    each, counts = len(events) // calls, Counter(event.kernel for event in events)
    if not each or any(count % calls for count in counts.values()):
        wayout = _WITHOUT_THREADS if run.device == "local-task" else f"{run.device} may be none"
        raise UserError(
            f"{run.entry.symbol} launched {len(events)} kernels in {calls} calls, and some not as often in each. A "
            f"profile needs all launches, on a device that IREE can profile; {wayout}"
        )
    return [list(events[i : i + each]) for i in range(each, len(events), each)]


def _periods(steps: Sequence[Sequence[_Event]]) -> list[float]:
    """The times from the first launch of a call to that of the next; of a single call, its length."""
    return [after[0].start - before[0].start for before, after in pairwise(steps)] or [_length(steps[0])]


def _length(step: Sequence[_Event]) -> float:
    return max(event.end for event in step) - step[0].start


def _active(step: Sequence[_Event]) -> float:
    """The time in which at least one kernel runs."""
    total, until = 0.0, step[0].start
    for event in step:
        total += max(0.0, event.end - max(until, event.start))
        until = max(until, event.end)
    return total


def _median_step(steps: Sequence[Sequence[_Event]]) -> Sequence[_Event]:
    return sorted(steps, key=_length)[len(steps) // 2]


def _kernel_times(steps: Sequence[Sequence[_Event]], record: TargetRecord, entry: str) -> list[KernelTime]:
    times: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        sums: dict[str, float] = defaultdict(float)
        for event in step:
            sums[event.kernel] += event.end - event.start
        for name, seconds in sums.items():
            times[name].append(seconds)
    counts = {name: sum(event.kernel == name for event in steps[0]) for name in times}
    found = [
        _kernel_time(name, counts[name], statistics.median(seconds), record, entry) for name, seconds in times.items()
    ]
    return sorted(found, key=lambda kernel: kernel.seconds, reverse=True)


def _kernel_time(name: str, launches: int, seconds: float, record: TargetRecord, entry: str) -> KernelTime:
    kernel = next((k for k in record.kernels if k.name == name), None)
    own = [e for e in executed(record, entry) if kernel_name(record, e.launch) == name]
    nbytes = sum(e.times * (e.launch.read + e.launch.written) for e in own)
    operations = None if kernel is None or kernel.operations is None else kernel.operations * launches
    of_launches = [source_of_launch(record, e.launch) for e in own]
    of_kernel = [record.sources[n] for n in kernel.sources] if kernel is not None else []
    sources = [source for source in (*of_launches, *of_kernel) if source is not None]
    modules = tuple(dict.fromkeys(s.module for s in sources if s.module))
    lines = tuple(dict.fromkeys(s.line for s in sources if s.line))
    return KernelTime(name, launches, seconds, operations, nbytes, modules, lines)


def _spans(step: Sequence[_Event], record: TargetRecord, entry: str) -> list[Span]:
    """The launches of a step. The launches of one kernel run in program order, which tells where each comes from."""
    waiting: dict[str, list[Launch]] = defaultdict(list)
    for each in executed(record, entry):
        waiting[kernel_name(record, each.launch)] += [each.launch] * each.times
    spans = []
    for event in step:
        launches = waiting[event.kernel]
        source = source_of_launch(record, launches.pop(0)) if launches else None
        about = source or Source("", "", "", "", "")
        start, seconds = event.start - step[0].start, event.end - event.start
        spans.append(Span(event.kernel, about.module, about.line, about.phase, start, seconds))
    return spans


def gaps(spans: Sequence[Span]) -> list[tuple[float, Span, Span]]:
    """The times between two launches in which nothing runs, in seconds, with the launches, the longest first."""
    found, last = [], spans[0]
    for before, after in pairwise(spans):
        last = max(last, before, key=lambda span: span.start + span.seconds)
        if (idle := after.start - (last.start + last.seconds)) > 0:
            found.append((idle, last, after))
    return sorted(found, key=lambda gap: gap[0], reverse=True)
