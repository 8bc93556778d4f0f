"""The queries that a decomposition may make of sizes that are known only when a step runs.

A plain comparison of such a size would add a guard, and the graph would be right for sizes that meet the guard only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def is_known(size: int) -> bool:
    """Return whether `size` is a number, not a symbol."""
    return not isinstance(size, torch.SymInt)


def example_of(size: int) -> int:
    """Return the value of `size` in the example, for choices that are right for every size."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def always(condition: bool) -> bool:
    """Return whether `condition` on sizes is known to hold for all sizes."""
    return bool(statically_known_true(condition))


def for_every_size(size: int) -> AbstractContextManager[None]:
    """While open, PyTorch's own queries of sizes (for strides, or whether a tensor is empty) add no guards.

    Operators that are traced meanwhile have to be right for every size.

    Args:
        size: a symbol of the graph that is traced.
    """
    assert isinstance(size, torch.SymInt)
    manager: AbstractContextManager[None] = size.node.shape_env.suppress_guards()
    return manager
