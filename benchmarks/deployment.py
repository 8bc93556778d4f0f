"""What a deployed training process costs: start-up to the first finished step, and resident memory.

    python benchmarks/deployment.py [--runs 5] [--json]

The same step (examples/digits.py) in fresh processes: IronGrad's runtime on a compiled artifact, `iree-run-module` on
it, and eager PyTorch. Then IronGrad's runtime on larger steps of `step_time.py`, beside the memory of their state and
transients. Medians over the runs, taken in turn, and the least.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

# Both print the resident memory in MB after the first finished step.
RESIDENT = "import psutil; print(psutil.Process().memory_info().rss / 1e6)"

DEPLOYED = f"""
import sys
import numpy as np
import irongrad.runtime
session = irongrad.runtime.load(sys.argv[1])
with np.load(sys.argv[1] + "/batch.npz") as batch:
    session.train_step(**batch)
{RESIDENT}
"""

LARGER = (("gpt", "large"), ("resnet18", "cifar"))

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


def compiled(step: Any, folder: Path) -> str:
    """Compile a step, and put its example beside it; return the artifact's directory."""
    import irongrad as ig

    ig.compile(step, folder)
    np.savez(folder / "batch.npz", **{name: tensor.numpy() for name, tensor in step.inputs.items()})
    return str(folder)


def needed(artifact: str) -> float:
    """The megabytes of the state and of the transients of a training step."""
    from irongrad.runtime.manifest_file import read_manifest

    manifest = read_manifest(Path(artifact))
    state = sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in manifest.state)
    return (state + manifest.targets[0].transients["train_step"]) / 1e6


def main() -> None:
    """Compile the steps, run each kind of process in turn, and print medians."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    import digits
    from step_time import CASES, make_step

    with tempfile.TemporaryDirectory() as directory:
        artifacts = {"digits": compiled(digits.make_step(), Path(directory) / "digits")}
        for family, size in LARGER:
            name = f"{family} {size}"
            artifacts[name] = compiled(make_step(family, CASES[family][size]), Path(directory) / name)
        kinds: dict[str, Callable[[], tuple[float, float]]] = {
            "digits, iree-run-module": lambda: run_module(artifacts["digits"]),
            "digits, eager PyTorch": lambda: run_python(EAGER),
        }
        kinds |= {f"{name}, IronGrad": partial(run_python, DEPLOYED, a) for name, a in artifacts.items()}
        found: dict[str, list[tuple[float, float]]] = {k: [] for k in kinds}
        for _ in range(options.runs):
            for kind, run in kinds.items():
                found[kind].append(run())
        held = {f"{name}, IronGrad": needed(artifact) for name, artifact in artifacts.items()}
    medians = {
        kind: {
            "seconds": statistics.median(s for s, _ in runs),
            "least seconds": min(s for s, _ in runs),
            "megabytes": statistics.median(m for _, m in runs),
            "megabytes of state and transients": held.get(kind),
        }
        for kind, runs in found.items()
    }
    if options.json:
        print(json.dumps(medians, indent=2))
        return
    table = Table("process", "start to first step, s", "least, s", "resident, MB", "state and transients, MB")
    for kind, values in medians.items():
        of_step = "" if (size := values["megabytes of state and transients"]) is None else f"{size:.0f}"
        seconds = (f"{values[key]:.2f}" for key in ("seconds", "least seconds"))
        table.add_row(kind, *seconds, f"{values['megabytes']:.0f}", of_step)
    Console().print(table)


if __name__ == "__main__":
    main()
