"""Step graphs with mixed precision and loss scaling agree with eager `torch.autocast` and `torch.amp.GradScaler`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import irongrad as ig
from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.step_graph import StepGraph, Value
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import GROWTH_TRACKER, SCALE, SKIPPED, STEPS

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def graph_of(step: ig.TrainStep) -> StepGraph:
    return add_optimizer(differentiate(capture(step)))


class Running:
    """Runs the functions of a step graph in eager, and keeps the state between steps."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.state = {t.name: t.initial.clone() for t in graph.state}

    def step(self, **inputs: torch.Tensor) -> dict[Value, torch.Tensor]:
        values = {Value("input", n): t for n, t in inputs.items()}
        values |= {Value("hyper", n): torch.tensor(v, dtype=torch.float64) for n, v in self.graph.hypers.items()}
        for name in ("joint", "update"):
            function = self.graph.functions[name]
            values |= {Value("state", n): t for n, t in self.state.items()}
            results = interpret(function.graph, [values[a] for a in function.arguments])
            values |= dict(zip(function.results, results, strict=True))
            self.state |= {r.name: values[r] for r in function.results if r.kind == "state"}
        return values


class Net(nn.Module):
    """Operators that autocast runs in half precision, in float32 and in their inputs' dtype; a region without it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.batch = nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.mix, self.outer = nn.Linear(16, 16, bias=False), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.batch(torch.relu(self.inner(x))))
        with torch.autocast("cpu", enabled=False):
            hidden = hidden + self.mix(hidden.to(self.mix.weight.dtype))
        gates = nn.functional.softmax(hidden @ self.mix.weight, -1)
        return self.outer(gates * nn.functional.gelu(hidden))


def make_step(make_optimizer: Callable[..., torch.optim.Optimizer] | None = None, **options: object) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Net()
    make = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    inputs = {"x": torch.randn(12, 8), "y": torch.randint(0, 4, (12,))}
    return ig.TrainStep(model, cross_entropy, make(model.parameters()), inputs, **options)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    true = expected.detach().double()
    return float((found.detach().double() - true).norm() / true.norm())


@pytest.mark.parametrize("precision", HALVES)
def test_loss_and_gradients_agree_with_eager_autocast(precision: str) -> None:
    """As close to float64 as eager autocast is, and no closer than half precision can be."""
    step = make_step(precision=precision, loss_scale=1.0)
    values = Running(graph_of(step)).step(**step.inputs)
    model, exact = copy.deepcopy(step.model), copy.deepcopy(step.model).double()
    with torch.autocast("cpu", HALVES[precision]):
        loss = cross_entropy(model(step.inputs["x"]), step.inputs["y"])
    loss.backward()
    true_loss = cross_entropy(exact(step.inputs["x"].double()), step.inputs["y"])
    true_loss.backward()
    found = values[Value("output", "loss")]
    assert found.dtype == loss.dtype
    assert distance(found, loss) <= max(1e-6, 0.5 * distance(loss, true_loss))
    for name, parameter in model.named_parameters():
        gradient, truth = values[Value("gradient", name)], exact.get_parameter(name).grad
        assert gradient.dtype == torch.float32
        assert 1e-5 < distance(gradient, truth) <= 2 * distance(parameter.grad, truth), name


@pytest.mark.parametrize("precision", ["f32", *HALVES])
def test_products_keep_the_users_lines(precision: str) -> None:
    """Under the autocast of the whole step, and in the region without it."""
    joint = differentiate(capture(make_step(precision=precision)))
    for function in (joint.joint, joint.inference["eval"], joint.inference["predict"]):
        products = [n for n in function.graph.graph.nodes if n.target is torch.ops.aten.mm.default]
        lines = [line_of(n, otherwise="") for n in products]
        assert any("self.mix(" in line for line in lines), lines
        assert any("hidden @ self.mix.weight" in line for line in lines), lines
    backward = [n for n in joint.joint.graph.graph.nodes if n.meta.get("autograd_backward")]
    assert any("self.mix(" in line_of(n, otherwise="") for n in backward)


class Dtypes(TorchDispatchMode):
    """Records the operators that run and the dtypes of their results, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor):
            self.found.append((str(func), first.dtype))
        return result


@pytest.mark.parametrize("precision", HALVES)
def test_operators_run_in_the_dtypes_of_autocast(precision: str) -> None:
    """`precision` runs the same operators, in the same dtypes, as a `torch.autocast` around the model."""
    step = make_step(precision=precision)
    program = capture(step).train.module(check_guards=False)
    with Dtypes() as captured:
        program(*step.inputs.values())
    with Dtypes() as eager, torch.autocast("cpu", HALVES[precision]):
        cross_entropy(copy.deepcopy(step.model)(step.inputs["x"]), step.inputs["y"])
    kept = ("mm", "softmax", "norm", "gelu", "nll")
    of_interest = [[(n, d) for n, d in found.found if any(k in n for k in kept)] for found in (captured, eager)]
    assert len({d for _, d in of_interest[0]}) == 2
    assert of_interest[0] == of_interest[1]


