"""The layers of a model that can be quantised, and their replacement by quantised ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from irongrad.quantisation.modules import QuantizedEmbedding, QuantizedLinear
from irongrad.quantisation.weights import QuantizedWeight

Model = TypeVar("Model", bound=nn.Module)

# The linear layer of transformers' GPT-2, whose weight is [columns, rows].
_CONV1D = "transformers.pytorch_utils.Conv1D"


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight of `layer` is [columns, rows], with a row for each feature of the result."""
    kind = type(layer)
    return f"{kind.__module__}.{kind.__qualname__}" == _CONV1D


def quantisable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that can be quantised, with their names.

    Layers derived from them may compute something else. Those of PEFT's adapters stay as they are, frozen or not: an
    adapter's matrices lie beside a `base_layer`, and layers that are trained whole in `modules_to_save`.
    """
    adapted = [f"{name}." for name, module in model.named_modules() if hasattr(module, "base_layer")]
    for name, module in model.named_modules():
        beside = any(name.startswith(a) and not name.startswith(f"{a}base_layer") for a in adapted)
        is_layer = type(module) in (nn.Linear, nn.Embedding) or is_transposed(module)
        if is_layer and not beside and "modules_to_save" not in name.split("."):
            yield name, module


def replace_layers(model: Model, weights: Mapping[nn.Module, QuantizedWeight]) -> Model:
    """Replace layers of a model, under all names that they have; layers with one weight share its parameters.

    Returns:
        The model; or the new layer, if the model is itself a layer.
    """
    new: dict[nn.Module, QuantizedLinear | QuantizedEmbedding] = {}
    shared: dict[QuantizedWeight, QuantizedWeight] = {}
    for layer, weight in weights.items():
        new[layer] = _in_place_of(layer, shared.get(weight, weight))
        shared[weight] = QuantizedWeight(new[layer].packed, new[layer].scale, new[layer].offset)
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # named_children leaves out the second name of a module
            if child in new:
                setattr(module, name, new[child])
    whole: Model = new.get(model, model)  # a model may be a layer
    return whole


def _in_place_of(layer: Any, weight: QuantizedWeight) -> QuantizedLinear | QuantizedEmbedding:
    new: QuantizedLinear | QuantizedEmbedding
    if isinstance(layer, nn.Embedding):
        new = QuantizedEmbedding(weight, layer.padding_idx)
    else:
        new = QuantizedLinear(weight, layer.bias)
    new.train(layer.training)
    return new
