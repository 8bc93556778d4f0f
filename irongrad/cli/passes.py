"""`irongrad passes`."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

import click
from rich.table import Column, Table

from irongrad.cli.common import console, json_option, print_json
from irongrad.runtime.errors import UserError

if TYPE_CHECKING:
    from irongrad.passes import Pass
    from irongrad.passes.module_pass import ModulePass


@click.command(
    epilog="""\b
Example:
  irongrad passes
  irongrad passes cse
  irongrad passes --iree
"""
)
@click.argument("name", required=False)
@click.option("--iree", is_flag=True, help="The passes over IREE's module, by phase, not those over the step graph.")
@json_option
def command(name: str | None, iree: bool, as_json: bool) -> None:
    """List the passes with their options and the levels that they run at, or describe the one called NAME."""
    if iree:
        _show_phases(as_json)
        return
    from irongrad.passes.pipelines import LEVELS, passes_at
    from irongrad.passes.registry import all_passes

    levels = {level: [p.name for p in passes_at(level)] for level in LEVELS}
    kinds = [_known(name)] if name is not None else list(all_passes().usable.values())
    rows = [_describe(kind, [level for level, names in levels.items() if kind.name in names]) for kind in kinds]
    if as_json:
        print_json({"passes": rows, "levels": levels, "broken": all_passes().broken})
    elif name is not None:
        _print_one(rows[0])
    else:
        _print(rows, levels, all_passes().broken)


def _known(name: str) -> type[Pass | ModulePass]:
    from irongrad.passes.registry import known_pass
    from irongrad.pipeline.iree.phases import module_passes

    over_iree = module_passes()
    try:
        return over_iree.get(name) or known_pass(name)
    except UserError as error:
        raise UserError(f"{error}; those over IREE's module are {', '.join(over_iree)}") from None


def _show_phases(as_json: bool) -> None:
    """Print the table of phases and their passes."""
    from irongrad.pipeline.iree.phases import PHASES

    phases = [
        {"phase": p.name, "reached": p.reached, "passes": [_describe(kind, []) for kind in p.passes]} for p in PHASES
    ]
    if as_json:
        print_json({"phases": phases})
        return
    table = Table(Column("phase", no_wrap=True), "reached by", Column("pass", no_wrap=True), "", box=None)
    for phase in PHASES:
        heads = [(phase.name, phase.reached)] + [("", "")] * len(phase.passes)
        for (first, reached), kind in zip(heads, phase.passes, strict=False):
            table.add_row(first, reached, kind.name, _summary(kind))
    console.print(table)


def _summary(kind: type[Pass | ModulePass]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _describe(kind: type[Pass | ModulePass], levels: list[int]) -> dict[str, Any]:
    text = inspect.getdoc(kind) or ""
    options = {f.name: {"type": str(f.type), "default": _default(f)} for f in fields(kind)}  # type: ignore[arg-type]
    row = {"name": kind.name, "summary": _summary(kind), "levels": levels, "options": options, "doc": text}
    return row | _phase_of(kind.name)


def _phase_of(name: str) -> dict[str, str]:
    """For a pass over IREE's module: its phase, and why it cannot be left out if it cannot."""
    from irongrad.pipeline.iree.phases import PHASES

    return {
        key: value
        for phase in PHASES
        for kind in phase.passes
        if kind.name == name
        for key, value in (("phase", phase.name), ("required", kind.required))
        if value
    }


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return None if option.default is MISSING else option.default


def _spelled(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={option['default']}" for name, option in row["options"].items())


def _print(rows: list[dict[str, Any]], levels: dict[int, list[str]], broken: dict[str, str]) -> None:
    table = Table("pass", "levels", "options", "", box=None)
    for row in rows:
        table.add_row(row["name"], ", ".join(map(str, row["levels"])), _spelled(row), row["summary"])
    console.print(table)
    for level, names in levels.items():
        console.print(f"--opt-level {level}: {', '.join(names) or 'nothing'}", highlight=False)
    for reason in broken.values():
        console.print(f"broken: {reason}", style="red", highlight=False, soft_wrap=True)


def _print_one(row: dict[str, Any]) -> None:
    console.print(row["doc"], highlight=False)
    levels = f"levels: {', '.join(map(str, row['levels'])) or 'none'}"
    console.print(f"\nphase: {row['phase']}" if "phase" in row else f"\n{levels}", highlight=False)
    if "required" in row:
        console.print(f"required, because {row['required']}", highlight=False, soft_wrap=True)
    for name, option in row["options"].items():
        console.print(f"option {name}: {option['type']}, {option['default']} by default", highlight=False)
