"""Reductions, scans and sorting over padded dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def _along(*names: str):
    def reduce(h: Tensor) -> list[Tensor]:
        results = [getattr(torch, n)(h, d) for n in names for d in (0, 1)]
        return [t for r in results for t in (r if isinstance(r, tuple) else (r,))]

    return reduce


def _all(*names: str):
    return lambda h: [getattr(torch, n)(h) for n in names]


def _places(boundaries: Tensor, h: Tensor) -> Tensor:
    return h * (torch.bucketize(h, boundaries.sort()[0]) + torch.bucketize(h, boundaries.sort()[0], right=True))


FUNCTIONS: dict[str, Any] = {
    "sums and means": (_along("sum", "mean", "nansum"), "BTC"),
    "extremes": (_along("amax", "amin", "max", "min", "argmax", "argmin"), "BTC"),
    "spread": (_along("var", "std", "var_mean"), "BTC"),
    "others": (lambda h: (h.logsumexp(1), h.prod(1), h.prod(0), h.median(1)[0]), "BTC"),
    "of everything": (_all("sum", "mean", "max", "min", "var", "std", "norm"), "BTC"),
    "index of everything": (torch.argmax, "BC"),
    "two dimensions": (lambda h: (h.mean((0, 1)), *torch.var_mean(h, (0, 1), correction=0)), "BTC"),
    "a merged dimension": (lambda h: (h.flatten(0, 1).mean(0), h.flatten(0, 1).amax(0), h.flatten().sum()), "BTC"),
    "truth": (lambda h: ((h > 0).all(1), (h > 1).any(0), (h > -9).all(), (h > 9).any()), "BTC"),
    "norms": (lambda h: (h.norm(dim=1), h.norm(1, dim=0), h.abs().norm(float("inf"), dim=1)), "BTC"),
    "scans": (lambda h: (h.cumsum(1), h.cumsum(0), h.logcumsumexp(1), h.cummax(1)[0]), "BTC"),
    "a mean so far": (lambda h: h.cumsum(1) / torch.arange(1, h.shape[1] + 1).view(-1, 1), "BTC"),
    "a masked mean": (lambda h, i: (h * (i > 0).unsqueeze(2)).sum(1) / (i > 0).sum(), "BTC", ("BT", 3)),
    "sorts": (lambda h: (*h.sort(1), h.sort(0, descending=True)[0], h.argsort(1)), "BTC"),
    "places among boundaries": (lambda h: (_places(h[0, :, 0], h), _places(torch.arange(3.0).double(), h)), "BTC"),
    "topk": (lambda h: (*h.topk(2, 1), h.topk(2, 1, largest=False)[0], *h.flatten(1).topk(3)[:1]), "BTC"),
    "gathered extremes": (lambda h: torch.take_along_dim(h, h.argsort(1), 1), "BTC"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_true_elements_do_not_depend_on_padding(name: str, holds: Callable[..., None]):
    holds(*FUNCTIONS[name])
