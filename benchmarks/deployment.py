"""What a deployed training process costs: start-up to the first finished step, and resident memory.

    python benchmarks/deployment.py [--runs 5] [--json]

The same step (examples/digits.py) in fresh processes: IronGrad's runtime on a compiled artifact, `iree-run-module` on
it, and eager PyTorch. Medians over the runs, taken in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# Both print the resident memory in MB after the first finished step.
RESIDENT = "import psutil; print(psutil.Process().memory_info().rss / 1e6)"

DEPLOYED = f"""
import sys
import numpy as np
import irongrad.runtime
session = irongrad.runtime.load(sys.argv[1])
session.train_step(x=np.zeros((32, 1, 8, 8), np.float32), y=np.zeros(32, np.int64))
{RESIDENT}
"""

EAGER = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from torch import nn
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loss = nn.functional.cross_entropy(model(torch.zeros(32, 1, 8, 8)), torch.zeros(32, dtype=torch.long))
loss.backward()
optimizer.step()
{RESIDENT}
"""


def run_python(code: str, *arguments: str) -> tuple[float, float]:
    """Run `code` in a fresh process; return its wall seconds and the megabytes it printed."""
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, float(result.stdout)


def run_module(artifact: str) -> tuple[float, float]:
    """Run one step with iree-run-module; return its wall seconds and the largest resident memory seen, in MB."""
    from irongrad.runtime import commands
    from irongrad.runtime.manifest_file import read_manifest

    command = commands.run_module(read_manifest(Path(artifact)), Path(artifact), "train_step")
    start = time.perf_counter()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    largest = 0.0
    while process.poll() is None:
        try:
            largest = max(largest, process.memory_info().rss / 1e6)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.001)
    return time.perf_counter() - start, largest


def main() -> None:
    """Compile the step, run each kind of process in turn, and print medians."""
    from rich.console import Console
    from rich.table import Table

    import irongrad as ig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    import digits

    with tempfile.TemporaryDirectory() as directory:
        artifact = str(Path(directory) / "digits")
        ig.compile(digits.make_step(), artifact)
        kinds = {
            "IronGrad runtime": lambda: run_python(DEPLOYED, artifact),
            "iree-run-module": lambda: run_module(artifact),
            "eager PyTorch": lambda: run_python(EAGER),
        }
        found: dict[str, list[tuple[float, float]]] = {k: [] for k in kinds}
        for _ in range(options.runs):
            for kind, run in kinds.items():
                found[kind].append(run())
    medians = {
        k: {"seconds": statistics.median(s for s, _ in v), "megabytes": statistics.median(m for _, m in v)}
        for k, v in found.items()
    }
    if options.json:
        print(json.dumps(medians, indent=2))
        return
    table = Table("process", "start to first finished step, s", "resident memory, MB")
    for kind, values in medians.items():
        table.add_row(kind, f"{values['seconds']:.2f}", f"{values['megabytes']:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
