"""`irongrad.load_gguf`: put the weights of a GGUF file into a model, quantised ones as they are.

The format is that of ggml (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), read by the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from irongrad.quantisation.layers import Model, is_transposed, quantisable, replace_layers
from irongrad.quantisation.weights import BIAS, QuantizedWeight, pack_pairs
from irongrad.runtime.errors import UserError

# What a tensor of a file is called in the model; None if it has no place there.
Names = Callable[[str], str | None] | Mapping[str, str]

Bytes = npt.NDArray[np.uint8]


def load_gguf(model: Model, path: str | Path, names: Names | None = None) -> Model:
    """Put the tensors of a GGUF file into a model in place; layers whose weights are Q8_0 or Q4_0 become quantised.

    Quantised numbers and their scales are taken as they are, and not trained. Tensors of F32, F16 and BF16 are copied
    into the model's parameters and buffers. Parameters that the file lacks stay as they are.

    Args:
        model: the model, in which a quantised tensor has to be the weight of an `nn.Linear` or `nn.Embedding`.
        path: the file.
        names: the model's name for each tensor of the file, as a function or a mapping; a tensor without one is left
            out. By default the names are the model's own.

    Returns:
        The same model; or the new layer, if the model is itself a layer.

    Raises:
        UserError: the file cannot be read, a tensor is stored in another way, or has another shape than the model's, or
            the model has none of that name. The model is unchanged then.
    """
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    weights: dict[nn.Module, QuantizedWeight] = {}
    values: list[tuple[Tensor, Tensor]] = []
    for tensor in _tensors(path):
        if (name := _name_in_model(tensor.name, names)) is None:
            continue
        where = f"{path}: the tensor {tensor.name!r}"
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if name not in own:
            raise UserError(f"{where} is {name!r} in the model, which has no such parameter; names= maps the names")
        if shape != tuple(own[name].shape):
            raise UserError(f"{where} has the shape {shape}, and {name!r} in the model has {tuple(own[name].shape)}")
        layers = [layer for _, layer in quantisable(model) if layer.weight is own[name]]
        if any(map(is_transposed, layers)):
            raise UserError(f"{where} is the weight of a Conv1D in the model, which has rows and columns exchanged")
        kind = tensor.tensor_type.name
        if kind in _PLAIN:
            values.append((own[name], _PLAIN[kind](np.array(tensor.data)).reshape(shape)))
        elif kind in _QUANTISED and layers:
            weights |= dict.fromkeys(layers, _QUANTISED[kind](np.array(tensor.data)))
        elif kind in _QUANTISED:
            raise UserError(f"{where} is {kind}, and {name!r} is not the weight of a linear layer or an embedding")
        else:
            known = ", ".join((*_QUANTISED, *_PLAIN))
            raise UserError(f"{where} is stored as {kind}, which cannot be read; {known} can")
    if not weights and not values:
        raise UserError(f"{path} has no tensor to which names= gives a name in the model")
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value)
    return replace_layers(model, weights)


def _tensors(path: str | Path) -> list[Any]:
    try:
        import gguf
    except ImportError as error:
        raise UserError("a GGUF file needs the package gguf: pip install 'irongrad[gguf]'") from error
    try:
        return list(gguf.GGUFReader(path).tensors)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a GGUF file: {error}") from error


def _name_in_model(name: str, names: Names | None) -> str | None:
    if names is None:
        return name
    return names.get(name) if isinstance(names, Mapping) else names(name)


def _q8_0(blocks: Bytes) -> QuantizedWeight:
    """Blocks of a float16 scale and 32 numbers of 8 bits: uint8 [rows, 34 * blocks]."""
    scale, numbers = _parts(blocks, 34)
    return QuantizedWeight(torch.from_numpy(numbers.view(np.int8)).flatten(1), scale)


def _q4_0(blocks: Bytes) -> QuantizedWeight:
    """Blocks of a float16 scale and 32 numbers of 4 bits, plus 8: uint8 [rows, 18 * blocks].

    Byte i of a block has number i in its low bits, and number i + 16 in its high bits.
    """
    scale, pairs = _parts(blocks, 18)
    biased = np.concatenate([pairs & 15, pairs >> 4], -1)
    return QuantizedWeight(pack_pairs(torch.from_numpy(biased.view(np.int8)).flatten(1) - BIAS), scale)


def _parts(blocks: Bytes, size: int) -> tuple[Tensor, Bytes]:
    """The scales, float16 [rows, blocks], and the other bytes, uint8 [rows, blocks, size - 2], of blocks of a size."""
    split = blocks.reshape(len(blocks), -1, size)
    scale = np.ascontiguousarray(split[..., :2]).view(np.float16)[..., 0]
    return torch.from_numpy(scale), np.ascontiguousarray(split[..., 2:])


def _bf16(values: Bytes) -> Tensor:
    return torch.from_numpy(values).view(torch.bfloat16)


_QUANTISED: dict[str, Callable[[Bytes], QuantizedWeight]] = {"Q8_0": _q8_0, "Q4_0": _q4_0}
_PLAIN: dict[str, Callable[[Any], Tensor]] = {"F32": torch.from_numpy, "F16": torch.from_numpy, "BF16": _bf16}
