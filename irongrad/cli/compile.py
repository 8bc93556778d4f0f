"""`irongrad compile`."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

import irongrad
from irongrad.cli.common import console, fallback_option, json_option, pass_options, precision_option, print_json
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import MANIFEST

if TYPE_CHECKING:
    from irongrad.passes.manager import PassRecord
    from irongrad.pipeline.driver import Build
    from irongrad.step import TrainStep


@click.command(
    epilog="""\b
Example:
  irongrad compile examples/digits.py:make_step -o build/digits --target llvm-cpu
"""
)
@click.argument("source", metavar="FILE:FUNCTION")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact's directory.")
@click.option(
    "--target", "targets", multiple=True, default=["llvm-cpu"], show_default=True, help="What to compile for."
)
@pass_options
@click.option(
    "--max-memory", default="", metavar="SIZE", help="Have a step fit, say into 512MiB, or 50% of its memory."
)
@click.option("--tune", is_flag=True, help="Choose the forms of convolutions by measurement on this machine.")
@click.option("--pass-report", is_flag=True, help="Show what every pass did, and how long it took.")
@click.option("--route", default="linalg", show_default=True, help="To linalg directly, or over stablehlo.")
@click.option("--entry-point", "entry_points", multiple=True, help="Include only these entry points; repeatable.")
@precision_option
@fallback_option
@click.option("--dump-dir", type=click.Path(path_type=Path), help="Write every stage's readable form here.")
@click.option("--stop-after", metavar="STAGE", help="Stop after this stage.")
@click.option("--cache/--no-cache", default=True, help="Take what was compiled before from the cache on disk.")
@click.option("--depfile", type=click.Path(path_type=Path), help="Write the source files this depends on, for builds.")
@json_option
def command(
    source: str,
    output: Path,
    targets: tuple[str, ...],
    opt_level: int,
    passes: str | None,
    disable_passes: tuple[str, ...],
    max_memory: str,
    tune: bool,
    pass_report: bool,
    route: str,
    entry_points: tuple[str, ...],
    precision: str | None,
    bucket_fallback: str | None,
    dump_dir: Path | None,
    stop_after: str | None,
    cache: bool,
    depfile: Path | None,
    as_json: bool,
) -> None:
    """Compile the training step that FUNCTION in the Python file FILE returns.

    The result is verified against eager float64 before it is written.
    """
    from irongrad.pipeline.driver import STAGES, build, make_options

    status = console.status("")

    @contextmanager
    def show(stage: str) -> Iterator[None]:
        status.update(f"{stage} ({STAGES.index(stage) + 1}/{len(STAGES)})")
        with status:
            yield

    options = make_options(
        output,
        targets,
        opt_level=opt_level,
        passes=passes,
        disable_passes=disable_passes,
        max_memory=max_memory,
        tune=tune,
        route=route,
        entry_points=entry_points or None,
        dump_dir=dump_dir,
        stop_after=stop_after,
        cache=cache,
        on_stage=None if as_json else show,
        on_measuring=lambda what: status.update(f"measuring {what}"),
    )
    before = dict(sys.modules)
    step = load_step(source, precision)
    if bucket_fallback is not None:
        step = replace(step, bucket_fallback=bucket_fallback)
    made = build(step, options)
    if depfile is not None and made.artifact is not None:
        _write_depfile(depfile, output, _user_files(before))
    if as_json:
        print_json(_summary(made))
        return
    if pass_report:
        _print_passes(made.passes)
    _print_choices(made.passes)
    _print(made)


def load_step(source: str, precision: str | None = None) -> TrainStep:
    """Import FILE and call FUNCTION; `precision` in place of the step's own.

    Raises:
        UserError: no such file or function, or it returns something else.
    """
    from irongrad.step import TrainStep

    path, _, name = source.rpartition(":")
    if not path or not name:
        raise UserError(f"{source!r} is not FILE:FUNCTION; write for instance examples/digits.py:make_step")
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"{path} does not exist")
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{path} has no function {name!r}; it has {', '.join(there)}")
    step = function()
    if not isinstance(step, TrainStep):
        raise UserError(f"{source} returned a {type(step).__name__}; it must return an irongrad.TrainStep")
    return step if precision is None else replace(step, precision=precision)


def _user_files(before: Mapping[str, ModuleType]) -> list[Path]:
    """The files of modules imported since `before`, without Python's own, installed packages and IronGrad."""
    own = {Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib")} | {Path(irongrad.__file__).parent}
    new = [m for n, m in sys.modules.items() if before.get(n) is not m]
    files = {Path(f).resolve() for m in new if isinstance(f := getattr(m, "__file__", None), str)}
    return sorted(
        f
        for f in files
        if f.is_file()
        and not {"site-packages", "dist-packages"} & set(f.parts)
        and not any(f.is_relative_to(d.resolve()) for d in own)
    )


def _write_depfile(path: Path, output: Path, files: Sequence[Path]) -> None:
    """A Makefile rule, as `cc -MD` writes, that Ninja and Make read."""
    target, *needed = (_make_path(f) for f in (output / MANIFEST, *files))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{target}: {' '.join(needed)}\n")


def _make_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "\\ ").replace("#", "\\#")


