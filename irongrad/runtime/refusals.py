"""The texts with which a module refuses values, known to those who check that it does."""

from __future__ import annotations

from irongrad.runtime.manifest import UNLIMITED, TensorSpec

NOT_RUN = "the step was not run"


def range_of(spec: TensorSpec) -> str:
    """What is said first when an input leaves its range."""
    exempt = f" (or {spec.exempt})" if spec.exempt is not None else ""
    return f"{spec.name}: every value must be in [{spec.minimum}, {largest_of(spec)}]{exempt}; {NOT_RUN}"


def largest_of(spec: TensorSpec) -> str:
    """The largest value that an input may have, in words: it may depend on the sizes of a call."""
    known = [str(spec.maximum)] if not spec.limits or spec.maximum != UNLIMITED else []
    every = [*known, *spec.limits]
    return every[0] if len(every) == 1 else f"min({', '.join(every)})"


def too_large(spec: TensorSpec) -> str:
    """What stands before the numbers where a value is above its range."""
    return f"{range_of(spec)}; a value, written as a shape:"


def too_small(spec: TensorSpec) -> str:
    """What stands before the numbers where a value is below its range: by how much, for no shape is negative."""
    return f"{range_of(spec)}; how far a value is below {spec.minimum}, written as a shape:"


def mismatch(dimension: int, expected: int, given: int) -> str:
    """What IREE 3.13.0 adds to a text where sizes differ."""
    return f"shape dimension {dimension} mismatch; expected {expected} but have {given}"


def out_of_range(spec: TensorSpec, value: int) -> str:
    """The whole text, of `value`."""
    assert spec.minimum is not None
    assert spec.maximum is not None
    if value < spec.minimum:
        return f"{too_small(spec)} {mismatch(0, 0, spec.minimum - value)}"
    return f"{too_large(spec)} {mismatch(0, spec.maximum, value)}"
