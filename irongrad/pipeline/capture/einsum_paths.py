"""Capture `torch.einsum` of three operands or more, whose sizes vary.

With opt-einsum installed, torch 2.13 orders the products by their cost. The cost is an int of every size, which a trace
keeps as that of the example.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.backends import opt_einsum


@contextmanager
def einsum_paths() -> Iterator[None]:
    """While open, the sizes of the example order the products, and are not kept."""
    if not opt_einsum.is_available():
        yield
        return
    library = opt_einsum.get_opt_einsum()
    plain = library.contract_path

    def contract_path(equation: str, *operands: torch.Tensor, **options: Any) -> Any:
        return plain(equation, *map(_example_shape, operands), shapes=True, **options)

    with mock.patch.object(library, "contract_path", contract_path):
        yield


def _example_shape(operand: torch.Tensor) -> tuple[int, ...]:
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in operand.shape)
