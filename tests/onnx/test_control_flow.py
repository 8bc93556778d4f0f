"""If, Loop and Scan: results match onnxruntime, gradients match numeric ones, and steps compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser
from torch import nn
from torch._higher_order_ops.scan import scan

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.graph.step_graph import StepGraph
from irongrad.onnx.load import from_proto
from irongrad.runtime.errors import UnsupportedOpError

control = torch.ops.higher_order

BRANCHES = """
<ir_version: 10, opset_import: ["" : 21]>
branches (float[3] x) => (float[3] y) <float[3] scale = {1.5, -2, 0.5}> {
    zero = Constant <value = float {0}> ()
    total = ReduceSum <keepdims = 0> (x)
    goes = Greater(total, zero)
    y = If (goes) <
        then_branch = up () => (float[3] a) <float[3] w = {1, 2, 3}> { p = Mul(x, w)  q = Mul(p, scale)  a = Sin(q) },
        else_branch = down () => (float[3] a) <float[3] w = {4, 5, 6}> { p = Add(x, w)  a = Mul(p, p) }
    >
}
"""
RECURRENCE = """
<ir_version: 10, opset_import: ["" : 21]>
recurrence (float[2, LENGTH, 3] x) => (float[2] last, float[2, LENGTH] all)
<float[2] start = {0.5, -1}, float[3] u = {1, -2, 0.5}>
{
    last, all = Scan <
        num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
        scan_input_directions = [BACKWARDS], scan_output_directions = [BACKWARDS],
        body = cell (float[2] h, float[2, 3] row) => (float[2] new, float[2] also) {
            part = MatMul(row, u)
            sum = Add(h, part)
            new = Tanh(sum)
            also = Mul(new, h)
        }
    > (start, x)
}
"""
POWERS = """
<ir_version: 10, opset_import: ["" : 21]>
powers (float[3] x) => (float[3] y, float[TRIPS, 3] all) <int64 trips = {TRIPS}, float[3] w = {0.5, -0.25, 1.25}> {
    yes = Constant <value = bool {1}> ()
    y, all = Loop (trips, yes, x) <
        body = step (int64 i, bool go, float[3] v) => (bool on, float[3] new, float[3] row) {
            on = Identity(go)
            number = Cast <to = 1> (i)
            part = Mul(w, number)
            waved = Sin(part)
            sum = Add(v, waved)
            new = Tanh(sum)
            row = Mul(new, w)
        }
    >
}
"""
UNTIL = """
<ir_version: 10, opset_import: ["" : 21]>
until (float[3] x, float limit) => (float[3] y) <float[3] w = {1.5, 2, 1.25}> {
    most = Constant <value = int64 {50}> ()
    total = ReduceSum <keepdims = 0> (x)
    begins = Less(total, limit)
    y = Loop (most, begins, x) <
        body = step (int64 i, bool go, float[3] v) => (bool on, float[3] new) {
            new = Mul(v, w)
            sum = ReduceSum <keepdims = 0> (new)
            on = Less(sum, limit)
        }
    >
}
"""


def parsed(text: str, **values: Any) -> onnx.ModelProto:
    for name, value in values.items():
        text = text.replace(name, str(value))
    model = parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    return model


def run_onnxruntime(model: onnx.ModelProto, *inputs: torch.Tensor) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return session.run(None, {n: t.numpy() for n, t in zip(names, inputs, strict=True)})


def outputs_of(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    made = model(*inputs)
    return list(made.values()) if isinstance(made, dict) else [made]


def check(proto: onnx.ModelProto, *inputs: torch.Tensor) -> StepGraph:
    """Compare results with onnxruntime, gradients with numeric ones, and the traced graph with both."""
    model = from_proto(proto)
    for found, expected in zip(outputs_of(model, *inputs), run_onnxruntime(proto, *inputs), strict=True):
        np.testing.assert_allclose(found.detach(), expected, rtol=1e-5, atol=1e-6)
    names = [n for n, _ in model.named_parameters()]
    wide = from_proto(proto).double()

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, given = values[: len(names)], values[len(names) :]
        made = torch.func.functional_call(wide, dict(zip(names, weights, strict=True)), given)
        return tuple(made.values()) if isinstance(made, dict) else (made,)

    arguments = [*wide.parameters(), *(t.double() for t in inputs)]
    arguments = [a.detach().clone().requires_grad_() for a in arguments]
    assert torch.autograd.gradcheck(function, arguments)

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return sum((t * torch.linspace(1, 2, t.numel()).reshape(t.shape)).sum() for t in function(*values))

    graph = trace_function(flat_function(loss, tuple(a.detach() for a in arguments), gradients=True), loss)
    expected = loss(*arguments)
    gradients = torch.autograd.grad(expected, arguments, allow_unused=True, materialize_grads=True)
    found = graph.functions["call"].graph(*(a.detach() for a in arguments))
    torch.testing.assert_close(list(found), [expected.detach(), *gradients])
    return graph


def targets_of(graph: StepGraph) -> list[Any]:
    return [n.target for n in graph.functions["call"].graph.graph.nodes]


def test_a_constant_condition_takes_its_branch() -> None:
    for known, expected in ((1, "w"), (0, "w_2")):
        text = BRANCHES.replace("goes = Greater(total, zero)", f"goes = Constant <value = bool {{{known}}}> ()")
        graph = check(parsed(text), torch.tensor([0.1, 0.2, -0.7]))
        assert control.cond not in targets_of(graph)
        model = from_proto(parsed(text))
        model(torch.ones(3)).sum().backward()
        assert model.get_parameter(expected).grad is not None


def test_a_condition_that_depends_on_data_becomes_a_cond() -> None:
    """Both branches have a weight of the same name."""
    proto = parsed(BRANCHES)
    assert {n for n, _ in from_proto(proto).named_parameters()} == {"scale", "w", "w_2"}
    assert {n for n, _ in from_proto(proto, freeze=["w*"]).named_parameters()} == {"scale"}
    for x in ([0.1, 0.2, 0.3], [0.1, 0.2, -0.7]):
        assert control.cond in targets_of(check(proto, torch.tensor(x)))


@pytest.mark.parametrize("length", [5, 20])
@pytest.mark.parametrize("backwards", ["0", "1"])
def test_scan_runs_along_any_axis_either_way(length: int, backwards: str) -> None:
    torch.manual_seed(0)
    proto = parsed(RECURRENCE, LENGTH=length, BACKWARDS=backwards)
    graph = check(proto, torch.randn(2, length, 3))
    assert (control.scan in targets_of(graph)) == (length == 20)


@pytest.mark.parametrize("trips", [1, 7, 30])
def test_a_counted_loop_is_unrolled_or_becomes_a_scan(trips: int) -> None:
    graph = check(parsed(POWERS, TRIPS=trips), torch.tensor([0.1, 0.2, 0.3]))
    assert (control.scan in targets_of(graph)) == (trips == 30)


def test_a_loop_may_count_its_own_iterations() -> None:
    text = POWERS.replace("on = Identity(go)", "next = Add(i, one)  on = Less(next, most)")
    text = text.replace("<int64 trips", "<int64 one = {1}, int64 most = {4}, int64 trips").replace("TRIPS, 3", "4, 3")
    graph = check(parsed(text, TRIPS=9), torch.tensor([0.1, 0.2, 0.3]))
    assert control.while_loop not in targets_of(graph)


def test_a_loop_whose_end_depends_on_data_runs_without_gradients() -> None:
    proto = parsed(UNTIL)
    model = from_proto(proto)
    for limit in (0.0, 10.0, 1000.0, 1e30):  # no iteration, some iterations, all iterations
        inputs = (torch.tensor([0.5, 0.25, 1.0]), torch.tensor(limit))
        np.testing.assert_allclose(model(*inputs).detach(), run_onnxruntime(proto, *inputs)[0], rtol=1e-5)

    def function(*values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(*values)

    graph = trace_function(flat_function(function, inputs, gradients=False), function)
    assert control.while_loop in targets_of(graph)
    (found,) = graph.functions["call"].graph(torch.tensor([0.5, 0.25, 1.0]), torch.tensor(10.0))
    torch.testing.assert_close(found, function(torch.tensor([0.5, 0.25, 1.0]), torch.tensor(10.0)))


def make_step(proto: onnx.ModelProto, file: str, **inputs: torch.Tensor) -> ig.TrainStep:
    model = from_proto(proto, file)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model=model, loss=lambda y: y.square().sum(), optimizer=optimizer, inputs=inputs)


def test_a_gradient_through_a_loop_whose_end_depends_on_data_is_refused() -> None:
    inputs = {"x": torch.tensor([0.5, 0.25, 1.0]), "limit": torch.tensor(10.0)}
    with pytest.raises(UnsupportedOpError, match=r"until\.onnx:3.*while_loop: a gradient needs the values of all"):
        ig.compile(make_step(parsed(UNTIL), "until.onnx", **inputs), "never", entry_points=["train_step"])


class Recurrent(nn.Module):
    """A recurrence over rows, and a branch between two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 5)
        self.up, self.down = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(state: Any, row: torch.Tensor) -> Any:
            h, c = self.cell(row, state)
            return (h, c), h.clone()

        zero = x.new_zeros(4, 5)
        (h, _), rows = scan(step, (zero, zero.clone()), x)
        return torch.cond(h.sum() > 0, lambda h: self.up(h), lambda h: self.down(h), (h + rows.mean(0),))


