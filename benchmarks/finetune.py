"""Fine-tuning MiniLM: memory, time to the first step and step time, beside eager PyTorch with PEFT and without.

    python benchmarks/finetune.py build/news build/news.npz [--adapter build/adapter] [--steps 12] [--rounds 3]

Each variant trains in a process of its own, in turn. A time to the first step is from the start of that process to the
end of its first step, and its memory is the process's largest resident set. All figures are medians over the rounds.
The folder `build/minilm` of examples/finetune must be there.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune"
Batch = dict[str, np.ndarray]


def batches(data: str, count: int, rows: int = 16) -> list[Batch]:
    """The first batches of the data."""
    with np.load(data) as file:
        arrays = {name: file[name] for name in file}
    return [{name: array[i * rows : (i + 1) * rows] for name, array in arrays.items()} for i in range(count)]


def compiled(artifact: str) -> Callable[[Batch], float]:
    """Train the artifact."""
    from irongrad.runtime import load

    session = load(artifact)
    return lambda batch: session.train_step(**batch)


def eager(*, adapter: bool) -> Callable[[Batch], float]:
    """Train eager PyTorch, the adapter alone or the whole model."""
    sys.path.insert(0, str(EXAMPLE))
    import minilm
    import torch

    model: Any = minilm.adapted(minilm.classifier()) if adapter else minilm.classifier()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3 if adapter else 2e-5)

    def step(batch: Batch) -> float:
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        labels = inputs.pop("labels")
        loss = minilm.loss(model(**inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def measured(variant: str, artifact: str, data: str, steps: int, started: float) -> dict[str, float]:
    """Train in this process, which began at `started`."""
    step = compiled(artifact) if variant == "compiled" else eager(adapter=variant == "eager, adapter")
    times: list[float] = []
    first = 0.0
    for batch in batches(data, steps):
        before = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - before)
        first = first or time.time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"MiB": peak, "first step, s": first, "step, s": statistics.median(times[1:])}


def swaps(artifact: str, adapter: str, count: int = 9) -> dict[str, float]:
    """The milliseconds of putting an adapter into a running session, and of restoring the whole state."""
    import tempfile

    from irongrad.runtime import load

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(count):
            before = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - before))
        return statistics.median(times)

    with load(artifact) as session, tempfile.TemporaryDirectory() as folder:
        whole = f"{folder}/whole.safetensors"
        session.save(whole, trainable=False)
        return {
            "load_adapter, ms": median(lambda: session.load_adapter(adapter)),
            "restore of a whole checkpoint, ms": median(lambda: session.restore(whole)),
        }


def main() -> None:
    """Measure every variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact")
    parser.add_argument("data")
    parser.add_argument("--adapter", default="")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(measured(given.variant, given.artifact, given.data, given.steps, given.started)))
        return
    found: dict[str, list[dict[str, float]]] = {"compiled": [], "eager, adapter": [], "eager, whole model": []}
    for _ in range(given.rounds):
        for variant, results in found.items():
            options = ["--steps", str(given.steps), "--variant", variant, "--started", str(time.time())]
            command = [sys.executable, __file__, given.artifact, given.data, *options]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            results.append(json.loads(printed.splitlines()[-1]))
    for variant, results in found.items():
        medians = {name: statistics.median(r[name] for r in results) for name in results[0]}
        print(f"{variant:20}", ", ".join(f"{name} {value:.2f}" for name, value in medians.items()))
    if given.adapter:
        print(", ".join(f"{name} {value:.1f}" for name, value in swaps(given.artifact, given.adapter).items()))


if __name__ == "__main__":
    main()
