"""Step time and size in float32, bfloat16 and float16, measured in turns: `python benchmarks/precision.py`.

Prints a Markdown table: medians over the rounds, ratios to float32's medians in the same run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import gpt  # noqa: E402
import mlp  # noqa: E402
import resnet18  # noqa: E402

import irongrad as ig  # noqa: E402
from irongrad.graph.dtypes import to_numpy  # noqa: E402
from irongrad.step.train_step import PRECISIONS  # noqa: E402

STEPS = {"mlp": mlp.make_step, "gpt": gpt.make_step, "resnet18": resnet18.make_step}
ROUNDS = 30


def main() -> None:
    """Compile and measure the families named on the command line, by default all."""
    print("| family | precision | step, ms | to f32 | .vmfb, KiB |\n| --- | --- | --- | --- | --- |")
    for family in sys.argv[1:] or list(STEPS):
        with tempfile.TemporaryDirectory() as directory:
            measure(family, Path(directory))


def measure(family: str, directory: Path) -> None:
    """Print the rows of one family."""
    step = STEPS[family]()
    inputs = {name: to_numpy(tensor) for name, tensor in step.inputs.items()}
    sessions, sizes = {}, {}
    for precision in PRECISIONS:
        artifact = ig.compile(step, directory / precision, precision=precision, entry_points=("train_step",))
        sessions[precision] = artifact.load()
        sizes[precision] = artifact.manifest.files[artifact.manifest.targets[0].file].size
    times: dict[str, list[float]] = {precision: [] for precision in sessions}
    for _ in range(ROUNDS):
        for precision, session in sessions.items():
            start = time.perf_counter()
            session.train_step(**inputs)
            times[precision].append(time.perf_counter() - start)
    medians = {precision: statistics.median(found) for precision, found in times.items()}
    for precision, median in medians.items():
        ratio, size = median / medians["f32"], sizes[precision] / 1024
        print(f"| {family} | {precision} | {1e3 * median:.2f} | {ratio:.2f} | {size:.0f} |", flush=True)


if __name__ == "__main__":
    main()
