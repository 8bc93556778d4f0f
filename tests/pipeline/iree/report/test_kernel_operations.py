"""The number of operations in the kernels of a module, and the device that it chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import irongrad as ig
from irongrad.mlir.walk import parsed
from irongrad.pipeline.iree.report.kernel_operations import Work, work_of
from irongrad.runtime import Session

KERNELS = """
#rows = affine_map<(i, j) -> (i)>
#all = affine_map<(i, j) -> (i, j)>
flow.executable private @products {
  flow.executable.export public @product
  builtin.module {
    func.func @product(%a: tensor<2x3xf32>, %b: tensor<3x5xf32>, %c: tensor<2x5xf32>) -> tensor<2x5xf32> {
      %p = linalg.matmul ins(%a, %b : tensor<2x3xf32>, tensor<3x5xf32>) outs(%c : tensor<2x5xf32>) -> tensor<2x5xf32>
      return %p : tensor<2x5xf32>
    }
  }
}
flow.executable private @sums {
  flow.executable.export public @sum
  builtin.module {
    func.func @sum(%a: tensor<8xROWSxf32>, %c: tensor<8xf32>) -> tensor<8xf32> {
      %s = linalg.generic {indexing_maps = [#all, #rows], iterator_types = ["parallel", "reduction"]}
          ins(%a : tensor<8xROWSxf32>) outs(%c : tensor<8xf32>) {
        ^bb0(%x: f32, %y: f32):
          %e = math.exp %x : f32
          %z = arith.addf %e, %y : f32
          linalg.yield %z : f32
      } -> tensor<8xf32>
      return %s : tensor<8xf32>
    }
  }
}
util.func public @step(%a: tensor<2x3xf32>, %x: tensor<8xROWSxf32>SIZE) -> tensor<8xf32> {
  %p = flow.dispatch @products::@product(%a) : (tensor<2x3xf32>) -> tensor<2x5xf32>
  %q = flow.dispatch @products::@product(%a) : (tensor<2x3xf32>) -> tensor<2x5xf32>
  %s = flow.dispatch @sums::@sum(%x) : (tensor<8xROWSxf32>OF) -> tensor<8xf32>
  util.return %s : tensor<8xf32>
}
"""


def test_every_launch_counts_with_its_loops() -> None:
    text = KERNELS.replace("ROWS", "7").replace("SIZE", "").replace("OF", "")
    with parsed(text.encode()) as flow:
        assert work_of(flow) == Work(2 * (2 * 2 * 3 * 5) + 2 * 8 * 7, 3)


def test_a_launch_counts_as_often_as_a_loop_runs() -> None:
    text = KERNELS.replace("ROWS", "7").replace("SIZE", "").replace("OF", "")
    loop = """
      %zero = arith.constant 0 : index
      %one = arith.constant 1 : index
      %four = arith.constant 4 : index
      %r = scf.for %i = %zero to %four step %one iter_args(%y = %x) -> (tensor<8x7xf32>) {
        %t = flow.dispatch @sums::@sum(%y) : (tensor<8x7xf32>) -> tensor<8xf32>
        scf.yield %y : tensor<8x7xf32>
      }
      util.return %s"""
    with parsed(text.replace("  util.return %s", loop).encode()) as flow:
        assert work_of(flow) == Work(2 * (2 * 2 * 3 * 5) + 5 * 2 * 8 * 7, 7)


def test_nothing_is_counted_where_a_size_is_not_known() -> None:
    text = KERNELS.replace("ROWS", "?").replace("SIZE", ", %n: index").replace("OF", "{%n}")
    with parsed(text.encode()) as flow:
        assert work_of(flow).operations is None


@pytest.mark.parametrize(("width", "device"), [(8, "local-sync"), (768, "local-task")])
def test_short_kernels_run_on_the_thread_that_calls(tmp_path: Path, width: int, device: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    x = torch.randn(64, width)
    step = ig.TrainStep(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters()), {"x": x, "y": x})
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    assert artifact.load().device == device
    states = []
    for other in ("local-sync", "local-task"):
        session = Session(tmp_path / "artifact", device=other)
        for _ in range(3):
            session.train_step(x=x.numpy(), y=x.numpy())
        states.append(session.state())
    one, two = states
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_the_threads_stay_where_sizes_vary(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    inputs = {"x": torch.randn(3, 4), "y": torch.randn(3, 2)}
    dynamic = {"x": {0: "B"}, "y": {0: "B"}}
    step = ig.TrainStep(model, torch.nn.L1Loss(), torch.optim.SGD(model.parameters()), inputs, dynamic=dynamic)
    assert ig.compile(step, tmp_path / "artifact", entry_points=("train_step",)).load().device == "local-task"
