"""`irongrad place`: propose which modules to place on which target."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.table import Table

from irongrad.cli.common import console, json_option, precision_option, print_json, step_argument, step_option
from irongrad.cli.compile import load_one_step
from irongrad.cli.working import working
from irongrad.runtime.byte_sizes import readable


@click.command(
    epilog="""\b
Example:
  irongrad place examples/gpt.py:make_step --target llvm-cpu --target vulkan --memory 8GiB --memory 512MiB
"""
)
@step_argument
@step_option
@click.option("--target", "targets", multiple=True, required=True, help="A target, in the order of the forward.")
@click.option("--memory", multiple=True, metavar="SIZE", help="The memory of each target, in the same order.")
@click.option("--speed", multiple=True, type=float, help="How fast each target is, compared with the others.")
@precision_option
@json_option
def command(
    source: str,
    step_name: str | None,
    targets: tuple[str, ...],
    memory: tuple[str, ...],
    speed: tuple[float, ...],
    precision: str | None,
    as_json: bool,
) -> None:
    """Propose how to divide the model of the step that FUNCTION in FILE returns among several targets.

    The parts follow one another in the order of the forward. The proposal is the division that fits into the memory and
    whose slowest part is the fastest, by the compiler's models of memory and cost. Nothing is compiled.
    """
    from irongrad.pipeline.proposed_placement import propose_placement

    with working("capturing the step, and weighing its modules", quiet=as_json):
        step = load_one_step(source, step_name, precision=precision)
        proposal = propose_placement(step, targets, memory=memory, speed=speed)
    if as_json:
        parts = [{**asdict(part), "memory": part.memory} for part in proposal.parts]
        print_json({"place": proposal.place, "parts": parts, "crossing": proposal.crossing})
        return
    table = Table("target", "modules", "cost", "state", "values", "kept or passed", "memory", box=None)
    for part in proposal.parts:
        first, last = part.paths[0], part.paths[-1]
        modules = first if len(part.paths) == 1 else f"{first} … {last} ({len(part.paths)})"
        sizes = map(readable, (part.state, part.transients, part.passed, part.memory))
        table.add_row(part.target, modules, f"{part.share:.0%}", *sizes)
    console.print(table)
    console.print(f"{readable(proposal.crossing)} cross between targets in a step", highlight=False)
    options = " ".join(f"--place {name}={target}" for name, target in proposal.place.items())
    console.print(options, highlight=False, soft_wrap=True)
