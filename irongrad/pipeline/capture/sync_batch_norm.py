"""Capture BatchNorm as one operator that ranks compute together: nn.SyncBatchNorm, or all of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from irongrad.operators.decompositions.sync_batch_norm import sync_batch_norm


class Synchronised(Enum):
    """Which batch normalisations take the statistics of all ranks' batches.

    Attributes:
        NONE: none, in a step that runs on one rank alone.
        LAYERS: those of nn.SyncBatchNorm, as in PyTorch.
        ALL: all that train.
    """

    NONE = "none"
    LAYERS = "layers"
    ALL = "all"


@contextmanager
def synchronised_batch_norm(chosen: Synchronised) -> Iterator[None]:
    """While open, the chosen batch normalisations are captured as `irongrad::sync_batch_norm` where they train."""
    if chosen is Synchronised.NONE:
        yield
        return
    everywhere = chosen is Synchronised.ALL
    plain, layer = functional.batch_norm, nn.SyncBatchNorm.forward
    running = 0  # the calls of SyncBatchNorm under way

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or not (everywhere or running):
            return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        functional._verify_batch_size(input.size())  # type: ignore[attr-defined]
        made = sync_batch_norm(input, weight, bias, running_mean, running_var, momentum, eps)
        with torch.no_grad():
            for old, new in ((running_mean, made[4]), (running_var, made[5])):
                if old is not None:
                    old.copy_(new.detach())
        out: Tensor = made[0]
        return out

    def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        nonlocal running
        running += 1
        try:
            return layer(self, input)
        finally:
            running -= 1

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(functional, "batch_norm", batch_norm))
        stack.enter_context(mock.patch.object(nn.SyncBatchNorm, "forward", forward))
        yield
