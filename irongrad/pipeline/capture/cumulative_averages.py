"""Capture batch normalisation whose statistics are the mean over all steps (momentum=None).

PyTorch takes the weight of a step from the number of batches so far, as a Python number: a trace would keep the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def cumulative_averages() -> Iterator[None]:
    """While open, such a layer computes the weight of a step as a tensor."""
    plain = _BatchNorm.forward

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:
        averages = self.momentum is None and self.training and self.track_running_stats
        if not averages or self.running_mean is None or self.num_batches_tracked is None:
            return plain(self, input)
        self._check_input_dim(input)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
        # With a momentum of 1, these become the statistics of the batch.
        new = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = functional.batch_norm(input, *new, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        with torch.no_grad():
            for mean, of_batch in zip((self.running_mean, self.running_var), new, strict=True):
                mean.add_((of_batch - mean) / self.num_batches_tracked)
        return out

    with mock.patch.object(_BatchNorm, "forward", forward):
        yield
