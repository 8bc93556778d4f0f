"""The sizes that the functions of a step accept: up to its largest bucket, and without buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.differentiate.programs import Programs
from irongrad.pipeline.differentiate.size_one import two_or_more
from irongrad.pipeline.differentiate.specialise import Program, captured_conditions
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.buckets import Bucket, open_dimensions
from irongrad.sizes.dimensions import holds, relations_of
from irongrad.sizes.expressions import symbol
from irongrad.sizes.limits import Limits, always_holds, limits_of, limits_up_to, spelled
from irongrad.step.train_step import TrainStep, sizes_of


def _programs(untraced: Programs) -> list[Program]:
    return [untraced.joint, *untraced.inference.values()]


def _not_one(untraced: Programs, names: Iterable[str]) -> list[Any]:
    """The conditions that dimensions of any size are not one, where a captured graph would be wrong."""
    return [c for program in _programs(untraced) for name in names for c in two_or_more(program, name)]


def _conditions(untraced: Programs) -> list[Any]:
    """The conditions on named dimensions under which the captured graphs are right."""
    found = _programs(untraced)
    own = [
        condition
        for program in found
        for condition in (
            *captured_conditions(program),
            *relations_of(program.derived),
        )
    ]
    return [*own, *untraced.conditions]


def any_size_limits(untraced: Programs, captured: CapturedStep) -> Limits | None:
    """The sizes that any-size functions accept; None if the step has no such functions."""
    step = captured.step
    if not step.dynamic or (step.bucket_list and not step.bucket_fallback):
        return None
    names = list(sizes_of(step, step.inputs))
    return limits_of([*_conditions(untraced), *_not_one(untraced, names), *step.conditions], names)


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
    unlimited = open_dimensions(step.dynamic, buckets[0])
    asked = [*(need >= 0 for need in needs), *_conditions(untraced), *_not_one(untraced, unlimited)]
    limits = limits_up_to(asked, largest, step.conditions, unlimited)
    alone = [c for c in limits.conditions if len(c.free_symbols) == 1 and c not in known]
    if gaps := [c for c in alone if not {s.name for s in c.free_symbols} & {*unlimited}]:
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
        names = {s.name for s in condition.free_symbols}
        for bucket in buckets:
            left_open = sorted(names - bucket.keys())
            if left_open and names & bucket.keys():
                _check_open(condition, bucket, left_open)
            elif not left_open and not holds(condition, bucket):
                raise CaptureError(
                    f"the model or the loss needs {spelled(condition)}, and the bucket {dict(bucket)} runs at its own "
                    "sizes. Choose sizes for which that holds, or a list of combinations; calls at others are refused"
                )


def _check_open(condition: Any, bucket: Bucket, left_open: Sequence[str]) -> None:
    """Refuse a bucket in which a condition does not hold for every size of the dimensions that it leaves open."""
    at_bucket = condition.xreplace({symbol(name): sympy.Integer(size) for name, size in bucket.items()})
    if not always_holds(at_bucket, Limits()):
        listed = ", ".join(map(repr, left_open))
        raise CaptureError(
            f"the model or the loss needs {spelled(condition)}, and the bucket {dict(bucket)} runs at its own sizes, "
            f"with any size of {listed}. Give {listed} sizes in buckets= too, or leave out buckets="
        )
