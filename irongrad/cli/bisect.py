"""`irongrad bisect`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from irongrad.cli.common import (
    choice_options,
    console,
    fallback_option,
    given_choices,
    json_option,
    precision_option,
    print_json,
    step_argument,
    step_option,
    targets_option,
)
from irongrad.cli.compile import load_one_step, load_step
from irongrad.cli.working import working
from irongrad.pipeline.choices import OF_PASSES, Choices, completed
from irongrad.runtime.errors import InternalError

if TYPE_CHECKING:
    from irongrad.pipeline.bisect.bisect import Finding
    from irongrad.pipeline.module_bisect import ModuleFinding


@click.command(
    epilog="""\b
Example:
  irongrad bisect examples/digits.py:make_step
  irongrad bisect examples/digits.py:make_step --passes dce,cse,mine --precision bf16
"""
)
@step_argument
@targets_option
@choice_options(*OF_PASSES)
@precision_option
@fallback_option
@step_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    source: str,
    targets: tuple[str, ...],
    precision: str | None,
    bucket_fallback: str | None,
    step_name: str | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Find the first pass that changes the numbers of the training step that FUNCTION in FILE returns.

    The step's functions are run after every pass, with the state of a first step and of a second. In float64, rounding
    neither hides a change nor looks like one. In their own dtypes, they may lose no more digits than other runs of the
    step itself. If none of these passes changes the numbers, the step is compiled and verified. If that fails, passes
    over IREE's module are left out until it succeeds. The exit code is 0 if no pass changes the numbers.
    """
    from irongrad.cache import default_store
    from irongrad.pipeline.bisect.bisect import bisect
    from irongrad.pipeline.driver import step_graph
    from irongrad.pipeline.module_bisect import bisect_module_passes
    from irongrad.pipeline.options import check_choices, passes_over_graph
    from irongrad.pipeline.stopwatch import Stopwatch
    from irongrad.targets import common_abilities, parse_targets

    given = completed(Choices(**given_choices(choices)))  # type: ignore[typeddict-item]
    chosen = passes_over_graph(given)
    devices = parse_targets(targets)
    with working("capture", quiet=as_json):
        step = load_one_step(source, step_name, precision=precision, bucket_fallback=bucket_fallback)
        check_choices(step, chosen, given["route"])
        graph = step_graph(step)
    timer = Stopwatch(devices, default_store()) if given["tune"] else None
    with working("running the step after every pass", quiet=as_json):
        abilities = common_abilities(devices)
        found = bisect(graph, chosen, [d.backend for d in devices], timer, abilities=abilities)
    guilty = next((f for f in found if f.changes_numbers), None)
    module = None
    if guilty is None:
        with working("compiling and verifying the step", quiet=as_json):
            module = bisect_module_passes(load_step(source, precision, bucket_fallback), targets, given)
    if as_json:
        changes, first = [asdict(f) for f in found], asdict(guilty) if guilty else None
        print_json({"changes": changes, "first": first, "module": asdict(module) if module else None})
    else:
        _print(found, guilty, module)
    if guilty is not None or (module is not None and module.failure):
        context.exit(InternalError.exit_code)


def _print(found: tuple[Finding, ...], guilty: Finding | None, module: ModuleFinding | None) -> None:
    table = Table("", "pass", "function", "step", "difference", "error", "in", box=None)
    for finding in found:
        style = "bold red" if finding.changes_numbers else ""
        where = finding.result if finding.difference or finding.error else ""
        numbers = f"{finding.difference:.1e}", f"{finding.error:.0%}"
        table.add_row(
            str(finding.number), finding.name, finding.function, str(finding.step), *numbers, where, style=style
        )
    console.print(table)
    console.print("difference: relative, in float64. error: in the step's own dtypes, as a share of the tolerance.")
    if module is not None:
        _print_module(module)
    if guilty is None:
        return
    what = "changes the numbers" if guilty.changes_meaning else "loses digits"
    console.print(
        f"[red]{guilty.name}[/] {what} of {guilty.function}. --disable-pass {guilty.name} leaves it out; "
        f"irongrad compile --dump-dir DIR shows the graph before and after",
        markup=True,
        highlight=False,
    )


def _print_module(module: ModuleFinding) -> None:
    console.print("no pass over the step graph changes the numbers", style="green", highlight=False)
    if not module.failure:
        console.print("the compiled step agrees with the oracle", style="green", highlight=False)
        return
    console.print(f"the compiled step fails: {module.failure}", style="red", highlight=False, soft_wrap=True)
    if module.guilty is None:
        console.print(
            "It also fails without our passes over IREE's module: the fault is in the module before them, or in IREE."
        )
    else:
        console.print(
            f"[red]{module.guilty}[/] is the first pass over IREE's module with which it fails. --disable-pass "
            f"{module.guilty} leaves it out; irongrad compile --dump-dir DIR shows the module after each pass",
            markup=True,
            highlight=False,
        )
