"""The arguments and results of a function as flat tensors, with what `compile_function` refuses of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from irongrad.diagnostics import source_lines
from irongrad.diagnostics.advice import DENSE
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.runtime.structure import Structure, flatten


def flatten_tensors(value: Any, what: str) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of a value, and its structure; a refusal says `what` it is."""
    try:
        return flatten(value, lambda part: isinstance(part, torch.Tensor))
    except TypeError as error:
        raise CaptureError(f"{what}: {error}") from None


def check_dense(fn: Callable[..., Any], arguments: Mapping[str, torch.Tensor]) -> None:
    """Refuse a sparse argument."""
    for name, tensor in arguments.items():
        if tensor.layout is not torch.strided:
            raise UnsupportedOpError(
                f"{source_lines.where(fn)}: the argument {name!r} is a {tensor.layout} tensor, and only dense ones can "
                f"be compiled. Use {DENSE}"
            )


def check_unwritten(fn: Callable[..., Any], arguments: Mapping[str, torch.Tensor]) -> None:
    """Refuse a function that has written into an argument."""
    for name, tensor in arguments.items():
        if tensor._version:
            raise CaptureError(
                f"{source_lines.where(fn)}: the function writes into its argument {name!r}, and a compiled function "
                f"writes into none. Write into a copy, x.clone(), and return that"
            )


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def check_scalar(outputs: Sequence[torch.Tensor], fn: Callable[..., Any]) -> None:
    """Refuse gradients of a first result that is no floating-point scalar."""
    if not outputs or outputs[0].shape != () or not outputs[0].is_floating_point():
        shape = tuple(outputs[0].shape) if outputs else "none"
        raise CaptureError(
            f"{source_lines.where(fn)}: gradients=True needs a floating-point scalar as the first result, it has shape "
            f"{shape}. Reduce it, or call torch.func.vjp inside the function"
        )


def check_differentiable(tensors: Sequence[torch.Tensor], fn: Callable[..., Any]) -> None:
    """Refuse gradients with respect to nothing."""
    if not any(map(is_differentiable, tensors)):
        raise CaptureError(
            f"{source_lines.where(fn)}: gradients=True needs a floating-point tensor among the arguments. Leave it "
            "out, or pass the tensor to differentiate with respect to as an argument"
        )


def replaced(structure: Structure, leaves: Iterator[Structure]) -> Structure:
    """A structure with other leaves, in order."""
    if structure.kind == "leaf":
        return next(leaves)
    if structure.kind == "constant":
        return Structure("constant")
    return Structure(structure.kind, tuple(replaced(i, leaves) for i in structure.items), structure.keys)


def argument_names(fn: Callable[..., Any], structure: Structure) -> list[str]:
    """A name for every tensor argument: the name of its parameter, and the path into it."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
        parameters = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    except (TypeError, ValueError):  # a function written in C has no signature
        parameters = []
    names: list[str] = []

    def walk(part: Structure, name: str) -> None:
        if part.kind == "leaf":
            names.append(name)
        keys = part.keys or range(len(part.items))
        for key, item in zip(keys, part.items, strict=True):
            walk(item, f"{name}.{key}")

    for number, item in enumerate(structure.items):
        walk(item, parameters[number] if number < len(parameters) else f"arg{number}")
    return names