def test_an_autocast_region_of_the_users_own_is_kept() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x)

    torch.manual_seed(0)
    model = Own()
    inputs = {"x": torch.randn(6, 8), "y": torch.randn(6, 1)}
    step = ig.TrainStep(model, mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    joint = differentiate(capture(step))
    assert joint.inference["predict"].results_like()[0].dtype == torch.bfloat16
    values = Running(add_optimizer(joint)).step(**inputs)
    loss = mse_loss(model(inputs["x"]), inputs["y"])
    loss.backward()
    torch.testing.assert_close(values[Value("output", "loss")], loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(values[Value("gradient", "layer.weight")], model.layer.weight.grad, rtol=1e-2, atol=1e-4)


class Teacher(nn.Module):
    """Values without gradients inside autocast: a target from the same weights, and a buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("last", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            target = self.layer(x + 1).tanh()
            self.last.copy_(y)
        return y - target


def test_no_grad_inside_autocast_is_kept() -> None:
    torch.manual_seed(0)
    model = Teacher()
    inputs = {"x": torch.randn(6, 8)}
    step = ig.TrainStep(
        model, lambda o: o.square().mean(), torch.optim.SGD(model.parameters()), inputs, precision="bf16"
    )
    joint = differentiate(capture(step))
    written = [dict(zip(f.results, f.results_like(), strict=True)) for f in (joint.joint, *joint.inference.values())]
    assert {results[Value("state", "last")].dtype for results in written} == {torch.float32}
    values = Running(add_optimizer(joint)).step(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs["x"]).square().mean()
    loss.backward()
    torch.testing.assert_close(values[Value("gradient", "layer.weight")], model.layer.weight.grad, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(values[Value("state", "last")], model.last)


class Composite(nn.Module):
    """Composite operators: autocast has rules only for the products that they consist of."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell = nn.Parameter(torch.randn(3, 8, 16)), nn.GRUCell(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = torch.einsum("td,edh->eth", x, self.into)
        mixed = torch.einsum("eth,ehd,te->td", experts, self.into.mT, x[:, :3].softmax(-1))
        return self.cell(torch.tensordot(mixed.to(x.dtype), self.into[0], 1))


@pytest.mark.parametrize("precision", HALVES)
def test_parts_of_composite_operators_run_as_in_eager_autocast(precision: str) -> None:
    """In prediction too, and in a product of one matrix in half precision and one in float32."""
    torch.manual_seed(0)
    model = Composite()
    inputs = {"x": torch.randn(12, 8), "y": torch.randint(0, 4, (12,))}
    step = ig.TrainStep(
        model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs, precision=precision, loss_scale=1.0
    )
    predict = differentiate(capture(step)).inference["predict"]
    values = {"x": inputs["x"], **model.state_dict()}
    (found,) = interpret(predict.graph, [values[a.name] for a in predict.arguments])
    with torch.no_grad(), torch.autocast("cpu", HALVES[precision]):
        expected = model(inputs["x"])
    with torch.no_grad():
        exact = model.double()(inputs["x"].double())
    assert found.dtype == expected.dtype
    assert distance(found, expected) <= 0.2 * distance(expected, exact)


def eager_steps(step: ig.TrainStep, scaler: torch.amp.GradScaler, batches: list[dict[str, torch.Tensor]]):
    """Train as PyTorch's documentation does; yield the loss, the model and the scaler after every step."""
    model, optimizers = copy.deepcopy((step.model, list(step.optimizers)))
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with step.autocast():
            loss = step.loss(model(batch["x"]), batch["y"])
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if step.clip_grad_norm is not None:
            clip_grad_norm_(model.parameters(), step.clip_grad_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        yield loss.detach(), model, scaler


def batches_with_overflow(step: ig.TrainStep, overflows: list[bool]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(12, 8, generator=generator), "y": step.inputs["y"]} for _ in overflows]
    for batch, overflow in zip(batches, overflows, strict=True):
        if overflow:
            batch["x"][0, 0] = float("inf")
    return batches


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_agree_with_grad_scaler(name: str) -> None:
    """In f16 with clipping: overflow in the first and in later steps, and growth after three steps without overflow."""
    options = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    scaler = torch.amp.GradScaler("cpu", **options)
    step = make_step(OPTIMIZERS[name], precision="f16", loss_scale=scaler, clip_grad_norm=0.5)
    overflows = [True, False, False, False, False, True, True, False, False, False, False]
    batches = batches_with_overflow(step, overflows)
    running = Running(graph_of(step))
    twin = torch.amp.GradScaler("cpu", **options)
    scales = []
    for number, (loss, model, eager) in enumerate(eager_steps(step, twin, batches)):
        before = running.state
        values = running.step(**batches[number])
        assert running.state[SCALE].item() == eager.get_scale()
        assert running.state[GROWTH_TRACKER].item() == eager._growth_tracker.item()
        assert running.state[SKIPPED].tolist() == [sum(overflows[: number + 1])]
        assert running.state[STEPS].item() == number + 1
        scales.append(eager.get_scale())
        if overflows[number]:
            kept = [n for n in before if n in dict(model.named_parameters()) or n.startswith("optimizer/")]
            assert all(torch.equal(running.state[n], before[n]) for n in kept)
            continue
        assert distance(values[Value("output", "loss")], loss) < 2e-3
        for key, parameter in model.named_parameters():
            assert distance(running.state[key], parameter) < 5e-3, key
    assert scales == [256.0, 256.0, 256.0, 1024.0, 1024.0, 256.0, 64.0, 64.0, 64.0, 256.0, 256.0]


def test_each_optimizer_skips_for_its_own_gradients() -> None:
    """GradScaler skips the optimizer whose gradients overflow, and reduces the scale for all."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x.nan_to_num(posinf=0.0)) + self.second(x)

    torch.manual_seed(0)
    model = Two()
    optimizers = [
        torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
        torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    ]
    inputs = {"x": torch.randn(12, 8), "y": torch.randn(12, 4)}

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(output.nan_to_num(posinf=0.0, neginf=0.0), y)

    step = ig.TrainStep(model, loss, optimizers, inputs, loss_scale=torch.amp.GradScaler("cpu", init_scale=8.0))
    overflows = [True, False, False]
    batches = [{**b, "y": inputs["y"]} for b in batches_with_overflow(step, overflows)]
    running = Running(graph_of(step))
    for number, (_, eager, scaler) in enumerate(eager_steps(step, torch.amp.GradScaler("cpu", 8.0), batches)):
        running.step(**batches[number])
        assert running.state[SCALE].item() == scaler.get_scale() == 4.0
        assert running.state[SKIPPED].tolist() == [0, 1]
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(running.state[name], parameter.detach(), msg=name)


def test_a_fixed_scale_changes_no_float32_number() -> None:
    plain, scaled = Running(graph_of(make_step())), Running(graph_of(make_step(loss_scale=4096.0)))
    assert set(scaled.state) - set(plain.state) == {SCALE}
    inputs = make_step().inputs
    for _ in range(2):
        plain.step(**inputs)
        values = scaled.step(**inputs)
    assert all(torch.equal(scaled.state[n], t) for n, t in plain.state.items())
    assert scaled.state[SCALE].item() == 4096.0
    assert values[Value("gradient", "outer.bias")].abs().max() > 1.0


def test_scale_of_a_used_scaler_is_taken_over() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    step = make_step(precision="f16", loss_scale=scaler)
    list(eager_steps(step, scaler, batches_with_overflow(step, [True, False, False])))
    state = {t.name: t.initial.item() for t in graph_of(step).state if t.name in (SCALE, GROWTH_TRACKER)}
    assert state == {SCALE: 32768.0, GROWTH_TRACKER: 2}


def test_f16_has_a_dynamic_scale_unless_told_otherwise() -> None:
    hypers = graph_of(make_step(precision="f16")).hypers
    assert (hypers["growth_factor"], hypers["backoff_factor"], hypers["growth_interval"]) == (2.0, 0.5, 2000.0)
    for options in ({"precision": "bf16"}, {}, {"loss_scale": torch.amp.GradScaler("cpu", enabled=False)}):
        assert not [t for t in graph_of(make_step(**options)).state if t.name == SCALE]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "precision is 'fp16'; it must be one of f32, bf16, f16"),
        ({"loss_scale": 0.0}, "loss_scale is 0.0; it must be a positive number"),
        ({"loss_scale": "dynamic"}, "loss_scale is a str; it must be a number or a torch.amp.GradScaler"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        make_step(**options)


def test_a_scaler_refuses_float16_parameters() -> None:
    model = nn.Linear(8, 1).half()
    inputs = {"x": torch.randn(6, 8).half(), "y": torch.randn(6, 1).half()}
    with pytest.raises(CaptureError, match="does not take float16 parameters"):
        ig.TrainStep(model, mse_loss, torch.optim.SGD(model.parameters()), inputs, precision="f16")
