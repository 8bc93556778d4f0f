"""`irongrad targets`."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from irongrad.cli.common import console, json_option, print_json
from irongrad.runtime.cpu import architecture, cpu_features, cpu_name
from irongrad.runtime.devices import Device, devices_of
from irongrad.targets import Kind, kinds
from irongrad.targets.cuda import find_ptxas
from irongrad.targets.vulkan import PROFILES, propose


@click.command(
    epilog="""\b
Example:
  irongrad targets
  irongrad targets --probe
  irongrad compile step.py:make_step -o build/step --target llvm-cpu --target vulkan:profile=desktop
"""
)
@click.option("--probe", is_flag=True, help="Read the devices of this machine, and propose what to compile for them.")
@json_option
def command(probe: bool, as_json: bool) -> None:
    """List the targets with their options, and the devices of this machine; needs no compiler."""
    found = _found()
    if as_json:
        print_json({"targets": [_described(k) for k in kinds()], "profiles": PROFILES, "found": found})
    elif probe:
        _print_proposals(found)
    else:
        _print(found)


def _described(kind: Kind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "summary": kind.summary,
        "options": [asdict(o) for o in kind.options],
        "quirks": [asdict(q) for q in kind.quirks],
    }


def _found() -> dict[str, Any]:
    """The devices and tools of this machine, by kind."""
    return {
        "cpu": {"name": cpu_name(), "architecture": architecture(), "features": sorted(cpu_features() or ())},
        "vulkan": [_device(d) | {"target": propose(d)} for d in devices_of("vulkan")],
        "cuda": [_device(d) for d in devices_of("cuda")],
        "ptxas": _ptxas(),
    }


def _device(device: Device) -> dict[str, Any]:
    size, least, most = device.subgroup
    return {
        "uri": device.uri,
        "name": device.name,
        "driver": device.driver,
        "kind": device.kind,
        "subgroup": {"size": size, "least": least, "most": most},
    }


def _ptxas() -> str:
    """The version of CUDA's assembler; empty where it is not installed."""
    tool = find_ptxas()
    if tool is None:
        return ""
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return next((line.rpartition(" ")[2] for line in said if "release" in line), "")


def _print(found: dict[str, Any]) -> None:
    table = Table("target", "option", "values", "", box=None)
    for kind in kinds():
        table.add_row(kind.name, "", "", kind.summary, style="bold")
        for option in kind.options:
            table.add_row("", option.name, ", ".join(option.values), option.summary)
    console.print(table)
    table = Table("vulkan profile", "arithmetic", "subgroup", "", box=None)
    for name, profile in PROFILES.items():
        table.add_row(name, ", ".join(profile.compute), str(profile.subgroup or ""), profile.summary)
    console.print(table)
    console.rule("on this machine", align="left")
    cpu = found["cpu"]
    console.print(f"cpu: {cpu['name']}, {cpu['architecture']}, {len(cpu['features'])} features", highlight=False)
    for driver in ("vulkan", "cuda"):
        for device in found[driver]:
            console.print(f"{driver}: {_line(device)}", highlight=False, soft_wrap=True)
        if not found[driver]:
            console.print(f"{driver}: no device", highlight=False)
    console.print(f"ptxas: {found['ptxas'] or 'not installed'}", highlight=False)


def _line(device: dict[str, Any]) -> str:
    lanes = device["subgroup"]
    spread = f"{lanes['size']}" if lanes["least"] == lanes["most"] else f"{lanes['least']} to {lanes['most']}"
    subgroup = f", subgroups of {spread} lanes" if lanes["size"] else ""
    return f"{device['name']}, {device['driver']}{subgroup} ({device['uri']})"


def _print_proposals(found: dict[str, Any]) -> None:
    console.print(f"{found['cpu']['name']}: --target llvm-cpu", highlight=False)
    for device in found["vulkan"]:
        console.print(_line(device), highlight=False, soft_wrap=True)
        console.print(f"    --target {device['target']}", highlight=False)
    if not found["vulkan"]:
        console.print("no Vulkan device; code for any runs with --target vulkan:profile=generic", highlight=False)
