"""In-place writes through views, and through results that alias the argument in eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.errors import CaptureError

functional = nn.functional
View = Callable[[torch.Tensor], torch.Tensor]

VIEWS: dict[str, View] = {
    "dropout of nothing": lambda h: functional.dropout(h, 0.0, training=True),
    "dropout in evaluation": lambda h: functional.dropout(h, 0.5, training=False),
    "alpha dropout in evaluation": lambda h: functional.alpha_dropout(h, 0.5, training=False),
    "dropout of channels in evaluation": lambda h: functional.dropout2d(h[..., None, None], 0.5, training=False),
    "the same dtype": lambda h: h.float(),
    "contiguous": lambda h: h.contiguous(),
    "the same shape": lambda h: h.expand(8, 8),
    "reshape": lambda h: h.reshape(4, 16),
    "windows with gaps": lambda h: h.unfold(1, 2, 3),
    "rows of windows with gaps": lambda h: h.unfold(0, 3, 4)[:, 1:],
    "windows without gaps": lambda h: h.unfold(1, 2, 2),
    "as_strided": lambda h: h.as_strided((2, 3), (3, 20), 1),
    "diagonal": lambda h: h.diagonal(1),
    "steps": lambda h: h[1::3, ::2],
    "complex numbers": lambda h: torch.view_as_complex(h.view(8, 4, 2)).imag,
    "unflatten": lambda h: h.unflatten(1, (2, 4)),
}

REFUSED: dict[str, View] = {
    "overlapping windows": lambda h: h.unfold(1, 3, 2),
    "windows of a view": lambda h: h[:, 1:].unfold(1, 2, 3),
    "windows of windows": lambda h: h.unfold(0, 2, 3).unfold(1, 2, 3),
    "as_strided of a view": lambda h: h.view(64).as_strided((2, 3), (3, 20), 1),
}


class Writer(nn.Module):
    """Writes into a view of a tensor, and reads the tensor; or writes into the tensor, and reads the view."""

    def __init__(self, view: View, *, into_view: bool) -> None:
        super().__init__()
        self.linear, self.view, self.into_view = nn.Linear(4, 8), view, into_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        view = self.view(h)
        if self.into_view:
            view.mul_(3)
            return h
        h.mul_(3)
        return view.sum() + h


def compiled(view: View, directory: Path, *, into_view: bool = True) -> None:
    """Compile a step; compilation compares its results with eager PyTorch."""
    model = Writer(view, into_view=into_view)
    inputs = {"x": torch.randn(8, 4), "y": torch.randn(8, 8)}
    step = ig.TrainStep(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    ig.compile(step, directory, entry_points=("train_step", "eval_step"), cache=False)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("into_view", [True, False])
def test_a_write_is_seen_as_in_eager(name: str, into_view: bool, tmp_path: Path) -> None:
    compiled(VIEWS[name], tmp_path / "step", into_view=into_view)


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_cannot_be_inverted_is_refused_at_its_line(name: str, tmp_path: Path) -> None:
    line = r"test_writes_through_views\.py:\d+: view\.mul_\(3\)\n  aten\.mul_\.Tensor writes in place into the windows"
    with pytest.raises(CaptureError, match=line) as refused:
        compiled(REFUSED[name], tmp_path / "step")
    assert ("as_strided" if "as_strided" in name else "of unfold") in str(refused.value)
