"""Passes by name: IronGrad's own, and those that other packages bring.

A package adds passes with an entry point in the group `irongrad.passes`, whose name is the pass's and whose value is
its class (https://packaging.python.org/en/latest/specifications/entry-points/). The syntax of a pipeline,
`name{option=value,...}`, is that of MLIR's textual pass pipelines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TypeGuard, TypeVar

import msgspec

from irongrad.passes.base import Lowering, Pass
from irongrad.passes.module_pass import ModulePass
from irongrad.runtime.errors import UserError

GROUP = "irongrad.passes"

# One file each; the order is that of `irongrad passes`.
MODULES = (
    "dead_code",
    "common_subexpressions",
    "constant_folding",
    "simplify",
    "convolutions",
    "sink_transposes",
    "interleave",
    "table_products",
    "multi_tensor",
    "gradient_norm",
    "half_products",
    "rematerialise",
)

P = TypeVar("P", Pass, ModulePass)

_ITEM = re.compile(r"\s*([\w.-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


@dataclass(frozen=True)
class Passes:
    """Every pass there is.

    Attributes:
        usable: by name, IronGrad's first.
        broken: why one cannot be used, by the name of its entry point.
    """

    usable: dict[str, type[Pass]]
    broken: dict[str, str]


@cache
def all_passes() -> Passes:
    """What can be asked for; other packages' passes that cannot be loaded stop only who asks for one of them."""
    kinds: list[type[Pass]] = [import_module(f"irongrad.passes.graph.{module}").PASS for module in MODULES]
    own = {kind.name: kind for kind in kinds}
    others: dict[str, type[Pass]] = {}
    broken: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        try:
            kind = _loaded(entry)
        except UserError as error:
            broken[entry.name] = str(error)
            continue
        if own.get(entry.name, kind) is not kind or others.setdefault(entry.name, kind) is not kind:
            broken[entry.name] = f"{_spelled(entry)} has the name of another; rename its entry point"
    return Passes(own | {name: kind for name, kind in others.items() if name not in broken}, broken)


def registered() -> dict[str, type[Pass]]:
    """Every pass that can be used, by name, IronGrad's first."""
    return all_passes().usable


def _loaded(entry: EntryPoint) -> type[Pass]:
    try:
        kind: object = entry.load()
    except Exception as error:
        raise UserError(f"{_spelled(entry)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not _is_pass(kind):
        raise UserError(f"{_spelled(entry)} is no dataclass with a method `run`")
    if (name := getattr(kind, "name", None)) != entry.name:
        raise UserError(
            f"{_spelled(entry)} calls itself {name!r}; its class's `name` and its entry point's have to be the same"
        )
    return kind


def _is_pass(kind: object) -> TypeGuard[type[Pass]]:
    return isinstance(kind, type) and is_dataclass(kind) and callable(getattr(kind, "run", None))


def _spelled(entry: EntryPoint) -> str:
    return f"the pass {entry.name!r} ({entry.value})"


def parse_passes(text: str) -> tuple[Pass, ...]:
    """The passes over the step graph that `name,name{option=value,...},...` says, in order.

    Raises:
        UserError: there is no such pass or option, or a value has the wrong type.
    """
    return tuple(make_pass(known_pass(name), options) for name, options in split_passes(text))


def split_passes(text: str) -> list[tuple[str, str]]:
    """The name and the options of each pass in `name,name{option=value,...},...`.

    Raises:
        UserError: that is not the form of `text`.
    """
    passes: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None:
            raise UserError(f"{text[position:]!r} is not NAME or NAME{{OPTION=VALUE,…}}, separated by commas")
        passes.append((item.group(1), item.group(2) or ""))
        position = item.end()
    return passes


def make_pass(kind: type[P], options: str) -> P:
    """A pass with the options that `option=value,...` says; all that it leaves out have their defaults.

    Raises:
        UserError: there is no such option, or a value has the wrong type.
    """
    name = kind.name
    values: dict[str, str] = {}
    for option in filter(None, (o.strip() for o in options.split(","))):
        key, separator, value = option.partition("=")
        if not separator:
            raise UserError(f"{name}{{{options}}}: {option!r} is not OPTION=VALUE")
        values[key.strip().replace("-", "_")] = value.strip()
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        there = ", ".join(known) or "no options"
        raise UserError(f"the pass {name!r} has no option {unknown[0]!r}; it has {there}")
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{name}{{{options}}}: {error}") from None


def spelled(pass_: Pass) -> str:
    """`pass_` as `parse_passes` reads it."""
    values = ((f.name, getattr(pass_, f.name)) for f in fields(pass_))  # type: ignore[arg-type]
    options = ",".join(f"{name}={value}" for name, value in values)
    return f"{pass_.name}{{{options}}}" if options else pass_.name


def known_pass(name: str) -> type[Pass]:
    """The pass called `name`.

    Raises:
        UserError: there is none, or it cannot be used.
    """
    passes = all_passes()
    if name in passes.usable:
        return passes.usable[name]
    if name in passes.broken:
        raise UserError(passes.broken[name])
    raise UserError(f"there is no pass {name!r}; the passes are {', '.join(passes.usable)}")


def without(passes: Sequence[Pass], disabled: Sequence[str]) -> tuple[Pass, ...]:
    """`passes` but for those with a name in `disabled`.

    Raises:
        UserError: there is no pass of such a name.
    """
    for name in disabled:
        known_pass(name)
    return tuple(p for p in passes if p.name not in disabled)


def lowerings_left_out(passes: Sequence[Pass]) -> Iterator[type[Lowering]]:
    """The passes that graphs are captured for and that `passes` lacks."""
    present = {p.name for p in passes}
    for kind in registered().values():
        if kind.name not in present and issubclass(kind, Lowering):
            yield kind
