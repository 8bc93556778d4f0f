"""Choose how many rows a block has, by size or by measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from irongrad.graph.nodes import value_of
from irongrad.passes.base import Choice, Timer
from irongrad.passes.graph.row_blocks.apart import apart
from irongrad.passes.graph.row_blocks.plan import Plan, Size, compute_in_blocks, plan_of
from irongrad.passes.graph.row_blocks.region import Axes

# The fewest bytes of a matrix for which forms are measured. A smaller one stays in the second-level cache.
_LEAST_MEASURED = 1 << 18

# The rank of one matrix, as that of the logits of a loss.
_RANK = 2

_WHOLE = "whole"


@dataclass(frozen=True)
class Forms:
    """Chooses the size of blocks. Equal computations are measured once.

    A matrix of `least` bytes or more is never left whole, because memory then would not be linear in its rows.

    Attributes:
        size: the size of a block without a measurement.
        of_batches: the same for a batch of matrices, as attention has.
        least: the fewest bytes of a matrix that comes in blocks without a measurement.
        timer: measures forms; None to take the default.
        choices: the choices that were made by measurement, by what was measured.
        sizes: the chosen size of each, None for a whole matrix.
    """

    size: Size
    of_batches: Size
    least: int
    timer: Timer | None
    choices: dict[str, Choice] = field(default_factory=dict)
    sizes: dict[str, Size | None] = field(default_factory=dict)

    def chosen(self, node: Node, axes: Axes) -> Size | None:
        """The size of the blocks in which the softmax of a matrix is computed; None to leave it whole."""
        size: int = value_of(node).nbytes
        default = self._size(node) if size >= self.least else None
        if self.timer is None or size < _LEAST_MEASURED:
            return default
        forms = self._forms(node, axes, default)
        if len(forms) < 2:
            return default
        plan = next(plan for _, plan in forms.values() if plan is not None)
        what = apart(plan.regions, node).description
        if what not in self.sizes:
            self.sizes[what] = self._measured(what, node, axes, forms, plan)
        return self.sizes[what]

    def _size(self, node: Node) -> Size:
        return self.of_batches if value_of(node).ndim > _RANK else self.size

    def _forms(self, node: Node, axes: Axes, default: Size | None) -> dict[str, tuple[Size | None, Plan | None]]:
        """The forms of a matrix by name; the first is the default."""
        size = self._size(node)
        rows = size.rows
        sizes = [replace(size, rows=r) for r in (rows, rows // 2, 2 * rows)]
        plans = {size: plan_of(node, axes, size) for size in sizes}
        forms: dict[str, tuple[Size | None, Plan | None]] = {}
        if default is None or plans[default] is None:
            forms[_WHOLE] = None, None
        for size, plan in plans.items():
            if plan is not None:
                forms.setdefault(f"{plan.blocks} blocks", (size, plan))
        return forms

    def _measured(
        self, what: str, node: Node, axes: Axes, forms: dict[str, tuple[Size | None, Plan | None]], plan: Plan
    ) -> Size | None:
        assert self.timer is not None
        default, *_ = forms
        candidates = {name: _standalone(plan, node, size) for name, (size, _) in forms.items()}
        self.timer.expect(1)
        times = self.timer(what, candidates, apart(plan.regions, node).operands)
        if times is None:
            return forms[default][0]
        self.choices[what] = choice = Choice.of(what, times, default)
        return forms[choice.chosen][0]


def _standalone(plan: Plan, node: Node, size: Size | None) -> Callable[..., Sequence[torch.Tensor]]:
    """The softmax of a matrix, with its gradient, as a function of what it reads."""
    one = apart(plan.regions, node)
    if size is not None:
        compute_in_blocks(one.graph, one.node, one.axes, size)
    return lambda *tensors: torch.fx.Interpreter(one.graph).run(*tensors, enable_io_processing=False)
