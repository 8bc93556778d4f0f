"""Compiled modules, state and golden values -> the artifact directory, verified before anyone can see it."""

from __future__ import annotations

import hashlib
import math
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from irongrad.analysis.file import encoded
from irongrad.analysis.records import FORMAT_VERSION as RECORD_VERSION
from irongrad.analysis.records import Analysis, Judged
from irongrad.graph.dtypes import to_numpy
from irongrad.graph.step_graph import Relied, StateTensor, StepGraph
from irongrad.passes import Pass, spelled
from irongrad.passes.base import Choice
from irongrad.pipeline.assemble.exchange import exchanged
from irongrad.pipeline.assemble.interface import OF_WHOLE, Interface
from irongrad.pipeline.assemble.shard_functions import exchange_buckets
from irongrad.pipeline.assemble.size_constraints import constraints_of
from irongrad.pipeline.assemble.size_guards import accepted_sizes
from irongrad.pipeline.assemble.statistics import statistics_bytes
from irongrad.pipeline.base_file import base_spec, bytes_of, shared_base
from irongrad.pipeline.iree.compile import CompiledModule
from irongrad.pipeline.oracle.expected_values import ExpectedAtSizes
from irongrad.pipeline.verify_targets import verified
from irongrad.runtime.arrays import shown_values
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.checkpoint import header
from irongrad.runtime.devices import is_local
from irongrad.runtime.errors import InternalError
from irongrad.runtime.golden import Golden, are_same, kept, read_golden, write_golden
from irongrad.runtime.installed import VERSION
from irongrad.runtime.manifest import (
    ANALYSIS,
    CHECKPOINT_HEADER,
    FORMAT_VERSION,
    INITIAL_STATE,
    OF_BASE,
    TRAIN_AND_EXPORT,
    Certificate,
    ChoiceSpec,
    FunctionSpec,
    HyperSpec,
    LayoutSpec,
    Manifest,
    MemorySpec,
    PlacementSpec,
    ReliedSpec,
    StepSpec,
    TargetSpec,
    golden_file,
)
from irongrad.runtime.manifest_file import file_spec, write_manifest
from irongrad.runtime.notebook_table import notebook_table
from irongrad.runtime.parameter_archive import write_archive
from irongrad.runtime.report import Report
from irongrad.runtime.selection import why_not
from irongrad.runtime.session import Session
from irongrad.runtime.staging import publish, staged
from irongrad.runtime.verification import certificate


class Modules(Protocol):
    """What an artifact is made of: one portable module, or one for each part of a placed step."""

    @property
    def graphs(self) -> tuple[StepGraph, ...]:
        """The step graphs over one state."""

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """Their entry points, in the same order."""

    @property
    def placement(self) -> PlacementSpec | None:
        """The parts of a placed step, or None."""

    @property
    def portable(self) -> Mapping[str, bytes]:
        """The files of the portable modules."""


PACKAGES = ("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime", "numpy")


@dataclass(frozen=True)
class Artifact:
    """A written artifact.

    Attributes:
        directory: the artifact's directory.
        manifest: the artifact's manifest.
        reports: the verification of each target that can run here, by target name.
    """

    directory: Path
    manifest: Manifest
    reports: dict[str, Report]

    def load(self, **options: object) -> Session:
        """Load the artifact; the options are those of `irongrad.runtime.load`."""
        return Session(self.directory, **options)  # type: ignore[arg-type]

    def _repr_html_(self) -> str:
        """The artifact as a notebook shows it: its entry points, and its targets with their verification."""
        entries = [("entry point", entry.symbol, entry.summary) for entry in self.manifest.all_entry_points]
        targets = [
            ("target", f"{t.name}, {readable(self.manifest.files[t.file].size)}", _verification(t.certificate))
            for t in self.manifest.targets
        ]
        return notebook_table(f"Artifact {self.directory}", [*targets, *entries])


def _verification(certificate: Certificate | None) -> str:
    if certificate is None:
        return "not verified: it cannot run here"
    return f"worst error {certificate.worst:.0%} of what is allowed, against eager {certificate.oracle}"


@dataclass(frozen=True)
class Origin:
    """How a module was made, for the manifest.

    Attributes:
        asked: each target as the user wrote it.
        passes: the passes that ran on the step graph.
        choices: the choices that the passes made by measurement.
        route: the route of the import: `linalg` or `stablehlo`.
        memory: the memory plan; None without one.
        function: the call structure of a compiled function; None for a training step.
        versions: the versions of further packages that made the module, such as JAX.
        layouts: the forms in which the model can be taken out.
        base: the file of the frozen parameters and buffers; None to keep them in the artifact.
        record: what the step does, without its targets.
    """

    asked: Sequence[str]
    passes: Sequence[Pass] = ()
    choices: Sequence[Choice] = ()
    route: str = "linalg"
    memory: MemorySpec | None = None
    function: FunctionSpec | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, LayoutSpec] = field(default_factory=dict)
    base: Path | None = None
    record: Analysis = field(default_factory=lambda: Analysis(RECORD_VERSION))


