"""Numbers computed from sizes have their eager values at every size, in steps of any size and in buckets."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.pipeline.driver import step_graph
from irongrad.runtime.errors import UnsupportedOpError

BUCKETS = {"B": [4, 12]}


def _batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {n: torch.randn(rows, c, generator=generator) for n, c in {"x": 4, "y": 2}.items()}


def _step(loss: Any, **options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    dynamic = {"x": {0: "B"}, "y": {0: "B"}}
    return ig.TrainStep(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), _batch(10), dynamic=dynamic, **options
    )


def _numbers(o: Tensor, y: Tensor) -> Tensor:
    """A loss with every kind of number, and every kind of operator that takes a number."""
    n = o.shape[0]
    scaled = torch.addcmul((o - y).square(), o, o, value=1 / n) + torch.full((n, 1), 1 / n)
    whole = min(n, 8) + math.ceil(n / 2) + round(n / 4) + n**2
    return (scaled * (1 - 0.9**n)).sum() * (1.0 / o.numel()) + (o * n**-0.5).mean() / whole


def _counts(o: Tensor, y: Tensor) -> Tensor:
    """A loss that counts up to quotients, products, powers and remainders of sizes."""
    n = o.shape[0]
    counts = torch.arange(n // 2, n // 2 + n) / n + torch.arange(-(-n // 3)).sum() / n**2 + n % 3
    squares = (torch.arange(n * n).view(n, n) + torch.arange(n**2).view(n, n)).sum(0) / n**3
    return ((o - y).square().mean(1) * (counts + squares)).sum()


LOSSES: dict[str, Any] = {
    "mse": nn.MSELoss(),
    "smooth l1": nn.SmoothL1Loss(),
    "huber": nn.HuberLoss(delta=0.5),
    "a float of rank 0": lambda o, y: (o - y).square().sum() * (1.0 / o.numel()),
    "numbers": _numbers,
    "counts": _counts,
    "ranks": lambda o, y: nn.functional.margin_ranking_loss(o[:, 0], o[:, 1], y[:, 0].sign(), margin=0.3),
}


@pytest.mark.parametrize("options", [{}, {"buckets": BUCKETS}], ids=["any size", "buckets"])
@pytest.mark.parametrize("name", LOSSES)
def test_steps_at_other_sizes_match_eager(name: str, options: dict[str, Any], tmp_path: Path):
    step = _step(LOSSES[name], **options)
    twin = copy.deepcopy(step.model).double()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    session = ig.compile(step, tmp_path / "artifact", entry_points=["train_step"]).load()
    # 150 rows have chunks of elements to sum, where the example has none.
    for batch in map(_batch, (3, 5, 2, 12, 9) if options else (3, 5, 2, 12, 9, 150, 1)):
        loss = LOSSES[name](twin(batch["x"].double()), batch["y"].double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made = session.train_step(**{n: t.numpy() for n, t in batch.items()})
        np.testing.assert_allclose(made, loss.item(), rtol=1e-5)
    for parameter, value in twin.named_parameters():
        np.testing.assert_allclose(session.state()[parameter], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"buckets": BUCKETS}], ids=["any size", "buckets"])
def test_python_numbers_do_not_change_the_dtype_of_results(options: dict[str, Any]):
    step = _step(LOSSES["a float of rank 0"], **options)
    graph = step_graph(step).functions["joint"].graph
    made = [v for n in graph.graph.output_node().args[0] if (v := n.meta["val"]).is_floating_point()]
    assert {v.dtype for v in made} == {torch.float32}


def test_an_operator_that_takes_no_tensor_for_a_number_is_refused_with_its_line():
    with pytest.raises(UnsupportedOpError, match=r"test_size_numbers.py:\d+.*\n?.*takes a number.*Leave the dimension"):
        step_graph(_step(lambda o, y: nn.functional.leaky_relu(o - y, 1 / o.shape[0]).sum()))
