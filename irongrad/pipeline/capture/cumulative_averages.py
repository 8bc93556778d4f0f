"""Capture batch normalisation whose statistics are the mean over all steps (momentum=None).

PyTorch takes the weight of a step from the number of batches so far, as a Python number: a trace would keep the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
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
            values = input.to(self.running_mean.dtype)
            others = [d for d in range(input.ndim) if d != 1]
            for mean, new in ((self.running_mean, values.mean(others)), (self.running_var, values.var(others))):
                mean.add_((new - mean) / self.num_batches_tracked)
        return batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    with mock.patch.object(_BatchNorm, "forward", forward):
        yield
