"""IREE's statistics of a compiled program, from its pass `iree-stream-dump-statistics{output-format=csv}`.

The file has a row of sums over the whole module, followed by the commands of each function's submissions. The counts
are static: a command in a loop counts once. compiler/src/iree/compiler/Dialect/Stream/Transforms/DumpStatistics.cpp in
IREE's sources writes the file.
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
        dispatches: the number of kernel launches in all functions.
        kernels: the number of distinct kernels; equal kernels, for example of several buckets, are shared.
        copies: the number of buffer copies in all functions.
        transient_bytes: the bytes allocated for intermediate values, summed over all functions.
        by_function: the number of dispatches of each function that has any.
        transients: the peak memory for intermediate values, in bytes, by function.
        traffic: the bytes that kernels read and write, by function.
        work: the operations and the number of all kernel launches, counted for every iteration of loops.
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
    """Read IREE's statistics file; `transients`, `traffic` and `work` come from the module itself."""
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
