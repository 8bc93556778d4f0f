"""Losses over padded dimensions, and reads and writes at indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def _cross_entropy(**options: object):
    def losses(h: Tensor, i: Tensor) -> list[Tensor]:
        reductions = [{**options, "reduction": r} for r in ("mean", "sum", "none")]
        flat = [F.cross_entropy(h.flatten(0, 1), i.flatten(), **o) for o in reductions]
        return [*flat, *(F.cross_entropy(h.mT, i, **o) for o in reductions)]

    return losses


def _regression(h: Tensor) -> list[Tensor]:
    target = h.detach().flip(2)
    losses = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss)
    return [loss(h, target, reduction=r) for loss in losses for r in ("mean", "sum", "none")]


def _binary(h: Tensor) -> list[Tensor]:
    target = (h > 0).to(h.dtype)
    return [
        F.binary_cross_entropy(h.sigmoid(), target),
        F.binary_cross_entropy(h.sigmoid(), target, reduction="none"),
        F.binary_cross_entropy_with_logits(h, target),
        F.soft_margin_loss(h, 2 * target - 1),
    ]


def _divergence(h: Tensor) -> list[Tensor]:
    p, q = h.log_softmax(2), h.detach().flip(1).softmax(2)
    probabilities = F.cross_entropy(h.flatten(0, 1), q.flatten(0, 1))
    return [F.kl_div(p, q, reduction="batchmean"), F.kl_div(p, q, reduction="sum"), probabilities]


def _counted(h: Tensor, i: Tensor) -> list[Tensor]:
    columns = i.unsqueeze(2).expand(-1, -1, 6)
    return [
        torch.zeros(h.shape[0], 9, 6).double().scatter_add(1, columns, h),
        torch.zeros(9, 6).double().index_add(0, i.flatten(), h.flatten(0, 1)),
        torch.zeros(9, 6).double().index_put((i,), h, accumulate=True),
        h.scatter(2, (i % 6).unsqueeze(2), 1.0),
    ]


_CLASSES = torch.linspace(1, 2, 6, dtype=torch.float64)

FUNCTIONS: dict[str, Any] = {
    "cross entropy": (_cross_entropy(), "BTC", ("BT", 6)),
    "ignored classes": (_cross_entropy(ignore_index=2), "BTC", ("BT", 6)),
    "weighted classes": (_cross_entropy(weight=_CLASSES), "BTC", ("BT", 6)),
    "smoothed": (_cross_entropy(label_smoothing=0.1, ignore_index=1), "BTC", ("BT", 6)),
    "weighted and smoothed": (_cross_entropy(label_smoothing=0.1, weight=_CLASSES), "BTC", ("BT", 6)),
    "padded classes": (lambda h: F.cross_entropy(h @ h.t(), torch.arange(h.shape[0])), "BC"),
    "regression": (_regression, "BTC"),
    "binary": (_binary, "BTC"),
    "divergence": (_divergence, "BTC"),
    "cosine": (lambda h: F.cosine_similarity(h, h.flip(1), dim=-1), "BTC"),
    "embedding": (lambda h, i: h + F.embedding(i, h[0, 0].outer(torch.arange(6.0).double())), "BTC", ("BT", 6)),
    "one-hot": (lambda h, i: h * F.one_hot(i, 6), "BTC", ("BT", 6)),
    "gathers": (lambda h, i: (h.gather(2, i.unsqueeze(2)), h[..., 0].gather(1, i)), "BTC", ("BT", 3)),
    "rows at indices": (lambda h, i: (h[:, i], h.index_select(1, i), h[:, i - 2]), "BTC", ("S", 2)),
    "an index each": (lambda h, i: h[torch.arange(h.shape[0]), i], "BTC", ("B", 3)),
    "merged rows": (lambda h, i: h.flatten(0, 1)[i] + h.flatten(0, 1)[i].mean(), "BTC", ("S", 3)),
    "writes": (_counted, "BTC", ("BT", 9)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_true_elements_do_not_depend_on_padding(name: str, holds: Callable[..., None]):
    holds(*FUNCTIONS[name])
