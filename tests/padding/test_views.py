"""Views, slices and rearrangements of padded dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def _assigned(h: Tensor) -> Tensor:
    z = h.clone()
    z[:, 0] = 0.0
    z[:, -1] = 1.0
    z[:, 1:] = z[:, 1:] * 2
    return z


def _shifted(h: Tensor) -> Tensor:
    z = torch.zeros_like(h)
    z[:, 1:] = h[:, :-1]
    return z


def _sized(h: Tensor) -> Tensor:
    return h * h.shape[1] + h / h.shape[0] ** 0.5 + h.numel() + h.shape[1] * 0.5


FUNCTIONS: dict[str, Any] = {
    "slices": (lambda h: (h[:, 1:], h[:, :-1], h[:, -2:], h[:, ::2], h[:, 1:-1], h[:, :2], h[1:]), "BTC"),
    "rows": (lambda h: (h[:, 0], h[:, -1], h[-1], h[:, -2]), "BTC"),
    "parts": (lambda h: (*h.split([1, h.shape[1] - 1], 1), *h.chunk(2, 2), *h.unbind(2)[:2]), "BTC"),
    "assignments": (lambda h: (_assigned(h), _shifted(h)), "BTC"),
    "cat": (lambda h: (torch.cat([h, h * 2, h[:, :1]], 1), torch.cat([h, h], 0), torch.cat([h, h], 2)), "BTC"),
    "stack": (lambda h: (torch.stack([h, h * 2], 1), torch.stack([h, h * 2], -1)), "BTC"),
    "flips": (lambda h: (h.flip(1), h.flip(0, 1, 2), h.roll(2, 1), h.roll((1, -1), (0, 1))), "BTC"),
    "repeats": (lambda h: (h.repeat(1, 2, 1), h.repeat(2, 1, 1, 1), h.repeat_interleave(2, 1)), "BTC"),
    "constant padding": (lambda h: (F.pad(h, (1, 2)), F.pad(h, (0, 0, 1, 2), value=3.0)), "BTC"),
    "negative padding": (lambda h: F.pad(h, (0, 0, -1, -1)), "BTC"),
    "padding to a size": (lambda h: F.pad(h, (0, 0, 0, 8 - h.shape[1]), value=1.0), "BTC"),
    "windows": (lambda h: h.unfold(1, 2, 1), "BTC"),
    "dimensions": (lambda h: (h.unsqueeze(1).squeeze(1).transpose(0, 1), h.permute(2, 0, 1), h.mT), "BTC"),
    "split dimensions": (lambda h: h.view(*h.shape[:2], 2, 3).transpose(1, 2).reshape(-1, h.shape[1], 3), "BTC"),
    "merged both ways": (lambda h: h.transpose(0, 1).reshape(-1, 6).softmax(0) + h.reshape(-1, 6), "BTC"),
    "sizes as numbers": (lambda h: (_sized(h), torch.where(h > 0, h, h.shape[1]), h.clamp(-h.shape[1] / 9)), "BTC"),
    "counts": (lambda h: h * torch.arange(h.shape[1] - 1, -1, -1).unsqueeze(1) / h.shape[1], "BTC"),
    "triangles": (lambda h: (torch.bmm(h, h.mT).tril(), h * torch.ones(h.shape[1], 6).triu(1)), "BTC"),
    "three dimensions": (lambda h: (h.flatten(0, 2).mean(0), h.flatten(1, 2).cumsum(0), h.flip(2)), "BTUC"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_true_elements_do_not_depend_on_padding(name: str, holds: Callable[..., None]):
    holds(*FUNCTIONS[name])
