"""What IronGrad makes of a step: read from the record of its artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from irongrad.analysis.file import read_analysis
from irongrad.analysis.records import Source, TargetRecord
from irongrad.analysis.totals import executed, kernel_name, source_of_launch
from irongrad.graph.dtypes import to_numpy
from irongrad.peers.kernels import LOSS, MODEL, OPTIMIZER, Compiled, Kernel
from irongrad.pipeline.driver import compile as compile_step
from irongrad.reports.summary import summary_of
from irongrad.runtime.installed import VERSION
from irongrad.step.train_step import TrainStep

NAME = "irongrad"
_ENTRY = "train_step"
_TARGET = "llvm-cpu"


def compiled(step: TrainStep, folder: Path, *, one_thread: bool) -> tuple[Compiled, Callable[[], float]]:
    """Compile and verify a step with IronGrad; return what it made, and what takes a step."""
    classes = layers_of(step)
    inputs = {name: to_numpy(tensor) for name, tensor in step.inputs.items()}
    start = time.perf_counter()
    artifact = compile_step(step, folder / "artifact", _TARGET, entry_points=(_ENTRY,), cache=False)
    session = artifact.load(device="local-sync" if one_thread else "local-task")
    loss = float(session.train_step(**inputs))
    seconds = time.perf_counter() - start
    record = read_analysis(artifact.directory, artifact.manifest)
    summary = summary_of(record, _TARGET, _ENTRY)
    made = Compiled(
        NAME,
        VERSION,
        tuple(_kernels(record.targets[_TARGET], classes)),
        summary.compiled.flops or 0,
        "all arithmetic",
        session.target.transients[_ENTRY],
        seconds,
        loss,
    )
    return made, lambda: float(session.train_step(**inputs))


def layers_of(step: TrainStep) -> dict[str, str]:
    """The class of each module of a step, by its path as sources have it."""
    named = {path: type(module).__name__ for path, module in step.model.named_modules()}
    return named | {"": LOSS, LOSS: LOSS, MODEL: named[""]}


def layer_of(source: Source | None, classes: dict[str, str]) -> str:
    """The class of a source's module; `(loss)` outside of the model, `(optimizer)` in an update, empty if unknown."""
    if source is None or not source.operator:
        return ""
    if source.phase == "update":
        return OPTIMIZER
    return classes.get(source.module, source.module)


def _kernels(target: TargetRecord, classes: dict[str, str]) -> Iterator[Kernel]:
    for found in executed(target, _ENTRY):
        launch, source = found.launch, source_of_launch(target, found.launch)
        yield Kernel(
            kernel_name(target, launch),
            False,
            source.phase if source is not None else "",
            layer_of(source, classes),
            launch.read,
            launch.written,
            launch.intermediates,
            launch.intermediate_bytes,
            found.times,
        )
