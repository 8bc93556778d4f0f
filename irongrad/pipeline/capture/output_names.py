"""Names for the outputs of a model: a tensor, a tuple, a dictionary, a dataclass or a ModelOutput."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from irongrad.runtime.errors import CaptureError


def flatten_outputs(output: object) -> dict[str, torch.Tensor]:
    """Return the tensors in `output` by name, in order.

    A lone tensor is called `output`. An element of a tuple is named by its position (`output0`). An entry of a
    dictionary, and a field of a dataclass or a named tuple, keep their own names. A dot joins the names of nested
    outputs. An artifact cannot return other values (None, numbers, caches), so they are left out.
    """
    if isinstance(output, torch.Tensor):
        return {"output": output}
    return dict(_walk(output, ""))


def loss_of(output: object) -> torch.Tensor:
    """Return the loss that a model computed itself.

    Raises:
        CaptureError: `output` is neither a tensor nor has a `loss`, or its loss is None.
    """
    if isinstance(output, torch.Tensor):
        return output
    loss = dict(_children(output)).get("loss")
    if not isinstance(loss, torch.Tensor):
        names = [name for name, _ in _children(output)]
        raise CaptureError(
            f"TrainStep.loss is None, but the model returned {type(output).__name__} with no loss in it (it has "
            f"{names}). Pass loss=..., or add the input from which the model computes its loss, such as labels"
        )
    return loss


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((str(k), v) for k, v in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        yield from ((str(i), v) for i, v in enumerate(value))


def _walk(value: object, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, child in _children(value):
        first = f"output{name}" if name.isdigit() else name
        path = f"{prefix}.{name}" if prefix else first
        if isinstance(child, torch.Tensor):
            yield path, child
        else:
            yield from _walk(child, path)
