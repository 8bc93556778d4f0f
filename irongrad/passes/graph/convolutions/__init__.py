"""The form of every convolution and of its gradients."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from irongrad.graph.nodes import call, replace, value_of
from irongrad.passes.base import Context, Lowering, PassResult, Timer
from irongrad.passes.graph.convolutions.choice import Costs, choices_of, fastest, measured
from irongrad.passes.graph.convolutions.forms import Form, forms_of
from irongrad.passes.graph.convolutions.problem import Problem
from irongrad.passes.graph.convolutions.recognise import Task, tasks_of
from irongrad.passes.inline import inline

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolutions(Lowering):
    """Write convolutions, and the gradients of their inputs and weights, in the form that is fastest.

    Before:
        y = convolution(x, w, ...)                                # x [N, C, H, W]
    After, for a 1x1 kernel:
        y = (x.permute(0, 2, 3, 1).flatten(0, 2) @ w.t()).reshape(N, H, W, O).permute(0, 3, 1, 2)

    `convolutions/forms.py` lists the forms: `winograd` for 3x3 kernels with stride 1; products of matrices with what
    the places of a kernel meet, which are gathered before the product (`gathered`, `by-row`) or added up after it
    (`scattered`); `depthwise`, elementwise code; and `direct`, as IREE lowers it. The one that costs least is taken, by
    `convolutions/costs.py`, or by measurement on the target (`--tune`). All but `direct` are channels-last inside: the
    pass `layout` takes the transposes between them away. One dimension is two, the first of size one. Transposed
    convolutions, and those of three dimensions, are convolutions of two by then.

    Left alone: numbers of less than 32 bits, as Winograd's sums need more of them.

    Attributes:
        winograd: whether that form may be chosen.
        direct: whether that form may be chosen where another one computes the same.
        least_gain: milliseconds of one core that Winograd has to save of a weight's gradient, by the table of costs, to
            be chosen. There it saves least, and compiling its kernels takes a third of a second for each different
            convolution (docs/convolutions.md). Where forms are measured it is not asked for.
    """

    name: ClassVar[str] = "convolutions"

    winograd: bool = True
    direct: bool = True
    least_gain: float = 0.0

    def run(self, graph: GraphModule, context: Context) -> PassResult:
        """Run the pass on one graph."""
        stats: dict[str, int] = {}
        changed = False
        tasks = [task for node in graph.graph.nodes for task in tasks_of(node)]
        costs: dict[Problem, Costs] = {}
        for task in tasks:
            if task.problem not in costs:
                costs[task.problem] = self._costs(task, context.timer)
        forms = fastest(costs, [task.problem for task in tasks])
        for node in list(graph.graph.nodes):
            for task in tasks_of(node):  # whose operands are what was written for the nodes before
                form = forms[task.problem]
                stats[form.name] = stats.get(form.name, 0) + 1
                if task.result is not None or form.name != "direct":
                    write(node, task, form)
                    changed = True
        return PassResult(changed, stats, choices_of(costs, forms) if context.timer else ())

    def _costs(self, task: Task, timer: Timer | None) -> Costs:
        """What each form of a task costs, by measurement where there is a timer."""
        allowed = {"winograd": self.winograd, "direct": self.direct}
        every = forms_of(task.problem)
        forms = [f for f in every if allowed.get(f.name, True)] or every
        if timer:
            return measured(task, forms, timer)
        costs = {f: f.cost(task.problem) for f in forms}
        return _with_gain(costs, self.least_gain) if task.problem.kind == "weight" else costs

    @staticmethod
    def lower_plainly(graph: GraphModule) -> None:
        """Write the backwards of convolutions in their plain form, which the importer takes."""
        for node in graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
            for task in tasks_of(node):
                write(node, task, forms_of(task.problem)[0])


def _with_gain(costs: Costs, least: float) -> Costs:
    """`costs`, without Winograd's where it does not save `least` milliseconds."""
    cheapest = min(cost for form, cost in costs.items() if form.name != "winograd")
    return {form: cost for form, cost in costs.items() if form.name != "winograd" or cheapest - cost >= least * 1e6}


def write(node: Node, task: Task, form: Form) -> None:
    """Compute a task of `node` in `form`."""
    result = inline(_Written(form, task.problem), task.operands, node)
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
class _Written:
    """A form as a function of tensors; equal for equal problems. One dimension is two, of which one is of size one."""

    form: Form
    problem: Problem

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if first.ndim == 3:
            return self.form.build(first.unsqueeze(2), second.unsqueeze(2), self.problem).squeeze(2)
        return self.form.build(first, second, self.problem)


PASS = Convolutions
