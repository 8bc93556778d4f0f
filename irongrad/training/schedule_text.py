"""Schedules as text, such as `cosine` or `step:size=100,gamma=0.5`, for the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import Manifest
from irongrad.training import schedules
from irongrad.training.schedules import Schedule

# The schedules by name: the function, and the options that it takes with their types.
_KINDS: dict[str, tuple[Callable[..., Schedule], dict[str, type]]] = {
    "constant": (schedules.constant, {"warmup": int}),
    "linear": (schedules.linear, {"warmup": int, "total": int}),
    "cosine": (schedules.cosine, {"warmup": int, "total": int, "cycles": float}),
    "cosine-annealing": (schedules.cosine_annealing, {"total": int, "minimum": float}),
    "step": (schedules.step, {"size": int, "gamma": float}),
    "one-cycle": (
        schedules.one_cycle,
        {"total": int, "rise": float, "divide": float, "final": float, "least": float, "most": float},
    ),
}
NAMES = tuple(_KINDS)


def schedule_of(
    text: str, manifest: Manifest, rates: dict[str, float], *, warmup: int | None, last: int | None
) -> Schedule:
    """Return the schedule that `text` describes: NAME, or NAME:OPTION=VALUE,….

    Args:
        text: the description.
        manifest: the manifest of the step.
        rates: the learning rate of each parameter group by the name of its hyperparameter.
        warmup: the number of steps of the warm-up; None for none.
        last: the number of steps at which training ends, which is the schedule's end unless the text has `total`.

    Raises:
        UserError: the text describes no schedule, or one that has no warm-up.
    """
    name, _, rest = text.partition(":")
    if name not in _KINDS:
        raise UserError(f"--schedule {text}: there is no schedule {name!r}; there are {', '.join(NAMES)}")
    make, known = _KINDS[name]
    options: dict[str, Any] = {k: _value(text, k, v, known) for k, v in _pairs(text, rest)}
    if warmup is not None:
        if "warmup" not in known:
            raise UserError(f"--warmup: the schedule {name} has no warm-up; constant, linear and cosine have one")
        options["warmup"] = warmup
    if "total" in known and "total" not in options:
        if last is None:
            raise UserError(f"--schedule {text}: give its end, as in {name}:total=1000")
        options["total"] = last
    if "size" in known and "size" not in options:
        raise UserError(f"--schedule {text}: give the number of steps of one rate, as in step:size=100")
    if name == "one-cycle":
        options["momenta"] = schedules.momenta_of(manifest)
    return make(rates, **options)


def _pairs(text: str, rest: str) -> list[tuple[str, str]]:
    pairs = [item.partition("=") for item in rest.split(",")] if rest else []
    if wrong := [name for name, separator, _ in pairs if not separator]:
        raise UserError(f"--schedule {text}: {wrong[0]!r} is not OPTION=VALUE")
    return [(name, value) for name, _, value in pairs]


def _value(text: str, name: str, value: str, known: dict[str, type]) -> Any:
    if name not in known:
        raise UserError(f"--schedule {text}: there is no option {name!r}; there are {', '.join(known)}")
    try:
        return known[name](value)
    except ValueError:
        kind = "a whole number" if known[name] is int else "a number"
        raise UserError(f"--schedule {text}: {name} must be {kind}, not {value!r:.60}") from None
