"""Control flow as plain Python, for the eager runs that compiled results are compared with.

PyTorch runs its control flow operators through torch.compile, and differentiates them with graphs of its own. As Python
loops and branches, they are differentiated by eager autograd, operator by operator. That is an independent reference. A
dispatch mode such as `RoundingNoise` then also sees the operators inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops import utils
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Region = Callable[..., Any]


@contextmanager
def eager_control_flow() -> Iterator[None]:
    """While open, cond, while_loop, scan and map run as Python code."""
    operators = torch.ops.higher_order
    plain: dict[Any, Region] = {
        operators.cond: cond,
        operators.while_loop: while_loop,
        operators.scan: scan,
        operators.map_impl: map_rows,
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


def cond(predicate: Any, true: Region, false: Region, operands: Sequence[Any] = ()) -> Any:
    """Run `torch.ops.higher_order.cond`."""
    return true(*operands) if predicate else false(*operands)


def while_loop(condition: Region, body: Region, carried: Sequence[Any], additional: Sequence[Any]) -> Any:
    """Run `torch.ops.higher_order.while_loop`."""
    values = tuple(carried)
    while condition(*values, *additional):
        values = tuple(body(*values, *additional))
    return values


def scan(body: Region, carried: Sequence[Any], sequences: Sequence[Any], additional_inputs: Sequence[Any]) -> Any:
    """Run `torch.ops.higher_order.scan`; the results of its body may be nested."""
    values, structure = list(carried), None
    rows: list[list[Any]] = []
    for slices in zip(*sequences, strict=True):
        results, structure = tree_flatten(body(*values, *slices, *additional_inputs))
        values, row = results[: len(values)], results[len(values) :]
        rows.append(row)
    return tree_unflatten([*values, *(torch.stack(column) for column in zip(*rows, strict=True))], structure)


def map_rows(body: Region, sequences: Sequence[Any], additional: Sequence[Any]) -> Any:
    """Run `torch.ops.higher_order.map_impl`."""
    rows = [body(*slices, *additional) for slices in zip(*sequences, strict=True)]
    return tree_map(lambda *parts: torch.stack(parts), *rows)
