"""Padding of dimensions that a model splits into parts of a fixed size, or that depend on other dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.runtime.errors import CaptureError
from irongrad.step.train_step import TrainStep


class _Blocks(nn.Module):
    """Attends within blocks of four tokens, averages each block, and normalises over the blocks."""

    def __init__(self, blocks: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.layer, self.norm = blocks, nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(self.layer(x))
        h = torch.softmax(h @ h.mT, -1) @ h
        return self.norm(h.mean(2).mT)


def _loss(out: Tensor) -> Tensor:
    return out.square().mean() + out[:, 0].sum()


BLOCKS = {
    "view": lambda h: h.view(h.shape[0], h.shape[1] // 4, 4, 6),
    "unflatten": lambda h: h.unflatten(1, (-1, 4)),
    "reshape": lambda h: h.reshape(h.shape[0], -1, 4, 6),
}


def _inputs(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * b + t)
    return {"x": torch.randn(b, t, 6, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_parts_of_a_dimension_are_padded_exactly(step_holds: Callable[..., None], blocks: Callable[[Tensor], Tensor]):
    sizes = [(3, 16), (1, 12)]
    step_holds(_Blocks(blocks), _loss, {"x": {0: "B", 1: "T"}}, [_inputs(*size) for size in sizes])


class _Pairs(nn.Module):
    """Computes outputs for each row and its negative, so targets have twice as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([x, -x]))


def _pairs(b: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(b)
    return {n: torch.randn(m * b, 6, generator=generator, dtype=torch.float64) for n, m in (("x", 1), ("y", 2))}


def test_a_dimension_twice_another_is_padded_exactly(step_holds: Callable[..., None]):
    names = {"x": {0: "B"}, "y": {0: "P"}}
    step_holds(_Pairs(), nn.functional.mse_loss, names, [_pairs(b) for b in (4, 3, 1)])


class _Halved(nn.Module):
    """A convolution with stride 2, which halves a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(6, 6, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


def _halves(b: int, t: int) -> dict[str, Tensor]:
    return {**_inputs(b, t), "y": _inputs(b, (t + 1) // 2)["x"]}


HALVED = {"x": {0: "B", 1: "T"}, "y": {0: "B", 1: "H"}}


def test_a_dimension_half_another_is_padded_exactly(step_holds: Callable[..., None]):
    step_holds(_Halved(), nn.functional.mse_loss, HALVED, [_halves(*size) for size in [(3, 8), (2, 7), (3, 3)]])


@pytest.mark.parametrize(("half", "fits"), [(4, True), (5, False)])
def test_half_a_dimension_is_checked_in_a_call_and_in_a_bucket(half: int, fits: bool):
    buckets = {"B": [4], "T": [8], "H": [half]}
    step = _step(_Halved(), nn.functional.mse_loss, _halves(3, 7), dynamic=HALVED, buckets=buckets)
    if not fits:
        with pytest.raises(CaptureError, match=r"needs Eq\(H, .*, and the bucket .* or a list of combinations"):
            differentiate(capture(step))
        return
    limits = differentiate(capture(step)).bucket_limits
    taken = [(t, h) for t in range(4, 9) for h in range(1, 6) if limits.allow({"B": 2, "T": t, "H": h})]
    assert taken == [(t, (t + 1) // 2) for t in range(4, 9)]


def _step(model: nn.Module, loss: Any, inputs: dict[str, Tensor], **options: Any) -> TrainStep:
    torch.manual_seed(0)
    return TrainStep(model.double(), loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs, **options)


def test_a_bucket_that_cannot_be_split_is_refused():
    names = {"x": {0: "B", 1: "T"}}
    step = _step(_Blocks(BLOCKS["view"]), _loss, _inputs(3, 16), dynamic=names, buckets={"B": [4], "T": [16, 18]})
    with pytest.raises(CaptureError, match=r"needs T a multiple of 4, and the bucket \{'B': 4, 'T': 18\}"):
        differentiate(capture(step))


def test_a_bucket_of_sizes_that_contradict_each_other_is_refused():
    names, buckets = {"x": {0: "B"}, "y": {0: "P"}}, {"B": [4, 8], "P": [8, 16]}
    step = _step(_Pairs(), nn.functional.mse_loss, _pairs(3), dynamic=names, buckets=buckets)
    with pytest.raises(CaptureError, match=r"needs Eq\(P, 2\*B\), and the bucket .* or a list of combinations"):
        differentiate(capture(step))


def test_an_example_with_a_single_part_is_refused():
    names = {"x": {0: "B", 1: "T"}}
    step = _step(_Blocks(BLOCKS["reshape"]), _loss, _inputs(3, 4), dynamic=names, buckets={"B": [4], "T": [16]})
    with pytest.raises(CaptureError, match="the size of 'T' is in dynamic, but .* for that of the example alone"):
        differentiate(capture(step))
