"""Sizes that are known only when a step runs: what a decomposition may ask of them.

A comparison of such a size would be a condition on it, under which alone the graph is right.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def is_known(size: int) -> bool:
    """Whether `size` is a number."""
    return not isinstance(size, torch.SymInt)


def example_of(size: int) -> int:
    """What `size` is in the example; for choices that every size is right with."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def always(condition: bool) -> bool:
    """Whether `condition` on sizes is true whatever they are."""
    return bool(statically_known_true(condition))


def for_every_size(size: int) -> AbstractContextManager[None]:
    """While open, what PyTorch asks of sizes (for strides, or whether there are elements) makes no condition on them.

    What is traced meanwhile has to be right for every size.
    """
    assert isinstance(size, torch.SymInt)
    manager: AbstractContextManager[None] = size.node.shape_env.suppress_guards()
    return manager
