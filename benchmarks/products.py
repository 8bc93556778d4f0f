"""Products of matrices on one core: by our kernels, as IREE's data tiling has them, and eager.

    python benchmarks/products.py [--target llvm-cpu:cpu=x86-64-v3] [--rounds 25] [--json]

Each is a function of its own, called in turn, round by round; GFLOP/s of the medians, with all that it takes to lay
operands out. Eager is MKL's. What lies before and behind a product in a step may lay operands out for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Rows, columns and summands: of a GPT's layers and their gradients, of experts, of convolutions, of an LSTM.
SIZES = (
    (1024, 1536, 384),
    (1024, 384, 1536),
    (1024, 1024, 1024),
    (2048, 128, 2048),
    (2048, 64, 576),
    (128, 512, 4608),
    (32, 512, 128),
)
FORMS: dict[str, Callable[..., Any]] = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.T": lambda x, w: x @ w.T,
    "x.T @ w": lambda x, w: x.T @ w,
}


@dataclass(frozen=True)
class Row:
    """One product.

    Attributes:
        form: which operands are transposed.
        rows: of the result.
        columns: of the result.
        depth: summands of each result.
        gflops: by who computes it.
    """

    form: str
    rows: int
    columns: int
    depth: int
    gflops: dict[str, float]


def measure(form: str, sizes: tuple[int, int, int], target: str, rounds: int) -> Row:
    """Measure one product."""
    import torch

    rows, columns, depth = sizes
    x = torch.randn((depth, rows) if form.startswith("x.T") else (rows, depth))
    w = torch.randn((columns, depth) if form.endswith("w.T") else (depth, columns))
    function = FORMS[form]
    with tempfile.TemporaryDirectory() as directory:
        compiled = {
            "ours": _compiled(function, (x, w), target, Path(directory, "ours")),
            "data tiling": _with_data_tiling(function, (x, w), target, Path(directory, "tiles")),
        }
        calls: dict[str, Callable[[], object]] = {"eager": lambda: function(x, w)}
        for name, call in compiled.items():
            calls[name] = lambda call=call: call(x.numpy(), w.numpy())
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 3):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn >= 3:
                    times[name].append(time.perf_counter() - start)
    operations = 2 * rows * columns * depth
    return Row(form, *sizes, {name: operations / statistics.median(found) / 1e9 for name, found in times.items()})


def _compiled(function, arguments, target: str, directory: Path):
    import irongrad as ig
    from irongrad.runtime.function import load_function

    ig.compile_function(function, arguments, target=target, cache=False).save(directory)
    return load_function(directory, device="local-sync")


def _with_data_tiling(function, arguments, target: str, directory: Path):
    from irongrad.passes.module.matmul_kernels import MatmulKernels

    ours = MatmulKernels.applies
    MatmulKernels.applies = lambda self, context: False
    try:
        return _compiled(function, arguments, target, directory)
    finally:
        MatmulKernels.applies = ours


def main() -> None:
    """Measure every product and print a table, or JSON."""
    import torch
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llvm-cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [(form, sizes) for sizes in SIZES for form in FORMS]
    shown = track(cases, "products", console=Console(file=sys.stderr))
    rows = [measure(form, sizes, options.target, options.rounds) for form, sizes in shown]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("product", "rows", "columns", "summands", *(f"{name}, GFLOP/s" for name in rows[0].gflops))
    for row in rows:
        sizes = (str(n) for n in (row.rows, row.columns, row.depth))
        table.add_row(row.form, *sizes, *(f"{found:.0f}" for found in row.gflops.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
