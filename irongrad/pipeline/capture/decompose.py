"""Run torch.export's decompositions on a program. torch 2.13 loses gradients in some programs, and fails on others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._higher_order_ops.utils import autograd_not_implemented
from torch._ops import OperatorBase
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import InputKind

from irongrad.graph.derivatives import with_gradients


def decompose(program: ExportedProgram, table: Mapping[OperatorBase, Callable[..., Any]]) -> ExportedProgram:
    """Return the functional form of a program, with the operators of `table` decomposed."""
    with _composites_expanded_early(table), _unused_untied(program):
        return with_gradients(program).run_decompositions(dict(table))


@contextmanager
def _composites_expanded_early(table: Mapping[OperatorBase, Callable[..., Any]]) -> Iterator[None]:
    """While open, `run_decompositions` expands composite operators where autograd and autocast still see their parts.

    torch 2.13 expands them below the dispatch keys of both. There, the product in an einsum keeps the dtypes of its
    operands. In eager, and in a joint graph, that product runs in half precision. And no gradient goes through them.
    """

    def kernel(operator: OperatorBase, *, deferred_error: bool) -> Callable[..., Any]:
        return table[operator] if operator in table else autograd_not_implemented(operator, deferred_error)

    with mock.patch.object(exported_program, "autograd_not_implemented", kernel):
        yield


@contextmanager
def _unused_untied(program: ExportedProgram) -> Iterator[None]:
    """While open, each buffer that the graph does not read has memory of its own.

    torch.export reads a tied buffer under one of its names. If the graph also writes it, torch 2.13 fails to decompose
    a program in which another name has the same memory ("expected compiled_fn to be GraphModule").
    """
    before = dict(program.state_dict)
    users = {node.name: node.users for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        target = str(spec.target)
        if spec.kind is InputKind.BUFFER and target in program.state_dict and not users[spec.arg.name]:
            program.state_dict[target] = program.state_dict[target].clone()
    try:
        yield
    finally:
        program.state_dict.update(before)