def _summary(made: Build) -> dict[str, Any]:
    result: dict[str, Any] = {"seconds": made.seconds, "passes": [asdict(r) for r in made.passes], "output": None}
    result["cached"] = made.cached
    if (artifact := made.artifact) is not None:
        result["output"] = str(artifact.directory)
        result["predicted"] = made.memory.predicted if made.memory else {}
        result["targets"] = {
            t.name: {
                "bytes": artifact.manifest.files[t.file].size,
                "worst": t.certificate.worst if t.certificate else None,
                "statistics": asdict(made.statistics[t.name]),
            }
            for t in artifact.manifest.targets
        }
    return result


def _print_passes(records: Sequence[PassRecord]) -> None:
    table = Table("pass", "function", "nodes", "", "ms", box=None)
    for record in records:
        if record.changed:
            before, after = record.nodes
            counts = ", ".join(f"{name} {count}" for name, count in record.stats.items())
            milliseconds = f"{record.seconds * 1000:.0f}"
            table.add_row(record.name, record.function, f"{before} to {after}", counts, milliseconds)
    console.print(table)


def _print_choices(records: Sequence[PassRecord]) -> None:
    """What was chosen by measurement; functions that have the same to compute have it once."""
    choices = {choice.what: choice for record in records for choice in record.choices}
    if not choices:
        return
    table = Table("what", "chosen", "ms", box=None)
    for choice in choices.values():
        times = sorted(choice.seconds.items(), key=lambda item: item[1])
        table.add_row(choice.what, choice.chosen, ", ".join(f"{name} {1e3 * value:.3g}" for name, value in times))
    console.print(table)


def _print(made: Build) -> None:
    table = Table("stage", "seconds", box=None)
    for name, value in made.seconds.items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    if (artifact := made.artifact) is None:
        console.print("stopped as asked; no artifact was written")
        return
    if made.cached:
        console.print("nothing has changed since it was compiled; it comes from the cache")
    for target in artifact.manifest.targets:
        size = artifact.manifest.files[target.file].size / 1024
        if target.certificate is not None:
            note = (
                f"verified: {target.certificate.steps} steps against eager {target.certificate.oracle}, worst error "
                f"{target.certificate.worst:.0%} of what is allowed"
            )
        else:
            note = "not verified: it cannot run here; run 'irongrad verify' on the device"
        console.print(f"{artifact.directory / target.file}: {size:.0f} KiB, {note}", highlight=False)
        counts = made.statistics[target.name]
        each = ", ".join(f"{name} {dispatches}" for name, dispatches in counts.by_function.items())
        console.print(f"dispatches: {counts.dispatches} ({each}) of {counts.kernels} kernels", highlight=False)
        each = ", ".join(f"{name} {moved / 2**20:.1f}" for name, moved in counts.traffic.items())
        console.print(f"MiB that kernels read and write: {each}", highlight=False)
        predicted = made.memory.predicted if made.memory else {}
        for name, size in predicted.items():
            real = counts.transients.get(name, 0)
            text = f"transient memory of {name}: {real / 2**20:.1f} MiB, {size / 2**20:.1f} MiB predicted"
            console.print(text, highlight=False)
