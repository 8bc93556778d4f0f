"""torch.cond, while_loop, scan and map become structured control flow. Compilation compares them with eager float64."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.operators.legalize.retrace import interpret_eager, retrace
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.dump import readable
from irongrad.pipeline.guards.step_indices import step_indices
from irongrad.pipeline.lower.importer import import_functions
from irongrad.runtime import Session
from irongrad.runtime.errors import InternalError, UnsupportedOpError


def linalg_of(function, *examples: torch.Tensor, scratch: Path, gradients: bool = False) -> str:
    graph = trace_function(flat_function(function, examples, gradients=gradients), function)
    imported = import_functions(graph, scratch)
    return dict(readable(imported))[".linalg.mlir"]


def cell(state: torch.Tensor, row: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.tanh(state @ weight + row)
    return new, new * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x * x).sin().sum(), lambda x: x.exp().sum(), (x,))


def test_both_branches_of_one_compiled_cond():
    compiled = ig.compile_function(branches, (torch.rand(4),), gradients=True)
    for x in (np.float32([0.1, 0.2, 0.3, 0.4]), -np.float32([0.1, 0.2, 0.3, 0.4])):
        value, (gradient,) = compiled(x)
        exact = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        expected = (exact * exact).sin().sum() if x.sum() > 0 else exact.exp().sum()
        expected.backward()
        np.testing.assert_allclose(value, expected.detach(), rtol=1e-6)
        np.testing.assert_allclose(gradient, exact.grad, rtol=1e-6)


def grow(x: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = (torch.zeros((), dtype=torch.int64), x)
    return while_loop(lambda i, y: y.sum() < limit, lambda i, y: (i + 1, y * 1.5 + x), start)


def test_a_while_loop_runs_as_often_as_its_values_say():
    compiled = ig.compile_function(grow, (torch.ones(3), torch.tensor(100.0)))
    for limit in (1.0, 20.0, 5000.0):
        count, y = compiled(np.ones(3, np.float32), np.float32(limit))
        expected, steps = torch.ones(3, dtype=torch.float64), 0
        while expected.sum() < limit:
            expected, steps = expected * 1.5 + 1, steps + 1
        assert count == steps
        np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_a_while_loop_whose_first_condition_is_a_constant_ends(tmp_path):
    """If torch-mlir 20261001 folds the first condition to true, it lowers the loop to one without a condition."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))

    lowered = linalg_of(function, torch.ones(3), scratch=tmp_path)
    assert "scf.while" in lowered
    assert "scf.for" not in lowered


