"""`irongrad bisect`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.table import Table

from irongrad.cli.common import console, fallback_option, json_option, pass_options, precision_option, print_json
from irongrad.cli.compile import load_step
from irongrad.runtime.errors import InternalError

if TYPE_CHECKING:
    from irongrad.pipeline.bisect.bisect import Finding


@click.command(
    epilog="""\b
Example:
  irongrad bisect examples/digits.py:make_step
  irongrad bisect examples/digits.py:make_step --passes dce,cse,mine --precision bf16
"""
)
@click.argument("source", metavar="FILE:FUNCTION")
@click.option(
    "--target", "targets", multiple=True, default=["llvm-cpu"], show_default=True, help="What it would be compiled for."
)
@pass_options
@precision_option
@fallback_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    source: str,
    targets: tuple[str, ...],
    opt_level: int,
    passes: str | None,
    disable_passes: tuple[str, ...],
    max_memory: str,
    tune: bool,
    route: str,
    precision: str | None,
    bucket_fallback: str | None,
    as_json: bool,
) -> None:
    """Find the first pass that changes the numbers of the training step that FUNCTION in FILE returns.

    The step's functions are run after every pass, at a first step and at a second: in float64, where rounding hides no
    change and is not taken for one, and in their own dtypes, where no more digits may be lost than in other runs of the
    step itself. The exit code is 0 if no pass changes the numbers.
    """
    from irongrad.cache import default_store
    from irongrad.passes import chosen_passes
    from irongrad.pipeline.bisect.bisect import bisect
    from irongrad.pipeline.driver import step_graph
    from irongrad.pipeline.lower.routes import known_route
    from irongrad.pipeline.options import check_choices
    from irongrad.pipeline.stopwatch import Stopwatch
    from irongrad.targets import parse_targets

    chosen = chosen_passes(opt_level, passes, disable_passes, max_memory, known_route(route))
    devices = parse_targets(targets)
    with console.status("capture"):
        step = load_step(source, precision, bucket_fallback)
        check_choices(step, chosen, route)
        graph = step_graph(step)
    timer = Stopwatch(devices, default_store()) if tune else None
    with console.status("running the step after every pass"):
        found = bisect(graph, chosen, [d.backend for d in devices], timer)
    guilty = next((f for f in found if f.changes_numbers), None)
    if as_json:
        print_json({"changes": [asdict(f) for f in found], "first": asdict(guilty) if guilty else None})
    else:
        _print(found, guilty)
    if guilty is not None:
        context.exit(InternalError.exit_code)


def _print(found: tuple[Finding, ...], guilty: Finding | None) -> None:
    table = Table("", "pass", "function", "step", "difference", "error", "in", box=None)
    for finding in found:
        style = "bold red" if finding.changes_numbers else ""
        where = finding.result if finding.difference or finding.error else ""
        numbers = f"{finding.difference:.1e}", f"{finding.error:.0%}"
        table.add_row(
            str(finding.number), finding.name, finding.function, str(finding.step), *numbers, where, style=style
        )
    console.print(table)
    console.print("difference: in float64. error: in the step's own dtypes, of what is allowed.")
    if guilty is None:
        console.print("[green]no pass changes the numbers[/]: a disagreement comes from a later stage", highlight=False)
        return
    what = "changes the numbers" if guilty.changes_meaning else "loses digits"
    console.print(
        f"[red]{guilty.name}[/] {what} of {guilty.function}. --disable-pass {guilty.name} leaves it out; "
        f"irongrad compile --dump-dir DIR shows the graph before and after",
        highlight=False,
    )
