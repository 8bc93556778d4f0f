"""Which forward values to keep for the backward: the least recomputation that fits.

An integer program over the values of the forward pass, solved with HiGHS, whose memory constraints are added as they
turn out to be needed: a plan is carried out on a copy of the graph, the model of `liveness.py` says where it takes too
much, and that moment becomes a constraint (lazy constraint generation, as travelling salesman solvers do; the variables
are those of Jain et al., "Checkmate", MLSys 2020, for one recomputation at most).
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
from irongrad.passes.graph.rematerialise.recompute import is_backward, is_forward, recompute

ROUNDS = 25
_SOLVER_SECONDS = 5.0
# How far from the optimum the solver may stop; the costs are no more exact than this.
_GAP = 0.01
# Constraints that one plan gives, and how far its moments are apart.
_MOMENTS = 8
_APART = 2
# Of two equally cheap choices, the one that keeps less.
_TIE = 1e-4
# How much less is tried, to find the least.
_STEP = 0.07
_LEAST_STEP = 0.005
_MEGABYTE = 1e6


@dataclass(frozen=True)
class Load:
    """What is in memory at one moment of a plan.

    Attributes:
        bytes: all of it.
        kept: bytes of values that are there where they are kept, by value.
        made: bytes of values that are there as they were computed again, by value.
    """

    bytes: int
    kept: Mapping[Node, int]
    made: Mapping[Node, int]


@dataclass(frozen=True)
class Plan:
    """What the backward keeps of the forward.

    Attributes:
        saved: the values that are kept.
        seconds: the cost of computing the others again.
        total: bytes that the step takes then.
        loads: its highest points, the highest first.
    """

    saved: frozenset[Node]
    seconds: float
    total: int
    loads: tuple[Load, ...]

    @property
    def peak(self) -> int:
        """The most bytes at one moment; `total` has those that packing wastes."""
        return self.loads[0].bytes if self.loads else 0


@dataclass(frozen=True)
class Problem:
    """The choice that a graph leaves.

    Attributes:
        graph: the graph.
        kept: as `usage` takes it.
        values: the forward values in memory that the backward may need, in order.
        read: those that it reads itself.
        inputs: by value, the values that it is computed from.
        costs: by value, of computing it again, in seconds.
        last_read: by value, the last position in the backward where it is read.
        packed: as `usage` takes it.
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
    """The values of `graph` that can be kept or computed again; `kept` and `packed` as `usage` takes them."""
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
    for value in reversed(ordered):  # what a value is computed from is read wherever the value is
        for needed in inputs[value]:
            last[needed] = max(last[needed], last[value])
    return Problem(graph, tuple(kept), tuple(ordered), frozenset(read), inputs, costs, last, packed)


