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
from irongrad.operators.decompositions.loss_margin import multi_margin_loss, multilabel_margin_loss


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
            _margins_without_gradient(),
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


@contextmanager
def _margins_without_gradient() -> Iterator[None]:
    """While open, a traced margin loss has no gradient where a score is exactly at the margin, as in eager.

    torch 2.13's decompositions in Python clamp the distance there, and the gradient of a clamp at its bound is one.
    """
    key = torch._C.DispatchKey.Autograd
    replaced: dict[torch._ops.OpOverload, Callable[..., object]] = {
        torch.ops.aten.multi_margin_loss.default: multi_margin_loss,
        torch.ops.aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
    }
    before = {operator: operator.py_kernels[key] for operator in replaced}
    for operator, kernel in replaced.items():
        operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernel in before.items():
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


def _errors_of_linalg() -> EffectHolder:
    """Return torch 2.13's record that the error check of a factorisation has an effect, because it raises."""
    return simple_registry.singleton.find("aten::_linalg_check_errors").effect


def _is_said_to_be_causal(mask: object, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Tell from the flag alone whether a mask is causal.

    nn.Transformer reads the mask's values for this. For a causal mask it takes a faster kernel with the same result.
    """
    return is_causal is True