def test_an_exported_recurrence_with_a_branch_trains(tmp_path: Path, export_model: Callable[..., None]) -> None:
    """Gradients in float64 match the original model's; compiling compares three steps with eager float64."""
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(20, 4, 3)
    export_model(model, (x,), tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    read = from_proto(proto)
    np.testing.assert_allclose(read(x).detach(), run_onnxruntime(proto, x)[0], rtol=1e-5, atol=1e-6)

    own, wide = copy.deepcopy(model).double(), from_proto(proto).double()
    with eager_control_flow():
        theirs = own(x.double())
    mine = wide(x.double())
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    theirs.square().sum().backward()
    mine.square().sum().backward()
    for name, parameter in own.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found = wide.get_parameter(name).grad
        found = torch.zeros_like(parameter) if found is None else found
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)

    step = make_step(proto, str(tmp_path / "m.onnx"), x=x)
    assert ig.compile(step, tmp_path / "out", entry_points=["train_step"]).reports["llvm-cpu"].passed


def test_a_gaussian_process_of_scikit_learn_learns_its_length_scale() -> None:
    """skl2onnx computes distances with a Scan over the training data of the model."""
    from skl2onnx import to_onnx
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    rng = np.random.default_rng(0)
    x = rng.standard_normal((24, 3)).astype(np.float32)
    y = np.sin(x.sum(1))
    learned = GaussianProcessRegressor(RBF(1.5), alpha=1e-2, optimizer=None).fit(x, y)
    model = from_proto(to_onnx(learned, x[:1]))
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach()[:, 0], learned.predict(x), atol=1e-5)
    before = model.get_parameter("Di_Divcst").item()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    new = rng.standard_normal((24, 3)).astype(np.float32)
    losses = []
    for _ in range(5):
        loss = (model(torch.from_numpy(new))[:, 0] - torch.from_numpy(np.sin(new.sum(1)))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.get_parameter("Di_Divcst").item() != before


NESTED = """
<ir_version: 10, opset_import: ["" : 21]>
nested (float[20, 3] x) => (float[3] last, float[20, 3] all)
<float[3] start = {0.5, -1, 2}, float[3] u = {1, -2, 0.5}>
{
    zero = Constant <value = float {0}> ()
    last, all = Scan <
        num_scan_inputs = 1,
        body = cell (float[3] h, float[3] row) => (float[3] new, float[3] also) <float[3] w = {0.25, 0.5, 1}> {
            sum = Add(h, row)
            total = ReduceSum <keepdims = 0> (sum)
            goes = Greater(total, zero)
            new = If (goes) <
                then_branch = up () => (float[3] a) { p = Mul(sum, u)  a = Sin(p) },
                else_branch = down () => (float[3] a) <float[3] w = {2, 1, 0.5}> { p = Mul(sum, w)  a = Tanh(p) }
            >
            also = Mul(new, w)
        }
    > (start, x)
}
"""


def test_a_branch_inside_a_loop_reads_both_enclosing_graphs() -> None:
    torch.manual_seed(0)
    graph = check(parsed(NESTED), torch.randn(20, 3))
    assert control.scan in targets_of(graph)


GROWING = """
<ir_version: 10, opset_import: ["" : 21]>
growing (float[3] x) => (float[N] y) <int64 trips = {TRIPS}> {
    yes = Constant <value = bool {1}> ()
    y = Loop (trips, yes, x) <
        body = step (int64 i, bool go, float[M] v) => (bool on, float[K] new) {
            on = Identity(go)
            new = Concat <axis = 0> (v, x)
        }
    >
}
"""


def test_a_carried_value_keeps_its_shape_unless_the_loop_is_unrolled() -> None:
    assert from_proto(parser.parse_model(GROWING.replace("TRIPS", "3")))(torch.ones(3)).shape == (12,)
    model = from_proto(parser.parse_model(GROWING.replace("TRIPS", "20")), "net.onnx")
    with pytest.raises(
        UnsupportedOpError, match=r"net\.onnx:1: y = Loop\(.*\n.* changes what it carries from .*\[3\] to"
    ):
        model(torch.ones(3))


def test_a_stack_whose_length_depends_on_data_is_refused() -> None:
    text = UNTIL.replace("(float[3] y) <", "(float[3] y, float[N, 3] all) <").replace("y = Loop", "y, all = Loop")
    text = text.replace("float[3] new)", "float[3] new, float[3] row)").replace(
        "new = Mul(v, w)", "new = Mul(v, w) row = Neg(new)"
    )
    with pytest.raises(UnsupportedOpError, match="stacks a result of every iteration, whose number depends on data"):
        from_proto(parser.parse_model(text))(torch.ones(3), torch.tensor(3.0))


def test_batch_statistics_in_a_branch_that_depends_on_data_are_refused() -> None:
    norm = "m = Constant <value = float[3] {0, 0, 0}> ()  v = Constant <value = float[3] {1, 1, 1}> ()  "
    text = BRANCHES.replace("float[3]", "float[4, 3]").replace("float[4, 3] w =", "float[3] w =")
    text = text.replace("float[4, 3] scale", "float[3] scale").replace("zero = Const", norm + "zero = Const")
    text = text.replace("a = Sin(q)", "a = BatchNormalization(q, w, w, m, v)")
    model = from_proto(parsed(text), "net.onnx")
    assert model.eval()(torch.ones(4, 3)).shape == (4, 3)
    with pytest.raises(UnsupportedOpError, match="BatchNormalization of opset 21 collects statistics inside of y"):
        model.train()(torch.ones(4, 3))


def test_a_sequence_is_carried_through_an_unrolled_loop() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    listed (float[N, 2] x) => (float[N, 2] y) <int64 trips = {3}, float[2] w = {2, 3}> {
        yes = Constant <value = bool {1}> ()
        none = SequenceEmpty ()
        rows = Loop (trips, yes, none) <
            body = step (int64 i, bool go, seq(float[2]) old) => (bool on, seq(float[2]) new) {
                on = Identity(go)
                row = Gather(x, i)
                made = Mul(row, w)
                new = SequenceInsert(old, made)
            }
        >
        y = ConcatFromSequence <axis = 0, new_axis = 1> (rows)
    }
    """
    check(parser.parse_model(text), torch.rand(3, 2))
    with pytest.raises(UnsupportedOpError, match="has a sequence of tensors, and what runs depends on data"):
        from_proto(parser.parse_model(text.replace("{3}", "{30}")))(torch.rand(30, 2))