def _computed_from(value: Node, read: Set[Node], grouping: Kernels) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The values in memory that `value` is computed from, and what is computed on the way, in its kernel alone.

    That is never kept: it would take memory that it does not take where everything is kept.
    """
    inputs: dict[Node, None] = {}
    inside: dict[Node, None] = {}  # in order: sums of their costs are the same in every process
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
    """The plan that keeps `saved`, measured on a copy of the graph."""
    copy = Graph(problem.graph.owning_module)
    new_of: dict[Node, Node] = {}
    copy.output(copy.graph_copy(problem.graph, new_of))
    copy.output_node().meta = problem.graph.output_node().meta
    made = recompute(copy, {new_of[n] for n in saved}, packed=problem.packed)
    found = usage(copy, [_in_copy(each, new_of) for each in problem.kept], packed=problem.packed)
    old_of = {new: old for old, new in new_of.items()}
    again = {copied: old_of[original] for copied, original in made.items()}
    loads = tuple(_loads(problem, found, old_of, again, saved))
    return Plan(frozenset(saved), sum(map(cost, made)), found.total, loads)


def _in_copy(kept: HandedOn, new_of: Mapping[Node, Node]) -> HandedOn:
    nodes, written, read = (frozenset(new_of[n] for n in group) for group in (kept.nodes, kept.written, kept.read))
    return HandedOn(nodes, written, read, kept.kernels)


def everything_saved(problem: Problem) -> Plan:
    """The plan that computes nothing again."""
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
    """What is in memory at the highest points of the curve, the highest first, by whose decision."""
    curve = found.curve()
    order = {n: i for i, n in enumerate(problem.graph.nodes)}
    tops = [t for t in range(len(curve)) if curve[t] == max(curve[max(0, t - _APART) : t + _APART])]
    for moment in sorted(tops, key=lambda t: -curve[t])[:_MOMENTS]:
        kept: dict[Node, int] = {}
        made: dict[Node, int] = {}
        for item in found.at(moment):
            if item.node in again:
                original = again[item.node]
                if original in problem.costs:
                    made[original] = max(made.get(original, 0), item.bytes)
            elif (old := old_of.get(item.node)) in saved and item.end > item.start:
                kept[old] = max(kept.get(old, 0), item.bytes)
        later = (old_of[n] for kernels in found.computed[moment:] for n in kernels if n in old_of)
        here = min((order[n] for n in later), default=len(order))
        for value in problem.values:
            if order[value] <= here <= problem.last_read[value]:
                kept.setdefault(value, bytes_of(value))
        yield Load(curve[moment], kept, made)


def cheapest(problem: Problem, budget: int) -> Plan | None:
    """The cheapest plan found whose memory is at most `budget` bytes; None where none was found."""
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
    """A plan that keeps nothing but what is dearest for its bytes, as long as that fits; None where nothing does.

    For where the moments of other plans say too little of this one's.
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
    """The plan found that takes the least memory, at whatever cost."""
    best = everything_saved(problem)
    step = _STEP
    while step >= _LEAST_STEP:
        plan = cheapest(problem, int(best.total * (1 - step)))
        if plan is None:
            step /= 2
        else:
            best = plan
    return cheapest(problem, best.total - 1) or best  # anything less, where nothing was found a step away


class _Program:
    """The integer program. Its columns: for every value whether it is kept, then for every one whether made again."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.index = {v: i for i, v in enumerate(problem.values)}
        self.rows: list[tuple[dict[int, float], float]] = []
        self.waste = sys.maxsize
        for value in problem.values:
            if value in problem.read:
                self.rows.append(({self._kept(value): -1.0, self._made(value): -1.0}, -1.0))
            for needed in problem.inputs[value]:
                row = {self._made(value): 1.0, self._kept(needed): -1.0, self._made(needed): -1.0}
                self.rows.append((row, 0.0))

    def _kept(self, value: Node) -> int:
        return self.index[value]

    def _made(self, value: Node) -> int:
        return len(self.index) + self.index[value]

    def require(self, plan: Plan, budget: int) -> None:
        """Add the constraints that `plan` breaks: less in memory at its highest points.

        What packing wastes is not any one value's, and differs from plan to plan: the least of any counts, unless that
        of this plan is all that is too large.
        """
        waste = plan.total - plan.peak
        self.waste = min(self.waste, waste)
        if plan.peak + self.waste > budget:
            waste = self.waste
        for load in plan.loads:
            excess = load.bytes + waste - budget
            if excess <= 0:
                continue
            row = {self._kept(v): b / _MEGABYTE for v, b in load.kept.items()}
            row |= {self._made(v): b / _MEGABYTE for v, b in load.made.items()}
            now = sum(b for v, b in load.kept.items() if v in plan.saved) + sum(load.made.values())
            limit = (now - excess) / _MEGABYTE
            self.rows.append((row, limit))

    def solve(self) -> frozenset[Node] | None:
        """The best choice under the constraints so far; None where there is none."""
        values = self.problem.values
        if not values:
            return None
        scale = sum(self.problem.costs.values()) or 1.0
        size = sum(map(bytes_of, values)) or 1
        kept = [_TIE * bytes_of(v) / size for v in values]
        made = [self.problem.costs[v] / scale for v in values]
        columns = 2 * len(values)
        entries = [(r, c, w) for r, (row, _) in enumerate(self.rows) for c, w in row.items()]
        rows, indices, weights = zip(*entries, strict=True)
        matrix = csr_array((weights, (rows, indices)), shape=(len(self.rows), columns))
        limits = np.array([limit for _, limit in self.rows])
        result = milp(
            np.array([*kept, *made]),
            integrality=np.ones(columns),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, ub=limits),
            options={"time_limit": _SOLVER_SECONDS, "mip_rel_gap": _GAP},
        )
        if result.x is None:
            return None
        return frozenset(v for v in values if result.x[self._kept(v)] > 0.5)
