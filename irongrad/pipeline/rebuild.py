"""An artifact -> the same artifact with targets compiled again from its portable module, by the installed IREE.

State, golden values and interface stay as they were captured. So a rebuild needs none of the user's Python code, and
its result is verified against the same float64 values.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from iree.compiler import ir

from irongrad.analysis.file import read_analysis
from irongrad.pipeline.iree.compile import CompiledModule
from irongrad.pipeline.iree.compile_cached import compile_all
from irongrad.pipeline.package import Artifact, target_spec, write_record
from irongrad.pipeline.tuned_products import current, with_forms
from irongrad.runtime.errors import ToolchainError, UserError, VerificationError
from irongrad.runtime.golden import read_goldens
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import ANALYSIS, INITIAL_STATE, PORTABLE_MODULE, SIGNATURE, EntryPoint, Manifest
from irongrad.runtime.manifest_file import file_spec, read_manifest, write_manifest
from irongrad.runtime.report import Report
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.selection import why_not
from irongrad.runtime.session import Session
from irongrad.runtime.staging import publish, staged
from irongrad.runtime.verification import certificate, verify
from irongrad.targets import parse_target


@dataclass(frozen=True)
class StoredModule:
    """The portable module of an artifact.

    Attributes:
        text: the module as text.
        bytecode: the module as MLIR bytecode.
        entry_points: its exported functions.
    """

    text: str
    bytecode: bytes
    entry_points: tuple[EntryPoint, ...]


def rebuild(directory: Path, targets: Sequence[str] = (), base: Path | None = None) -> Artifact:
    """Compile targets of the artifact in `directory` again, and verify them; other targets stay as they are.

    Args:
        directory: the artifact, which is replaced once everything is verified.
        targets: the targets, in the syntax of `--target`; by default all of the artifact. A new target is added.
        base: the artifact's base file, if not where it was when the artifact was compiled.

    Raises:
        ArtifactError: the artifact is damaged.
        UserError: no targets are given, and the manifest does not say how the user wrote them. Or the artifact is
            compiled with `place`.
        ToolchainError: this IREE cannot read or compile the module.
        VerificationError: a rebuilt target's numbers are wrong; the artifact stays as it was.
    """
    manifest = read_manifest(directory)
    if manifest.placement is not None:
        raise UserError(f"{directory} is compiled with place; compile the step itself again")
    check_files(manifest, directory, (PORTABLE_MODULE, INITIAL_STATE, *manifest.golden_files.values()))
    record = read_analysis(directory, manifest)
    asked = tuple(targets) or tuple(t.asked for t in manifest.targets)
    if not all(asked):
        raise UserError(f"{directory} does not say what it was compiled for; give --target")
    module = _read_module(directory / PORTABLE_MODULE, manifest)
    parsed = [parse_target(text) for text in asked]
    for target in parsed:
        manifest = replace(manifest, tuned=current(manifest.tuned, module, target))
    chosen = [with_forms(target, manifest.tuned) for target in parsed]
    with scratch_directory() as scratch:
        compiled = compile_all(None, module, chosen, scratch)
    with staged(directory) as staging:
        shutil.copytree(directory, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SIGNATURE))
        changed = _with_targets(manifest, compiled, asked, staging)
        write_manifest(changed, staging)
        rebuilt = [t for t in changed.targets if t.name in {c.target.name for c in compiled}]
        reports = {t.name: _verified(staging, t.name, base) for t in rebuilt if not why_not(t, staging, t.device)}
        signed = tuple(
            replace(t, certificate=certificate(reports[t.name], t.device)) if t.name in reports else t
            for t in changed.targets
        )
        write_record(record, compiled, reports, staging)
        files = {**changed.files, ANALYSIS: file_spec(staging / ANALYSIS)}
        changed = write_manifest(replace(changed, targets=signed, files=files), staging)
        publish(staging, directory)
    return Artifact(directory, changed, reports)


def _read_module(path: Path, manifest: Manifest) -> StoredModule:
    bytecode = path.read_bytes()
    with ir.Context(), ir.Location.unknown():
        try:
            return StoredModule(str(ir.Module.parse(bytecode)), bytecode, manifest.all_entry_points)
        except ir.MLIRError as error:
            raise ToolchainError(f"this IREE cannot read {path}: {error}") from error


def _with_targets(
    manifest: Manifest, compiled: Sequence[CompiledModule], asked: Sequence[str], staging: Path
) -> Manifest:
    """Write the compiled files to `staging`; return the manifest with these targets replaced or added."""
    targets, files = {t.name: t for t in manifest.targets}, dict(manifest.files)
    for binary, text in zip(compiled, asked, strict=True):
        spec = target_spec(binary, text)
        targets[spec.name] = spec
        (staging / spec.file).write_bytes(binary.vmfb)
        files[spec.file] = file_spec(staging / spec.file)
    return replace(manifest, targets=tuple(targets.values()), files=files)


def _verified(staging: Path, target: str, base: Path | None) -> Report:
    session = Session(staging, target=target, base=base, on_nonfinite="ignore")
    goldens = read_goldens(staging, session.manifest)
    report = verify(session, goldens)
    if not report.passed:
        worst = report.worst
        raise VerificationError(
            f"{target}, compiled again, disagrees with eager {report.oracle}: {worst.entry_point} "
            f"{worst.key}: error {worst.error:.3g}, allowed {worst.allowed:.3g}. The artifact stays as it was. Its "
            "tolerances were measured when its program was verified; compiling the step itself measures them again"
        )
    return report