def package(
    module: Modules,
    compiled: Sequence[CompiledModule],
    origin: Origin,
    expected: Mapping[str, ExpectedAtSizes],
    initial: Path,
    output: Path,
) -> Artifact:
    """Write all files to a directory beside `output`, verify each target there, and move it into place.

    Args:
        module: the portable module, or those of the parts of a placed step.
        compiled: the compiled module of each target.
        origin: how the modules were made.
        expected: the expected values by the name of the step, and of several steps in turn. The artifact keeps those at
            the example's own sizes.
        initial: the file that `write_state` returned; it is moved into the artifact.
        output: the directory to write.

    Raises:
        VerificationError: a target's numbers are wrong; nothing is written.
    """
    with staged(output) as staging, shared_base(module.graphs[0], origin.base) as base:
        for binary in compiled:
            (staging / f"step.{binary.target.name}.vmfb").write_bytes(binary.vmfb)
        for name, bytecode in module.portable.items():
            (staging / name).write_bytes(bytecode)
        shutil.move(initial, staging / INITIAL_STATE)
        manifest = _with_header(_manifest(module, compiled, origin, staging), staging)
        manifest = replace(manifest, base_file=None if base is None else base_spec(module.graphs[0], base, output))
        write_manifest(manifest, staging)
        reports: dict[str, Report] = {}
        targets: list[TargetSpec] = []
        for together in _loaded_together(manifest):
            runs_here = not any(why_not(target, staging, target.device) for target in together)
            if not (runs_here and all(is_local(target.device) for target in together)):
                for values in expected.values():
                    values.own.widest()  # other devices may round more; other CPUs round like this one
            if runs_here:
                chosen = together[0].name if manifest.placement is None else None
                report = verified(Session(staging, target=chosen, on_nonfinite="ignore"), expected)
                reports |= {target.name: report for target in together}
                together = tuple(replace(t, certificate=certificate(report, t.device)) for t in together)
            targets += together
        write_record(origin.record, compiled, reports, staging)
        files = {**manifest.files, ANALYSIS: file_spec(staging / ANALYSIS)}
        for name, values in expected.items():
            path = staging / golden_file(name if name in manifest.steps else "")
            _write_golden(values.own.golden, path)
            files[path.name] = file_spec(path)
        manifest = write_manifest(replace(manifest, targets=tuple(targets), files=files), staging)
        publish(staging, output)
    return Artifact(output, manifest, reports)


def _loaded_together(manifest: Manifest) -> list[tuple[TargetSpec, ...]]:
    """The targets of the parts of a placed step at once, or each target by itself."""
    return [manifest.targets] if manifest.placement is not None else [(target,) for target in manifest.targets]


def _with_header(manifest: Manifest, staging: Path) -> Manifest:
    """Write the beginning of checkpoints, if an entry point returns the rest of one."""
    if all(entry.name != TRAIN_AND_EXPORT for entry in manifest.all_entry_points):
        return manifest
    path = staging / CHECKPOINT_HEADER
    path.write_bytes(header(manifest))
    return replace(manifest, files={**manifest.files, path.name: file_spec(path)})


def _write_golden(golden: Golden, path: Path) -> None:
    """Write the part of `golden` that the artifact keeps; packaging itself compares all of it."""
    write_golden(golden, path)
    if not are_same(read_golden(path), kept(golden)):
        raise InternalError("the stored golden values differ from the computed ones")


def write_state(module: Modules, scratch: Path) -> Path:
    """Write the initial state as an IREE parameter archive, and return the file."""
    path = scratch / INITIAL_STATE
    write_archive(path, {t.name: bytes_of(t.initial) for t in module.graphs[0].state if not t.in_base})
    return path


def write_record(
    record: Analysis, compiled: Sequence[CompiledModule], reports: Mapping[str, Report], directory: Path
) -> None:
    """Write the record of the compilation, with the kernels of `compiled` added to it or in place of earlier ones.

    Args:
        record: the record of the step.
        compiled: the compiled modules.
        reports: the verification of each of these targets that can run here, by name.
        directory: where the artifact is written.
    """
    verified = {name: _judged(report) for name, report in reports.items()}
    own = {
        c.target.name: replace(c.record, other_sizes=record.other_sizes, judged=verified.get(c.target.name, ()))
        for c in compiled
    }
    (directory / ANALYSIS).write_bytes(encoded(replace(record, targets={**record.targets, **own})))


