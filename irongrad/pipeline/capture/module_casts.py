"""Refuse a forward that casts or moves a module; let those calls through that leave every tensor as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from irongrad.diagnostics.source_lines import here
from irongrad.runtime.errors import CaptureError


@contextmanager
def casts_refused() -> Iterator[None]:
    """While open, `module.to(…)`, `.half()` and the like raise CaptureError if they would change a tensor's type.

    Such a call gives the parameters other memory, so the optimizer would update those of before.
    """
    with mock.patch.object(nn.Module, "_apply", _refused):
        yield


def _refused(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    if any(_kind(function(t.detach())) != _kind(t) for t in tensors):
        raise CaptureError(
            f"{here()}\n  the forward casts or moves a module, which a compiled step cannot do. Do so before "
            "compiling, once, or cast the tensors instead"
        )
    return module


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.shape
