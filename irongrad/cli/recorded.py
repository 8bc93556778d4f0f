"""Run a command that compiles a step, unless nothing that it reads has changed since its last run."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from irongrad.cache.artifacts import restored
from irongrad.cache.recordings import CommandPlace, Recording, command_place
from irongrad.cli.common import console
from irongrad.cli.outcome import Outcome, summary_of
from irongrad.cli.working import Work
from irongrad.runtime.installed import PACKAGE
from irongrad.runtime.staging import check_output

if TYPE_CHECKING:
    from irongrad.cache.tracer import Tracer
    from irongrad.step.steps import Steps
    from irongrad.step.train_step import TrainStep

# What each stage does, for people who wait for it.
_DOES = {
    "capture": "the forward as a graph",
    "differentiate": "the backward",
    "optimizer": "the update",
    "guards": "conditions on the inputs",
    "passes": "rewriting the graph",
    "import": "lowering to MLIR",
    "assemble": "one module with state and entry points",
    "oracle": "the step in eager float64, to compare with",
    "compile": "machine code",
    "package": "comparing with float64, and writing",
}


def compile_or_repeat(
    load: Callable[[], TrainStep | Steps],
    output: Path,
    targets: Sequence[str],
    options: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    known: Sequence[str] = (),
    quiet: bool,
) -> Outcome:
    """Compile the step of `load`, or take the artifact from the cache without calling `load` or importing PyTorch.

    Args:
        load: creates the step.
        output: the artifact's directory.
        targets: the targets to compile for.
        options: further options of `irongrad.pipeline.options.make_options`.
        parameters: the parsed parameters of the command line.
        known: installed packages with native code that, as far as `load` uses it, opens files in Python only.
        quiet: whether to hide the progress.
    """
    began = perf_counter()
    check_output(output)
    runs = not options["cache"] or options.get("dump_dir") is not None or options.get("stop_after") is not None
    place = None if runs else command_place(parameters)
    outcome = repeated(place, output, began) if place is not None else None
    if outcome is not None:
        return outcome

    from irongrad.cache.tracer import Tracer

    tracer = Tracer(known)
    if place is not None:
        tracer.start()
    outcome, key = _compiled(load, output, targets, options, tracer, quiet=quiet)
    if place is None or key is None:
        return outcome
    trace = tracer.finish()
    if trace is None:
        return replace(outcome, unrecorded=tracer.refusal)
    said = msgspec.json.encode({"summary": outcome.summary, "files": outcome.files})
    place.record(Recording(key, trace, said))
    return outcome


def repeated(place: CommandPlace, output: Path, began: float) -> Outcome | None:
    """Write the artifact of an earlier run again; return None if there is none, or if anything has changed since."""
    found = place.recorded()
    if found is None or (kept := restored(place.store, found.artifact, output, bytes)) is None:
        return None
    said = msgspec.json.decode(found.result)
    seconds = {"cache": perf_counter() - began}
    return Outcome(said["summary"] | {"seconds": seconds, "cached": True}, said["files"], kept[0])


def _compiled(
    load: Callable[[], TrainStep | Steps],
    output: Path,
    targets: Sequence[str],
    options: Mapping[str, Any],
    tracer: Tracer,
    *,
    quiet: bool,
) -> tuple[Outcome, str | None]:
    """Compile the step of `load`, and trace what the artifact's key depends on; return the key if it is kept."""
    from irongrad.pipeline.driver import build
    from irongrad.pipeline.options import STAGES, make_options
    from irongrad.pipeline.step_key import environment

    running = Work("")
    status = console.status(running)

    @contextmanager
    def show(stage: str) -> Iterator[None]:
        running.what = f"{stage} ({STAGES.index(stage) + 1}/{len(STAGES)}): {_DOES[stage]}"
        with nullcontext() if quiet else status:
            yield
        if stage == "capture":
            users.close()
            environment()  # part of the artifact's key, so the tracer must see what it reads
            tracer.stop()

    def measure(what: str) -> None:
        running.what = f"measuring {what}"

    asked = make_options(output, targets, **options, on_stage=show, on_measuring=measure)
    before = dict(sys.modules)
    with ExitStack() as users:
        users.enter_context(tracer.users_code())
        result = build(load(), asked)
    manifest = result.artifact.manifest if result.artifact is not None else None
    return Outcome(summary_of(result), [str(f) for f in _user_files(before)], manifest), result.key


def _user_files(before: Mapping[str, ModuleType]) -> list[Path]:
    """The files of modules imported since `before`, without Python's own, installed packages and IronGrad."""
    own = {Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib")} | {PACKAGE}
    new = [m for n, m in sys.modules.items() if before.get(n) is not m]
    files = {Path(f).resolve() for m in new if isinstance(f := getattr(m, "__file__", None), str)}
    return sorted(
        f
        for f in files
        if f.is_file()
        and not {"site-packages", "dist-packages"} & set(f.parts)
        and not any(f.is_relative_to(d.resolve()) for d in own)
    )
