"""Run models on plain operators, which have a backward and which every target compiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._library import simple_registry
from torch._library.effects import EffectHolder
from torch.nn.attention import SDPBackend, sdpa_kernel

from irongrad.graph.subgraphs import aliases_allowed


@contextmanager
def plain_operators() -> Iterator[None]:
    """While open, attention and recurrent layers run as plain operators, not as fused kernels of this machine's CPU.

    Only the plain operators decompose into operators that have a backward and that every target compiles.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mkldnn.flags warns about Intel GPUs on exit
        with (
            sdpa_kernel([SDPBackend.MATH]),
            torch.backends.mkldnn.flags(enabled=False),
            torch.backends.nnpack.flags(enabled=False),  # PyTorch chooses it by batch size, which adds a guard
            mock.patch("torch.nn.modules.transformer._detect_is_causal_mask", _is_said_to_be_causal),
            # AOTAutograd would order these checks with tokens: further arguments and results of the graph. A compiled
            # step raises no error, so their order is irrelevant.
            mock.patch.object(_errors_of_linalg(), "_effect", None),
            aliases_allowed(),
            _inactive_dropouts_are_their_arguments(),
        ):
            yield


@contextmanager
def _inactive_dropouts_are_their_arguments() -> Iterator[None]:
    """While open, a dropout that drops nothing returns its argument itself when it is traced, as it does in eager.

    torch 2.13's decomposition in Python returns a copy, so that a write into the result does not reach the argument.
    """
    operator = torch.ops.aten.dropout.default
    before = dict(operator.py_kernels)

    def kernel(key: torch._C.DispatchKey) -> Callable[..., torch.Tensor]:
        def dropout(input: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
            result: torch.Tensor = before[key](input, p, train) if train and p else input
            return result

        return dropout

    operator.py_kernels.update({key: kernel(key) for key in before})
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.update(before)
        operator._dispatch_cache.clear()


def _errors_of_linalg() -> EffectHolder:
    """Return torch 2.13's record that the error check of a factorisation has an effect, because it raises."""
    return simple_registry.singleton.find("aten::_linalg_check_errors").effect


def _is_said_to_be_causal(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Tell from the flag alone whether a mask is causal.

    nn.Transformer reads the mask's values for this. For a causal mask it takes a faster kernel with the same result.
    """
    return is_causal is True
