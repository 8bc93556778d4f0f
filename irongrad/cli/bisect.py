"""`irongrad bisect`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.table import Table

from irongrad.cli.common import console, json_option, pass_options, print_json
from irongrad.cli.compile import load_step
from irongrad.runtime.errors import InternalError

if TYPE_CHECKING:
    from irongrad.passes.bisect import Finding


@click.command(
    epilog="""\b
Example:
  irongrad bisect examples/digits.py:make_step
  irongrad bisect examples/digits.py:make_step --passes dce,cse,mine
"""
)
@click.argument("source", metavar="FILE:FUNCTION")
@click.option("--target", default="llvm-cpu", show_default=True, help="What it would be compiled for.")
@pass_options
@json_option
@click.pass_context
def command(
    context: click.Context,
    source: str,
    target: str,
    opt_level: int,
    passes: str | None,
    disable_passes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the first pass that changes the numbers of the training step that FUNCTION in FILE returns.

    The step's functions are run in float64 after every pass, so that rounding hides nothing and is not taken for a
    change. The exit code is 0 if no pass changes them.
    """
    from irongrad.passes import passes_at, without
    from irongrad.passes.bisect import bisect
    from irongrad.passes.registry import parse_passes
    from irongrad.pipeline.driver import step_graph
    from irongrad.targets import parse_target

    chosen = without(passes_at(opt_level) if passes is None else parse_passes(passes), disable_passes)
    with console.status("capture"):
        graph = step_graph(load_step(source))
    with console.status("running the step after every pass"):
        found = bisect(graph, chosen, [parse_target(target).backend])
    guilty = next((f for f in found if f.changes_numbers), None)
    if as_json:
        print_json({"changes": [asdict(f) for f in found], "first": asdict(guilty) if guilty else None})
    else:
        _print(found, guilty)
    if guilty is not None:
        context.exit(InternalError.exit_code)


def _print(found: tuple[Finding, ...], guilty: Finding | None) -> None:
    table = Table("", "pass", "function", "largest difference", "in", box=None)
    for finding in found:
        style = "bold red" if finding.changes_numbers else ""
        where = finding.result if finding.difference else ""
        table.add_row(
            str(finding.number), finding.name, finding.function, f"{finding.difference:.1e}", where, style=style
        )
    console.print(table)
    if guilty is None:
        console.print("[green]no pass changes the numbers[/]: a disagreement comes from a later stage", highlight=False)
        return
    console.print(
        f"[red]{guilty.name}[/] changes the numbers of {guilty.function}. --disable-pass {guilty.name} leaves it out; "
        f"irongrad compile --dump-dir DIR shows the graph before and after",
        highlight=False,
    )
