"""Choose the forward values to keep for the backward: the least recomputation that fits a memory budget.

An integer program over the forward values, solved with HiGHS. Its memory constraints are added lazily, as solvers of
the travelling salesman problem do (lazy constraint generation). Each plan is carried out on a copy of the graph.
`memory_model/liveness.py` finds the moments at which the plan takes too much memory, and these become constraints. The
variables are those of Jain et al., "Checkmate", MLSys 2020, for at most one recomputation.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array
from torch.fx import Graph, Node

from irongrad.memory_model.early_updates import HandedOn
from irongrad.memory_model.fusion import Kernels, kernels
from irongrad.memory_model.kernel_roles import bytes_of, is_constant, readers, sources
from irongrad.memory_model.liveness import Usage, usage
from irongrad.memory_model.node_costs import cost
from irongrad.passes.recompute import is_backward, is_forward, recompute

ROUNDS = 25
_SOLVER_SECONDS = 5.0
# The relative gap to the optimum at which the solver may stop: the costs are no more exact.
_GAP = 0.01
# The number of constraints from one plan, and the least distance between their moments.
_MOMENTS = 8
_APART = 2
# The weight of kept bytes in the objective, so that of equally cheap choices the one that keeps less wins.
_TIE = 1e-4
# Relative steps of the search for the smallest plan: the first, and the last.
_STEP = 0.07
_LEAST_STEP = 0.005
_MEGABYTE = 1e6


@dataclass(frozen=True)
class Load:
    """The memory in use at one moment of a plan.

    Attributes:
        bytes: the total.
        kept: by value, the bytes that are in memory if the plan keeps the value.
        made: by value, the bytes that are in memory if the plan recomputes the value.
    """

    bytes: int
    kept: Mapping[Node, int]
    made: Mapping[Node, int]


@dataclass(frozen=True)
class Plan:
    """The forward values that the backward keeps, and what that costs.

    Attributes:
        saved: the values that are kept.
        seconds: the cost of recomputing the others.
        total: the bytes that the step takes with this plan.
        loads: the highest peaks of memory use, the highest first.
    """

    saved: frozenset[Node]
    seconds: float
    total: int
    loads: tuple[Load, ...]

    @property
    def peak(self) -> int:
        """The most bytes in use at one moment; `total` adds the gaps that placement leaves."""
        return self.loads[0].bytes if self.loads else 0


@dataclass(frozen=True)
class Problem:
    """The values of a graph that can be kept or recomputed.

    Attributes:
        graph: the graph.
        kept: the results that another graph reads, as in `usage`.
        values: the forward values in memory that the backward may need, in order of computation.
        read: the values among them that the backward reads directly.
        inputs: by value, the values that it is computed from.
        costs: by value, the cost of recomputing it, in seconds.
        last_read: by value, the last position in the backward that reads it.
        packed: whether operands of contractions are packed, as in `usage`.
    """

    graph: Graph
    kept: tuple[HandedOn, ...]
    values: tuple[Node, ...]
    read: frozenset[Node]
    inputs: Mapping[Node, tuple[Node, ...]]
    costs: Mapping[Node, float]
    last_read: Mapping[Node, int]
    packed: bool


def problem_of(graph: Graph, kept: Collection[HandedOn] = (), *, packed: bool = True) -> Problem:
    """Return the values of `graph` that can be kept or recomputed; `kept` and `packed` are as in `usage`."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    read = {v for n in graph.nodes if is_backward(n) for v in _values_read(n)}
    grouping = kernels(graph, packed=packed)
    inputs: dict[Node, tuple[Node, ...]] = {}
    inside: dict[Node, tuple[Node, ...]] = {}
    stack = sorted(read, key=position.__getitem__)
    while stack:
        value = stack.pop()
        if value not in inputs:
            inputs[value], inside[value] = _computed_from(value, read, grouping)
            stack.extend(inputs[value])
    ordered = sorted(inputs, key=position.__getitem__)
    costs, last = {}, {}
    for value in ordered:
        backward = [r for r in readers(value) if is_backward(r)]
        times = max(1, len({grouping.leader.get(r) for r in backward}))
        costs[value] = (cost(value) + sum(map(cost, inside[value]))) * times
        last[value] = max((grouping.runs_at(r) for r in backward), default=0)
    for value in reversed(ordered):  # recomputing a value reads its inputs where the value is read
        for needed in inputs[value]:
            last[needed] = max(last[needed], last[value])
    return Problem(graph, tuple(kept), tuple(ordered), frozenset(read), inputs, costs, last, packed)


