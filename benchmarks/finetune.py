"""Fine-tuning MiniLM: memory, time to the first step and step time, beside eager PyTorch with PEFT and without.

    python benchmarks/finetune.py build/news build/news.npz [--adapter build/adapter] [--steps 12] [--rounds 3]
        [--predict build/predict] [--merged build/merged] [--onnx build/news.onnx] [--checkpoint build/news.safetensors]

Each variant trains, or predicts, in a process of its own, in turn. A time to the first step is from the start of that
process to the end of its first step, and its memory is the process's largest resident set. All figures are medians over
the rounds. At the end come the sizes of all files. The folder `build/minilm` of examples/finetune must be there.
"""

from __future__ import annotations

import argparse
import io
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


def compiled(artifact: str) -> Callable[[Batch], Any]:
    """Train the artifact."""
    from irongrad.runtime import load

    session = load(artifact)
    return lambda batch: session.train_step(**batch)


def minilm(*, adapter: bool) -> Any:
    """The model, with an adapter or to be trained as a whole."""
    sys.path.insert(0, str(EXAMPLE))
    import minilm

    return minilm.adapted(minilm.classifier()) if adapter else minilm.classifier()


def optimizer_of(model: Any, *, adapter: bool) -> Any:
    """AdamW over what is trained."""
    import torch

    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3 if adapter else 2e-5)


def eager(*, adapter: bool) -> Callable[[Batch], Any]:
    """Train eager PyTorch, the adapter alone or the whole model."""
    import torch

    model = minilm(adapter=adapter)
    model.train()
    optimizer = optimizer_of(model, adapter=adapter)

    def step(batch: Batch) -> float:
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        labels = inputs.pop("labels")
        loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def predicting(artifact: str) -> Callable[[Batch], Any]:
    """Predict with an artifact."""
    from irongrad.runtime import load

    session = load(artifact)
    return lambda batch: session.predict(**without_labels(batch))


def onnx(path: str) -> Callable[[Batch], Any]:
    """Predict with ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, without_labels(batch))


def eager_prediction() -> Callable[[Batch], Any]:
    """Predict with eager PyTorch and PEFT."""
    import torch

    model = minilm(adapter=True).eval()

    def predict(batch: Batch) -> Any:
        with torch.inference_mode():
            return model(**{name: torch.from_numpy(array) for name, array in without_labels(batch).items()})

    return predict


def without_labels(batch: Batch) -> Batch:
    """The inputs of the model."""
    return {name: array for name, array in batch.items() if name != "labels"}


# What is measured by name, and the option without which it is left out.
VARIANTS: dict[str, tuple[str, Callable[[argparse.Namespace], Callable[[Batch], Any]]]] = {
    "compiled": ("artifact", lambda given: compiled(given.artifact)),
    "eager, adapter": ("", lambda given: eager(adapter=True)),
    "eager, whole model": ("", lambda given: eager(adapter=False)),
    "predict, same artifact": ("artifact", lambda given: predicting(given.artifact)),
    "predict, inference artifact": ("predict", lambda given: predicting(given.predict)),
    "predict, merged": ("merged", lambda given: predicting(given.merged)),
    "predict, ONNX Runtime": ("onnx", lambda given: onnx(given.onnx)),
    "predict, eager": ("", lambda given: eager_prediction()),
}


def measured(given: argparse.Namespace) -> dict[str, float]:
    """Train or predict in this process, which began at `given.started`."""
    step = VARIANTS[given.variant][1](given)
    times: list[float] = []
    first = 0.0
    for batch in batches(given.data, given.steps):
        before = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - before)
        first = first or time.time() - given.started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"MiB": peak, "first step, s": first, "step, s": statistics.median(times[1:])}


def sizes(given: argparse.Namespace) -> dict[str, int]:
    """The bytes of each file or folder; those of an artifact without its golden values."""
    import torch

    named = {n: getattr(given, n) for n in ("artifact", "predict", "merged", "onnx", "checkpoint", "adapter")}
    found = {f"{name} {path}": size_of(Path(path)) for name, path in named.items() if path}
    for adapter in (True, False):
        model = minilm(adapter=adapter)
        optimizer = optimizer_of(model, adapter=adapter)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        found[f"eager checkpoint, {'adapter' if adapter else 'whole model'}"] = file.getbuffer().nbytes
    return found


def size_of(path: Path) -> int:
    """The bytes of a file, or of a folder."""
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in files if not f.name.startswith("golden"))


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
    for name in ("adapter", "predict", "merged", "onnx", "checkpoint"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        print(json.dumps(measured(given)))
        return
    found: dict[str, list[dict[str, float]]] = {n: [] for n, (o, _) in VARIANTS.items() if not o or getattr(given, o)}
    for _ in range(given.rounds):
        for variant, results in found.items():
            options = ["--variant", variant, "--started", str(time.time())]
            printed = subprocess.run([sys.executable, *sys.argv, *options], capture_output=True, text=True, check=True)
            results.append(json.loads(printed.stdout.splitlines()[-1]))
    for variant, results in found.items():
        medians = {name: statistics.median(r[name] for r in results) for name in results[0]}
        print(f"{variant:28}", ", ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    if given.adapter:
        print(", ".join(f"{name} {value:.1f}" for name, value in swaps(given.artifact, given.adapter).items()))
    for name, size in sizes(given).items():
        print(f"{name:40} {size:>12,} bytes")


if __name__ == "__main__":
    main()
