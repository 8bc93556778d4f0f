"""Rematerialisation: the same results in less memory, within the budget, at nearly the least cost."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.func import functionalize
from torch.fx import GraphModule
from torch.nn import functional as F

from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.memory_model.fusion import kernels
from irongrad.memory_model.kernel_roles import source
from irongrad.memory_model.liveness import usage
from irongrad.operators.legalize.retrace import interpret, retrace
from irongrad.operators.random import Draws
from irongrad.passes.base import Context
from irongrad.passes.graph.rematerialise import Rematerialise, bytes_in
from irongrad.passes.graph.rematerialise.order import separate_late_sums
from irongrad.passes.graph.rematerialise.schedule import carry_out, cheapest, everything_saved, problem_of
from irongrad.passes.recompute import is_backward, is_cast, is_recomputed, recompute
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import UserError

aten = torch.ops.aten
Step = Callable[..., torch.Tensor]


def with_gradients(loss: Step) -> Callable[..., list[torch.Tensor]]:
    """`loss`, and its gradients with respect to all arguments but the first."""

    def run(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        leaves = [w.detach().requires_grad_() for w in weights]
        with torch.enable_grad():
            value = loss(x, *leaves)
            setup_stacktrace_preservation_hooks([value.grad_fn])
            gradients = torch.autograd.grad(value, leaves)
        return [value.detach(), *gradients]

    return run


def joint(loss: Step, *examples: torch.Tensor, decompose: bool = True) -> GraphModule:
    """The forward and backward graph of `loss`, without common subexpressions."""
    graph = retrace(with_gradients(loss), examples, decompose=decompose)
    merge_common_subexpressions(graph)
    graph.graph.eliminate_dead_code()
    return graph


def network(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Layers whose backward needs many saved values: GELU, softmax and products."""
    for weight in weights:
        x = F.gelu(F.layer_norm(x @ weight, [weight.shape[1]]))
        x = x * torch.softmax(x, -1)
    return x.square().mean()


def arguments(layers: int = 4, rows: int = 256, width: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, width), *(torch.randn(width, width) / width**0.5 for _ in range(layers))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_numbers_in_half_the_memory(apply: Callable[..., Any], dtype: torch.dtype) -> None:
    examples = [a.to(dtype) for a in arguments()]
    done = apply(Rematerialise("50%"), with_gradients(network), *examples, function="joint")
    before, after = usage(done.before.graph).total, usage(done.after.graph).total
    assert done.stats["bytes"] == after
    assert after <= before / 2
    for a, b in zip(interpret(done.before, examples), interpret(done.after, examples), strict=True):
        assert torch.equal(a, b)  # bit for bit: a tied value has the bits of the value


def test_nothing_is_tied_to_a_cast(apply: Callable[..., Any]) -> None:
    """IREE 3.13.0 took minutes and gigabytes for a kernel that casts a tensor and reads one element of it."""

    def in_halves(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh((x.half() @ weight.half()).float())
        return x.square().mean()

    done = apply(Rematerialise("85%"), with_gradients(in_halves), *arguments(), function="joint")
    sizes = [n for n in done.after.graph.nodes if n.target is torch.ops.aten.abs.default]
    assert sizes
    assert not any(is_cast(source(n.args[0])) for n in sizes)


def test_without_a_budget_or_a_backward_nothing_changes(apply: Callable[..., Any]) -> None:
    assert not apply(Rematerialise(), with_gradients(network), *arguments(1), function="joint").changed
    assert not apply(Rematerialise("50%"), with_gradients(network), *arguments(1), function="update").changed
    assert not apply(Rematerialise("50%"), network, *arguments(1), function="joint").changed


def test_a_budget_that_is_met_already_changes_nothing(apply: Callable[..., Any]) -> None:
    assert not apply(Rematerialise("100%"), with_gradients(network), *arguments(), function="joint").changed


def test_without_recomputable_values_a_small_budget_changes_nothing(apply: Callable[..., Any]) -> None:
    """The compiler decides whether the step fits."""
    done = apply(Rematerialise("10%"), with_gradients(lambda x, w: (x @ w).sum()), *arguments(1), function="joint")
    assert not done.changed
    assert done.stats["bytes"] == done.stats["bytes before"] > done.stats["budget"]


def test_bodies_of_loops_are_left_alone() -> None:
    """A percentage is one of the memory of the whole step, not of a body."""
    graph = joint(network, *arguments(2))
    before = str(graph.graph)
    assert not Rematerialise("50%").run(graph, Context("joint")).changed
    assert str(graph.graph) == before


def test_a_budget_that_cannot_be_met_gives_the_smallest_plan(apply: Callable[..., Any]) -> None:
    least = apply(Rematerialise("1KiB"), with_gradients(network), *arguments(2), function="joint").stats["bytes"]
    half = apply(Rematerialise("50%"), with_gradients(network), *arguments(2), function="joint").stats["bytes"]
    assert 1024 < least <= half
    assert (
        apply(Rematerialise(str(least)), with_gradients(network), *arguments(2), function="joint").stats["bytes"]
        <= least
    )


def test_the_ratio_of_allocated_to_predicted_memory_shrinks_the_plan(apply: Callable[..., Any]) -> None:
    stats = apply(Rematerialise("80%", ratio=1.2), with_gradients(network), *arguments(2), function="joint").stats
    assert stats["budget"] == int(0.8 * stats["bytes before"])
    assert stats["bytes"] <= stats["budget"] / 1.2


@pytest.mark.parametrize(
    ("text", "count"), [("512MiB", 512 * 2**20), ("1.5 GB", 1_500_000_000), ("1000", 1000), ("25%", 50), ("2kib", 2048)]
)
def test_amounts_of_memory(text: str, count: int) -> None:
    assert bytes_in(text, 200) == count


@pytest.mark.parametrize(("count", "text"), [(0, "0.0KiB"), (1000, "1.0KiB"), (2**20, "1.0MiB"), (1_500_000, "1.5MiB")])
def test_readable_amounts_are_rounded_up(count: int, text: str) -> None:
    assert readable(count) == text
    assert count <= bytes_in(text, 0)


@pytest.mark.parametrize("text", ["", "much", "12 parsecs", "-1", "50 %%", "0.5"])
def test_a_text_that_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no amount of memory"):
        bytes_in(text, 200)


def test_a_budget_that_is_no_amount_is_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match="'half' is no amount of memory"):
        Rematerialise("half")


