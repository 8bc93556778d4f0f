"""Make the Python code of torch.optim keep symbolic values symbolic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import sympy
import torch
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import clip_grad

from irongrad.pipeline.optimizer.traced_calls import product


@contextmanager
def traceable_optimizers() -> Iterator[None]:
    """While open, torch.optim's Python code keeps symbolic values symbolic.

    `is_compiling` makes it keep step counts as tensors. The builtins `min`, `max` and `float` in Adafactor and in
    gradient clipping would force a decision or a constant, so they are replaced.
    """
    from torch.optim import _adafactor

    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.compiler.is_compiling", return_value=True))
        # A subclass that calls super().step() enters it, for the profiler.
        stack.enter_context(mock.patch("torch.autograd.profiler.record_function", nullcontext))
        stack.enter_context(mock.patch.object(_adafactor, "min", torch.sym_min, create=True))
        stack.enter_context(mock.patch.object(_adafactor, "max", torch.sym_max, create=True))
        stack.enter_context(mock.patch.object(clip_grad, "float", lambda x: x, create=True))
        stack.enter_context(mock.patch.dict(proxy_tensor._sympy_handlers(), {sympy.Mul: product}))
        yield
