"""The sizes that the functions of a step accept: up to its largest bucket, and without buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.differentiate.programs import Programs
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.buckets import Bucket
from irongrad.sizes.dimensions import holds, relations_of
from irongrad.sizes.expressions import in_dimensions
from irongrad.sizes.limits import Limits, limits_of, limits_up_to, spelled
from irongrad.step.train_step import TrainStep, sizes_of


def _conditions(untraced: Programs) -> list[Any]:
    """The conditions on named dimensions under which the captured graphs are right."""
    found = [program for program in (untraced.joint, untraced.eval, untraced.predict) if program is not None]
    own = [
        condition
        for program in found
        for condition in (
            *(in_dimensions(guard.xreplace(dict(program.names))) for guard in program.guards),
            *relations_of(program.derived),
        )
    ]
    return [*own, *untraced.conditions]


def any_size_limits(untraced: Programs, captured: CapturedStep) -> Limits | None:
    """The sizes that any-size functions accept; None if the step has no such functions."""
    step = captured.step
    if not step.dynamic or (step.bucket_list and not step.bucket_fallback):
        return None
    return limits_of([*_conditions(untraced), *step.conditions], list(sizes_of(step, step.inputs)))


def bucket_limits(untraced: Programs, needs: set[Any], step: TrainStep) -> Limits:
    """The sizes that a step with buckets accepts, up to its largest bucket.

    Raises:
        CaptureError: the step needs a condition that some of these sizes violate, or a bucket holds no input.
    """
    buckets = step.bucket_list
    if not buckets:
        return Limits()
    known = (*step.conditions, *relations_of(untraced.joint.derived))
    largest = {name: max(bucket[name] for bucket in buckets) for name in buckets[0]}
    limits = limits_up_to([*(need >= 0 for need in needs), *_conditions(untraced)], largest, step.conditions)
    if gaps := [c for c in limits.conditions if len(c.free_symbols) == 1 and c not in known]:
        needs_text = ", ".join(map(spelled, gaps))
        names = ", ".join(sorted(repr(s.name) for c in gaps for s in c.free_symbols))
        raise CaptureError(
            f"this model or loss needs {needs_text}, which not all sizes up to the largest bucket {largest} satisfy. "
            f"Say so in constraints=, or leave {names} out of dynamic"
        )
    for bucket in buckets:
        for name, size in bucket.items():
            if size < limits.smallest[name]:
                raise CaptureError(
                    f"bucket {dict(bucket)} holds no input: {name} must be at least {limits.smallest[name]}"
                )
    return limits


def check_buckets(untraced: Programs, buckets: Sequence[Bucket]) -> None:
    """Refuse a bucket whose own sizes the program does not accept, because the bucket runs at these sizes.

    Raises:
        CaptureError: there is such a bucket.
    """
    equal = [c for c in _conditions(untraced) if isinstance(c, sympy.Eq) and len(c.free_symbols) > 1]
    for condition in (*relations_of(untraced.joint.derived), *equal):
        for bucket in buckets:
            if not holds(condition, bucket):
                raise CaptureError(
                    f"the model or the loss needs {spelled(condition)}, and the bucket {dict(bucket)} runs at its own "
                    "sizes. Choose sizes for which that holds, or a list of combinations; calls at others are refused"
                )
