"""Elementwise code that reads more values than a kernel of IREE's can bind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import irongrad as ig
from irongrad.passes.module.keep_operands_apart import KeepOperandsApart
from irongrad.runtime.errors import ArtifactError


def _tensors(count: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(count, 6, generator=torch.Generator().manual_seed(0)))


def _chosen(*tensors: Tensor) -> Tensor:
    result = tensors[0]
    for other in tensors[1:]:
        result = torch.where(result > other, result * 0.5, result + other)
    return result


FUNCTIONS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "chain": _chosen,
    "sum": lambda *tensors: sum((t * 0.5 for t in tensors), tensors[0]),
    "before a reduction": lambda *tensors: (_chosen(*tensors[:32]) * tensors[-1]).sum(),
    "two chains": lambda *tensors: (_chosen(*tensors), _chosen(*tensors[::-1])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_code_that_reads_many_tensors_equals_eager(name: str) -> None:
    """compile_function compares with eager float64."""
    ig.compile_function(FUNCTIONS[name], _tensors(70))


def test_iree_still_binds_more_than_it_loads(without: Callable[[type], None]) -> None:
    """When this fails, the pass is no longer needed."""
    without(KeepOperandsApart)
    with pytest.raises(ArtifactError, match="binding count 33 > 32"):
        ig.compile_function(_chosen, _tensors(32))
