"""`irongrad plan`: predict training on many machines from one measured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from irongrad.cli.common import base_option, console, device_option, directory_argument, json_option, print_json
from irongrad.distributed.plan import (
    MeasuredStep,
    Network,
    Prediction,
    bandwidth_in,
    doubled,
    latency_in,
    with_gradients,
    with_local_steps,
)
from irongrad.distributed.probe import measured_step
from irongrad.distributed.sync_text import parsed_sync
from irongrad.runtime import load
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.errors import UserError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.manifest import GOLDEN


@click.command(
    epilog="""\b
Example:
  irongrad plan build/mlp --machines 8 --bandwidth 1Gbit --latency 20ms
  irongrad plan build/mlp --machines 1000 --bandwidth 100Mbit --latency 50ms --sync diloco:500:int8
"""
)
@directory_argument
@click.option("--machines", type=click.IntRange(1), required=True, help="How many machines there will be.")
@click.option("--bandwidth", required=True, help="What each sends a second, such as 1Gbit.")
@click.option("--latency", required=True, help="The time from one machine to another, such as 20ms.")
@click.option("--sync", default="gradients", show_default=True, help="When they synchronise, as for irongrad train.")
@base_option
@device_option
@json_option
def command(
    directory: Path,
    machines: int,
    bandwidth: str,
    latency: str,
    sync: str,
    base: Path | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Predict time, communication and memory of training the artifact in DIRECTORY on many machines.

    One training step is measured on this machine, with the inputs of the example.
    """
    network = Network(bandwidth_in(bandwidth), latency_in(latency))
    predict = _predictor(sync, network)
    if not (directory / GOLDEN).exists():
        raise UserError(f"{directory} has no {GOLDEN}, whose inputs a plan measures a step with")
    with load(directory, device=device, base=base) as session:
        step = measured_step(session, read_golden(directory / GOLDEN), sync)
    found = [predict(step, count) for count in doubled(machines)]
    if as_json:
        rows = [{**asdict(p), "utilisation": p.utilisation} for p in found]
        print_json({"step": asdict(step), "network": asdict(network), "sync": sync, "predictions": rows})
        return
    console.print(_table(found))
    console.print(
        "Assumed: machines as fast as this one, none slower or lost; the full bandwidth in both directions at once, "
        "for one exchange at a time. docs/scaling.md has the model.",
        highlight=False,
    )


def _predictor(sync: str, network: Network) -> Callable[[MeasuredStep, int], Prediction]:
    name, every, form = parsed_sync(sync)
    if name == "gradients":
        return lambda step, count: with_gradients(step, network, count)
    return lambda step, count: with_local_steps(step, network, count, every, form)


def _table(found: list[Prediction]) -> Table:
    """The predictions, and how much faster than one machine so many samples are trained."""
    table = Table("machines", "a step, ms", "exposed, ms", "computing", "speed-up", "sent a step", "memory a rank")
    for column in table.columns:
        column.justify = "right"
    for p in found:
        speed = p.machines * found[0].seconds / p.seconds
        table.add_row(
            str(p.machines),
            f"{p.seconds * 1e3:,.1f}",
            f"{p.exposed * 1e3:,.1f}",
            f"{p.utilisation:.0%}",
            f"{speed:,.1f}",
            readable(round(p.nbytes)),
            readable(p.memory),
        )
    return table
