"""Runs a step in a bucket with poisoned padding, and compares it with the unpadded step, both in eager float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from irongrad.graph.step_graph import Value
from irongrad.operators.legalize.retrace import interpret_eager
from irongrad.operators.random import Draws
from irongrad.padding.interpreter import PaddedInterpreter, zeroed_in
from irongrad.padding.layout import Layout
from irongrad.padding.padded import Padded, Padding
from irongrad.pipeline.capture.capture import CapturedStep, capture, export
from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.pipeline.differentiate.joint_program import joint_program
from irongrad.pipeline.differentiate.programs import Programs, programs
from irongrad.pipeline.differentiate.specialise import Program, padded_shape, padding_in, specialise
from irongrad.pipeline.differentiate.state_names import StateNames
from irongrad.pipeline.guards.decisions import Indices
from irongrad.runtime.manifest import DRAWS, SEED
from irongrad.sizes.open import opened
from irongrad.step.train_step import TrainStep, call_of

BUCKET = {"B": 4, "T": 6, "U": 8}
WAVES = torch.cos(torch.arange(256.0).double() * 0.7 + torch.arange(5.0).double().unsqueeze(1)).unbind()
POISON = 1 << 40  # out of range as an index


@dataclass(frozen=True)
class Case:
    """A captured step, ready to run at any sizes.

    Attributes:
        step: the step.
        programs: its captured programs.
    """

    step: TrainStep
    programs: Programs


def case(model: nn.Module, loss: Any, dynamic: Mapping[str, Mapping[int, str]], **inputs: Tensor) -> Case:
    """Capture a step whose only bucket has the sizes of the example."""
    torch.manual_seed(0)
    model = model.double()
    sizes = {dim: inputs[n].shape[d] for n, dims in dynamic.items() for d, dim in dims.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, loss, optimizer, inputs, dynamic=dynamic, buckets=[sizes])
    return Case(step, programs(capture(step), Indices()))


class Poisoning(PaddedInterpreter):
    """Writes poison into the padding of every value; if a value's padding is marked as zero, checks that it is.

    Arguments are poisoned too, although entry points pad them with zeros.
    """

    def _given(self, value: Tensor, layout: Layout) -> Padded:
        return replace(super()._given(value, layout), zero=False)

    def _finished(self, result: Padded | None, number: int) -> Padded | Tensor | None:
        made = super()._finished(result, number)
        if not isinstance(made, Padded):
            return made
        solid = [d for d in made.padded() if not any(a.uniform for a in made.layout[d])]
        valid = self._padding.valid(made, solid) if solid else torch.tensor(True)
        if made.zero:
            assert not torch.where(valid, torch.zeros_like(made.tensor), made.tensor).any(), self.node.format_node()
            return made
        return replace(made, tensor=torch.where(valid, made.tensor, poison_of(made.tensor.dtype)))


def poison_of(dtype: torch.dtype) -> Tensor:
    """The value that fills padding and must not be read: NaN, True or a large integer."""
    if dtype.is_floating_point:
        return torch.full((), float("nan"), dtype=dtype)
    return torch.full((), True if dtype == torch.bool else min(POISON, torch.iinfo(dtype).max), dtype=dtype)


def padded_with(filler: Tensor, tensor: Tensor, shape: list[int]) -> Tensor:
    """`tensor` padded with `filler`."""
    result = filler.expand(shape).clone()
    result[tuple(slice(0, s) for s in tensor.shape)] = tensor
    return result


def check(case: Case, bucket: Mapping[str, int], inputs: Mapping[str, Tensor]) -> None:
    """Compare a padded run with an unpadded one: loss, gradients, buffers, evaluation and prediction."""
    step = case.step
    true = {dim: inputs[n].shape[d] for n, dims in step.dynamic.items() for d, dim in dims.items()}
    joint = _padded(case, case.programs.joint, bucket, true, inputs)
    expected = _eager(step, inputs, training=True)
    assert set(joint) == set(expected)
    for value, tensor in joint.items():
        _same(tensor, expected[value], str(value))
    inference = case.programs.inference
    if "eval" not in inference:
        return
    evaluated = _padded(case, inference["eval"], bucket, true, inputs)
    _same(evaluated[Value("output", "loss")], _eager(step, inputs, training=False)[Value("output", "loss")], "eval")
    if "predict" in inference:
        predicted = _padded(case, inference["predict"], bucket, true, inputs)
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
        return padded_with(
            poison_of(tensor.dtype), tensor, padded_shape(tensor.shape, case.step.dynamic.get(value.name, {}), bucket)
        )

    def interpret(graph: GraphModule, values: Sequence[Tensor]) -> Sequence[Tensor]:
        names = opened(program.names, bucket)

        def padding() -> Padding:
            return padding_in(graph, values, names, bucket, {n: torch.tensor(size) for n, size in true.items()})

        zeroed = zeroed_in(graph, values, names, padding())
        results: Sequence[Tensor] = Poisoning(graph, names, padding(), zeroed).run(*values, enable_io_processing=False)
        return results

    with torch.no_grad(), Draws(3, 5):
        outputs = program.run(interpret, *(argument(a) for a in program.arguments))
    return dict(zip(program.results, outputs, strict=True))


def _eager(step: TrainStep, inputs: Mapping[str, Tensor], *, training: bool) -> dict[Value, Tensor]:
    module = copy.deepcopy(StepModule(step))
    module.train(training)
    before = {n: b.clone() for n, b in module.named_buffers()}
    with Draws(3, 5), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(var|std).*degrees of freedom")  # both runs may have a single element
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
    with torch.no_grad(), Draws(3, 5):
        outputs: Any = module.outputs(dict(inputs))
    if step.loss is None:
        outputs = {n: t for n, t in outputs.items() if n != "loss"}
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]


class Weighted(nn.Module):
    """Applies `function` to the first input times a parameter, and to the other inputs."""

    def __init__(self, function: Callable[..., Any], channels: int) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, channels))

    def forward(self, x: Tensor, *others: Tensor) -> list[Tensor]:
        made = self.function(x * self.scale, *others)
        return [self.scale, *(made if isinstance(made, list | tuple) else (made,))]


def placed(outputs: list[Tensor]) -> Tensor:
    """A number that depends on every element and on its position."""
    total = torch.zeros((), dtype=torch.float64)
    for number, output in enumerate(outputs):
        weighted = output.double()
        for d in range(output.ndim):
            shape = [-1 if i == d else 1 for i in range(output.ndim)]
            weighted = weighted * WAVES[(number + d) % len(WAVES)][: output.shape[d]].reshape(shape)
        total = total + weighted.sum()
    return total


def function_case(function: Callable[..., Any], sizes: str, *others: tuple[str, int]) -> Case:
    """Capture `function` of a float input and of integer inputs; the dimensions B, T and U are dynamic.

    Args:
        function: takes tensors and returns one or several.
        sizes: the names of the float input's dimensions, one letter each.
        others: for each integer input, the names of its dimensions and the upper limit of its values.
    """
    inputs = example(sizes, others, BUCKET)
    dynamic = {
        n: {d: dim for d, dim in enumerate(given) if dim in "BTU"}
        for n, given in zip(inputs, [sizes, *(o[0] for o in others)], strict=True)
    }
    channels = inputs["x"].shape[-1] if sizes[-1] not in "BTU" else 1
    model = Weighted(function, channels).double()
    names = sorted({d for dims in dynamic.values() for d in dims.values()})
    step = TrainStep(
        model,
        placed,
        torch.optim.SGD(model.parameters(), lr=0.1),
        inputs,
        model_inputs=list(inputs),
        dynamic=dynamic,
        buckets=[{d: BUCKET[d] for d in names}],
    )
    module = StepModule(step)
    train = export(module, tuple(inputs.values()), [dynamic[n] for n in inputs])
    state = StateNames(module)
    joint = joint_program(CapturedStep(step, call_of(step), train, {}, ()), state)
    return Case(step, Programs(state.state, joint, {}))


def example(sizes: str, others: tuple[tuple[str, int], ...], at: Mapping[str, int]) -> dict[str, Tensor]:
    """Random inputs of these sizes."""
    generator = torch.Generator().manual_seed(sum(at.values()))
    size = {"C": 6, "S": 4, **at}
    inputs = {"x": torch.randn([size[d] for d in sizes], generator=generator, dtype=torch.float64)}
    for number, (dims, limit) in enumerate(others):
        inputs[f"i{number}"] = torch.randint(0, limit, [size[d] for d in dims], generator=generator)
    return inputs


SIZES = st.fixed_dictionaries({"B": st.integers(1, 4), "T": st.integers(3, 6), "U": st.integers(3, 8)})


def _holds(function: Callable[..., Any], sizes: str, *others: tuple[str, int]) -> None:
    made = function_case(function, sizes, *others)

    @settings(max_examples=2, deadline=None, derandomize=True, database=None)
    @given(at=SIZES)
    @hypothesis.example(at=BUCKET)
    def run(at: Mapping[str, int]) -> None:
        bucket, inputs = made.step.bucket_list[0], example(sizes, others, at)
        check(made, bucket, inputs)
        if bucket.keys() > {"B"}:  # nothing is padded along B if the bucket leaves it out
            check(made, {name: size for name, size in bucket.items() if name != "B"}, inputs)

    run()


@pytest.fixture
def holds() -> Callable[..., None]:
    """Checks at random sizes that padding does not change a function; takes the arguments of `function_case`."""
    return _holds


@pytest.fixture
def joint_graph() -> Callable[..., GraphModule]:
    """The joint graph of forward and backward in a bucket, as compiled; takes the arguments of `function_case`."""

    def traced(function: Callable[..., Any], sizes: str, *others: tuple[str, int]) -> GraphModule:
        made = function_case(function, sizes, *others)
        return specialise(made.programs.joint, made.step.bucket_list[0])[0].graph

    return traced


@pytest.fixture
def step_holds() -> Callable[..., None]:
    """Captures a whole step, and checks it for each of several inputs."""

    def run(model: nn.Module, loss: Any, dynamic: Mapping[str, Any], inputs: Sequence[Mapping[str, Tensor]]) -> None:
        made = case(model, loss, dynamic, **inputs[0])
        for given_inputs in inputs:
            check(made, made.step.bucket_list[0], given_inputs)

    return run


def _graph_holds(case: Case, bucket: Mapping[str, int], inputs: Sequence[Mapping[str, Tensor]]) -> None:
    function = specialise(case.programs.joint, bucket)[0]
    for given_inputs in inputs:
        made = interpret_eager(function.graph, [_given(case, v, bucket, given_inputs) for v in function.arguments])
        results = dict(zip(function.results, made, strict=True))
        for value, expected in _eager(case.step, given_inputs, training=True).items():
            _same(results[value], expected, str(value))


def _given(case: Case, value: Value, bucket: Mapping[str, int], inputs: Mapping[str, Tensor]) -> Tensor:
    """An argument of a traced function, as an entry point passes it on."""
    if value.kind == "input":
        tensor, dims = inputs[value.name], case.step.dynamic.get(value.name, {})
        return padded_with(torch.zeros((), dtype=tensor.dtype), tensor, padded_shape(tensor.shape, dims, bucket))
    if value.kind == "size":
        named = ((dim, inputs[n].shape[d]) for n, dims in case.step.dynamic.items() for d, dim in dims.items())
        return torch.tensor(dict(named)[value.name])
    random = {SEED: 3, DRAWS: 5}
    return torch.tensor(random[value.name]) if value.name in random else case.programs.state[value.name].initial


@pytest.fixture
def open_holds() -> Callable[..., None]:
    """Traces a function once for any B, padded along T and U, and checks the graph at each of several sizes."""

    def run(
        function: Callable[..., Any], sizes: str, *others: tuple[str, int], at: Sequence[Mapping[str, int]]
    ) -> None:
        made = function_case(function, sizes, *others)
        bucket = {name: size for name, size in made.step.bucket_list[0].items() if name != "B"}
        _graph_holds(made, bucket, [example(sizes, others, given_sizes) for given_sizes in at])

    return run


@pytest.fixture
def open_step_holds() -> Callable[..., None]:
    """Traces a step for a bucket that leaves dimensions open, and checks the graph for each of several inputs."""

    def run(
        model: nn.Module, loss: Any, dynamic: Mapping[str, Any], bucket: Mapping[str, int], inputs: Sequence[Any]
    ) -> None:
        _graph_holds(case(model, loss, dynamic, **inputs[0]), bucket, inputs)

    return run
