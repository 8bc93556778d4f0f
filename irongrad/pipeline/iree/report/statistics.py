"""What IREE says about the program that it makes, from its pass `iree-stream-dump-statistics{output-format=csv}`.

The file has a row of sums over the whole module, and then the commands of each of its functions' submissions, static
counts: what stands in a loop counts once. compiler/src/iree/compiler/Dialect/Stream/Transforms/DumpStatistics.cpp in
IREE's sources writes it.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from irongrad.pipeline.iree.report.kernel_operations import Work

STATISTICS = "statistics.csv"

_FUNCTION = re.compile(r"> util\.\w+(?: @(\S+))? > ")


@dataclass(frozen=True)
class Statistics:
    """Static counts of a compiled module.

    Attributes:
        dispatches: kernel launches, in all functions.
        kernels: of which they are; equal ones, of several buckets say, are shared.
        copies: copies of buffers, in all functions.
        transient_bytes: memory set aside for intermediate values, summed over all functions.
        by_function: the dispatches of each function that has any.
        transients: the most memory for intermediate values at once, by function.
        traffic: how many bytes the kernels of each function read and write.
        work: what all kernel launches compute, and how many they are, loops run through.
    """

    dispatches: int
    kernels: int
    copies: int
    transient_bytes: int
    by_function: dict[str, int]
    transients: dict[str, int]
    traffic: dict[str, int]
    work: Work


def read_statistics(file: Path, transients: dict[str, int], traffic: dict[str, int], work: Work) -> Statistics:
    """Read what IREE wrote; `transients`, `traffic` and `work` are from the module itself."""
    lines = [line for line in file.read_text().splitlines() if line]
    start = next(i for i, line in enumerate(lines) if not line.startswith(";"))
    (total,) = csv.DictReader(lines[start : start + 2])
    by_function: Counter[str] = Counter()
    function = ""
    for line in lines[start + 2 :]:
        if line.startswith(";"):
            found = _FUNCTION.search(line)
            function = (found[1] or "initializer") if found else function
        elif line.split(",")[1] == '"dispatch"':
            by_function[function] += 1
    sums = {name: int(value) for name, value in total.items()}
    counts = sums["Dispatches"], sums["Executables"], sums["Copies"], sums["Transient Size"]
    return Statistics(*counts, dict(by_function), transients, traffic, work)
