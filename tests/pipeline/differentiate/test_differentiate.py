"""The joint graph and the evaluation graphs against eager autograd, without compiling them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.graph.step_graph import Function, Value
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import JointStep, differentiate
from irongrad.runtime.manifest import Role


class Net(nn.Module):
    """Tied weights, a frozen parameter, an unused one, a constant, BatchNorm statistics, an index by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6), nn.Linear(6, 10)
        self.head.weight = self.embed.weight
        self.norm, self.unused = nn.BatchNorm1d(6), nn.Linear(2, 2)
        self.head.bias.requires_grad_(False)
        self.register_buffer("order", torch.tensor([1, 0, 2, 3, 5, -2]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(tokens))[:, self.order]
        return self.head(h * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.arange(6))


@pytest.fixture(scope="module")
def joint() -> JointStep:
    torch.manual_seed(0)
    model = Net()
    inputs = {"tokens": torch.randint(0, 10, (12,)), "y": torch.randint(0, 10, (12,))}
    return differentiate(
        capture(ig.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs))
    )


def run(joint: JointStep, function: Function) -> dict[Value, torch.Tensor]:
    state = {t.name: t.initial for t in joint.state}
    inputs = joint.captured.step.inputs
    values = [state[a.name] if a.kind == "state" else inputs[a.name] for a in function.arguments]
    return dict(zip(function.results, function.graph(*values), strict=True))


def test_state(joint: JointStep) -> None:
    roles = {t.name: t.role for t in joint.state if t.role is not Role.CONSTANT}
    assert roles.pop("embed.weight") is Role.PARAMETER
    assert "head.weight" not in roles
    assert {n for n, r in roles.items() if r is Role.BUFFER} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "order",
    }
    assert next(t for t in joint.state if t.name == "embed.weight").aliases == ("head.weight",)
    constants = [t.initial for t in joint.state if t.role is Role.CONSTANT]
    assert any(torch.equal(c, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])) for c in constants)


def test_loss_gradients_and_statistics(joint: JointStep) -> None:
    step = joint.captured.step
    found = run(joint, joint.joint)
    model = Net()
    model.load_state_dict(step.model.state_dict())
    loss = cross_entropy(model(step.inputs["tokens"]), step.inputs["y"])
    loss.backward()
    torch.testing.assert_close(found[Value("output", "loss")], loss.detach())
    gradients = {v.name for v in found if v.kind == "gradient"}
    assert gradients == {"embed.weight", "norm.weight", "norm.bias"}
    for name in gradients:
        torch.testing.assert_close(found[Value("gradient", name)], model.get_parameter(name).grad)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        torch.testing.assert_close(found[Value("state", name)], model.get_buffer(name))


def test_evaluation(joint: JointStep) -> None:
    step = joint.captured.step
    model = Net().eval()
    model.load_state_dict(step.model.state_dict())
    output = model(step.inputs["tokens"])
    found = run(joint, joint.inference["eval"])
    assert list(found) == [Value("output", "loss")]
    torch.testing.assert_close(found[Value("output", "loss")], cross_entropy(output, step.inputs["y"]).detach())
    assert [a for a in joint.inference["predict"].arguments if a.kind == "input"] == [Value("input", "tokens")]
    torch.testing.assert_close(run(joint, joint.inference["predict"])[Value("output", "output")], output.detach())


def test_graphs_are_functional_and_know_their_lines(joint: JointStep) -> None:
    for function in (joint.joint, joint.inference["eval"], joint.inference["predict"]):
        operators = [n for n in function.graph.graph.nodes if n.op == "call_function"]
        assert not [n for n in operators if getattr(n.target, "_schema", None) and n.target._schema.is_mutable]
        assert not [n for n in function.graph.graph.nodes if n.op == "get_attr"]
        assert any(__file__ in (n.stack_trace or "") for n in operators)


def test_capture_changes_nothing_in_the_model(joint: JointStep) -> None:
    model = joint.captured.step.model
    assert model.norm.num_batches_tracked == 0
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_evaluation_of_operators_that_the_dispatcher_would_expand() -> None:
    """RMSNorm is one: ATen expands it into operators that write into a tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(4), nn.Upsample(scale_factor=2), nn.BatchNorm1d(3))
    inputs = {"x": torch.randn(2, 3, 4), "t": torch.randn(2, 3, 8)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    predict = differentiate(capture(step)).inference["predict"]
    assert not any(n.target._schema.is_mutable for n in predict.graph.graph.nodes if n.op == "call_function")
    values = [{"input": inputs, "state": model.state_dict()}[a.kind][a.name] for a in predict.arguments]
    (out,) = torch.fx.Interpreter(predict.graph).run(*values)
    model.eval()
    torch.testing.assert_close(out, model(inputs["x"]))


class Solver(nn.Module):
    """Factorisations, whose error checks are side effects in PyTorch, and an identity matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[2.0, 0.5], [0.3, 1.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.w @ self.w.T + torch.eye(2)
        return torch.linalg.solve(a, x) + torch.linalg.inv(a) + torch.linalg.cholesky(a)


def test_a_step_factors_matrices() -> None:
    model = Solver()
    inputs = {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    step = ig.TrainStep(model, lambda y: y.square().sum(), torch.optim.SGD(model.parameters()), inputs)
    joint = differentiate(capture(step))
    found = run(joint, joint.joint)
    model(inputs["x"]).square().sum().backward()
    torch.testing.assert_close(found[Value("gradient", "w")], model.w.grad)
    ranges = [n for n in joint.joint.graph.graph.nodes if "arange" in str(n.target)]
    assert ranges
    assert all(n.meta["val"].itemsize > 1 for n in ranges), "torch-mlir 20261001 crashes on ranges of bytes"
