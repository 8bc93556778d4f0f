"""Control flow as plain Python, for the eager runs that compiled results are compared with.

PyTorch runs its control flow operators through torch.compile, and differentiates them with graphs of its own. As Python
loops and branches they are differentiated by eager autograd, operator by operator, which says independently what is
right; and a mode that sees every operator, as `RoundingNoise` does, sees those inside too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops import utils
from torch.utils._pytree import tree_map

Region = Callable[..., Any]


@contextmanager
def eager_control_flow() -> Iterator[None]:
    """While open, cond, while_loop, scan and map run in Python."""
    operators = torch.ops.higher_order
    plain: dict[Any, Region] = {
        operators.cond: _cond,
        operators.while_loop: _while_loop,
        operators.scan: _scan,
        operators.map_impl: _map,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(utils, "_hop_compile_and_call", _call))
        for operator, function in plain.items():
            stack.enter_context(mock.patch.object(type(operator), "__call__", _method(function)))
        yield


def _call(function: Region, arguments: Sequence[Any], keywords: dict[str, Any] | None = None) -> Any:
    return function(*arguments, **(keywords or {}))


def _method(function: Region) -> Region:
    return lambda self, *args, **kwargs: function(*args, **kwargs)


def _cond(predicate: Any, true: Region, false: Region, operands: Sequence[Any] = ()) -> Any:
    return true(*operands) if predicate else false(*operands)


def _while_loop(condition: Region, body: Region, carried: Sequence[Any], additional: Sequence[Any]) -> Any:
    values = tuple(carried)
    while condition(*values, *additional):
        values = tuple(body(*values, *additional))
    return values


def _scan(
    body: Region, carried: Sequence[Any], sequences: Sequence[Any], additional_inputs: Sequence[Any]
) -> list[Any]:
    values = list(carried)
    rows: list[list[Any]] = []
    for slices in zip(*sequences, strict=True):
        results = list(body(*values, *slices, *additional_inputs))
        values, row = results[: len(values)], results[len(values) :]
        rows.append(row)
    return [*values, *(torch.stack(column) for column in zip(*rows, strict=True))]


def _map(body: Region, sequences: Sequence[Any], additional: Sequence[Any]) -> Any:
    rows = [body(*slices, *additional) for slices in zip(*sequences, strict=True)]
    return tree_map(lambda *parts: torch.stack(parts), *rows)
