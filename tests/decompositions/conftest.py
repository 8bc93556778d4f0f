"""What the tests of decompositions share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from irongrad.decompositions import decomposition_table

aten = torch.ops.aten

Check = Callable[..., list[torch.Tensor]]


@pytest.fixture(scope="session")
def equals_aten() -> Check:
    """Compare the decomposition of an operator with ATen's kernel in float64, and return what the kernel gives."""

    def check(name: str, *arguments: object) -> list[torch.Tensor]:
        operator = getattr(aten, name)
        operator = operator if isinstance(operator, torch._ops.OpOverload) else operator.default
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        found, expected = decomposition_table()[operator](*arguments), operator(*copies)
        if isinstance(expected, torch.Tensor):
            found, expected = [found], [expected]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10, equal_nan=True)
        return list(expected)

    return check
