"""A step run in a bucket, on poisoned padding, against the same step without padding; all of it in eager float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from irongrad.pipeline.capture import StepModule, capture
from irongrad.pipeline.differentiate import Programs, programs
from irongrad.pipeline.graphs import Value
from irongrad.pipeline.specialise import Program, padded_interpreter, padded_shape
from irongrad.random import Draws
from irongrad.step import TrainStep

POISON = 1 << 40  # no index of anything


@dataclass(frozen=True)
class Case:
    """A captured step, ready to be run at any sizes."""

    step: TrainStep
    programs: Programs


def case(model: nn.Module, loss: Any, dynamic: Mapping[str, Mapping[int, str]], **inputs: Tensor) -> Case:
    """Capture a step whose dimensions are as large as buckets as in the example."""
    torch.manual_seed(0)
    model = model.double()
    sizes = {dim: inputs[n].shape[d] for n, dims in dynamic.items() for d, dim in dims.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, loss, optimizer, inputs, dynamic=dynamic, buckets=[sizes])
    return Case(step, programs(capture(step)))


def poisoned(tensor: Tensor, shape: list[int]) -> Tensor:
    """`tensor` padded with what must not be read."""
    poison: Any = float("nan") if tensor.is_floating_point() else (True if tensor.dtype == torch.bool else POISON)
    result = torch.full(shape, poison, dtype=tensor.dtype)
    result[tuple(slice(0, s) for s in tensor.shape)] = tensor
    return result


def check(case: Case, bucket: Mapping[str, int], inputs: Mapping[str, Tensor]) -> None:
    """Compare loss, gradients, buffers, and the outputs of evaluation and prediction."""
    step = case.step
    true = {dim: inputs[n].shape[d] for n, dims in step.dynamic.items() for d, dim in dims.items()}
    joint = _padded(case, case.programs.joint, bucket, true, inputs)
    expected = _eager(step, inputs, training=True)
    assert set(joint) == set(expected)
    for value, tensor in joint.items():
        _same(tensor, expected[value], str(value))
    evaluated = _padded(case, case.programs.eval, bucket, true, inputs)
    _same(evaluated[Value("output", "loss")], _eager(step, inputs, training=False)[Value("output", "loss")], "eval")
    if case.programs.predict is not None:
        predicted = _padded(case, case.programs.predict, bucket, true, inputs)
        outputs = [t for v, t in predicted.items() if v.kind == "output"]
        for made, eager in zip(outputs, _predictions(step, inputs), strict=True):
            _same(made[tuple(slice(0, s) for s in eager.shape)], eager, "predict")


def _same(made: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda m: f"{what}: {m}")


def _padded(
    case: Case, program: Program, bucket: Mapping[str, int], true: Mapping[str, int], inputs: Mapping[str, Tensor]
) -> dict[Value, Tensor]:
    def argument(value: Value) -> Tensor:
        if value.kind != "input":
            return case.programs.state[value.name].initial
        tensor = inputs[value.name]
        return poisoned(tensor, padded_shape(tensor.shape, case.step.dynamic.get(value.name, {}), bucket))

    interpret = padded_interpreter(program.names, bucket, [torch.tensor(true[n]) for n in bucket])
    with torch.no_grad(), Draws(3, 5):
        outputs = program.run(interpret, *(argument(a) for a in program.arguments))
    return dict(zip(program.results, outputs, strict=True))


def _eager(step: TrainStep, inputs: Mapping[str, Tensor], *, training: bool) -> dict[Value, Tensor]:
    module = copy.deepcopy(StepModule(step))
    module.train(training)
    before = {n: b.clone() for n, b in module.named_buffers()}
    with Draws(3, 5):
        loss = module(*inputs.values())
        if training:
            loss.backward()
    results = {Value("output", "loss"): loss.detach()}
    if not training:
        return results
    results |= {
        Value("gradient", n.removeprefix("model.")): p.grad for n, p in module.named_parameters() if p.grad is not None
    }
    changed = {n: b for n, b in module.named_buffers() if not torch.equal(b, before[n])}
    return results | {Value("state", n.removeprefix("model.")): b for n, b in changed.items()}


def _predictions(step: TrainStep, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    module = copy.deepcopy(StepModule(step)).eval()
    with torch.no_grad():
        return [t for t in tree_leaves(module.outputs(dict(inputs))) if isinstance(t, Tensor)]


Loss = Callable[..., Tensor]
