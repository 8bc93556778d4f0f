"""Decisions of an optimizer's Python code on numbers that are known only at run time: both branches are traced.

A step counter or a sum of gradients is an input of the compiled step, so `if step > 5:` has no answer at capture. The
code is run once for each way through its decisions. The results of the ways are selected among at run time.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from irongrad.runtime.errors import CaptureError

# More ways than this would make the update of a network larger than its backward.
MOST_WAYS = 16


class TooManyWaysError(CaptureError):
    """There are more than `MOST_WAYS` ways through a step."""


@dataclass
class _Way:
    """One way through the decisions.

    Attributes:
        planned: the answers to the first decisions.
        conditions: what was decided on, in order.
        answers: the answers that were given.
    """

    planned: Sequence[bool]
    conditions: list[Any] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    known: dict[Any, bool] = field(default_factory=dict)

    def answer(self, condition: Any) -> bool:
        """Answer a condition; the same one gets the same answer."""
        expression = condition.node.expr
        if expression not in self.known:
            position = len(self.answers)
            self.known[expression] = self.planned[position] if position < len(self.planned) else True
            self.answers.append(self.known[expression])
            self.conditions.append(condition)
        return self.known[expression]


def along_all_ways(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The results of `run`, which may decide on symbolic numbers of unknown value, for whatever the decisions will be.

    Args:
        run: gives tensors of the same shapes each time.

    Raises:
        TooManyWaysError: there are more than `MOST_WAYS` ways.
    """
    count = 0

    def explored(planned: tuple[bool, ...]) -> list[torch.Tensor] | ZeroDivisionError:
        nonlocal count
        count += 1
        if count > MOST_WAYS:
            raise TooManyWaysError(
                f"the optimizer decides so often on numbers that are known only at run time that there are more than "
                f"{MOST_WAYS} ways through its step. Write the decisions with torch.where"
            )
        way = _Way(planned)
        results: list[torch.Tensor] | ZeroDivisionError
        with _answered_by(way):
            try:
                results = run()
            except ZeroDivisionError as error:
                results = error  # eager would fail there, too
        # From the last decision to the first that was not planned: what the other answer gives.
        for position in reversed(range(len(planned), len(way.answers))):
            others = explored((*way.answers[:position], not way.answers[position]))
            if isinstance(others, ZeroDivisionError):
                continue
            if isinstance(results, ZeroDivisionError):
                results = others
                continue
            chosen = torch.full((), torch.sym_ite(way.conditions[position], 1.0, 0.0), dtype=torch.float64) > 0.5
            results = [torch.where(chosen, r, o.to(r.dtype)) for r, o in zip(results, others, strict=True)]
        return results

    results = explored(())
    if isinstance(results, ZeroDivisionError):
        raise results
    return results


def _answered_by(way: _Way) -> AbstractContextManager[object]:
    """While open, a symbolic condition that cannot be decided is answered by `way`."""
    original: Callable[..., bool] = SymNode.guard_bool

    def decide(node: SymNode, file: str, line: int) -> bool:
        try:
            return original(node, file, line)
        except GuardOnDataDependentSymNode:
            return way.answer(torch.SymBool(node))

    stack = ExitStack()
    stack.enter_context(mock.patch.object(SymNode, "guard_bool", decide))
    for name in ("__truediv__", "__rtruediv__"):
        stack.enter_context(mock.patch.object(torch.SymFloat, name, _checked(name)))
    return stack


def _checked(name: str) -> Callable[[Any, Any], Any]:
    """Division of a symbolic number that raises ZeroDivisionError where the calling code would handle it."""
    divide: Callable[[Any, Any], Any] = getattr(torch.SymFloat, name)

    def apply(self: Any, other: Any) -> Any:
        divisor = self if name == "__rtruediv__" else other
        # The first way has the answer yes, and is the one that divides.
        if _handles_zero_division(sys._getframe(1)) and not divisor != 0:
            raise ZeroDivisionError
        return divide(self, other)

    return apply


def _handles_zero_division(frame: FrameType) -> bool:
    """Whether the running instruction of a frame is in a block of a function that names ZeroDivisionError."""
    code = frame.f_code
    if "ZeroDivisionError" not in code.co_names:
        return False
    blocks: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return any(block.start <= frame.f_lasti < block.end for block in blocks)
