"""Memory of training over a quantised base: bytes on disk, and the resident set of a process that trains.

    python benchmarks/quantised.py FLOAT32 QUANTISED... --data build/news.npz

The first artifact has the same step over a base in float32. Each artifact trains in a process of its own. A process
grows from the import of the runtime to the end of its last step. What it grows less than the process of the first
artifact is what quantisation saves: activations, adapters and the memory of kernels are the same for all.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

_STEPS = 6


def resident() -> tuple[int, int]:
    """The resident set of this process in bytes, now and at its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return found["VmRSS"], found["VmHWM"]


def measure(artifact: str, data: str) -> dict[str, float]:
    """Train a few steps in this process; the bytes by which it grew, and the last loss."""
    from irongrad.runtime import load

    with np.load(data) as file:
        arrays = {name: file[name] for name in file}
    before, _ = resident()
    with load(artifact) as session:
        rows = next(s.shape[0] for s in session.entry("train_step").inputs)
        seconds = math.inf
        for i in range(_STEPS):
            start = time.perf_counter()
            loss = session.train_step(**{name: a[i * rows : (i + 1) * rows] for name, a in arrays.items()})
            seconds = min(seconds, time.perf_counter() - start)
        frozen = [s for s in session.manifest.state if s.frozen]
        (target,) = session.manifest.targets
        sizes = {s.name: math.prod(s.shape) * np.dtype(_NUMPY.get(s.dtype, s.dtype)).itemsize for s in frozen}
        _, largest = resident()
    state = (Path(artifact) / "state.irpa").stat().st_size
    transients = target.transients["train_step"]
    return {
        "grown": largest - before,
        "seconds": seconds,
        "frozen": sum(sizes.values()),
        "state": state,
        "transients": transients,
        "loss": float(loss),
    }


_NUMPY = {"bfloat16": "float16"}  # numpy has no bfloat16; only its size is needed


def main() -> None:
    """Measure each artifact in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(chosen.artifacts[0], chosen.data)))
        return
    found = {}
    for artifact in chosen.artifacts:
        command = [sys.executable, __file__, artifact, "--data", chosen.data, "--one"]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[artifact] = json.loads(run.stdout.splitlines()[-1])
    wide = found[chosen.artifacts[0]]
    sizes = (f"{name}, MB" for name in ("state.irpa", "frozen", "transients", "growth"))
    columns = *sizes, "frozen, of float32", "saved, of float32", "step, s", "loss"
    print(f"| artifact | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for name, each in found.items():
        cells = [f"{each[key] / 1e6:.1f}" for key in ("state", "frozen", "transients", "grown")]
        shares = each["frozen"] / wide["frozen"], (wide["grown"] - each["grown"]) / wide["frozen"]
        cells += [f"{shares[0]:.3f}", f"{shares[1]:.2f}", f"{each['seconds']:.2f}", f"{each['loss']:.5f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
