"""IREE must not leave a clone of a splat outside of what a device executes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.passes.module.keep_splats_apart import KeepSplatsApart
from irongrad.runtime.errors import ToolchainError


def compile_step(directory: Path) -> None:
    """A loop between readers of the number of true steps; kernels of ours are for batches of several rows."""
    torch.manual_seed(0)
    layer = nn.GRU(4, 16, batch_first=True)
    step = ig.TrainStep(
        layer,
        lambda out: out[0].square().sum() + out[1].pow(3).sum(),
        torch.optim.SGD(layer.parameters(), lr=0.01),
        {"x": torch.randn(1, 20, 4)},
        dynamic={"x": {1: "T"}},
        buckets={"T": [6, 20]},
    )
    ig.compile(step, directory, "llvm-cpu", entry_points=("train_step",), cache=False)


def test_iree_still_leaves_a_clone_of_a_splat_outside(tmp_path: Path, without: Callable[[type], None]) -> None:
    """When this fails, IREE is fixed, and `keep-splats-apart` can go."""
    without(KeepSplatsApart)
    with pytest.raises(ToolchainError, match="streamable op expected to be in an execution region"):
        compile_step(tmp_path)


def test_a_recurrent_layer_over_padded_time_compiles(tmp_path: Path) -> None:
    compile_step(tmp_path)
