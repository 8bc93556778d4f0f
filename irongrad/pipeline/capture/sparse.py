"""Refuse sparse tensors by name: a compiled step has dense ones only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from irongrad.diagnostics.source_lines import where
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.step.borrow import Record


def refuse_sparse(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse sparse tensors that `module` takes or reaches, and layers with sparse gradients.

    Raises:
        UnsupportedOpError: there is one; with its name.
    """
    for what, tensor in _named(module, inputs):
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise UnsupportedOpError(
                f"{where(getattr(module, 'model', module))}\n  {what} is a sparse tensor ({layout}), and a compiled "
                "step has dense ones only. Make it dense with .to_dense(), or write the product with index_select and "
                "index_add over the indices and values as tensors of their own"
            )
    for path, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise UnsupportedOpError(
                f"{path} ({type(layer).__name__})\n  the layer has sparse gradients (sparse=True), and a compiled step "
                "has dense ones only. Make it with sparse=False, and use torch.optim.Adam in place of SparseAdam"
            )


def _named(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"the input {name}", tensor) for name, tensor in inputs.items())
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        yield f"self.{name.removeprefix('model.')}", tensor
    yield from (("a constant that the model or the loss names", tensor) for tensor in Record([module]).tensors)
