"""Run functions before and after every call of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def around_calls(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> Iterator[None]:
    """While open, `before` and `after` run around every call of `module`.

    Args:
        module: the module.
        before: a forward pre-hook; gets the module and the inputs.
        after: a forward hook; gets the module, the inputs and the output.
    """
    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
