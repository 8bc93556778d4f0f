"""The parts of a model that a user places on devices, each with its target."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from irongrad.runtime.errors import UserError
from irongrad.runtime.suggestion import suggestion
from irongrad.step.train_step import TrainStep
from irongrad.targets import Target, parse_target
from irongrad.targets.registry import kinds

# The most characters of a part's name in the name of its file.
_LONGEST = 40
# Joins the paths of a part that has several modules.
AND = "+"


@dataclass(frozen=True)
class Part:
    """A part of the model, and what it is compiled for.

    Attributes:
        name: the paths, joined by `+`.
        paths: the paths of its modules in the model, or names of single parameters and buffers.
        target: the target; its name begins with the part's.
        asked: the target as the user wrote it.
    """

    name: str
    paths: tuple[str, ...]
    target: Target
    asked: str


def parts_of(place: Mapping[str, str] | Sequence[str]) -> tuple[Part, ...]:
    """The parts of `{"encoder": "llvm-cpu", "head": "vulkan"}`, or of texts such as `encoder=llvm-cpu,head=vulkan`.

    Raises:
        UserError: a text is no PATH=TARGET, a target is unknown, there is one part only, or a path is named twice.
    """
    pairs = [*place.items()] if isinstance(place, Mapping) else [p for text in place for p in _pairs(text)]
    parts = tuple(_part(paths, asked) for paths, asked in pairs)
    paths = [path for part in parts for path in part.paths]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise UserError(f"place names {twice[0]!r} twice")
    if len(parts) == 1:
        raise UserError(
            f"place names one part, {parts[0].name!r}: name another for the rest, or compile the whole step with "
            f"target={parts[0].asked!r}"
        )
    return parts


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    """Split `encoder=llvm-cpu:cpu=x86-64-v3,features=+fma,head=vulkan`: options of a target have commas, too."""
    options = {option.name for kind in kinds() for option in kind.options}
    found: list[list[str]] = []
    for item in filter(None, text.split(",")):
        name, separator, value = item.partition("=")
        if found and ":" in found[-1][1] and name in options:
            found[-1][1] += f",{item}"
            continue
        if not separator or not name:
            raise UserError(f"place has {item!r}, which is no PATH=TARGET, such as encoder=llvm-cpu")
        found.append([name, value])
    return [(name, value) for name, value in found]


def _part(name: str, asked: str) -> Part:
    target, paths = parse_target(asked), tuple(name.split(AND))
    own = name if len(name) <= _LONGEST else f"{paths[0]}-and-{len(paths) - 1}-more"
    file = re.sub(r"[^\w.]+", "-", own)
    return Part(name, paths, replace(target, name=f"{file}-{target.name}"), asked)


def check_parts(parts: Sequence[Part], step: TrainStep) -> None:
    """Refuse a path that the model does not have, and steps that cannot be cut into parts.

    Raises:
        UserError: says which, and what to do.
    """
    modules = {name for name, _ in step.model.named_modules() if name}
    tensors = {name for name, _ in (*step.model.named_parameters(), *step.model.named_buffers())}
    for path in (path for part in parts for path in part.paths):
        if path not in modules | tensors:
            there = ", ".join(name for name, _ in step.model.named_children())
            hint = suggestion(path, modules | tensors) or f"; the model has {there}"
            raise UserError(f"place names {path!r}, and the model has no such module or parameter{hint}")
    refused = {
        "dynamic": "sizes that vary",
        "between": "steps in pieces",
        "carry": "values carried from call to call",
        "sam": "sharpness-aware minimisation",
    }
    for name, what in refused.items():
        if getattr(step, name):
            raise UserError(f"place does not work with {what}: leave out {name}, or place")
    if step.accumulate > 1:
        raise UserError(
            "place does not work with accumulate, which loops inside the module: leave it out, and call grad_step for "
            "each micro-batch and then apply_step"
        )
