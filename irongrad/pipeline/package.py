"""Compiled modules, state and golden values -> the artifact directory, verified before anyone can see it."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from iree import runtime as ireert

from irongrad.graph.dtypes import to_numpy
from irongrad.passes import Pass, spelled
from irongrad.passes.base import Choice
from irongrad.pipeline.assemble.assemble import AssembledModule
from irongrad.pipeline.assemble.size_constraints import constraints_of
from irongrad.pipeline.assemble.size_guards import accepted_sizes
from irongrad.pipeline.iree.compile import CompiledModule
from irongrad.pipeline.oracle.expected_values import Expected, verify_against
from irongrad.runtime.devices import is_local
from irongrad.runtime.errors import InternalError, VerificationError
from irongrad.runtime.golden import Golden, are_same, kept, read_golden, write_golden
from irongrad.runtime.installed import VERSION
from irongrad.runtime.manifest import (
    FORMAT_VERSION,
    GOLDEN,
    INITIAL_STATE,
    PORTABLE_MODULE,
    SKIPPED,
    ChoiceSpec,
    FunctionSpec,
    HyperSpec,
    Manifest,
    MemorySpec,
    TargetSpec,
    file_spec,
    write_manifest,
)
from irongrad.runtime.selection import why_not
from irongrad.runtime.session import Session
from irongrad.runtime.staging import publish, staged
from irongrad.runtime.verification import Comparison, Report, certificate

PACKAGES = ("torch", "torch-mlir", "iree-base-compiler", "iree-base-runtime", "numpy")


@dataclass(frozen=True)
class Artifact:
    """A written artifact.

    Attributes:
        directory: where it lies.
        manifest: what it says of itself.
        reports: the verification of each target that can run here, by target name.
    """

    directory: Path
    manifest: Manifest
    reports: dict[str, Report]

    def load(self, **options: object) -> Session:
        """Load it; options as those of `irongrad.runtime.load`."""
        return Session(self.directory, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Origin:
    """What the manifest tells of how a module came to be.

    Attributes:
        asked: what each target was asked for as.
        passes: what ran on the step graph.
        choices: what they chose by measurement.
        route: by which dialect it was imported.
        memory: the plan of its memory.
        function: how it is called, where it is a compiled function.
        versions: of what else made it, such as JAX.
    """

    asked: Sequence[str]
    passes: Sequence[Pass] = ()
    choices: Sequence[Choice] = ()
    route: str = "linalg"
    memory: MemorySpec | None = None
    function: FunctionSpec | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


def package(
    module: AssembledModule,
    compiled: Sequence[CompiledModule],
    origin: Origin,
    expected: Expected,
    initial: Path,
    output: Path,
    others: Sequence[Expected] = (),
) -> Artifact:
    """Write all files to a directory beside `output`, verify each target there, and move it into place.

    Args:
        module: the program.
        compiled: for each target.
        origin: how they were made.
        expected: expected values, which are kept in the artifact.
        initial: the file that `write_state` made of the program's state, which is moved.
        output: the directory.
        others: expected values for other buckets than that of `expected`.

    Raises:
        VerificationError: a target's numbers are wrong; nothing is written then.
    """
    with staged(output) as staging:
        for binary in compiled:
            (staging / f"step.{binary.target.name}.vmfb").write_bytes(binary.vmfb)
        (staging / PORTABLE_MODULE).write_bytes(module.bytecode)
        shutil.move(initial, staging / INITIAL_STATE)
        manifest = _manifest(module, compiled, origin, staging)
        write_manifest(manifest, staging)
        reports: dict[str, Report] = {}
        targets: list[TargetSpec] = []
        for target in manifest.targets:
            runs_here = not why_not(target, staging, target.device)
            if not (runs_here and is_local(target.device)):
                expected.widest()  # for devices whose errors are not known here; a CPU gives what this one gives
            if runs_here:
                session = Session(staging, target=target.name)
                for number, values in enumerate((*others, expected)):
                    if number:
                        session.load_state(session.initial_state())
                    report = verify_against(session, values)
                    check_report(report, values.golden)
                reports[target.name] = report
                target = replace(target, certificate=certificate(reports[target.name], target.device))
            targets.append(target)
        _write_golden(expected.golden, staging / GOLDEN)
        files = {**manifest.files, GOLDEN: file_spec(staging / GOLDEN)}
        manifest = replace(manifest, targets=tuple(targets), files=files)
        write_manifest(manifest, staging)
        publish(staging, output)
    return Artifact(output, manifest, reports)


def _write_golden(golden: Golden, path: Path) -> None:
    """Write what the artifact keeps of `golden`, all of which is compared here, for later."""
    write_golden(golden, path)
    if not are_same(read_golden(path), kept(golden)):
        raise InternalError("the golden values as they are stored are not those that were computed")


def check_report(report: Report, golden: Golden) -> None:
    """Refuse what disagrees with the expected values.

    Raises:
        VerificationError: it does.
    """
    if not report.passed:
        bad = sorted((c for c in report.comparisons if c.ratio > 1), key=lambda c: -c.ratio)
        rows = "\n".join(
            f"  {c.entry_point:<12} {c.key}: error {c.error:.3g}, allowed {c.allowed:.3g}" for c in bad[:8]
        )
        raise VerificationError(
            f"the compiled step disagrees with eager {golden.oracle} in {len(bad)} of {len(report.comparisons)} "
            f"values, so no artifact was written:\n{rows}\n{_OTHER_SKIPS if _skips_differ(bad) else ''}"
            "This is a bug in IronGrad or its toolchain. Please report it with the model; --dump-dir DIR keeps every "
            "stage"
        )


# A gradient of examples/resnet18.py is 65530 at the default scale; float16 rounds 65520 and more to infinity.
_OTHER_SKIPS = (
    "Eager and the compiled step skip different updates. Where a scaled gradient is as large as float16's largest "
    "number, 65504, its last bits say whether it overflows: compile with another scale, such as loss_scale="
    'torch.amp.GradScaler("cpu", init_scale=2.0**14). Where that disagrees too: '
)


def _skips_differ(bad: Sequence[Comparison]) -> bool:
    return any(c.key.endswith(f"/{SKIPPED}") for c in bad)


def write_state(module: AssembledModule, scratch: Path) -> Path:
    """Write the initial state as an IREE parameter archive. Returns the file.

    Without splat entries, although zeros would then take no room: loading them races on local-task in IREE 3.13.0
    ("transient buffer has not been committed", in about one start of iree-run-module in ten).
    tests/runtime/test_iree_bugs.py tells when it no longer does.
    """
    index = ireert.ParameterIndex()
    for tensor in module.graph.state:
        index.add_buffer(tensor.name, _bytes_of(tensor.initial))
    path = scratch / INITIAL_STATE
    index.create_archive_file(str(path))
    path.chmod(0o644)  # IREE makes it unreadable for others
    return path


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return to_numpy(tensor).reshape(-1).view(np.uint8)


def target_spec(compiled: CompiledModule, asked: str) -> TargetSpec:
    """What the manifest says of a module that was compiled for what `asked` says, not verified so far."""
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


def _manifest(module: AssembledModule, compiled: Sequence[CompiledModule], origin: Origin, directory: Path) -> Manifest:
    targets = [target_spec(c, a) for c, a in zip(compiled, origin.asked, strict=True)]
    names = [t.file for t in targets] + [PORTABLE_MODULE, INITIAL_STATE]
    versions = {"irongrad": VERSION, "python": platform.python_version()}
    return Manifest(
        format_version=FORMAT_VERSION,
        entry_points=module.interface.entry_points,
        hypers=tuple(HyperSpec(n, v) for n, v in module.graph.hypers.items()),
        fixed=dict(module.graph.fixed),
        state=module.interface.state,
        gradients=module.graph.gradients,
        targets=tuple(targets),
        versions=versions | {p: version(p) for p in PACKAGES} | dict(origin.versions),
        passes=tuple(map(spelled, origin.passes)),
        route=origin.route,
        tuned=tuple(ChoiceSpec(c.what, c.chosen, dict(c.seconds)) for c in origin.choices),
        memory=origin.memory,
        function=origin.function,
        files={n: file_spec(directory / n) for n in names},
        seed=module.graph.seed,
        precision=module.graph.precision,
        buckets=tuple(dict(bucket) for bucket in module.graph.buckets),
        sizes=accepted_sizes(module.graph),
        constraints=constraints_of(module.graph),
    )
