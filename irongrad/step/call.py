"""Which inputs of a step go to the model, and which to the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from irongrad.diagnostics.source_lines import where
from irongrad.runtime.errors import CaptureError


@dataclass(frozen=True)
class Call:
    """The distribution of the inputs between the model and the loss.

    Attributes:
        positional: names of the inputs that are passed to the model by position.
        keyword: names of the inputs that are passed to the model by keyword.
        targets: names of the inputs that are passed to the loss after the model's output.
    """

    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    targets: tuple[str, ...]

    def check(self, model: nn.Module, loss: Callable[..., object] | None) -> None:
        """Refuse a model or a loss that does not take these inputs.

        Raises:
            CaptureError: with its file and line.
        """
        _check_binds(model, self.positional, self.keyword, f"the model gets {_listed(self.positional + self.keyword)}")
        if loss is not None:
            arguments = ("model_output", *self.targets)
            _check_binds(loss, arguments, (), f"the loss gets {_listed(arguments)}")


def call_between(
    model: nn.Module,
    names: Sequence[str],
    model_inputs: Sequence[str] | None,
    loss_inputs: Sequence[str] | None,
) -> Call:
    """Divide the inputs `names` between a model and its loss.

    Args:
        model: the model.
        names: the inputs, in order.
        model_inputs: those of the model; None for those that its forward names as parameters, or else as many as it has
            required positional parameters.
        loss_inputs: those of the loss, in order; None for all that are not the model's.
    """
    call = _of_model(model, names, model_inputs)
    return call if loss_inputs is None else replace(call, targets=tuple(loss_inputs))


def _of_model(model: nn.Module, names: Sequence[str], model_inputs: Sequence[str] | None) -> Call:
    parameters = inspect.signature(model.forward).parameters
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    chosen = list(model_inputs) if model_inputs is not None else None
    by_name = [n for n in (names if chosen is None else chosen) if n in parameters or (chosen and accepts_any)]
    if by_name and (chosen is None or len(by_name) == len(chosen)):
        return Call((), tuple(by_name), tuple(n for n in names if n not in by_name))
    if chosen is None:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [p for p in parameters.values() if p.default is p.empty and p.kind in positional]
        chosen = list(names[: max(1, len(required))])
    return Call(tuple(chosen), (), tuple(n for n in names if n not in chosen))


def _listed(names: Sequence[str]) -> str:
    return f"({', '.join(names)})"


def _check_binds(
    thing: nn.Module | Callable[..., object], positional: Sequence[str], keyword: Sequence[str], given: str
) -> None:
    function = thing.forward if isinstance(thing, nn.Module) else thing
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C has none
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keyword))
    except TypeError as error:
        raise CaptureError(
            f"{where(thing)}: {given}, but its signature is {signature}: {error}. Which inputs go to the model is "
            "TrainStep.model_inputs; the others go to the loss, in the order of TrainStep.inputs, or those of "
            "TrainStep.loss_inputs"
        ) from None
