"""One run of the compiler: its stages, and its result."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from iree.compiler import ir

from irongrad.analysis.timeline import noted
from irongrad.diagnostics.stage_errors import reported
from irongrad.graph.step_graph import Function
from irongrad.passes import PassRecord, PassResult
from irongrad.passes.base import Choice
from irongrad.passes.module_pass import ModulePass
from irongrad.pipeline.build_cache import BuildRecord
from irongrad.pipeline.dump import dump_module_pass, dump_pass, dump_stage
from irongrad.pipeline.iree.phases import ModuleObserver, Phase
from irongrad.pipeline.iree.report.statistics import Statistics
from irongrad.pipeline.options import STAGES, Options
from irongrad.pipeline.package import Artifact
from irongrad.pipeline.stopwatch import Stopwatch
from irongrad.runtime.manifest import MemorySpec
from irongrad.step.steps import Steps
from irongrad.step.train_step import TrainStep

T = TypeVar("T")


@dataclass(frozen=True)
class Build:
    """The result of a run of the compiler.

    Attributes:
        artifact: the written artifact; None if the run stopped early.
        seconds: the time of each stage in seconds. `oracle` and `compile` run beside other stages; their times include
            only the wait for them.
        passes: the record of each pass on each function.
        statistics: the compiler's statistics of the program, by target; empty if the run stopped before it compiled.
        memory: the memory plan; None if the run stopped before it.
        cached: whether the artifact comes from the cache; `seconds` then has `capture` and `cache` only.
        key: the artifact's key in the cache; None if the cache does not have it.
    """

    artifact: Artifact | None
    seconds: dict[str, float]
    passes: tuple[PassRecord, ...]
    statistics: dict[str, Statistics]
    memory: MemorySpec | None
    cached: bool = False
    key: str | None = None


class StoppedEarly(Exception):  # noqa: N818 (it is no error)
    """Raised inside the compiler when `stop_after` is reached."""


@dataclass
class BuildRun:
    """The state of one compilation. If the step is planned again, fields hold the values of the latest plan.

    Attributes:
        options: how to compile.
        seconds: the total time of each stage in seconds.
        records: the record of each pass on each function.
        statistics: the compiler's statistics of the program, by target.
        memory: the memory plan, once there is one.
        artifact: the artifact, once it is written.
        key: the artifact's key in the cache, once it is kept.
        began: when the run began, as a value of `time.perf_counter`.
        current: the stage that runs, or that ran last.
        watch: measures forms on this machine; None if cost models choose them.
        choices: the choices that were made by measurement, beside those in `records`.
        last: the name of the last step.
        part: the name of the step that runs, of several over one state; empty for one step, or for all together.
    """

    options: Options
    seconds: dict[str, float] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    memory: MemorySpec | None = None
    artifact: Artifact | None = None
    key: str | None = None
    began: float = field(default_factory=time.perf_counter)
    current: str = STAGES[0]
    part: str = ""
    last: str = ""
    watch: Stopwatch | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def dump_dir(self) -> Path | None:
        """The directory for readable forms of what stages make: a folder of its own for each of several steps."""
        return self.options.dump_dir / self.part if self.options.dump_dir is not None else None

    def stage(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` as a stage: time it, show it, dump its result, and return the result.

        Raises:
            StoppedEarly: the stage is the last that the caller asked for.
        """
        start = time.perf_counter()
        self.current = name
        with self.options.on_stage(name), noted(f"{self.part}: {name}" if self.part else name):
            result = function(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        if self.dump_dir is not None:
            dump_stage(self.dump_dir, STAGES.index(name) + 1, name, result)
        if self.options.stop_after == name and self.part in ("", self.last):
            raise StoppedEarly
        return result

    def errors(self, step: TrainStep | Steps) -> AbstractContextManager[None]:
        """While open, an error that no stage expected becomes an IronGradError with the stage and the user's line."""
        return reported(lambda: f"the stage {self.current!r}", step.made_at)

    def note_pass(self, number: int, record: PassRecord, function: Function) -> None:
        """Keep the record of the pass at position `number`, and dump `function` if the pass changed it."""
        self.records.append(record)
        if self.dump_dir is not None and record.changed:
            directory = self.dump_dir / f"{STAGES.index('passes') + 1:02d}_passes"
            dump_pass(directory, number + 1, record, function)

    def note_module_pass(self, target: str = "") -> ModuleObserver:
        """Create an observer that dumps IREE's module after each change; `target` is empty before there is a target."""
        counter = itertools.count(1)

        def note(phase: Phase, item: ModulePass, result: PassResult, module: ir.Module) -> None:
            if self.options.dump_dir is not None and result.changed:
                stage = "compile" if target else "assemble"
                directory = self.options.dump_dir / f"{STAGES.index(stage) + 1:02d}_{stage}" / target
                dump_module_pass(directory, next(counter), f"{phase.name}.{item.name}", result, module)

        return note

    def from_cache(self, artifact: Artifact, record: BuildRecord, key: str) -> Build:
        """The result of an earlier run. The time of this run outside of its stages counts as `cache`."""
        seconds = self.seconds | {"cache": time.perf_counter() - self.began - sum(self.seconds.values())}
        memory = artifact.manifest.memory
        return Build(artifact, seconds, record.passes, record.statistics, memory, cached=True, key=key)

    def result(self) -> Build:
        """The result of this run."""
        records = tuple(self.records)
        return Build(self.artifact, self.seconds, records, self.statistics, self.memory, key=self.key)
