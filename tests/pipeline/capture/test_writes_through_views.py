"""In-place writes through views, and through results that alias the argument in eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.golden import key_of
from irongrad.runtime.report import Comparison

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
    """Writes into views of tensors, and reads the tensors; or writes into the tensors, and reads the views.

    Each view is of the result of a linear layer of its own.
    """

    def __init__(self, views: Mapping[str, View], *, into_view: bool) -> None:
        super().__init__()
        self.linear = nn.ModuleDict({name: nn.Linear(4, 8) for name in views})
        self.views, self.into_view = views, into_view

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self._written(self.linear[name](x), view) for name, view in self.views.items()]

    def _written(self, h: torch.Tensor, of: View) -> torch.Tensor:
        view = of(h)
        if self.into_view:
            view.mul_(3)
            return h
        h.mul_(3)
        return view.sum() + h


def loss(made: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return torch.stack([functional.mse_loss(h, y) for h in made]).sum()


def compiled(views: Mapping[str, View], directory: Path, *, into_view: bool = True) -> dict[str, Comparison]:
    """Compile a step for all these views; return the comparisons of its results with eager PyTorch."""
    torch.manual_seed(0)
    model = Writer(views, into_view=into_view)
    inputs = {"x": torch.randn(8, 4), "y": torch.randn(8, 8)}
    step = ig.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    artifact = ig.compile(step, directory, entry_points=("train_step", "eval_step"), cache=False)
    return {c.key: c for c in artifact.reports["llvm-cpu"].comparisons}


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Comparison]]:
    """The comparisons of all views; the keys are values of `into_view`."""
    folder = tmp_path_factory.mktemp("views")
    return {into: compiled(VIEWS, folder / f"into {into}", into_view=into) for into in (True, False)}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("into_view", [True, False])
def test_a_write_is_seen_as_in_eager(
    name: str, into_view: bool, comparisons: dict[bool, dict[str, Comparison]]
) -> None:
    found = comparisons[into_view][key_of("state", 1, f"linear.{name}.weight")]
    assert found.error <= found.allowed


@pytest.mark.parametrize("into_view", [True, False])
def test_the_losses_are_those_of_eager(into_view: bool, comparisons: dict[bool, dict[str, Comparison]]) -> None:
    for key in (key_of("loss", 0), key_of("eval", 0)):
        assert comparisons[into_view][key].error <= comparisons[into_view][key].allowed


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_that_cannot_be_inverted_is_refused_at_its_line(name: str, tmp_path: Path) -> None:
    line = r"test_writes_through_views\.py:\d+: view\.mul_\(3\)\n  aten\.mul_\.Tensor writes in place into the windows"
    with pytest.raises(CaptureError, match=line) as refused:
        compiled({name: REFUSED[name]}, tmp_path / "step")
    assert ("as_strided" if "as_strided" in name else "of unfold") in str(refused.value)