def test_while_loops_in_a_scan_and_in_a_while_loop():
    def grown(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = (torch.zeros((), dtype=torch.int64), state + 0.1)
        count, new = while_loop(lambda i, y: y.sum() < 4, lambda i, y: (i + 1, y * 1.5 + row), start)
        return new.tanh(), new * count

    def triangle(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def outer(n: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            start = (torch.zeros((), dtype=torch.int64), y)
            return n + 1, while_loop(lambda i, z: i < n, lambda i, z: (i + 1, z * 1.1 + x), start)[1]

        return while_loop(lambda n, y: y.sum() < 50, outer, (torch.ones((), dtype=torch.int64), x.clone()))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*scan(grown, torch.zeros(3), x), *triangle(x[0]))

    torch.manual_seed(0)
    compiled = ig.compile_function(function, (torch.rand(40, 3),))
    for _ in range(5):
        x = torch.rand(40, 3)
        with eager_control_flow():
            expected = function(x)
        for found, value in zip(compiled(x.numpy()), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 5])
def test_branches_in_a_scan_of_other_sizes_than_the_scan_before(size):
    """Dynamo traces the bodies, and remembers the sizes of earlier bodies in the process."""

    def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.cond(row.sum() > 0, lambda s, r: s + r, lambda s, r: s * 0.5, (state, row))
        return new, new * 2

    for length in (size, size + 1):
        ig.compile_function(lambda x: scan(step, x[0], x), (torch.randn(length, size),))


def test_a_while_loop_that_may_not_end_is_refused():
    """In a loop both branches of a cond run, so a while_loop in the branch not taken might never end."""

    def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def halve(r: torch.Tensor) -> torch.Tensor:
            return while_loop(lambda y: y.sum() > 1, lambda y: (y / 2,), (r,))[0]

        return torch.cond(row.min() > 0, halve, lambda r: r * 2, (row,)), state * 2

    with pytest.raises(UnsupportedOpError, match=r"test_control_flow\.py.*while_loop in a branch"):
        ig.compile_function(lambda x: scan(step, torch.zeros(3), x), (torch.ones(4, 3),))


def strided(x: torch.Tensor) -> torch.Tensor:
    last, rows = scan(lambda c, r: ((c + r).T, (c * r).T), x, torch.stack([x, x * 2]))
    return torch.cond(x.sum() > 0, lambda a: a.T * 2, lambda a: a.sin(), (rows[1] + last,)).sum()


def as_they_came(x: torch.Tensor) -> torch.Tensor:
    last, rows = scan(lambda c, r: (c, c * r), x[0], x)
    one, other = torch.cond(x.sum() > 0, lambda a: (a.sin(), a), lambda a: (a, a * 2), (rows,))
    return (one * other).sum() + last.sum()


def with_integers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = (torch.zeros(3), torch.tensor(0), torch.tensor(True))
    (last, count, sign), _ = scan(lambda c, r: ((c[0] * 2 + r, c[1] + 1, c[2] ^ (r[0] > 3)), r * 2), start, x)
    value, which = torch.cond(sign, lambda a: (a.sin(), torch.tensor(1)), lambda a: (a * 3, torch.tensor(2)), (last,))
    return value.sum(), count, which


@pytest.mark.parametrize("function", [strided, as_they_came, with_integers])
def test_gradients_of_bodies_that_pytorch_refuses(function):
    """Bodies whose results have other strides, or are their arguments, or are integers beside floats."""
    x = torch.arange(9.0).reshape(3, 3)
    graph = trace_function(flat_function(function, (x,), gradients=True), function)
    exact = x.clone().requires_grad_()
    with eager_control_flow():
        value, *rest = torch.utils._pytree.tree_leaves(function(exact))
        value.backward()
        found = interpret_eager(graph.functions["call"].graph, [x])
    torch.testing.assert_close(list(found), [value.detach(), *rest, exact.grad])


def test_constants_from_both_branches_are_lowered(tmp_path):
    """torch-mlir 20261001 turns the constants into an `arith.select`, which it cannot lower."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cond(x.sum() > 0, lambda a: (a * 2, torch.ones(2)), lambda a: (a.sin(), torch.zeros(2)), (x,))

    assert "arith.select" in linalg_of(function, torch.ones(3), scratch=tmp_path)


@pytest.mark.slow
def test_scans_both_ways_maps_and_nestings_with_gradients():
    """Compilation verifies the value and all gradients."""

    def step(state: torch.Tensor, row: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.cond(row.sum() > 0, lambda s, r: torch.tanh(s @ weight + r), lambda s, r: s * 0.5, (state, row))
        return new, new * 2

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(3)
        last, forward = scan(lambda s, r: cell(s, r, weight), zero, x)
        _, backward = scan(lambda s, r: cell(s, r, weight), zero, x, reverse=True)
        _, nested = scan(lambda s, r: step(s, r, weight), zero, x)
        rows = map_rows(lambda r, w: (r @ w).sin(), x, weight)
        products = associative_scan(lambda a, b: a * b, x[:4], 0, combine_mode="generic")
        return sum((t * t).sum() for t in (last, forward, backward, nested, rows, products))

    torch.manual_seed(0)
    ig.compile_function(function, (torch.randn(20, 3), torch.randn(3, 3)), gradients=True)


def rows_of_a_scan(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    _, rows = scan(lambda s, r: cell(s, r, weight), torch.zeros(3), x, reverse=True)
    return rows.square().sum()


ROWS = (torch.linspace(-1, 1, 3 * 33).reshape(-1, 3), torch.eye(3))


def test_a_scan_of_many_rows():
    ig.compile_function(rows_of_a_scan, ROWS, gradients=True)


def test_large_products_in_a_scan():
    """The pass matmul-kernels writes their kernels in a loop too."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        _, rows = scan(lambda s, r: cell(s, r, weight), torch.zeros(32, 256), x)
        return rows.square().mean()

    torch.manual_seed(0)
    ig.compile_function(function, (torch.randn(20, 32, 256), torch.randn(256, 256) / 16), gradients=True)


def scans_in_a_scan(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def block(state: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(lambda s, r: cell(s, r, weight), state, rows)

    _, rows = scan(block, torch.zeros(3), x.reshape(11, 3, 3))
    return rows.square().sum()


def test_scans_in_a_scan():
    ig.compile_function(scans_in_a_scan, ROWS)


def test_the_module_does_not_grow_with_the_length(tmp_path):
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        last, rows = scan(lambda s, r: cell(s, r, weight), torch.zeros(3), x)
        return (rows * last).sum()

    short, long = (
        linalg_of(function, torch.ones(n, 3), torch.ones(3, 3), scratch=tmp_path, gradients=True) for n in (300, 4000)
    )
    assert "scf.for" in short
    assert len(long) < 1.2 * len(short)  # longer sums have one more level
    assert long.count("math.tanh") == short.count("math.tanh")


def test_a_condition_is_structured_control_flow(tmp_path):
    assert "scf.if" in linalg_of(branches, torch.ones(3), scratch=tmp_path)
    assert "scf.while" in linalg_of(grow, torch.ones(3), torch.tensor(10.0), scratch=tmp_path)


def test_one_tensor_in_two_places_stays_two_in_the_body():
    """If both initial carries are one tensor, torch 2.13 traces a scan with one carry (`clone_input`)."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        zero = torch.zeros(3)
        return list(torch.ops.higher_order.scan(lambda a, b, r: [b + r, a * 2, a - b], [zero, zero], [x], (zero,)[:0]))

    x = torch.arange(12.0).reshape(4, 3)
    graph = retrace(lambda x: list(retrace(function, [x])(x)), [x])
    for found, expected in zip(graph(x), function(x), strict=True):
        torch.testing.assert_close(found, expected)


class Model(nn.Module):
    """A recurrence over embedded tokens, looked up inside the loop, and a choice between two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        def step(state: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.tanh(self.mix(state) + self.embed(token))
            return new, new.clone()

        last, rows = scan(step, self.mix.weight.new_zeros(4, 5), tokens)
        first, second = self.heads
        return torch.cond(last.sum() > 0, lambda h: first(h), lambda h: second(h), (last + rows.mean(0),))


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = Model()
    inputs = {"tokens": torch.randint(0, 7, (20, 4)), "y": torch.randint(0, 3, (4,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


def test_a_training_step(tmp_path):
    """Compilation compares three steps with eager float64."""
    ig.compile(make_step(), tmp_path / "out", entry_points=("train_step",))
    Session(tmp_path / "out")


def test_an_index_used_inside_a_loop_has_its_range_checked():
    ranges = {r.input: (r.minimum, r.maximum) for r in step_indices(capture(make_step())).ranges}
    assert ranges == {"tokens": (0, 6), "y": (0, 2)}


def test_an_index_from_either_branch_or_used_in_a_loop_has_its_range_checked():
    def function(table: torch.Tensor, i: torch.Tensor, j: torch.Tensor, ks: torch.Tensor) -> torch.Tensor:
        (index,) = torch.cond(table.sum() > 0, lambda i, j: (i.clone(),), lambda i, j: (j.clone(),), (i, j))
        zero = table.new_zeros(3)
        last, _ = scan(lambda s, k: (s + nn.functional.embedding(k, table), s * 2), zero, ks)
        return nn.functional.embedding(index, table) + last

    index = torch.tensor(0)
    flat = flat_function(function, (torch.ones(5, 3), index, index, torch.arange(2)), gradients=False)
    graph = trace_function(flat, function)
    assert {r.input: r.maximum for r in graph.ranges} == {"i": 4, "j": 4, "ks": 4}


def test_a_scan_of_nested_states_runs_in_python():
    def step(state: dict[str, torch.Tensor], row: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        new = {"a": state["a"] + row, "b": state["b"] * row}
        return new, new["a"] * new["b"]

    x = torch.rand(4, 3)
    with eager_control_flow():
        last, rows = scan(step, {"a": torch.zeros(3), "b": torch.ones(3)}, x)
    torch.testing.assert_close(last, {"a": x.sum(0), "b": x.prod(0)})
    torch.testing.assert_close(rows, x.cumsum(0) * x.cumprod(0))


class Doubling(nn.Module):
    """Doubles its input until it is large, which needs no gradient, and applies a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (large,) = while_loop(lambda x: x.sum() < 10, lambda x: (x * 2,), (x,))
        return self.layer(large)


def test_a_step_has_a_while_loop_that_no_gradient_goes_through():
    model = Doubling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda y: y.square().sum(), optimizer, {"x": torch.rand(2, 3)})
    joint = differentiate(capture(step)).joint
    values = {"layer.weight": model.layer.weight, "layer.bias": model.layer.bias, "x": torch.rand(2, 3)}
    results = joint.graph(*(values[a.name].detach() for a in joint.arguments))
    with eager_control_flow():
        loss = model(values["x"]).square().sum()
    loss.backward()
    expected = {"loss": loss, **{n: p.grad for n, p in model.named_parameters()}}
    for value, found in zip(joint.results, results, strict=True):
        torch.testing.assert_close(found, expected[value.name].detach())


class Sums(nn.Module):
    """Applies a layer to each row, and sums the rows in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(x[0])
        return scan(lambda s, r: (s + self.layer(r), s * 2), zero, x)[0]


class Doubled(nn.Module):
    """Applies a layer to twice as many rows as each step has, and maps the results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(sums: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = self.layer(torch.cat([row, row * 2]))
            return sums + made.sum(0), made

        sums, rows = scan(step, torch.zeros(3), x)
        return sums + map_rows(lambda r: r.tanh() * r, rows).sum((0, 1))


@pytest.mark.parametrize("kind", [Sums, Doubled])
def test_a_scan_of_any_size_trains_as_eager(kind: type[nn.Module], tmp_path: Path):
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model).double()
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=1e-5) for m in (model, twin))
    step = ig.TrainStep(
        model, lambda y: y.square().mean(), optimizer, {"x": torch.rand(20, 4, 3)}, dynamic={"x": {0: "T", 1: "B"}}
    )
    session = ig.compile(step, tmp_path / "out", entry_points=["train_step"]).load()
    for steps, batch in [(20, 4), (3, 2), (2, 7), (40, 3)]:
        x = torch.rand(steps, batch, 3)
        with eager_control_flow():
            loss = twin(x.double()).square().mean()
        eager.zero_grad()
        loss.backward()
        eager.step()
        np.testing.assert_allclose(session.train_step(x=x.numpy()), loss.item(), rtol=1e-5)
    for name, parameter in twin.named_parameters():
        np.testing.assert_allclose(session.state()[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_a_while_loop_is_refused():
    def function(x: torch.Tensor) -> torch.Tensor:
        (y,) = while_loop(lambda y: y.sum() < 10, lambda y: (y * 2,), (x,))
        return y.sum()

    with pytest.raises(UnsupportedOpError, match=r"test_control_flow\.py.*while_loop.*scan"):
        ig.compile_function(function, (torch.ones(3),), gradients=True)


def test_a_body_that_captures_a_tensor_is_an_internal_error():
    """A decomposition might capture a tensor. PyTorch itself lifts captured tensors to inputs of the operator."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.ops.higher_order.while_loop(lambda y: y.sum() < 10, lambda y: (y + x,), (x,), ()))

    with pytest.raises(InternalError, match="among the inputs"):
        retrace(function, [torch.ones(3)])
