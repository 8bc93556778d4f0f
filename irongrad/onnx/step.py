"""A training step of an ONNX file, with loss, optimizer and data given by name, as the command line does."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from irongrad.onnx.load import load
from irongrad.onnx.model import OnnxModel
from irongrad.runtime.argument_names import identifier
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import UserError
from irongrad.step.train_step import TrainStep

Function: TypeAlias = Callable[..., Any]


def make_step(
    path: Path,
    data: Mapping[str, Array],
    batch: int,
    *,
    loss: str | Function,
    optimizer: str | Function,
    options: Mapping[str, Any],
    freeze: Iterable[str] = (),
    output: str | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
) -> TrainStep:
    """Return the step that trains the model in `path` on the arrays of `data`.

    Args:
        path: the ONNX file.
        data: the model's inputs by name, then the loss's arguments after the model's output. The first rows are the
            example batch.
        batch: the number of rows in a batch.
        loss: a function of torch.nn.functional or a class of torch.nn, such as `cross_entropy` or `CrossEntropyLoss`;
            or a function of the output and the other arrays.
        optimizer: a class of torch.optim, such as `AdamW`; or a function of parameters and options.
        options: the options of the optimizer, such as `lr`.
        freeze: patterns of names of initialisers that are not trained.
        output: the model's output that the loss takes; None for all, as a dictionary if there are several.
        dynamic: as in `TrainStep`, by the names in `data`.
        buckets: as in `TrainStep`.

    Raises:
        UserError: there is no such loss or optimizer, or an input is missing, or its type would lose values.
    """
    model = load(path, freeze=freeze, outputs=[output] if output is not None else None)
    if isinstance(loss, str) and len(model.results) > 1:
        raise UserError(
            f"{path} has the outputs {', '.join(model.results)}, and the loss {loss} takes one: name it (--result), or "
            "give a loss of your own, which takes a dictionary of them (--loss FILE:FUNCTION)"
        )
    named = _named(data, model)
    rows = {named[name]: _rows(name, array, batch) for name, array in data.items()}
    wanted = list(inspect.signature(model.forward).parameters)
    if missing := [n for n in wanted if n not in rows]:
        raise UserError(f"the model takes {', '.join(wanted)}; the data has {', '.join(rows)}, and not {missing[0]}")
    for name, argument in model.arguments.items():
        _check_dtype(name, rows[argument], model)
    inputs = {n: torch.from_numpy(rows[n]) for n in (*wanted, *(n for n in rows if n not in wanted))}
    return TrainStep(
        model=model,
        loss=_loss(loss) if isinstance(loss, str) else loss,
        optimizer=_optimizer(optimizer, model, options),
        inputs=inputs,
        model_inputs=wanted,
        dynamic={named.get(name, name): dims for name, dims in (dynamic or {}).items()},
        buckets=buckets or (),
    )


def _named(data: Iterable[str], model: OnnxModel) -> dict[str, str]:
    """The step's input for each array."""
    named = {name: model.arguments.get(name, identifier(name)) for name in data}
    for name, argument in named.items():
        if same := [n for n, a in named.items() if n != name and a == argument]:
            raise UserError(
                f"the arrays {name!r} and {same[0]!r} would both be the input {argument!r}: rename the one that the "
                "model does not take"
            )
    return named


def _rows(name: str, array: Array, count: int) -> Array:
    """A copy of the first `count` rows, in the byte order of this machine."""
    if not np.ndim(array):
        raise UserError(f"{name} is a single number; the first dimension of an array counts samples")
    if len(array) < count:
        raise UserError(f"the data has {len(array)} rows of {name}, fewer than a batch of {count}")
    if array.dtype.kind not in "biufc":
        raise UserError(f"{name} has elements of type {array.dtype}; give numbers")
    return np.array(array[:count], array.dtype.newbyteorder("="))


def _check_dtype(name: str, array: Array, model: OnnxModel) -> None:
    wanted = model.inputs[name].dtype
    made_for = str(wanted).removeprefix("torch.")
    if wanted not in (None, torch.bfloat16) and not np.can_cast(array.dtype, made_for, "safe"):
        raise UserError(
            f"the data has {array.dtype} for the input {name!r}, and the ONNX file is made for {made_for}, which does "
            f"not hold every {array.dtype}. Convert the data: array.astype({made_for!r})"
        )


def _loss(name: str) -> Callable[..., torch.Tensor]:
    function = getattr(nn.functional, name, None)
    if callable(function) and not name.startswith("_"):
        found: Callable[..., torch.Tensor] = function
        return found
    found_class = getattr(nn, name, None)
    if isinstance(found_class, type) and issubclass(found_class, nn.Module):
        try:
            built: Callable[..., torch.Tensor] = found_class()
        except TypeError as error:
            raise UserError(
                f"torch.nn.{name} needs arguments ({error}): give a function of your own, --loss FILE:FUNCTION"
            ) from None
        return built
    raise UserError(
        f"there is no loss {name!r}: it is a function of torch.nn.functional, such as cross_entropy or mse_loss, or a "
        "class of torch.nn, such as CrossEntropyLoss"
    )


def _optimizer(name: str | Function, model: OnnxModel, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    found_class = getattr(torch.optim, name, None) if isinstance(name, str) else None
    if isinstance(name, str) and not (isinstance(found_class, type) and issubclass(found_class, torch.optim.Optimizer)):
        raise UserError(f"there is no optimizer {name!r} in torch.optim; it has AdamW, SGD and others")
    if not list(model.parameters()):
        raise UserError("the model has nothing to train: no initialiser in floating point is left")
    make: Any = name if found_class is None else found_class
    try:
        built: torch.optim.Optimizer = make(model.parameters(), **options)
    except (TypeError, ValueError, IndexError) as error:
        shown = f"torch.optim.{name}" if found_class is not None else getattr(name, "__name__", str(name))
        raise UserError(f"{shown} does not take these options: {error}") from None
    if not isinstance(built, torch.optim.Optimizer):
        raise UserError(f"{make.__name__} returned a {type(built).__name__}; it must return a torch.optim.Optimizer")
    return built


def options_of(items: Mapping[str, str]) -> dict[str, Any]:
    """Parse options that are written as Python literals: numbers, tuples of numbers, True and False.

    Raises:
        UserError: a value is none of these.
    """
    try:
        return {name: ast.literal_eval(text) for name, text in items.items()}
    except (ValueError, SyntaxError):
        shown = ", ".join(f"{n}={t}" for n, t in items.items())
        raise UserError(f"--set {shown}: a value is a number, a tuple of numbers, True or False") from None
