"""Decisions that a model makes on sizes, and for which PyTorch keeps no guard.

torch.export assumes sizes of two or more ("0/1 specialization", torch/fx/experimental/symbolic_shapes.py). So
`if x.shape[0] == 1` is false without a guard, and a BatchNorm never sees the single row that it refuses. A call with
size one would need the other branch. So each decision of the model becomes a guard, besides PyTorch's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import sympy
import torch
from torch._guards import SLoc
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from irongrad.diagnostics.source_lines import is_of_a_model
from irongrad.sizes.dimensions import Decision


@contextmanager
def kept_decisions() -> Iterator[None]:
    """While open, record the conditions on sizes that a model's Python tests; on exit, make the answers guards."""
    plain = torch.SymBool.__bool__
    found: list[tuple[ShapeEnv, Decision]] = []

    def decided(question: torch.SymBool) -> bool:
        answer: bool = plain(question)
        if is_of_a_model(sys._getframe(1).f_code.co_filename):
            asked = question.node.expr
            true = asked if answer else sympy.Not(asked)
            found.append((question.node.shape_env, Decision(true, SLoc(None, None), size_oblivious=False)))
        return answer

    with mock.patch.object(torch.SymBool, "__bool__", decided):
        yield
    for environment, guard in found:
        environment.guards.append(guard)
