"""`irongrad compile`."""

from __future__ import annotations

import importlib.util
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
import msgspec

import irongrad
from irongrad.cache.artifacts import restored
from irongrad.cache.recordings import CommandPlace, Recording, command_place
from irongrad.cli.common import console, fallback_option, json_option, pass_options, precision_option, print_json
from irongrad.cli.outcome import Outcome, print_outcome, summary_of
from irongrad.pipeline.staging import check_output
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import MANIFEST

if TYPE_CHECKING:
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
    began = time.perf_counter()
    check_output(output)
    parameters = click.get_current_context().params
    place = command_place(parameters) if cache and dump_dir is None and stop_after is None else None
    outcome = _repeated(place, output, began) if place is not None else None
    if outcome is None:
        options = {
            "opt_level": opt_level,
            "passes": passes,
            "disable_passes": disable_passes,
            "max_memory": max_memory,
            "tune": tune,
            "route": route,
            "entry_points": entry_points or None,
            "dump_dir": dump_dir,
            "stop_after": stop_after,
            "cache": cache,
        }
        step = partial(_load, source, precision, bucket_fallback)
        outcome = _compiled(step, output, targets, options, place, quiet=as_json)
    if depfile is not None and outcome.manifest is not None:
        _write_depfile(depfile, output, [Path(f) for f in outcome.files])
    if as_json:
        print_json(outcome.summary)
    else:
        print_outcome(outcome, output, pass_report=pass_report)


def _repeated(place: CommandPlace, output: Path, began: float) -> Outcome | None:
    """What this command line did before, where nothing has changed since; the artifact is written again."""
    found = place.recorded()
    if found is None or (kept := restored(place.store, found.artifact, output, bytes)) is None:
        return None
    said = msgspec.json.decode(found.result)
    seconds = {"cache": time.perf_counter() - began}
    return Outcome(said["summary"] | {"seconds": seconds, "cached": True}, said["files"], kept[0])


def _compiled(
    load: Callable[[], TrainStep],
    output: Path,
    targets: Sequence[str],
    options: Mapping[str, Any],
    place: CommandPlace | None,
    *,
    quiet: bool,
) -> Outcome:
    """Compile what `load` returns, and record what that depended on."""
    from irongrad.cache.tracer import Tracer

    tracer = Tracer()
    if place is not None:
        tracer.start()

    from irongrad.cache.keys import environment
    from irongrad.pipeline.driver import STAGES, build, make_options

    status = console.status("")

    @contextmanager
    def show(stage: str) -> Iterator[None]:
        status.update(f"{stage} ({STAGES.index(stage) + 1}/{len(STAGES)})")
        with nullcontext() if quiet else status:
            yield
        if stage == "capture":
            users.close()
            environment()  # the artifact's key has it, so the tracer shall see where it comes from
            tracer.stop()

    asked = make_options(
        output, targets, **options, on_stage=show, on_measuring=lambda what: status.update(f"measuring {what}")
    )
    before = dict(sys.modules)
    with ExitStack() as users:
        users.enter_context(tracer.users_code())
        made = build(load(), asked)
    manifest = made.artifact.manifest if made.artifact is not None else None
    outcome = Outcome(summary_of(made), [str(f) for f in _user_files(before)], manifest)
    if place is None or made.key is None:
        return outcome
    trace = tracer.finish()
    if trace is None:
        return replace(outcome, unrecorded=tracer.refusal)
    said = msgspec.json.encode({"summary": outcome.summary, "files": outcome.files})
    place.record(Recording(made.key, trace, said))
    return outcome


def _load(source: str, precision: str | None, bucket_fallback: str | None) -> TrainStep:
    step = load_step(source, precision)
    return step if bucket_fallback is None else replace(step, bucket_fallback=bucket_fallback)


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
    _seed()
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


def _seed() -> None:
    """Start every generator at a seed: a step that sets none has the same numbers each time it is compiled."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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
