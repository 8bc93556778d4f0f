"""Elements are looked up in slices with gaps: columns, and every second element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import irongrad as ig
from irongrad.passes.module.keep_slices_apart import KeepSlicesApart
from irongrad.runtime.errors import ToolchainError

INDEX = torch.tensor([1, 0, 3, 2])

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned column": lambda x, i: x[..., 1].flip(0) + i.sum(),
    "gathered column": lambda x, i: x[..., 0].gather(0, i.unsqueeze(1).expand(4, 4)),
    "every second row": lambda x, i: x[:, 0, 0][::2][i],
    "every second element": lambda x, i: x.flatten()[::2][i],
    "columns backwards": lambda x, i: x[..., 1:].flip(1) * i[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lookups_in_slices_with_gaps_equal_eager(name: str) -> None:
    """compile_function compares with eager float64."""
    x = torch.randn(8, 4, 2, generator=torch.Generator().manual_seed(0))
    ig.compile_function(FUNCTIONS[name], (x, INDEX))


def test_iree_still_has_no_code_for_lookups_in_slices_with_gaps(without: Callable[[type], None]) -> None:
    """When this fails, the pass is no longer needed."""
    without(KeepSlicesApart)
    with pytest.raises(ToolchainError, match="unrealized_conversion_cast"):
        ig.compile_function(lambda x: x[..., 1].flip(0), (torch.randn(6, 5, 4),))
