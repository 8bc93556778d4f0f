"""Choose the form in which every convolution, and each of its gradients, is computed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import call, replace, value_of
from irongrad.passes.base import Context, Lowering, Measured, PassResult
from irongrad.passes.graph.convolutions.choice import (
    Costs,
    choices_of,
    costs_of,
    fastest,
    hopeful,
    in_seconds,
    measured,
)
from irongrad.passes.graph.convolutions.forms import Form, forms_of
from irongrad.passes.graph.convolutions.problem import Halves, Problem
from irongrad.passes.graph.convolutions.recognise import Task, tasks_of
from irongrad.passes.graph.convolutions.windowed import is_windowed
from irongrad.passes.inline import inline
from irongrad.targets import Ability

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolutions(Lowering):
    """Rewrite each convolution, and the gradients of its input and weight, into the fastest form.

    Before:
        y = convolution(x, w, ...)                                # x [N, C, H, W]
    After, for a 1x1 kernel:
        y = (x.permute(0, 2, 3, 1).flatten(0, 2) @ w.t()).reshape(N, H, W, O).permute(0, 3, 1, 2)

    `convolutions/forms.py` lists the forms:

    * `winograd` is for 3x3 kernels with stride 1.
    * `gathered` and `by-row` are matrix products. The inputs that the kernel taps read are gathered before the product.
    * `scattered` is a matrix product whose elements are added to the result at each tap's inputs.
    * `depthwise` is elementwise code.
    * `windowed` is the convolution as it is, for which `passes/module/matmul_kernels` has kernels that read the windows
      of the image in place. Its gradients are written as such convolutions, too.
    * `filtered` is a depthwise convolution as it is, for which `passes/module/depthwise_kernels` has kernels. So are
      its gradients.
    * `direct` is the convolution as IREE lowers it.

    The pass takes the cheapest form, by the cost table `convolutions/costs.py` or by measurement on the target
    (`--tune`). All forms but `direct` are channels-last inside. The pass `layout` removes the transposes between them.
    A 1-D convolution is treated as a 2-D one whose first dimension has size one. Earlier stages have already rewritten
    transposed and 3-D convolutions as 2-D ones.

    Operands of bfloat16 are widened before. If the targets multiply them faster as they are, the forms that are
    products move the operands as bfloat16. Winograd's sums need float32.

    Attributes:
        winograd: whether the pass may choose the form `winograd`.
        direct: whether the pass may choose the form `direct` if another form computes the same result.
        windowed: whether the pass may choose the form `windowed`, for targets with kernels of ours.
        least_gain: the milliseconds of one core that `winograd` must save on a weight gradient, by the cost table, to
            be chosen. Weight gradients gain least, and compiling their kernels takes a third of a second for each
            different convolution (docs/convolutions.md). Measured forms ignore it.
    """

    name: ClassVar[str] = "convolutions"

    winograd: bool = True
    direct: bool = True
    windowed: bool = True
    least_gain: float = 0.0

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        stats: dict[str, int] = {}
        changed = False
        own, halves = Ability.CONVOLUTIONS in context.abilities, _halves(context.abilities)
        allowed = {"winograd": self.winograd, "direct": self.direct, "filtered": own, "windowed": own and self.windowed}
        tasks = [task for node in graph.graph.nodes for task in tasks_of(node, halves)]
        problems = [task.problem for task in tasks]
        of_problems = {task.problem: task for task in tasks}
        defaults = forms = fastest({p: self._default_costs(p, allowed) for p in of_problems}, problems)
        times: dict[Problem, Measured | None] = {}
        if timer := context.timer:
            several = {p: f for p, one in defaults.items() if len(f := hopeful(_costs(p, allowed), one)) > 1}
            timer.expect(len(several))
            times = {p: measured(of_problems[p], found, timer) for p, found in several.items()}
            known = {p: costs_of(times[p], found, defaults[p]) for p, found in several.items()}
            costs = {p: known.get(p) or in_seconds(self._default_costs(p, allowed)) for p in defaults}
            forms = fastest(costs, problems)
        for node in list(graph.graph.nodes):
            for task in tasks_of(node, halves):  # anew: the operands may be nodes that this loop wrote
                form = forms[task.problem]
                stats[form.name] = stats.get(form.name, 0) + 1
                if task.result is not None or not _is_written(task, form):
                    write(node, task, form)
                    changed = True
        return PassResult(changed, stats, choices_of(times, forms, defaults))

    def _default_costs(self, problem: Problem, allowed: Mapping[str, bool]) -> Costs:
        """The costs by which a form is chosen without a measurement."""
        costs = _costs(problem, allowed)
        return _without_small_gains(costs, self.least_gain) if problem.kind == "weight" else costs

    @staticmethod
    def lower_plainly(graph: GraphModule) -> None:
        """Write every convolution backward in its `direct` form, which the importer accepts."""
        for node in graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
            for task in tasks_of(node):
                write(node, task, forms_of(task.problem)[0])


def _halves(abilities: Collection[Ability]) -> Halves | None:
    """How a target with some abilities multiplies bfloat16."""
    if Ability.HALVES not in abilities:
        return None
    return Halves.TILES if Ability.TILES in abilities else Halves.VECTORS


def _costs(problem: Problem, allowed: Mapping[str, bool]) -> Costs:
    """The cost of each allowed form, by the cost table."""
    every = forms_of(problem)
    if allowed.get("windowed") and is_windowed(problem):
        allowed = {**allowed, "direct": False}  # our kernels compute it, too
    return {f: f.cost(problem) for f in [f for f in every if allowed.get(f.name, True)] or every}


def _without_small_gains(costs: Costs, least: float) -> Costs:
    """Drop Winograd from `costs` if it saves less than `least` milliseconds."""
    cheapest = min(cost for form, cost in costs.items() if form.name != "winograd")
    return {form: cost for form, cost in costs.items() if form.name != "winograd" or cheapest - cost >= least * 1e6}


def _is_written(task: Task, form: Form) -> bool:
    """Whether a convolution is in `form` as it is."""
    return form.name == "direct" or (form.name == "filtered" and task.bias is None)


def write(node: Node, task: Task, form: Form) -> None:
    """Replace the result of `node` that `task` describes by nodes that compute it in `form`."""
    operands = task.narrow_operands if form.is_product else task.operands
    result = inline(_FormFunction(form, task.problem), operands, node)
    if task.bias is not None:
        with node.graph.inserting_before(node):
            spatial = [1] * (value_of(result).ndim - 2)
            bias = call(node.graph, aten.view.default, task.bias, [-1, *spatial], like=node)
            result = call(node.graph, aten.add.Tensor, result, bias, like=node)
    if task.result is None:
        replace(node, result)
        return
    for user in [u for u in node.users if u.target is operator.getitem and u.args[1] == task.result]:
        replace(user, result)
    if not node.users:
        node.graph.erase_node(node)


@dataclass(frozen=True)
class _FormFunction:
    """A form as a function of two tensors.

    `inline` traces equal functions once, so equal problems give equal functions. A 1-D operand gets a first spatial
    dimension of size one.
    """

    form: Form
    problem: Problem

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if first.ndim == 3:
            return self.form.build(first.unsqueeze(2), second.unsqueeze(2), self.problem).squeeze(2)
        return self.form.build(first, second, self.problem)


PASS = Convolutions