def test_a_tied_value_is_itself_whatever_it_is_tied_to() -> None:
    graph = joint(lambda x, w: torch.exp(x * w).sum(), torch.randn(64), torch.randn(64))
    recompute(graph.graph, set())
    graph.recompile()
    ties = [n for n in graph.graph.nodes if n.target is aten.lt.Scalar]
    assert ties
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45] + [1.0] * 58)
    expected = with_gradients(lambda x, w: torch.exp(x * w).sum())(x, x)
    for a, b in zip(interpret(graph, [x, x]), expected, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_recomputed_masks_are_the_same() -> None:
    examples = [*arguments(3), torch.tensor(7), torch.tensor(0)]

    def dropped(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = F.dropout(torch.tanh(x @ weight), 0.5)
        return x.square().mean()

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        *rest, seed, draws = values
        with Draws(seed, draws):
            return with_gradients(dropped)(*rest)

    drawn = retrace(run, examples, decompose=False)
    graph = retrace(functionalize(lambda *v: list(interpret(drawn, v))), examples)
    merge_common_subexpressions(graph)
    expected = interpret(graph, examples)
    recompute(graph.graph, set())
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert any(is_recomputed(n) and n.target is aten.bitwise_xor.Tensor for n in graph.graph.nodes)
    for a, b in zip(interpret(graph, examples), expected, strict=True):
        assert torch.equal(a, b)


def test_copies_read_tied_values_and_the_backward_keeps_only_saved_values() -> None:
    graph = joint(network, *arguments(2))
    saved = {n for n in graph.graph.nodes if n.target is aten.mm.default and not is_backward(n)}
    recompute(graph.graph, saved)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    merge_common_subexpressions(graph)  # IREE does this too, and it must not merge a copy with its original
    forward = {n for n in graph.graph.nodes if n.op == "call_function" and not is_backward(n)} - saved
    grouping = kernels(graph.graph, packed=True)
    kept = {n for n in forward if n in grouping.leader and any(is_backward(u) for u in n.users)}
    assert [n.meta["val"].shape for n in kept] == [torch.Size([])]  # the loss, whose alias is made last
    assert sum(is_recomputed(n) for n in graph.graph.nodes) > 20


def brute_force(graph: GraphModule, budget: int) -> float | None:
    """The least cost of all choices of saved values that fit; None if no choice fits."""
    problem = problem_of(graph.graph)
    costs = [
        plan.seconds
        for count in range(len(problem.values) + 1)
        for chosen in combinations(problem.values, count)
        if (plan := carry_out(problem, set(chosen))).total <= budget
    ]
    return min(costs, default=None)


GRAPHS = {
    "chain": lambda x, a, b: torch.tanh(torch.exp(x @ a) @ b).sum(),
    "branches": lambda x, a, b: (torch.tanh(x @ a) * torch.sigmoid(x @ b)).sum(),
    "reduction": lambda x, a, b: (torch.exp(torch.tanh(x @ a)).mean(0, keepdim=True) @ b).sum(),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("fraction", [0.9, 0.7])
def test_the_cost_is_nearly_the_least(name: str, fraction: float) -> None:
    graph = joint(GRAPHS[name], torch.randn(512, 8), torch.randn(8, 8), torch.randn(8, 8), decompose=False)
    problem = problem_of(graph.graph)
    assert len(problem.values) <= 7
    budget = int(everything_saved(problem).total * fraction)
    plan, least = cheapest(problem, budget), brute_force(graph, budget)
    if plan is None:
        assert least is None
    else:
        assert least is not None
        assert plan.total <= budget
        assert plan.seconds <= 1.1 * least + 1e-9


def test_sums_of_early_and_late_values_are_read_from_memory() -> None:
    def tied(x: torch.Tensor, first: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return network(torch.tanh(x @ first), *weights, first)

    examples = arguments(8, rows=32)
    graph = joint(tied, *examples)
    expected = interpret(graph, examples)
    assert separate_late_sums(graph.graph) == 1
    assert separate_late_sums(graph.graph) == 0
    graph.recompile()
    for a, b in zip(interpret(graph, examples), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_several_results_of_one_operator_are_recomputed_together() -> None:
    """A loop or a split has several results. The pass copies the operator once, and ties each result."""

    def network(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            one, other = aten.split_with_sizes.default(torch.tanh(x @ weight), [8, 8], 1)
            x = torch.cat([one.exp() * other, other.sin() * one], 1)
        return x.square().mean()

    examples = arguments(3)
    graph = joint(network, *examples, decompose=False)
    expected = interpret(graph, examples)
    recompute(graph.graph, set())
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    items = [n for n in graph.graph.nodes if is_recomputed(n) and n.target is operator.getitem]
    assert len({n.args for n in items}) == len(items) > 4
    assert all(is_recomputed(n.args[0]) for n in items)
    for a, b in zip(interpret(graph, examples), expected, strict=True):
        assert torch.equal(a, b)
