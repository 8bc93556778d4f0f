"""Indices that a loop hands on from one iteration to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import irongrad as ig
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.guards.step_indices import step_indices
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import PROVED

ROWS = 7
Places = Callable[[nn.Module, Tensor, Tensor], Tensor]


def row(table: Tensor, i: Tensor) -> Tensor:
    return table.index_select(0, i.reshape(1))[0]


def scanned(following: Callable[[Tensor, Tensor], Tensor], start: Callable[[Tensor], Tensor], rows: int = 20) -> Places:
    """A lookup in each iteration of a scan over rows of `x`, at the place that the iteration before computed."""

    def places(model: nn.Module, x: Tensor, k: Tensor) -> Tensor:
        table = model.table.clone()

        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return following(i, x), x * row(table, i)

        return scan(body, start(k), x[:rows])[1].sum()

    return places


def repeated(
    following: Callable[[Tensor], Tensor], goes_on: Callable[[Tensor], Tensor], start: Callable[[Tensor], Tensor]
) -> Places:
    """A lookup in each iteration of a while_loop."""

    def places(model: nn.Module, x: Tensor, k: Tensor) -> Tensor:
        table = model.table.clone()

        def body(i: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            return following(i), total + row(table, i)

        return while_loop(lambda i, total: goes_on(i), body, (start(k), x[0]))[1].sum()

    return places


PROVED_LOOPS: dict[str, Places] = {
    "a remainder": scanned(lambda i, x: (i + 1) % ROWS, lambda k: k % ROWS),
    "clamped": scanned(lambda i, x: (2 * i).clamp(max=ROWS - 1), lambda k: k.clamp(0, 3)),
    "the place of a maximum": scanned(lambda i, x: x.argmax() + 0 * i, lambda k: k.clamp(0, ROWS - 1)),
    "chosen": scanned(lambda i, x: torch.where(i < ROWS - 1, i, 0) + 1, lambda k: 0 * k.clamp(0, 0)),
    "kept or another": scanned(lambda i, x: torch.where(x[0] > 0, x.argmax(), i), lambda k: k.clamp(5, ROWS - 1)),
    "a counter": scanned(lambda i, x: i + 1, lambda k: k.clamp(0, 0), rows=ROWS),
    "a counter by two": scanned(lambda i, x: i + 2, lambda k: k.clamp(0, 0), rows=4),
    "up to a limit": repeated(lambda i: i + 1, lambda i: i < ROWS, lambda k: k.clamp(0, 3)),
    "doubled up to a limit": repeated(lambda i: 2 * i + 1, lambda i: i <= ROWS - 1, lambda k: k.clamp(0, 3)),
    "down to zero": repeated(lambda i: i - 1, lambda i: i >= 0, lambda k: k.clamp(0, ROWS - 1)),
}
REFUSED: dict[str, Places] = {
    "a counter": scanned(lambda i, x: i + 1, lambda k: k.clamp(0, 1), rows=ROWS),
    "a counter down": scanned(lambda i, x: i - 1, lambda k: k.clamp(0, ROWS - 1), rows=3),
    "from anywhere": repeated(lambda i: i + 1, lambda i: i < ROWS, lambda k: k + 0),
    "one too far": repeated(lambda i: i + 1, lambda i: i <= ROWS, lambda k: k.clamp(6, 6)),
    "rarely out": repeated(
        lambda i: torch.where(i == 3, 10**9, (i + 1) % ROWS), lambda i: i < 10**9, lambda k: k.clamp(0, 1)
    ),
    "doubled": scanned(lambda i, x: 2 * i, lambda k: k.clamp(0, 1), rows=3),
}


class Loop(nn.Module):
    def __init__(self, places: Places) -> None:
        super().__init__()
        self.scale, self.places = nn.Parameter(torch.tensor(1.5)), places
        self.register_buffer("table", torch.randn(ROWS, 3))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.scale * self.places(self, x.detach(), k)


def step_of(places: Places) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Loop(places)
    inputs: dict[str, Any] = {"x": torch.randn(20, 3), "k": torch.tensor(0)}
    return ig.TrainStep(model, lambda y: y**2, torch.optim.SGD(model.parameters(), lr=0.01), inputs)


@pytest.mark.parametrize("name", PROVED_LOOPS)
def test_an_index_with_bounds_that_each_iteration_keeps_is_proved(name: str) -> None:
    specs = step_indices(capture(step_of(PROVED_LOOPS[name]))).specs
    assert {(s.operator, s.range, s.how) for s in specs} == {("index_select", "[0, 6]", PROVED)}


def test_an_input_that_a_loop_begins_with_has_a_range() -> None:
    """As the prompt of a language model that generates in a scan."""
    indices = step_indices(capture(step_of(scanned(lambda i, x: (i + x.argmax()) % ROWS, lambda k: k + 0))))
    assert [(r.input, r.minimum, r.maximum) for r in indices.ranges] == [("k", 0, ROWS - 1)]


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(CaptureError, match=r"test_loop_indices.py:\d+|index out of range"):
        step_indices(capture(step_of(REFUSED[name])))


@pytest.mark.parametrize("name", ["a remainder", "up to a limit"])
def test_a_compiled_loop_agrees_with_eager(name: str, tmp_path: Path) -> None:
    ig.compile(step_of(PROVED_LOOPS[name]), tmp_path / "step", entry_points=("train_step",), cache=False)
