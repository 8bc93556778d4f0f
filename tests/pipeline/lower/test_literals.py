"""Constants of several elements beside a loop, which makes IREE compile the module in two steps."""

from __future__ import annotations

import numpy as np
import torch

import irongrad as ig

TABLES = [
    torch.tensor([1.5, -2.0, 3.25], dtype=torch.float32),
    torch.tensor([1.5, -2.0, 3.25], dtype=torch.float64),
    torch.tensor([1.5, -2.0, 3.25], dtype=torch.float16),
    torch.tensor([3, -1, 7], dtype=torch.int64),
    torch.tensor([3, -1, 7], dtype=torch.int16),
    torch.tensor([3, -1, 7], dtype=torch.int8),
    torch.tensor([3, 255, 7], dtype=torch.uint8),
    torch.tensor([True, False, True]),
]
HALF = torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16)


def test_constants_of_every_dtype_beside_a_loop():
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        doubled, _ = torch._higher_order_ops.scan(lambda c, v: (c + v, c.clone()), x[0], x)
        return doubled, *(torch.where(x[0] > 0, t, t) for t in TABLES), torch.where(x[0] > 0, HALF, HALF).float()

    x = torch.arange(12.0).reshape(4, 3) + 1
    _, *found = ig.compile_function(function, (x,))(x.numpy())
    for value, table in zip(found, [*TABLES, HALF.float()], strict=True):
        np.testing.assert_array_equal(value, table.numpy())
