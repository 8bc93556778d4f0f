"""The messages with which a compiled module refuses values, shared with the code that checks for them."""

from __future__ import annotations

from irongrad.runtime.manifest import UNLIMITED, TensorSpec

NOT_RUN = "the step was not run"
# IREE appends a number to each message; see `irongrad.pipeline.assemble.refusal_messages`.
_NUMBER_OF_FALSE = "; one for a false condition, written as a shape"


def range_of(spec: TensorSpec) -> str:
    """Return the first part of the message about an input that is out of range."""
    return f"{spec.name}: every value must be in {interval_of(spec)}; {NOT_RUN}"


def interval_of(spec: TensorSpec) -> str:
    """Return the accepted values of an input as text."""
    exempt = f" (or {spec.exempt})" if spec.exempt is not None else ""
    return f"[{spec.minimum}, {largest_of(spec)}]{exempt}"


def largest_of(spec: TensorSpec) -> str:
    """Return the largest accepted value of an input as text; it may depend on the sizes of a call."""
    known = [str(spec.maximum)] if not spec.limits or spec.maximum != UNLIMITED else []
    every = [*known, *spec.limits]
    return every[0] if len(every) == 1 else f"min({', '.join(every)})"


def too_large(spec: TensorSpec) -> str:
    """Return the message about a value above its range, up to the numbers."""
    return f"{range_of(spec)}; a value, written as a shape:"


def too_small(spec: TensorSpec) -> str:
    """Return the message about a value below its range, up to the numbers.

    The numbers give the distance below the minimum, because no shape is negative.
    """
    return f"{range_of(spec)}; how far a value is below {spec.minimum}, written as a shape:"


def not_held(place: str, says: str) -> str:
    """Return the message about an assertion that does not hold, up to the number, which is 1 for that."""
    return f"{place}: {says}; {NOT_RUN}{_NUMBER_OF_FALSE}:"


def other_values(place: str, name: str, values: str, *, numbered: bool) -> str:
    """Return the message about state with other values than the ones that a step was compiled for.

    Args:
        place: the user's line that read the values when the step was captured.
        name: the state tensor.
        values: its values then, as text.
        numbered: whether IREE appends a number, which is 1 for that.
    """
    said = f"{place}: the step was compiled for the values of {name} at capture, {values}, and the state has others"
    return f"{said}{_NUMBER_OF_FALSE}:" if numbered else said


def without_number_of_false(message: str) -> str:
    """Return a message without the number of a false condition, which tells nothing."""
    return message.partition(_NUMBER_OF_FALSE)[0]


def mismatch(dimension: int, expected: int, given: int) -> str:
    """Return the text that IREE 3.13.0 appends to a message if sizes differ."""
    return f"shape dimension {dimension} mismatch; expected {expected} but have {given}"


def out_of_range(spec: TensorSpec, value: int) -> str:
    """Return the whole message about `value`."""
    assert spec.minimum is not None
    assert spec.maximum is not None
    if value < spec.minimum:
        return f"{too_small(spec)} {mismatch(0, 0, spec.minimum - value)}"
    return f"{too_large(spec)} {mismatch(0, spec.maximum, value)}"
