"""Capture nn.LSTM, nn.GRU and nn.RNN as one operator for each layer and direction."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.rnn import PackedSequence

from irongrad.memory_model.product_tiles import SMALLEST
from irongrad.operators.decompositions.recurrent import is_unrolled, recurrent
from irongrad.operators.decompositions.unknown_sizes import is_known
from irongrad.runtime.errors import UnsupportedOpError


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """While open, recurrent layers are captured as `irongrad::recurrent`.

    Raises:
        UnsupportedOpError: a recurrent layer is called with a packed sequence.
    """
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(_refuse_packed).remove)
        for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            plain = getattr(torch._VF, cell)
            stack.enter_context(mock.patch.object(torch._VF, cell, partial(_layers, cell, plain), create=True))
        yield


@contextmanager
def eager_lstm() -> Iterator[None]:
    """While open, eager's LSTM accepts float16 on every CPU.

    torch 2.13 always calls oneDNN's LSTM for float16, which raises on a CPU without float16 instructions.
    """
    fused = torch._VF.lstm

    def lstm(data: Tensor, *arguments: Any) -> Any:
        is_float16 = torch.float16 in (data.dtype, torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        if not is_float16:
            return fused(data, *arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mkldnn.flags warns about Intel GPUs on exit
            with torch.backends.mkldnn.flags(enabled=False):
                return fused(data, *arguments)

    with mock.patch.object(torch._VF, "lstm", lstm, create=True):
        yield


def _refuse_packed(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if isinstance(module, nn.RNNBase) and any(isinstance(i, PackedSequence) for i in inputs):
        raise UnsupportedOpError(
            f"{type(module).__name__}: the shapes of a packed sequence depend on its lengths. Pass the padded tensor, "
            "and mask what comes after each length"
        )


def _layers(cell: str, plain: Callable[..., Any], data: Tensor, *arguments: Any) -> Any:
    """Replace `torch._VF.lstm` and the like: return the outputs, then the last states of all layers and directions."""
    hidden, weights, biases, count, probability, training, bidirectional, batch_first = arguments
    x = data.transpose(0, 1) if batch_first else data
    drops = training and probability > 0 and count > 1
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return plain(data, *arguments)
    first = hidden if cell == "lstm" else (hidden,)
    last: list[Sequence[Tensor]] = []
    for number in range(count):
        states, own = [s.chunk(count)[number] for s in first], _part(weights, number, count)
        x, *state = _layer(cell, x, states, own, biases=biases, bidirectional=bidirectional)
        last.append(state)
        if drops and number < count - 1:  # PyTorch 2.13's own decomposition omits this (`_rnn_helper`)
            x = dropout(x, probability)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(s) for s in zip(*last, strict=True)))


def _part(weights: Sequence[Tensor], number: int, count: int) -> Sequence[Tensor]:
    """Cut `weights` into `count` equal parts, and return part `number`."""
    size = len(weights) // count
    return weights[number * size : (number + 1) * size]


def _layer(
    cell: str, x: Tensor, states: list[Tensor], weights: Sequence[Tensor], *, biases: bool, bidirectional: bool
) -> Sequence[Tensor]:
    """Run one layer; return its outputs and its last states."""
    directions = 2 if bidirectional else 1
    results = [
        _direction(cell, x, [s[d] for s in states], _part(weights, d, directions), biases=biases, backwards=d == 1)
        for d in range(directions)
    ]
    outputs, last = zip(*results, strict=True)
    return [torch.cat(outputs, -1), *(torch.stack(s) for s in zip(*last, strict=True))]


def _direction(
    cell: str, x: Tensor, state: list[Tensor], weights: Sequence[Tensor], *, biases: bool, backwards: bool
) -> tuple[Tensor, list[Tensor]]:
    """Run one direction of a layer; return its outputs and its last state."""
    input_weight, *inner = weights
    bias = None
    if biases:
        state_weight, bias, inner_bias, *projection = inner
        # GRU's reset gate multiplies the state's product after its bias is added, so the two biases cannot be merged.
        inner = [state_weight, *projection, *([inner_bias] if cell == "gru" else [])]
        bias = bias if cell == "gru" else bias + inner_bias
    projected = linear(x.flip(0) if backwards else x, input_weight, bias)
    # Under autocast the state is kept as wide as the weights. Its products may be narrower, as those of linear layers.
    carried = [s.to(input_weight.dtype) for s in state]
    if _multiplies_halves(projected, carried[0], inner[0]):
        inner = [w.to(projected.dtype) if w.dim() > 1 else w for w in inner]
    results = recurrent(cell, projected, carried, inner)
    *last, y = (r.to(s.dtype) for r, s in zip(results, [*state, state[0]], strict=False))
    return y.flip(0) if backwards else y, last


def _multiplies_halves(projected: Tensor, state: Tensor, weight: Tensor) -> bool:
    """Whether products of bfloat16 with the state are faster: kernels of ours compute them, each or in loops.

    Others take longer than in float32. On a Xeon with AMX, 16 unrolled steps of 32 rows and 64 units take 1.5 times as
    long. float16 is no faster anywhere.
    """
    steps, batch = projected.shape[:2]
    if projected.dtype != torch.bfloat16 or not (is_known(steps) and is_known(batch)):
        return False
    return bool(batch * weight.numel() >= SMALLEST if is_unrolled(projected, state) else batch > 1)
