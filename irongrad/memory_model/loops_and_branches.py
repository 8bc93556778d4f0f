"""The memory that a loop or a branch takes while it runs, and the part of it that holds the results.

IREE 3.13.0 runs the bodies of loops and branches apart from the code around them (`submissions.py`). IronGrad compiles
them (`pipeline/lower/control_flow.py`, `passes/module/loops_in_place.py`) so that:

* The rows that a loop stacks are written to a buffer that is allocated before the loop and is its result.
* A carry that the body computes gets a new buffer in every iteration, beside that of the iteration before. A
  `while_loop` also copies the carry where it reads it.
* A carry that begins with a constant gets a buffer before the loop.
* A branch allocates buffers for its results.
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
    """The memory that a loop or a branch takes, in bytes.

    Attributes:
        stacks: by result, the size of the buffer that is allocated before the loop and written in place.
        begins: the sizes of the constants with which the carries begin.
        made: by result, the size of the buffer that the loop or branch allocates for it.
        inside: the size of everything else that is allocated while it runs.
    """

    stacks: Mapping[int, int]
    begins: tuple[int, ...]
    made: Mapping[int, int]
    inside: int


def demand_of(node: Node, inside: Callable[[Graph, Sequence[int]], int]) -> Demand:
    """The memory that a loop or a branch takes.

    Args:
        node: the loop or the branch.
        inside: returns the bytes that a body takes, given which of its results are rows of a stack.
    """
    count = len(node.meta["val"])
    carries = _carries_of(node)
    rows = range(len(carries), count) if node.target in SEQUENCES else range(0)
    sizes = [v.numel() * v.element_size() if isinstance(v, torch.Tensor) else 0 for v in node.meta["val"]]
    computed = {i: sizes[i] for i in range(count) if i not in rows and _is_computed(node, i)}
    most = max(inside(body, rows) for body in bodies_of(node))
    copies = {_OPERATORS.cond: 0, _OPERATORS.while_loop: 2}.get(node.target, 1)
    begins = tuple(bytes_of(c) for c in carries if isinstance(c, Node) and is_constant(source(c)))
    return Demand({i: sizes[i] for i in rows}, begins, computed, most + copies * sum(computed.values()))


def iterations_of(node: Node) -> int:
    """The number of iterations of a loop, if it is known; otherwise 1."""
    if node.target not in SEQUENCES:
        return 1
    first, *_ = node.args[SEQUENCES[node.target]]
    return int(first.meta["val"].shape[0])


def _carries_of(node: Node) -> list[Any]:
    """The values with which the carries of a loop begin."""
    place = {_OPERATORS.scan: 1, _OPERATORS.while_loop: 2}.get(node.target)
    return list(node.args[place]) if place is not None else []


def _is_computed(node: Node, place: int) -> bool:
    """Whether a body computes the result, instead of returning one of its arguments."""
    bodies = bodies_of(node)[1:] if node.target is _OPERATORS.while_loop else bodies_of(node)
    results = (body.output_node().args[0][place] for body in bodies)
    return any(isinstance(r, Node) and source(r).op != "placeholder" for r in results)
