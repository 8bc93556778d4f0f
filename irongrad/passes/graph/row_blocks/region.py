"""Find the part of a graph whose values have rows that are computed independently of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from irongrad.graph.nodes import value_of
from irongrad.passes.graph.row_blocks.labels import PRODUCTS, RESHAPES, Dims, Labels, labels_of, operands_of

aten = torch.ops.aten

# Operators that may sum over rows: the sum is that of the blocks' sums.
_LINEAR: frozenset[Any] = PRODUCTS | {aten.sum.dim_IntList}


class Axes(NamedTuple):
    """The dimensions of a value that hold the rows and the columns of the softmax; None for one that it lacks."""

    row: int | None
    col: int | None

    @property
    def both(self) -> bool:
        """Whether the value is a matrix of rows and columns."""
        return self.row is not None and self.col is not None


class _Roles(NamedTuple):
    """The labels of rows and columns, among the labels of one operator."""

    row: Hashable | None
    col: Hashable | None

    def among(self, dims: Dims) -> Axes:
        def place(label: Hashable | None) -> int | None:
            return dims.index(label) if label is not None and label in dims else None

        return Axes(place(self.row), place(self.col))


class _Unsuitable(Exception):  # noqa: N818  control flow of the search
    """The rows cannot be computed apart."""


@dataclass(frozen=True)
class Region:
    """Nodes that are computed for one block of rows at a time.

    Attributes:
        axes: the nodes, in the graph's order, with the axes of their results.
        operand_axes: for each node the axes of its operands, in order.
        results: the nodes that are read outside, without matrices.
        outside: the readers of matrices that are not in the region.
    """

    axes: dict[Node, Axes]
    operand_axes: dict[Node, tuple[Axes, ...]]
    results: tuple[Node, ...]
    outside: frozenset[Node]

    @property
    def matrices(self) -> list[Node]:
        """The values that have rows and columns."""
        return [n for n, axes in self.axes.items() if axes.both]

    def operands(self) -> Iterator[tuple[Node, Node, Axes]]:
        """Yield each operand with its reader and its axes."""
        for node, all_axes in self.operand_axes.items():
            for operand, axes in zip(operands_of(node), all_axes, strict=True):
                yield node, operand, axes

    def divisor(self, axis: int) -> int:
        """Return the greatest number of equal parts into which all sizes along an axis divide; 0 is rows."""
        sizes = [
            value_of(value).shape[axes[axis]]
            for value, axes in [*self.axes.items(), *((o, a) for _, o, a in self.operands())]
            if axes[axis] is not None
        ]
        return math.gcd(*sizes)


def region_around(node: Node, axes: Axes, allowed: Callable[[Node], bool], places: dict[Node, int]) -> Region | None:
    """Return the region that `node` belongs to; None if rows depend on other rows.

    Args:
        node: a matrix.
        axes: its axes.
        allowed: which nodes may belong to the region.
        places: the nodes of the graph by their order.
    """
    search = _Search(allowed)
    return search.found(lambda: search.add_result(node, axes), places)


def region_of_readers(
    matrices: dict[Node, Axes], allowed: Callable[[Node], bool], places: dict[Node, int]
) -> Region | None:
    """Return the region of the allowed readers of `matrices`, and of all matrices that they depend on."""
    search = _Search(allowed)

    def start() -> None:
        for node, axes in matrices.items():
            search.add_readers(node, axes)

    return search.found(start, places)


class _Search:
    def __init__(self, allowed: Callable[[Node], bool]) -> None:
        self._allowed = allowed
        self._roles: dict[Node, _Roles] = {}
        self._labels: dict[Node, Labels] = {}
        self._of_product: dict[Node, bool] = {}
        self._new: list[Node] = []

    def found(self, start: Callable[[], None], places: dict[Node, int]) -> Region | None:
        """Add what `start` adds and all that belongs to it; None if rows depend on other rows."""
        try:
            start()
            self._spread()
            self._close()
            self._check()
        except _Unsuitable:
            return None
        if not self._roles:
            return None
        ordered = sorted(self._roles, key=places.__getitem__)
        axes = {n: self._axes(n) for n in ordered}
        own = [n for n in ordered if self._is_own(n)]
        outside = {u for n in own if axes[n].both for u in n.users if u not in axes}
        results = [n for n in own if not axes[n].both and any(u not in axes for u in n.users)]
        return Region(axes, {n: self._operand_axes(n) for n in ordered}, tuple(results), frozenset(outside))

    def add_result(self, node: Node, axes: Axes) -> None:
        """Compute `node`, whose result has these axes."""
        self._add(node, _roles(self._labels_of(node).result, axes))

    def add_readers(self, node: Node, axes: Axes) -> None:
        """Compute the allowed readers of a matrix."""
        for reader in node.users:
            if self._allowed(reader):
                labels = self._labels_of(reader)
                for operand, dims in zip(operands_of(reader), labels.operands, strict=True):
                    if operand is node:
                        self._add(reader, _roles(dims, axes))

    def _labels_of(self, node: Node) -> Labels:
        labels = self._labels.get(node) or labels_of(node)
        if labels is None:
            raise _Unsuitable
        self._labels[node] = labels
        return labels

    def _add(self, node: Node, roles: _Roles) -> None:
        if self._roles.setdefault(node, roles) != roles:
            raise _Unsuitable
        self._new.append(node)

    def _axes(self, node: Node) -> Axes:
        return self._roles[node].among(self._labels_of(node).result)

    def _operand_axes(self, node: Node) -> tuple[Axes, ...]:
        return tuple(map(self._roles[node].among, self._labels_of(node).operands))

    def _spread(self) -> None:
        """Add all matrices that are connected with those that were added, and what reduces them."""
        done: set[Node] = set()
        while self._new:
            node = self._new.pop()
            if node in done:
                continue
            done.add(node)
            for operand, axes in zip(operands_of(node), self._operand_axes(node), strict=True):
                if axes.both and (self._is_of_product(operand, axes) or labels_of(operand) is not None):
                    self.add_result(operand, axes)
            if self._axes(node).both and self._is_own(node):
                self.add_readers(node, self._axes(node))

    def _is_own(self, node: Node) -> bool:
        """Whether `node` is computed in this region alone. Others compute matrices that no product is part of too."""
        axes = self._axes(node)
        return self._allowed(node) and (not axes.both or self._is_of_product(node, axes))

    def _is_of_product(self, node: Node, axes: Axes) -> bool:
        """Whether a matrix depends on a product of rows and columns."""
        if node not in self._of_product:
            self._of_product[node] = node.target in PRODUCTS
            if not self._of_product[node] and (labels := labels_of(node)) is not None:
                roles = _roles(labels.result, axes)
                operands = zip(operands_of(node), map(roles.among, labels.operands), strict=True)
                self._of_product[node] = any(a.both and self._is_of_product(o, a) for o, a in operands)
        return self._of_product[node]

    def _close(self) -> None:
        """Add values of rows that depend on the region and that it reads."""
        below = _descendants(n for n in self._roles if self._is_own(n))
        waiting = list(self._roles)
        while waiting:
            node = waiting.pop()
            for operand, axes in zip(operands_of(node), self._operand_axes(node), strict=True):
                if operand in self._roles or operand not in below:
                    continue
                # A product here means that the whole network lies between.
                if axes.row is None or axes.both or operand.target in PRODUCTS or not self._allowed(operand):
                    raise _Unsuitable
                self.add_result(operand, axes)
                waiting.append(operand)

    def _check(self) -> None:
        for node in self._roles:
            own = self._axes(node)
            if own.row is None and node.target not in _LINEAR:
                raise _Unsuitable
            if node.target in RESHAPES and not _keeps(own, *self._operand_axes(node)):
                raise _Unsuitable
            for operand, axes in zip(operands_of(node), self._operand_axes(node), strict=True):
                if operand in self._roles and (axes.row is None or self._axes(operand) != axes):
                    raise _Unsuitable


def _roles(dims: Dims, axes: Axes) -> _Roles:
    row, col = (None if d is None else dims[d] for d in axes)
    return _Roles(row, col)


def _keeps(result: Axes, operand: Axes) -> bool:
    """Whether a reshape mixes neither rows nor columns with another dimension."""
    return [a is None for a in result] == [a is None for a in operand]


def _descendants(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found
