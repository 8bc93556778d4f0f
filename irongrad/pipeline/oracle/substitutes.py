"""Operators of which an eager run gives other results than PyTorch: what it leaves open, or gets wrong."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.pipeline.oracle import hidden_rows, vector_signs

# What computes an operator instead, from the operator and its arguments.
_SUBSTITUTES = {**hidden_rows.SUBSTITUTES, **vector_signs.SUBSTITUTES}


class Substitutes(TorchDispatchMode):
    """While open, operators have the results of their substitutes.

    It is one mode for all of them: an eager run calls it for each of its operators.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        substitute = _SUBSTITUTES.get(func)
        if substitute is None:
            return func(*args, **(kwargs or {}))
        return substitute(*args, **(kwargs or {}))
