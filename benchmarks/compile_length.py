"""How compile time grows with the length of a program: Euler steps of one layer in an unrolled loop, with gradients.

    python benchmarks/compile_length.py [--steps 50 100 200 400 500] [--levels 0 2]

Each compiles in a fresh process with empty caches, after a small step, which imports what is needed. Prints a Markdown
table of CPU time by stage, of the process and of all that it starts, and for each step of the loop. By the clock the
oracle runs beside the stages from `import` on; its CPU time is the difference between the stages and the whole.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import tempfile
import warnings
from pathlib import Path

import torch
from compile_time import Seconds, clock, now, warm_up_irongrad
from torch import Tensor, nn

import irongrad as ig

STAGES = ("capture", "differentiate", "passes", "import", "assemble", "compile")


class Euler(nn.Module):
    """The solution of an equation after `steps` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.layer = steps, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The solution that begins at `x`."""
        for _ in range(self.steps):
            x = x + 0.01 * torch.tanh(self.layer(x))
        return x


def measure(case: tuple[int, int]) -> tuple[Seconds, dict[str, float]]:
    """Compile a loop of some steps at a level; return the time in all, and CPU time by stage."""
    from irongrad.pipeline.driver import build
    from irongrad.pipeline.options import make_options

    steps, level = case
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    warm_up_irongrad()
    torch.manual_seed(0)
    model, stages = Euler(steps), dict.fromkeys(STAGES, 0.0)
    inputs = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    before = now()
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "artifact"
        options = {"entry_points": ("train_step",), "cache": False, "opt_level": level, "on_stage": clock(stages)}
        build(step, make_options(output, **options))
    return now() - before, stages


def main() -> None:
    """Measure every length at every level, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 200, 400, 500])
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 2])
    chosen = parser.parse_args()
    heads = ("level", "steps", *STAGES, "all, CPU s", "ms a step", "wall s")
    print("|", " | ".join(heads), "|")
    print("|", " | ".join("---:" for _ in heads), "|")
    for level in chosen.levels:
        for steps in chosen.steps:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                spent, stages = pool.apply(measure, ((steps, level),))
            times = [f"{stages[name]:.1f}" for name in STAGES]
            each = f"{1000 * spent.cpu / steps:.0f}"
            print(
                "|",
                " | ".join([str(level), str(steps), *times, f"{spent.cpu:.1f}", each, f"{spent.wall:.1f}"]),
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main()
