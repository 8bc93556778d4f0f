"""`irongrad machine`: measure what this machine can do at most."""

from __future__ import annotations

from dataclasses import asdict

import click

from irongrad.analysis.other_work import said
from irongrad.cli.common import console, json_option, print_json
from irongrad.reports.peaks import machine


@click.command(
    epilog="""\b
Example:
  irongrad machine
"""
)
@click.option("--again", is_flag=True, help="Measure again, though the cache has the peaks of this machine.")
@json_option
def command(again: bool, as_json: bool) -> None:
    """Measure the peaks of this machine's CPU: products and multiply-adds, and a copy.

    The cache keeps them. `irongrad analyze`, `profile` and `report` compare a step with them. Nothing else should run.
    """
    found = machine(again=again)
    if as_json:
        print_json({**asdict(found), "ridge": found.ridge})
        return
    console.print(f"{found.name}, {found.threads} threads", highlight=False)
    console.print(f"float32 arithmetic: {found.flops / 1e9:,.0f} GFLOP/s", highlight=False)
    console.print(f"a copy, read and written: {found.bandwidth / 1e9:,.1f} GB/s", highlight=False)
    if busy := said(found.others):
        console.print(f"{busy}: the peaks may be too low", highlight=False)
    console.print(f"both are reached at {found.ridge:,.1f} operations a byte", highlight=False)
