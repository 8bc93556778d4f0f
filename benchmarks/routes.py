"""The two routes to linalg, on the examples: `python benchmarks/routes.py`.

Prints a Markdown table of compile time, size and step time, the last by medians over rounds taken in turns, and how far
apart the losses of the first steps are.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from irongrad.graph.dtypes import to_numpy  # noqa: E402
from irongrad.pipeline.driver import build  # noqa: E402
from irongrad.pipeline.lower.routes import ROUTES  # noqa: E402
from irongrad.pipeline.options import make_options  # noqa: E402
from irongrad.runtime import Session  # noqa: E402

FAMILIES = ("mlp", "digits", "rnn", "gpt", "moe", "resnet18")
ROUNDS = 30
LOSSES = 5


@dataclass(frozen=True)
class Route:
    """A family's step, compiled by one route."""

    session: Session
    importing: float
    compiling: float
    kibibytes: float
    worst: float


def main() -> None:
    """Measure the families named on the command line, by default all."""
    print(
        "| family | route | import, s | compile, s | .vmfb, KiB | step, ms | to linalg | worst error | losses apart |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for family in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            measure(family, Path(directory))


def compiled(family: str, route: str, directory: Path) -> Route:
    """Compile and verify the example's `train_step`."""
    step = importlib.import_module(family).make_step()
    made = build(step, make_options(directory / route, route=route, entry_points=("train_step",), cache=False))
    assert made.artifact is not None
    size = made.artifact.manifest.files["step.llvm-cpu.vmfb"].size / 1024
    # The compiler runs beside the oracle.
    compiling = made.seconds["oracle"] + made.seconds["compile"]
    worst = made.artifact.reports["llvm-cpu"].worst.ratio
    return Route(made.artifact.load(), made.seconds["import"], compiling, size, worst)


def measure(family: str, directory: Path) -> None:
    """Print the rows of one family."""
    step = importlib.import_module(family).make_step()
    inputs = {name: to_numpy(tensor) for name, tensor in step.inputs.items()}
    routes = {route: compiled(family, route, directory) for route in ROUTES}
    losses = {n: np.array([float(r.session.train_step(**inputs)) for _ in range(LOSSES)]) for n, r in routes.items()}
    times: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(ROUNDS):
        for name, route in routes.items():
            start = time.perf_counter()
            route.session.train_step(**inputs)
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, route in routes.items():
        apart = np.max(np.abs(losses[name] / losses["linalg"] - 1))
        ratio = medians[name] / medians["linalg"]
        print(
            f"| {family} | {name} | {route.importing:.2f} | {route.compiling:.1f} | {route.kibibytes:.0f} "
            f"| {1e3 * medians[name]:.2f} | {ratio:.2f} | {route.worst:.0%} | {apart:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
