"""Further entry points of a step: functions of the user's over the step's model, such as `act` or `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from irongrad.diagnostics.source_lines import where
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.manifest import RESERVED, STANDARD, of_entry
from irongrad.step.argument_checks import check_input, outside_inference
from irongrad.step.carry import Carry, carry_of


@dataclass(frozen=True)
class Entry:
    """A function over the step's model, in evaluation mode and without gradients.

    Attributes:
        function: a bound method of the model, or any function that calls the model or parts of it. It returns a tensor,
            or tensors in a tuple, a dictionary or a dataclass, as a model does.
        inputs: an example of each input, by name. They are passed by name if the function has parameters of all these
            names, and by position otherwise.
        carry: values that go from call to call, such as a hidden state, by name, each with its value at the beginning.
            The function takes them as it takes inputs, after these, and returns their new values beside its result:
            `(result, {"hidden": hidden})`. They are state of their own.
    """

    function: Callable[..., object]
    inputs: Mapping[str, torch.Tensor]
    carry: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_carried", carry_of(self.carry, self.inputs))

    @property
    def carried(self) -> Carry:
        """What is carried from call to call."""
        carried: Carry = vars(self)["_carried"]
        return carried

    def run(self, values: Mapping[str, Any]) -> object:
        """Call the function on inputs by name."""
        if _takes_by_name(self.function, values):
            return self.function(**values)
        return self.function(*values.values())


def entries_of(given: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries that a user gave, by name: each an `Entry`, or a pair of a function and its inputs.

    Raises:
        CaptureError: one is neither, or its name or an input cannot be used.
    """
    if not isinstance(given, Mapping):
        raise CaptureError(
            f"entries is a {type(given).__name__}; it must be a dictionary of names and pairs, such as "
            "entries={'act': (model.act, {'obs': obs})}"
        )
    return {name: _checked(name, entry) for name, entry in given.items()}


def examples_of(entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """The examples of all inputs of entries, by the names that they have beside a step's own inputs."""
    return {of_entry(name, n): t for name, entry in entries.items() for n, t in entry.inputs.items()}


def _checked(name: Any, given: Any) -> Entry:
    if not (isinstance(name, str) and name.isidentifier()):
        raise CaptureError(f"entries has the name {name!r}; it must be an identifier, such as 'act'")
    if name in STANDARD | RESERVED:
        raise CaptureError(f"entries has the name {name!r}, which every artifact uses itself; rename it")
    is_pair = isinstance(given, tuple) and len(given) == 2
    entry = given if isinstance(given, Entry) else Entry(*given) if is_pair else None
    if entry is None or not callable(entry.function) or not isinstance(entry.inputs, Mapping):
        raise CaptureError(
            f"entries[{name!r}] must be a function and its example inputs, such as (model.{name}, {{'x': x}})"
        )
    for input_name, value in entry.inputs.items():
        check_input(input_name, value)
    _check_binds(name, entry)
    return replace(entry, inputs=outside_inference(entry.inputs))


def _takes_by_name(function: Callable[..., object], names: Mapping[str, object]) -> bool:
    try:
        parameters = _signature(function).parameters
    except (TypeError, ValueError):  # a function written in C has none
        return False
    return all(n in parameters and parameters[n].kind is not inspect.Parameter.POSITIONAL_ONLY for n in names)


def _signature(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function.forward if isinstance(function, nn.Module) else function)


def _check_binds(name: str, entry: Entry) -> None:
    try:
        signature = _signature(entry.function)
    except (TypeError, ValueError):
        return
    given = {**entry.inputs, **entry.carry}
    by_name = _takes_by_name(entry.function, given)
    try:
        signature.bind(*(() if by_name else given.values()), **(given if by_name else {}))
    except TypeError as error:
        raise CaptureError(
            f"{where(entry.function)}: entries[{name!r}] has the inputs ({', '.join(given)}), but the "
            f"function's signature is {signature}: {error}"
        ) from None
