"""Passes by name: IronGrad's own, and those of other packages.

A package adds a pass with an entry point in the group `irongrad.passes`. The entry point has the name of the pass, and
its value is the pass's class (https://packaging.python.org/en/latest/specifications/entry-points/). The syntax of a
pipeline, `name{option=value,...}`, is that of MLIR's textual pass pipelines.
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
from irongrad.runtime.suggestion import suggestion

GROUP = "irongrad.passes"

# In the order in which `irongrad passes` lists them.
MODULES = (
    "dead_code",
    "common_subexpressions",
    "constant_folding",
    "simplify",
    "convolutions",
    "sink_transposes",
    "interleave",
    "table_products",
    "row_blocks",
    "multi_tensor",
    "gradient_norm",
    "half_products",
    "recompute_dequantised",
    "rematerialise",
)

P = TypeVar("P", Pass, ModulePass)

_ITEM = re.compile(r"\s*([\w.-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


@dataclass(frozen=True)
class Passes:
    """All registered passes.

    Attributes:
        usable: the pass classes by name, IronGrad's own first.
        broken: why a pass cannot be used, by the name of its entry point.
    """

    usable: dict[str, type[Pass]]
    broken: dict[str, str]


@cache
def all_passes() -> Passes:
    """Load all passes. A pass of another package that fails to load is an error only if a caller asks for it."""
    pass_types: list[type[Pass]] = [import_module(f"irongrad.passes.graph.{module}").PASS for module in MODULES]
    own = {pass_type.name: pass_type for pass_type in pass_types}
    others: dict[str, type[Pass]] = {}
    broken: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        try:
            pass_type = _loaded(entry)
        except UserError as error:
            broken[entry.name] = str(error)
            continue
        if own.get(entry.name, pass_type) is not pass_type or others.setdefault(entry.name, pass_type) is not pass_type:
            broken[entry.name] = f"{_spelled(entry)} has the name of another; rename its entry point"
    return Passes(own | {name: pass_type for name, pass_type in others.items() if name not in broken}, broken)


def registered() -> dict[str, type[Pass]]:
    """All usable passes by name, IronGrad's own first."""
    return all_passes().usable


def _loaded(entry: EntryPoint) -> type[Pass]:
    try:
        pass_type: object = entry.load()
    except Exception as error:
        raise UserError(f"{_spelled(entry)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not _is_pass(pass_type):
        raise UserError(f"{_spelled(entry)} is no dataclass with a method `run`")
    if (name := getattr(pass_type, "name", None)) != entry.name:
        raise UserError(
            f"{_spelled(entry)} calls itself {name!r}; its class's `name` and its entry point's have to be the same"
        )
    return pass_type


def _is_pass(pass_type: object) -> TypeGuard[type[Pass]]:
    return isinstance(pass_type, type) and is_dataclass(pass_type) and callable(getattr(pass_type, "run", None))


def _spelled(entry: EntryPoint) -> str:
    return f"the pass {entry.name!r} ({entry.value})"


def parse_passes(text: str) -> tuple[Pass, ...]:
    """Parse `name,name{option=value,...},...` into passes over the step graph.

    Raises:
        UserError: a pass or an option does not exist, or a value has the wrong type.
    """
    return tuple(make_pass(known_pass(name), options) for name, options in split_passes(text))


def split_passes(text: str) -> list[tuple[str, str]]:
    """Split `name,name{option=value,...},...` into the name and the options of each pass.

    Raises:
        UserError: `text` does not have this form.
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
    """Create a pass with options of the form `option=value,...`; options that are left out have their defaults.

    Raises:
        UserError: an option does not exist, or a value has the wrong type.
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
    """Format `pass_` as text that `parse_passes` reads."""
    values = ((f.name, getattr(pass_, f.name)) for f in fields(pass_))  # type: ignore[arg-type]
    options = ",".join(f"{name}={value}" for name, value in values)
    return f"{pass_.name}{{{options}}}" if options else pass_.name


def known_pass(name: str) -> type[Pass]:
    """Find the pass with this name.

    Raises:
        UserError: no pass has this name, or the pass cannot be used.
    """
    passes = all_passes()
    if name in passes.usable:
        return passes.usable[name]
    if name in passes.broken:
        raise UserError(passes.broken[name])
    raise UserError(
        f"there is no pass {name!r}{suggestion(name, passes.usable)}; the passes are {', '.join(passes.usable)}"
    )


def is_known_pass(name: str) -> bool:
    """Whether a pass has this name, also if it cannot be used."""
    passes = all_passes()
    return name in passes.usable or name in passes.broken


def without(passes: Sequence[Pass], disabled: Sequence[str]) -> tuple[Pass, ...]:
    """Filter out the passes whose names are in `disabled`.

    Raises:
        UserError: no pass has such a name.
    """
    for name in disabled:
        known_pass(name)
    return tuple(p for p in passes if p.name not in disabled)


def lowerings_left_out(passes: Sequence[Pass]) -> Iterator[type[Lowering]]:
    """The registered `Lowering` passes that `passes` lacks."""
    present = {p.name for p in passes}
    for pass_type in registered().values():
        if pass_type.name not in present and issubclass(pass_type, Lowering):
            yield pass_type