def _computed_from(value: Node, read: Set[Node], grouping: Kernels) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The stored values that `value` is computed from, and the nodes between that only its own kernel computes.

    Those nodes are never kept: even the plan that keeps everything does not store them.
    """
    inputs: dict[Node, None] = {}
    inside: dict[Node, None] = {}  # ordered, so that sums of costs are the same in every process
    stack = list(_values_read(value))
    while stack:
        needed = stack.pop()
        if needed in read or grouping.is_stored(needed):
            inputs[needed] = None
        elif needed not in inside:
            inside[needed] = None
            stack.extend(_values_read(needed))
    return tuple(inputs), tuple(inside)


def _values_read(node: Node) -> Iterator[Node]:
    for argument in node.all_input_nodes:
        for value in sources(argument):
            if is_forward(value) and not is_constant(value):
                yield value


def carry_out(problem: Problem, saved: Set[Node]) -> Plan:
    """Return the plan that keeps `saved`, measured on a copy of the graph."""
    copy = Graph(problem.graph.owning_module)
    new_of: dict[Node, Node] = {}
    copy.output(copy.graph_copy(problem.graph, new_of))
    copy.output_node().meta = problem.graph.output_node().meta
    recomputed = recompute(copy, {new_of[n] for n in saved}, packed=problem.packed)
    found = usage(copy, [_in_copy(each, new_of) for each in problem.kept], packed=problem.packed)
    old_of = {new: old for old, new in new_of.items()}
    again = {copied: old_of[original] for copied, original in recomputed.items()}
    loads = tuple(_loads(problem, found, old_of, again, saved))
    return Plan(frozenset(saved), sum(map(cost, recomputed)), found.total, loads)


def _in_copy(kept: HandedOn, new_of: Mapping[Node, Node]) -> HandedOn:
    nodes, written, read = (frozenset(new_of[n] for n in group) for group in (kept.nodes, kept.written, kept.read))
    return HandedOn(nodes, written, read, kept.kernels)


def everything_saved(problem: Problem) -> Plan:
    """Return the plan that recomputes nothing."""
    found = usage(problem.graph, problem.kept, packed=problem.packed)
    saved = frozenset(problem.values)
    loads = tuple(_loads(problem, found, {n: n for n in problem.graph.nodes}, {}, saved))
    return Plan(saved, 0.0, found.total, loads)


def _loads(
    problem: Problem,
    found: Usage,
    old_of: Mapping[Node, Node],
    again: Mapping[Node, Node],
    saved: Set[Node],
) -> Iterator[Load]:
    """The highest peaks of memory use, the highest first, each attributed to the values that cause it."""
    curve = found.curve()
    order = {n: i for i, n in enumerate(problem.graph.nodes)}
    tops = [t for t in range(len(curve)) if curve[t] == max(curve[max(0, t - _APART) : t + _APART])]
    for moment in sorted(tops, key=lambda t: -curve[t])[:_MOMENTS]:
        kept: dict[Node, int] = {}
        recomputed: dict[Node, int] = {}
        for item in found.at(moment):
            if item.node in again:
                original = again[item.node]
                if original in problem.costs:
                    recomputed[original] = max(recomputed.get(original, 0), item.bytes)
            elif (old := old_of.get(item.node)) in saved and item.end > item.start:
                kept[old] = max(kept.get(old, 0), item.bytes)
        later = (old_of[n] for kernels in found.computed[moment:] for n in kernels if n in old_of)
        here = min((order[n] for n in later), default=len(order))
        for value in problem.values:
            if order[value] <= here <= problem.last_read[value]:
                kept.setdefault(value, bytes_of(value))
        yield Load(curve[moment], kept, recomputed)


def cheapest(problem: Problem, budget: int) -> Plan | None:
    """Return the cheapest plan found that takes at most `budget` bytes; None if none was found."""
    program = _Program(problem)
    plan = everything_saved(problem)
    for _ in range(ROUNDS):
        if plan.total <= budget:
            return plan
        program.require(plan, budget)
        saved = program.solve()
        if saved is None:
            break
        plan = carry_out(problem, saved)
    return _from_nothing(problem, budget)


def _from_nothing(problem: Problem, budget: int) -> Plan | None:
    """Start from the plan that keeps nothing, and keep the values that cost most per byte as long as they fit.

    A fallback: the peaks of other plans may say too little about the peaks of such a plan. Returns None if even the
    plan that keeps nothing does not fit.
    """
    plan = carry_out(problem, frozenset())
    if plan.total > budget:
        return None
    dearest = sorted(problem.values, key=lambda v: problem.costs[v] / max(bytes_of(v), 1), reverse=True)
    for value in dearest[:ROUNDS]:
        more = carry_out(problem, plan.saved | {value})
        if more.total <= budget and more.seconds < plan.seconds:
            plan = more
    return plan


def smallest(problem: Problem) -> Plan:
    """Return the plan found that takes the least memory, whatever it costs."""
    best = everything_saved(problem)
    step = _STEP
    while step >= _LEAST_STEP:
        plan = cheapest(problem, int(best.total * (1 - step)))
        if plan is None:
            step /= 2
        else:
            best = plan
    return cheapest(problem, best.total - 1) or best  # no plan is a whole step smaller, so any smaller one


class _Program:
    """The integer program: a column for each value that is 1 if it is kept, then one that is 1 if it is recomputed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.index = {v: i for i, v in enumerate(problem.values)}
        self.rows: list[tuple[dict[int, float], float]] = []
        self.waste = sys.maxsize
        for value in problem.values:
            if value in problem.read:
                self.rows.append(({self._keep_column(value): -1.0, self._recompute_column(value): -1.0}, -1.0))
            for needed in problem.inputs[value]:
                row = {
                    self._recompute_column(value): 1.0,
                    self._keep_column(needed): -1.0,
                    self._recompute_column(needed): -1.0,
                }
                self.rows.append((row, 0.0))

    def _keep_column(self, value: Node) -> int:
        return self.index[value]

    def _recompute_column(self, value: Node) -> int:
        return len(self.index) + self.index[value]

    def require(self, plan: Plan, budget: int) -> None:
        """Add the constraints that `plan` breaks: less memory at its highest peaks.

        Placement leaves gaps, which no single value causes and which differ from plan to plan. The constraints add the
        smallest gaps of any plan so far. They add this plan's gaps only if its peak would otherwise be within the
        budget.
        """
        waste = plan.total - plan.peak
        self.waste = min(self.waste, waste)
        if plan.peak + self.waste > budget:
            waste = self.waste
        for load in plan.loads:
            excess = load.bytes + waste - budget
            if excess <= 0:
                continue
            row = {self._keep_column(v): b / _MEGABYTE for v, b in load.kept.items()}
            row |= {self._recompute_column(v): b / _MEGABYTE for v, b in load.made.items()}
            now = sum(b for v, b in load.kept.items() if v in plan.saved) + sum(load.made.values())
            limit = (now - excess) / _MEGABYTE
            self.rows.append((row, limit))

    def solve(self) -> frozenset[Node] | None:
        """Return the best choice under the constraints so far; None if there is none."""
        values = self.problem.values
        if not values:
            return None
        scale = sum(self.problem.costs.values()) or 1.0
        size = sum(map(bytes_of, values)) or 1
        kept = [_TIE * bytes_of(v) / size for v in values]
        recomputed = [self.problem.costs[v] / scale for v in values]
        columns = 2 * len(values)
        entries = [(r, c, w) for r, (row, _) in enumerate(self.rows) for c, w in row.items()]
        rows, indices, weights = zip(*entries, strict=True)
        matrix = csr_array((weights, (rows, indices)), shape=(len(self.rows), columns))
        limits = np.array([limit for _, limit in self.rows])
        result = milp(
            np.array([*kept, *recomputed]),
            integrality=np.ones(columns),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, ub=limits),
            options={"time_limit": _SOLVER_SECONDS, "mip_rel_gap": _GAP},
        )
        if result.x is None:
            return None
        return frozenset(v for v in values if result.x[self._keep_column(v)] > 0.5)
