"""What a loop or a branch takes while it runs, and what of that its results are.

IREE 3.13.0 runs the bodies of loops and branches apart from what is around them (`submissions.py`). As they are
compiled here (`pipeline/lower/control_flow.py`, `passes/module/loops_in_place.py`):

* What a loop stacks, row by row, is memory that is there before it, and its result.
* A carry that is computed has new memory in every iteration, beside that of the one before; and a `while_loop` copies
  it where it reads it.
* A loop begins with memory of its own where it begins with a constant.
* A branch has memory for its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from irongrad.memory_model.kernel_roles import SEQUENCES, bodies_of, bytes_of, is_constant, source

_OPERATORS = torch.ops.higher_order


@dataclass(frozen=True)
class Demand:
    """Bytes of a loop, or of a branch.

    Attributes:
        stacks: by result, of memory that is there before and is written in place.
        begins: of constants that it begins with.
        made: by result, of memory that it makes for it.
        inside: of all else, while it runs.
    """

    stacks: Mapping[int, int]
    begins: tuple[int, ...]
    made: Mapping[int, int]
    inside: int


def demand_of(node: Node, inside: Callable[[Graph, Sequence[int]], int]) -> Demand:
    """What a loop or a branch takes.

    Args:
        node: it.
        inside: the bytes that a graph takes, given which of its results are rows of a stack.
    """
    count = len(node.meta["val"])
    carries = _carries_of(node)
    rows = range(len(carries), count) if node.target in SEQUENCES else range(0)
    sizes = [v.numel() * v.element_size() if isinstance(v, torch.Tensor) else 0 for v in node.meta["val"]]
    made = {i: sizes[i] for i in range(count) if i not in rows and _is_computed(node, i)}
    most = max(inside(body, rows) for body in bodies_of(node))
    copies = {_OPERATORS.cond: 0, _OPERATORS.while_loop: 2}.get(node.target, 1)
    begins = tuple(bytes_of(c) for c in carries if isinstance(c, Node) and is_constant(source(c)))
    return Demand({i: sizes[i] for i in rows}, begins, made, most + copies * sum(made.values()))


def iterations_of(node: Node) -> int:
    """How often the body of a loop runs, where that is known; else 1."""
    if node.target not in SEQUENCES:
        return 1
    first, *_ = node.args[SEQUENCES[node.target]]
    return int(first.meta["val"].shape[0])


def _carries_of(node: Node) -> list[Any]:
    """What a loop begins with."""
    place = {_OPERATORS.scan: 1, _OPERATORS.while_loop: 2}.get(node.target)
    return list(node.args[place]) if place is not None else []


def _is_computed(node: Node, place: int) -> bool:
    """Whether a body computes a result, and does not hand on what it got."""
    bodies = bodies_of(node)[1:] if node.target is _OPERATORS.while_loop else bodies_of(node)
    results = (body.output_node().args[0][place] for body in bodies)
    return any(isinstance(r, Node) and source(r).op != "placeholder" for r in results)