def _judged(report: Report) -> tuple[Judged, ...]:
    bounded = (c for c in report.comparisons if 0 < c.allowed < math.inf)
    return tuple(Judged(c.entry_point, c.key, c.error, c.allowed, c.elements) for c in bounded)


def target_spec(compiled: CompiledModule, asked: str) -> TargetSpec:
    """The manifest's entry for a compiled module, not yet verified; `asked` is the target as the user wrote it."""
    return TargetSpec(
        name=compiled.target.name,
        file=f"step.{compiled.target.name}.vmfb",
        device=compiled.device,
        flags=compiled.flags,
        architecture=compiled.architecture,
        features=compiled.features,
        transients=compiled.statistics.transients,
        compiler=version("iree-base-compiler"),
        asked=asked,
        subgroup=compiled.target.subgroup,
    )


def _choice(choice: Choice) -> ChoiceSpec:
    seconds, failed = dict(choice.seconds), dict(choice.failed)
    return ChoiceSpec(choice.what, choice.chosen, seconds, choice.default, choice.target, failed)


def _manifest(module: Modules, compiled: Sequence[CompiledModule], origin: Origin, directory: Path) -> Manifest:
    targets = [target_spec(c, a) for c, a in zip(compiled, origin.asked, strict=True)]
    names = [*(t.file for t in targets), *module.portable, INITIAL_STATE]
    graph = module.graphs[0]
    versions = {"irongrad": VERSION, "python": platform.python_version()}
    whole = module.interfaces[0]
    return Manifest(
        format_version=FORMAT_VERSION,
        **_of_step(graph, whole) if not graph.name else _of_whole(module),
        state=whole.state,
        base=_base(graph),
        layouts=dict(origin.layouts),
        targets=tuple(targets),
        versions=versions | {p: version(p) for p in PACKAGES} | dict(origin.versions),
        passes=tuple(map(spelled, origin.passes)),
        route=origin.route,
        tuned=tuple(map(_choice, origin.choices)),
        memory=origin.memory,
        function=origin.function,
        files={n: file_spec(directory / n) for n in names},
        seed=next((g.seed for g in module.graphs if g.seed is not None), None),
        exchange={
            g.name: tuple(b.nbytes for b in exchange_buckets(exchanged(g, outputs=True), g))
            for g in module.graphs
            if g.bucket_bytes and "joint" in g.functions
        },
        statistics={g.name: sizes for g in module.graphs if (sizes := statistics_bytes(g))},
        shards=tuple(shard.state for shard in graph.shards),
        placement=module.placement,
        relied={t.name: _relied(t, t.relied) for t in graph.state if t.relied is not None},
        steps={
            graph.name: StepSpec(**_of_step(graph, _without_whole(interface)))
            for graph, interface in zip(module.graphs, module.interfaces, strict=True)
            if graph.name
        },
    )


def _relied(tensor: StateTensor, relied: Relied) -> ReliedSpec:
    if relied.bounds is not None:
        return ReliedSpec(relied.line, bounds=relied.bounds)
    digest = hashlib.sha256(bytes_of(tensor.initial).data).hexdigest()
    return ReliedSpec(relied.line, shown_values(to_numpy(tensor.initial)), digest)


def _of_whole(module: Modules) -> dict[str, Any]:
    """The fields of a manifest of several steps that each step has, too: those of the whole state."""
    entry_points = tuple(e for i in module.interfaces for e in i.entry_points if e.name in OF_WHOLE)
    gradients = tuple(dict.fromkeys(name for graph in module.graphs for name in graph.gradients))
    return {"entry_points": entry_points, "hypers": (), "fixed": {}, "gradients": gradients}


def _without_whole(interface: Interface) -> Interface:
    return replace(interface, entry_points=tuple(e for e in interface.entry_points if e.name not in OF_WHOLE))


def _of_step(graph: StepGraph, interface: Interface) -> dict[str, Any]:
    """The fields of a manifest that concern one step."""
    return {
        "entry_points": interface.entry_points,
        "hypers": tuple(HyperSpec(n, v) for n, v in graph.hypers.items()),
        "fixed": dict(graph.fixed),
        "gradients": graph.gradients,
        "indices": graph.indices,
        "precision": graph.precision,
        "buckets": tuple(dict(bucket) for bucket in graph.buckets),
        "sizes": accepted_sizes(graph),
        "constraints": constraints_of(graph),
    }


def _base(graph: StepGraph) -> str:
    """The sha256 of the frozen parameters and buffers; empty if there are none."""
    frozen = [t for t in graph.state if t.frozen and t.role in OF_BASE]
    digest = hashlib.sha256()
    for tensor in sorted(frozen, key=lambda tensor: tensor.name):
        digest.update(tensor.name.encode() + b"\0")
        digest.update(bytes_of(tensor.initial).data)
    return digest.hexdigest() if frozen else ""
