"""`TrainStep.accumulate`: the micro-batches, their gradients, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import irongrad as ig
from irongrad.graph.step_graph import Value
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.runtime.errors import CaptureError
from irongrad.step.train_step import micro_batches


def make_step(accumulate: int, **inputs: torch.Tensor) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    given = {"x": torch.randn(12, 3), "y": torch.randn(12, 1), **inputs}
    return ig.TrainStep(
        model,
        lambda output, y, *rest: mse_loss(output, y),
        torch.optim.SGD(model.parameters()),
        given,
        accumulate=accumulate,
    )


def test_micro_batches_of_a_batch() -> None:
    x, scalar = torch.arange(6.0).reshape(6, 1), torch.tensor(2.0)
    parts = micro_batches({"x": x, "s": scalar}, 3)
    assert [p["x"].flatten().tolist() for p in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(p["s"] is scalar for p in parts)
    assert micro_batches({"x": x}, 1)[0]["x"] is x


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    step = make_step(4)
    graph = add_optimizer(differentiate(capture(step)))
    joint = graph.functions["joint"]
    assert [joint.example(i).shape[0] for i, a in enumerate(joint.arguments) if a.kind == "input"] == [3, 3]
    assert graph.functions["eval"].example(2).shape[0] == 12
    assert chain_of("train_step", graph) == ("joint", "accumulate", "update")
    total: dict[Value, torch.Tensor] = {}
    for part in micro_batches(step.inputs, 4):
        values = {Value("input", n): t for n, t in part.items()}
        values |= {Value("state", t.name): t.initial for t in graph.state}
        results = interpret(joint.graph, [values[a] for a in joint.arguments])
        for result, tensor in zip(joint.results, results, strict=True):
            total[result] = total.get(result, torch.zeros(())) + tensor
    loss = mse_loss(step.model(step.inputs["x"]), step.inputs["y"])
    loss.backward()
    torch.testing.assert_close(total[Value("output", "loss")] / 4, loss.detach())
    for name, parameter in step.model.named_parameters():
        torch.testing.assert_close(total[Value("gradient", name)], parameter.grad)


@pytest.mark.parametrize(
    ("accumulate", "inputs", "message"),
    [
        (0, {}, "accumulate is 0; it must be a positive integer"),
        (5, {}, "divisible by 5; their sizes are x: 12, y: 12"),
        (2, {"mask": torch.ones(3, 3)}, "their sizes are x: 12, y: 12, mask: 3. Make what is not a part of the batch"),
    ],
)
def test_refusals(accumulate: int, inputs: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        make_step(accumulate, **inputs)
