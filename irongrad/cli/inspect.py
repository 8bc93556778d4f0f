"""`irongrad inspect`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from irongrad.cli.common import base_option, console, directory_argument, json_option, print_json
from irongrad.cli.measured_choices import print_tuning
from irongrad.runtime.checkpoint import read
from irongrad.runtime.commands import command_line, training_script
from irongrad.runtime.errors import UserError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import (
    OF_GRADIENTS,
    OF_STATE,
    PASSED,
    STEPS_DIM,
    TRAIN_AND_EXPORT,
    Certificate,
    EntryPoint,
    Manifest,
    Role,
)
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.refusals import largest_of
from irongrad.runtime.tensor_sizes import size_of

# Roles of small state whose values show the progress of training.
_SHOWN = frozenset({Role.COUNTER, Role.RANDOM, Role.SCALER})


@click.command(
    epilog="""\b
Example:
  irongrad inspect build/digits
"""
)
@directory_argument
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Show the counters and the loss scale of this one.")
@click.option("--memory", is_flag=True, help="Show what the forward keeps for the backward, and what that takes.")
@click.option("--script", is_flag=True, help="Print shell functions that train with iree-run-module alone.")
@base_option
@json_option
def command(
    directory: Path, checkpoint: Path | None, memory: bool, script: bool, base: Path | None, as_json: bool
) -> None:
    """Show what the artifact in DIRECTORY holds, and how to run it with iree-run-module."""
    manifest = read_manifest(directory)
    here = tuple(name for name in manifest.files if (directory / name).exists())
    check_files(manifest, directory, here)
    state = read(checkpoint, manifest) if checkpoint is not None else initial_state(directory, base)
    values = {s.name: state[s.name].tolist() for s in manifest.state if s.role in _SHOWN}
    runnable = replace(manifest, targets=tuple(t for t in manifest.targets if t.file in here) or manifest.targets)
    alone = manifest.all_entry_points if manifest.placement is None else ()
    goldens = {step: read_golden(directory / file) for step, file in manifest.golden_files.items() if file in here}
    commands = {e.symbol: command_line(runnable, directory, e.symbol, base, goldens.get(e.step)) for e in alone}
    trains = [e.symbol for e in manifest.all_entry_points if e.name == TRAIN_AND_EXPORT]
    scripts = {symbol: training_script(runnable, directory, symbol, base) for symbol in trains}
    if as_json:
        report: dict[str, Any] = json.loads(msgspec.json.encode(manifest))
        signatures = {e.symbol: e.signature for e in manifest.all_entry_points}
        print_json({**report, "values": values, "signatures": signatures, "commands": commands, "scripts": scripts})
        return
    if memory:
        _memory(manifest)
        return
    if script:
        _scripts(scripts)
        return
    _entry_points(manifest)
    for name in manifest.steps or ("",):
        if name:
            console.rule(f"step {name}", align="left")
        view = manifest.of_step(name) if name else manifest
        _sizes(view)
        _indices(view)
        _hypers(view)
    _relied(manifest)
    _placement(manifest)
    if manifest.tuning is not None:
        console.rule("chosen by measurement", align="left")
        print_tuning(manifest)
    _state(manifest, values)
    _files(manifest, here)
    if commands:
        console.rule("commands", align="left")
    for text in commands.values():
        console.print(text, soft_wrap=True, highlight=False)
    if scripts:
        console.rule("training without Python", align="left")
        _scripts(scripts)


def _scripts(scripts: Mapping[str, str]) -> None:
    if not scripts:
        raise UserError(f"this artifact has no entry point {TRAIN_AND_EXPORT}; compile it with --entry-point")
    for text in scripts.values():
        console.print(text, soft_wrap=True, highlight=False)


def _entry_points(manifest: Manifest) -> None:
    console.rule("entry points", align="left")
    for entry in manifest.all_entry_points:
        short = entry.name in (*OF_STATE, *OF_GRADIENTS)
        signature = f"{entry.symbol}(…)" if short else _signature(entry)
        console.print(signature, highlight=False, soft_wrap=True)
        console.print(f"    {entry.summary}", style="dim")
        for spec in entry.inputs:
            if spec.minimum is not None and not short:
                exempt = f" or {spec.exempt}" if spec.exempt is not None else ""
                console.print(f"    {spec.name} in [{spec.minimum}, {largest_of(spec)}]{exempt}")


def _signature(entry: EntryPoint) -> str:
    """The signature; of an entry point that returns the state, too, with its losses alone."""
    if entry.name != TRAIN_AND_EXPORT:
        return entry.signature
    losses = tuple(s for s in entry.outputs if s.shape[:1] == (STEPS_DIM,))
    return f"{replace(entry, outputs=losses).signature.removesuffix(')')}, …)"


def _sizes(manifest: Manifest) -> None:
    buckets = "; ".join(", ".join(f"{n} {size}" for n, size in bucket.items()) for bucket in manifest.buckets)
    console.print(f"buckets: {buckets or ('none (any size)' if manifest.sizes else 'none (fixed shapes)')}")
    for name, (least, most) in manifest.sizes.items():
        console.print(f"    {name}: {f'{least} to {most}' if most else f'{least} and more'}")
    for constraint in manifest.constraints:
        console.print(f"    {constraint.text}")


def _indices(manifest: Manifest) -> None:
    if not manifest.indices:
        return
    console.rule("indices", align="left")
    table = Table("line", "operator", "in", "", box=None)
    for index in manifest.indices:
        table.add_row(index.line, index.operator, index.range, index.how)
    console.print(table)


def _relied(manifest: Manifest) -> None:
    """What state may not change, or only within bounds; constants of the program are left out."""
    shown = {name: spec for name, spec in manifest.relied.items() if spec.line}
    if not shown:
        return
    console.rule("state that the program relies on", align="left")
    table = Table("name", "has to be", "line", box=None)
    for name, spec in shown.items():
        values = spec.values if spec.bounds is None else f"in [{spec.bounds[0]}, {spec.bounds[1]}]"
        table.add_row(name, values, spec.line)
    console.print(table)


def _hypers(manifest: Manifest) -> None:
    console.rule("hyperparameters", align="left")
    table = Table("name", "default", "", box=None)
    for hyper in manifest.hypers:
        table.add_row(hyper.name, f"{hyper.default:g}", "run-time input")
    for name, value in manifest.fixed.items():
        table.add_row(name, f"{value:g}", "compiled in")
    console.print(table)


def _placement(manifest: Manifest) -> None:
    if manifest.placement is None:
        return
    console.rule("placement", align="left")
    table = Table("part", "target", "state", box=None)
    for part in manifest.placement.parts:
        size = sum(size_of(s) for s in manifest.state if s.name in part.state)
        table.add_row(part.name, part.target, f"{size:,} bytes")
    console.print(table)
    for name, calls in manifest.placement.programs.items():
        passed = sum(size_of(s) for call in calls for s in call.entry.outputs if s.name.startswith(PASSED))
        console.print(f"{name}: {' → '.join(c.part for c in calls)}; {passed:,} bytes passed on", highlight=False)


def _memory(manifest: Manifest) -> None:
    plan = manifest.memory
    if plan is None:
        raise UserError("this artifact is a compiled function: it has no backward of its own to keep values for")
    console.rule("transient memory", align="left")
    table = Table(
        "entry point", "allowed", "predicted", *(f"{t.name}, by the compiler" for t in manifest.targets), box=None
    )
    for name, size in plan.predicted.items():
        allowed = f"{plan.limits[name]:,}" if name in plan.limits else ""
        table.add_row(name, allowed, f"{size:,}", *(f"{t.transients.get(name, 0):,}" for t in manifest.targets))
    console.print(table)
    console.print(f"budget: {plan.budget or 'none'}")
    console.rule("values of the forward pass", align="left")
    table = Table("decision", "value", "dtype", "shape", "bytes", "line", box=None)
    for value in plan.values:
        shape = str(list(value.shape))
        table.add_row(value.decision, value.name, value.dtype, shape, f"{value.bytes:,}", value.line)
    for decision in ("saved", "recomputed", "discarded"):
        total = sum(v.bytes for v in plan.values if v.decision == decision)
        table.add_row(decision, "total", "", "", f"{total:,}", style="bold")
    console.print(table)


def _state(manifest: Manifest, values: Mapping[str, object]) -> None:
    console.rule("state", align="left")
    table = Table("name", "role", "dtype", "shape", "bytes", box=None)
    for spec in manifest.state:
        name = (
            f"{spec.name} (= {spec.aliases[0]}{', …' if len(spec.aliases) > 1 else ''})" if spec.aliases else spec.name
        )
        table.add_row(name, spec.role.value, spec.dtype, str(list(spec.shape)), f"{size_of(spec):,}")
    total = sum(size_of(s) for s in manifest.state)
    table.add_row("total", "", "", "", f"{total:,}", style="bold")
    console.print(table)
    if values:
        console.print(", ".join(f"{n} = {v}" for n, v in values.items()), highlight=False)
    if manifest.precision != "f32":
        console.print(f"precision: the model runs under autocast in {manifest.precision}", highlight=False)
    if manifest.seed is not None:
        console.print(f"random numbers: drawn from Philox 4x32-10 with seed {manifest.seed}", highlight=False)


def _files(manifest: Manifest, here: Sequence[str]) -> None:
    console.rule("targets and files", align="left")
    console.print(f"identity: {manifest.digest}", highlight=False, soft_wrap=True)
    for target in manifest.targets:
        signed = [c for c in (target.certificate, *target.verified) if c is not None]
        note = "" if signed else " not verified"
        console.print(f"{target.name} ({target.file}){note}", highlight=False)
        for certificate in signed:
            console.print(f"    {_verified(certificate)}", highlight=False, soft_wrap=True)
        console.print(f"    IREE {target.compiler}: {' '.join(target.flags)}", style="dim", soft_wrap=True)
    table = Table("file", "bytes", "sha256", box=None)
    for name, spec in manifest.files.items():
        table.add_row(name, f"{spec.size:,}", spec.sha256 if name in here else "not here")
    console.print(table)
    passes = ", ".join(manifest.passes) or "none"
    console.print(f"route: {manifest.route}; passes: {passes}", highlight=False)
    console.print(", ".join(f"{n} {v}" for n, v in manifest.versions.items()), highlight=False)


def _verified(certificate: Certificate) -> str:
    device = ", ".join(filter(None, (certificate.device, certificate.name, certificate.driver, certificate.date)))
    return (
        f"verified on {device}: {certificate.steps} steps against eager {certificate.oracle}, worst error "
        f"{certificate.worst:.0%} of what is allowed ({certificate.tensor})"
        + (f"; cannot be judged: {', '.join(certificate.unjudged)}" if certificate.unjudged else "")
    )
