"""A run of the compiler: its stages as they go by, and what comes of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from iree.compiler import ir

from irongrad.graph.step_graph import Function
from irongrad.passes import PassRecord, PassResult
from irongrad.passes.module_pass import ModulePass
from irongrad.pipeline.build_cache import BuildRecord
from irongrad.pipeline.dump import dump_module_pass, dump_pass, dump_stage
from irongrad.pipeline.iree.phases import ModuleObserver, Phase
from irongrad.pipeline.iree.report.statistics import Statistics
from irongrad.pipeline.options import STAGES, Options
from irongrad.pipeline.package import Artifact
from irongrad.runtime.manifest import MemorySpec

T = TypeVar("T")


@dataclass(frozen=True)
class Build:
    """What a run of the compiler made.

    Attributes:
        artifact: what was written; None when it was stopped early.
        seconds: how long each stage took; `oracle` and `compile` are what was left of each after what it
            runs beside.
        passes: what each pass did to each function.
        statistics: what the compiler says of the program, by target; empty when it was stopped before that.
        memory: the plan of its memory; None when it was stopped before that.
        cached: whether the artifact comes from the cache; `seconds` has `capture` and `cache` then.
        key: under which the cache has the artifact; None where it does not.
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
    """A run of the compiler, as far as it is; of what it is asked for as often as it is planned again, the last.

    Attributes:
        options: how to compile.
        seconds: how long each stage took, in all.
        records: what each pass did to each function.
        statistics: as in `Build`, as are the others.
        memory: as above.
        artifact: as above.
        key: as above.
        began: when it did.
    """

    options: Options
    seconds: dict[str, float] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    memory: MemorySpec | None = None
    artifact: Artifact | None = None
    key: str | None = None
    began: float = field(default_factory=time.perf_counter)

    def stage(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """What `function` returns, timed, shown and dumped as a stage.

        Raises:
            StoppedEarly: it was the last that was asked for.
        """
        start = time.perf_counter()
        with self.options.on_stage(name):
            result = function(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        if self.options.dump_dir is not None:
            dump_stage(self.options.dump_dir, STAGES.index(name) + 1, name, result)
        if self.options.stop_after == name:
            raise StoppedEarly
        return result

    def note_pass(self, number: int, record: PassRecord, function: Function) -> None:
        """Keep what the pass of this number did, and dump what it made of `function`."""
        self.records.append(record)
        if self.options.dump_dir is not None and record.changed:
            directory = self.options.dump_dir / f"{STAGES.index('passes') + 1:02d}_passes"
            dump_pass(directory, number + 1, record, function)

    def note_module_pass(self, target: str = "") -> ModuleObserver:
        """An observer that dumps what each pass over IREE's module made, for one target or before there is one."""
        counter = itertools.count(1)

        def note(phase: Phase, item: ModulePass, result: PassResult, module: ir.Module) -> None:
            if self.options.dump_dir is not None and result.changed:
                stage = "compile" if target else "assemble"
                directory = self.options.dump_dir / f"{STAGES.index(stage) + 1:02d}_{stage}" / target
                dump_module_pass(directory, next(counter), f"{phase.name}.{item.name}", result, module)

        return note

    def from_cache(self, artifact: Artifact, record: BuildRecord, key: str) -> Build:
        """What an earlier run made; the time since this one began that went into no stage went into finding it."""
        seconds = self.seconds | {"cache": time.perf_counter() - self.began - sum(self.seconds.values())}
        memory = artifact.manifest.memory
        return Build(artifact, seconds, record.passes, record.statistics, memory, cached=True, key=key)

    def result(self) -> Build:
        """What came of it."""
        records = tuple(self.records)
        return Build(self.artifact, self.seconds, records, self.statistics, self.memory, key=self.key)
