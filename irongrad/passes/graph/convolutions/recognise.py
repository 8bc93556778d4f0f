"""Find convolutions and their backwards in a graph, and describe them as problems."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from irongrad.graph.nodes import value_of
from irongrad.operators.decompositions.convolution import KEPT
from irongrad.operators.decompositions.windows import each
from irongrad.passes.graph.convolutions.problem import Halves, Kind, Problem, Window

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Task:
    """A problem that a node of a graph computes.

    Attributes:
        problem: the problem.
        operands: the nodes of its two operands.
        bias: the node that is added to each channel of the result, if any.
        result: the position of the result among the results of the node; None if the node has only one.
    """

    problem: Problem
    operands: tuple[Node, Node]
    bias: Node | None
    result: int | None

    @property
    def is_widened(self) -> bool:
        """Whether both operands are widened from bfloat16."""
        return all(_narrow(node) is not None for node in self.operands)

    @property
    def narrow_operands(self) -> tuple[Node, ...]:
        """The operands as bfloat16, if the problem is one of bfloat16; else the operands."""
        return tuple(_narrow(node) or node for node in self.operands) if self.problem.halves else self.operands


def tasks_of(node: Node, halves: Halves | None = None) -> list[Task]:
    """Return the tasks of `node`, if it is a convolution of one or two dimensions or the backward of one.

    Args:
        node: any node of a graph.
        halves: how operands are multiplied that are widened from bfloat16; None if they are no others than float32.
    """
    found = _tasks_of(node)
    return [replace(t, problem=replace(t.problem, halves=halves)) if t.is_widened else t for t in found]


def _tasks_of(node: Node) -> list[Task]:
    args: tuple[Any, ...] = node.args
    if node.target is aten.convolution.default:
        x, weight, bias, moves = args[0], args[1], args[2], args[3:9]
        task = _task("forward", x, weight, node, moves)
        return [] if task is None else [replace(task, bias=bias)]
    if node.target is aten.convolution_backward.default:
        grad, x, weight, moves = args[0], args[1], args[2], args[4:10]
        kinds: tuple[Kind, ...] = ("input", "weight")
        # The mask also wants gradients that nothing reads, such as those of another step's parameters.
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        tasks = [_task(kind, x, weight, grad, moves, n) for n, kind in enumerate(kinds) if args[10][n] and n in read]
        return [task for task in tasks if task is not None]
    return []


def _task(kind: Kind, x: Node, weight: Node, out: Node, moves: Sequence[Any], result: int | None = None) -> Task | None:
    stride, padding, dilation, transposed, _, groups = moves
    dims = value_of(x).ndim - 2
    if dims not in (1, 2) or transposed or value_of(x).dtype not in KEPT:
        return None
    padding = tuple(each(padding, dims))
    if kind != "input":
        x, padding = _unpadded(x, padding)
    image, kernel = value_of(x).shape, value_of(weight).shape
    window = Window(
        sizes=_pair(image[2:], 1),
        out=_pair(value_of(out).shape[2:], 1),
        kernel=_pair(kernel[2:], 1),
        stride=_pair(each(stride, dims), 1),
        padding=_pair(padding, 0),
        dilation=_pair(each(dilation, dims), 1),
    )
    operands = {"forward": (x, weight), "input": (out, weight), "weight": (out, x)}[kind]
    return Task(Problem(kind, image[0], (image[1], kernel[0]), groups, window), operands, None, result)


def _narrow(node: Node) -> Node | None:
    """The node of bfloat16 that `node` widens; None if it widens none."""
    if node.target is not prims.convert_element_type.default:
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and value_of(source).dtype is torch.bfloat16 else None


def _pair(values: Sequence[int], default: int) -> tuple[int, ...]:
    """Pad the sizes of a 1-D convolution to two: `default` is for the added first dimension."""
    return (*[default] * (2 - len(values)), *values)


def _unpadded(image: Node, padding: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
    """Skip a zero padding: return its operand, and `padding` plus the amount that it adds before each dimension."""
    args: tuple[Any, ...] = image.args
    if image.target is not aten.constant_pad_nd.default or min(args[1], default=0) < 0 or any(args[2:]):
        return image, padding
    before = args[1][::2][::-1]
    if len(before) != len(padding):
        return image, padding
    return args[0], tuple(map(operator.add, padding, before))
