"""Buckets that leave a dimension open: one trace is padded along the others, and serves every size of the open one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from irongrad.operators.decompositions.unknown_sizes import is_known
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.sizes.limits import spelled
from irongrad.step.train_step import TrainStep

AT = [{"B": 4, "T": 6, "U": 8}, {"B": 1, "T": 3, "U": 8}, {"B": 9, "T": 5, "U": 3}]


def _merged(h: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over both dimensions, and rows that are taken apart again: the padded dimension is the outer one."""
    rows = h.flatten(0, 1).softmax(1)
    return rows.mean(0), rows.unflatten(0, (h.shape[0], -1))


FUNCTIONS: dict[str, Any] = {
    "merged dimensions": (lambda h: (h.flatten(0, 1).mean(0), h.flatten(0, 1).cumsum(1).view(h.shape)), "BTC"),
    "merged the other way": (lambda h: _merged(h.transpose(0, 1)), "BTC"),
    "attention": (lambda h: F.scaled_dot_product_attention(h, h.tanh(), h, is_causal=True), "BTC"),
    "products over rows": (lambda h: (h.transpose(0, 1).mT @ h.transpose(0, 1), h.flatten(1) @ h.flatten(1).T), "BTC"),
    "numbers of sizes": (lambda h: (h / h.shape[0], h * (h.numel() / h.shape[1]), h - h.shape[0] * h.shape[1]), "BTC"),
    "means over rows": (lambda h: (h.mean(0), h.var((0, 1)), torch.var_mean(h, 0, correction=0)[1]), "BTC"),
    "rows alone": (lambda h, i: (h * i.double().sqrt().view(-1, 1, 1), (i * i.shape[0]).flip(0)), "BTC", ("B", 4)),
    "all rows but one": (lambda h: torch.cat([torch.ones_like(h[:1]), h[:-1]]), "BTC"),
    "rows by index": (lambda h, i: (h[i], h.index_select(0, i.flatten())), "BTC", ("B", 1)),
    "dropout": (lambda h: (F.dropout(h, 0.5), torch.rand(h.shape[0], h.shape[1])), "BTC"),
    "places in two dimensions": (lambda h: (h.flatten(1, 2).mean(0), h.flip(2), h.amax((0, 2))), "BTUC"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_is_right_at_every_size(name: str, open_holds: Callable[..., None]):
    open_holds(*FUNCTIONS[name], at=AT)


class _Blocks(nn.Module):
    """Averages blocks of four tokens, and normalises over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.layer(x)).unflatten(1, (-1, 4)).mean(2).mT)


def _squares(out: Tensor) -> Tensor:
    return out.square().mean() + out[:, 0].sum()


def _inputs(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * b + t)
    return {"x": torch.randn(b, t, 6, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("bucket", [{"T": 16}, {"B": 4}])
def test_blocks_of_a_dimension_that_is_padded_or_open(open_step_holds: Callable[..., None], bucket: dict[str, int]):
    inputs = [_inputs(*size) for size in [(3, 16), (4, 8), (1, 12), (2, 4)]]
    open_step_holds(_Blocks(), _squares, {"x": {0: "B", 1: "T"}}, bucket, inputs)


class _Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def _step(function: Callable[..., Tensor], inputs: dict[str, Tensor] | None = None, **options: Any) -> TrainStep:
    model = _Model(function)
    given = inputs or {"x": torch.randn(3, 5, 6)}
    dynamic = {"dynamic": {"x": {0: "B", 1: "T"}}, "buckets": {"T": [8]}, **options}
    return TrainStep(model, lambda h, *_: h.square().mean(), torch.optim.SGD([model.scale]), given, **dynamic)


def test_only_bucketed_dimensions_have_a_known_size():
    joint = differentiate(capture(_step(lambda h: h.cumsum(1)))).joint
    shape = next(joint.example(i).shape for i, a in enumerate(joint.arguments) if a.kind == "input")
    assert [is_known(size) for size in shape] == [False, True, True]
    assert shape[1:] == (8, 6)


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (lambda h: h[:2].sum() + h, 2),
        (lambda h: h.mean(2)[1] * h.mean(2), 2),
        (lambda h: h.mean((1, 2))[:3].sum() + h, 3),
        (lambda h: h.squeeze(), 1),
        (lambda h: h[:1] + h[-1:], 1),
    ],
)
def test_the_smallest_open_size_is_found(function: Callable[..., Tensor], least: int):
    assert differentiate(capture(_step(function))).bucket_limits.smallest == {"T": 1, "B": least}


def test_multiples_of_an_open_dimension_are_conditions():
    step = _step(lambda h: h.unflatten(0, (-1, 4)).mean(1), {"x": torch.randn(8, 5, 6)})
    assert list(map(spelled, differentiate(capture(step)).bucket_limits.conditions)) == ["B a multiple of 4"]


def test_a_condition_on_padded_and_open_sizes_is_refused():
    step = _step(lambda h: h.flatten(0, 1).unflatten(0, (-1, 3)).mean(1), {"x": torch.randn(6, 5, 6)})
    with pytest.raises(CaptureError, match=r"needs .*B\*T.*any size of 'B'. Give 'B' sizes in buckets= too, or leave"):
        differentiate(capture(step))


def test_an_open_dimension_that_depends_on_a_padded_one_is_refused():
    x, y = torch.randn(4, 6), torch.randn(8, 6)
    model = _Model(lambda h: torch.cat([h, -h]))
    step = TrainStep(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD([model.scale]),
        {"x": x, "y": y},
        dynamic={"x": {0: "B"}, "y": {0: "P"}},
        buckets={"B": [4]},
    )
    with pytest.raises(CaptureError, match="Give 'P' sizes in buckets= too"):
        differentiate(capture(step))


def test_an_operator_whose_form_depends_on_an_open_size_is_refused_with_its_line():
    with pytest.raises(
        UnsupportedOpError, match=r"pool.* compiled differently.*give 'B' sizes in buckets= too"
    ) as error:
        differentiate(capture(_step(lambda h: nn.functional.adaptive_avg_pool1d(h.movedim(0, 2), 4))))
    assert "test_open_dimensions.py" in str(error.value)
