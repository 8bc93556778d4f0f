"""Float64 tensors are refused by name for devices without float64, before a compiler starts; scalars are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.driver import build
from irongrad.pipeline.options import make_options
from irongrad.runtime.errors import UnsupportedOpError


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("table", torch.rand(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.linear(x).double() + 1.5  # inside
        return (inside * self.table).float()


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float()) * 0.3


def optimised(model: nn.Module, target: str, output: Path, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    step = ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        inputs={"x": torch.rand(5, 4, dtype=dtype), "y": torch.zeros(5, dtype=torch.long)},
    )
    build(step, make_options(output, ["llvm-cpu", target], stop_after="passes", cache=False))


def test_float64_state_and_operators_are_named(tmp_path):
    line = 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if "# inside" in text)
    with pytest.raises(UnsupportedOpError) as caught:
        optimised(Wide(), "vulkan:profile=desktop", tmp_path / "out")
    message = str(caught.value)
    assert "state 'table' gives a float64 tensor, and the devices of vulkan-desktop do not" in message
    assert f"{__file__}:{line}: inside = self.linear(x).double() + 1.5" in message
    assert "compile for a target with float64: llvm-cpu or cuda" in message


def test_a_float64_input_is_named(tmp_path):
    with pytest.raises(UnsupportedOpError, match="input 'x' gives a float64 tensor, and the devices of vulkan do not"):
        optimised(Narrow(), "vulkan", tmp_path / "out", torch.float64)


@pytest.mark.parametrize("target", ["vulkan:profile=lavapipe", "cuda"])
def test_targets_with_float64_accept_it(tmp_path, target):
    optimised(Wide(), target, tmp_path / "out")


def test_float64_scalars_are_accepted(tmp_path):
    optimised(Narrow(), "vulkan:profile=generic", tmp_path / "out")


def test_compiled_functions_are_checked_too():
    with pytest.raises(UnsupportedOpError, match="aten.* gives a float64 tensor, and the devices of vulkan-mobile"):
        ig.compile_function(
            lambda x: x.double().cumsum(0), (torch.rand(3),), gradients=False, target="vulkan:profile=mobile"
        )
