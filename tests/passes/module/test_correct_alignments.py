"""Kernels that write rows of any place: IREE takes the alignment of other calls for that of all calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from irongrad.mlir.tools import run_tool

# In a process of its own, as it ends with SIGSEGV if a store is aligned that must not be.
STEP = """
import sys
import torch
from torch import nn
from torch._higher_order_ops.map import map as rows
import irongrad as ig

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return rows(lambda row: row.cumsum(1), self.linear(x)).mean(0)

torch.manual_seed(0)
model = Sums()
inputs = {"x": torch.randn(4, 2, 3), "y": torch.randn(2, 3)}
dynamic = {"x": {0: "T", 1: "B"}, "y": {0: "B"}}
step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs, dynamic=dynamic)
ig.compile(step, sys.argv[1], entry_points=["train_step"], cache=False)  # which compares its steps with eager's
"""


def test_sums_over_rows_of_any_number_and_length_train(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", STEP, str(tmp_path / "step")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_iree_still_takes_the_alignment_of_other_calls(tmp_path: Path) -> None:
    """When this fails, IREE is fixed, and `correct-alignments` can go."""
    source = tmp_path / "module.mlir"
    source.write_text(
        """
        stream.executable private @copy {
          stream.executable.export public @kernel
          builtin.module {
            func.func @kernel(%out: !stream.binding, %place: index) {
              return
            }
          }
        }
        util.func public @call(%buffer: !stream.resource<external>, %size: index, %row: index) -> !stream.timepoint {
          %c0 = arith.constant 0 : index
          %c64 = arith.constant 64 : index
          %c12 = arith.constant 12 : index
          %aligned = util.align %size, %c64 : index
          %bytes = arith.muli %row, %c12 : index
          %done = stream.cmd.execute with(%buffer as %inner: !stream.resource<external>{%size}) {
            stream.cmd.dispatch @copy::@kernel(%aligned : index) {
              rw %inner[%c0 for %size] : !stream.resource<external>{%size}
            }
            stream.cmd.dispatch @copy::@kernel(%bytes : index) {
              rw %inner[%c0 for %size] : !stream.resource<external>{%size}
            }
          } => !stream.timepoint
          util.return %done : !stream.timepoint
        }
        """
    )
    annotated = run_tool(
        "iree-opt", ["--pass-pipeline=builtin.module(iree-stream-annotate-dispatch-arguments)", str(source)]
    )
    assert "%arg1: index {stream.alignment = 64 : index}" in annotated.stdout
