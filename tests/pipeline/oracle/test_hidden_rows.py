"""Attention whose mask hides a whole row has the gradient of a softmax in the oracle's runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import irongrad as ig
from irongrad.pipeline.oracle.substitutes import Substitutes


def _gradients(kernel: SDPBackend, dtype: torch.dtype, scale: float | None, least: float) -> list[Tensor]:
    torch.manual_seed(0)
    operands = [torch.randn(2, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(2, 1, 5, 5, dtype=dtype)
    mask[0], mask[1, :, 3] = least, -torch.inf
    with sdpa_kernel(kernel), Substitutes():
        scaled_dot_product_attention(*operands, attn_mask=mask, scale=scale).square().sum().backward()
    return [torch.as_tensor(x.grad) for x in operands]


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        (torch.float64, torch.finfo(torch.float64).min),
        (torch.float32, torch.finfo(torch.float32).min),
        (torch.float32, -1e9),
    ],
)
def test_both_kernels_give_the_same_gradients(dtype: torch.dtype, least: float, scale: float | None):
    plain = _gradients(SDPBackend.MATH, dtype, scale, least)
    for made, expected in zip(_gradients(SDPBackend.FLASH_ATTENTION, dtype, scale, least), plain, strict=True):
        torch.testing.assert_close(made, expected)


class _Attention(nn.Module):
    """Attention with a mask of large numbers, as models of transformers make it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.parts(x)[:, None].chunk(3, -1)
        hidden = torch.where(mask[:, None, None] > 0, 0.0, torch.finfo(x.dtype).min)
        return scaled_dot_product_attention(query, key, value, attn_mask=hidden)[:, 0]


def test_a_step_with_a_sample_of_padding_alone_is_right(tmp_path: Path):
    torch.manual_seed(0)
    model = _Attention()
    mask = torch.ones(3, 6, dtype=torch.int64)
    mask[0], mask[1, 4:] = 0, 0
    batch = {"x": torch.randn(3, 6, 8), "mask": mask, "y": torch.randn(3, 6, 8)}
    step = ig.TrainStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.5), batch)
    ig.compile(step, tmp_path / "artifact", entry_points=["train_step"])
