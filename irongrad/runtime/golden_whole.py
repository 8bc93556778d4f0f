"""Whole golden values for an artifact that keeps only samples, from a run here that agrees with the samples.

`iree-run-module` needs whole values: it starts from whole states and compares whole outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError, VerificationError
from irongrad.runtime.golden import SAMPLE, Golden, key_of, read_goldens
from irongrad.runtime.manifest import Manifest
from irongrad.runtime.session import Session, load
from irongrad.runtime.verification import error_of


def whole_goldens(directory: Path, manifest: Manifest, base: Path | None = None) -> tuple[dict[str, Golden], str]:
    """Read all golden values of an artifact, with whole values in place of samples.

    Args:
        directory: the artifact's directory.
        manifest: its manifest.
        base: its base file, if not where it was when the artifact was compiled.

    Returns:
        The golden values by step, and the reason why some are left out; empty if none is.

    Raises:
        ArtifactError: a file is damaged.
        VerificationError: a value that the artifact computes here disagrees with its sample.
    """
    found: dict[str, Golden] = {}
    reasons: list[str] = []
    for name, golden in read_goldens(directory, manifest).items():
        if golden.order:
            continue
        own = manifest.of_step(name) if name else manifest
        found[name], reason = whole_golden(directory, own, golden, name, base)
        reasons += [reason] if reason else []
    return found, next(iter(reasons), "")


def whole_golden(
    directory: Path, manifest: Manifest, golden: Golden, step: str = "", base: Path | None = None
) -> tuple[Golden, str]:
    """Replace samples by whole values, and leave out samples that have no whole value here.

    Returns:
        The golden values, and the reason why some are left out; empty if none is.

    Raises:
        VerificationError: a value that the artifact computes here disagrees with its sample.
    """
    missing = _samples(manifest, golden)
    if not missing:
        return golden, ""
    try:
        found, reason = _run(directory, manifest, golden, step, base), ""
    except ArtifactError as error:
        found, reason = {}, str(error)
    expected, allowed = dict(golden.expected), dict(golden.allowed)
    for key in missing:
        sample = expected.pop(key)
        if key not in found:
            reason = reason or "the artifact has no entry point export_state"
            continue
        if (off := error_of(golden, key, found[key], sample)) > allowed[key]:
            raise VerificationError(
                f"{directory} is wrong here: {key} is off by {off:.3g}, and {allowed[key]:.3g} is allowed"
            )
        expected[key] = found[key]
        allowed[key] *= 2  # two correct values can be twice the tolerance apart
    return replace(golden, expected=expected, allowed=allowed), reason


def _samples(manifest: Manifest, golden: Golden) -> list[str]:
    """Return the keys of values that are samples, or look like samples."""
    states = {(k, s.name): s.shape for k in range(1, golden.steps) for s in manifest.state}
    shapes: dict[str, tuple[int | str, ...]] = {key_of("state", *named): shape for named, shape in states.items()}
    for entry in (e for e in manifest.entry_points if e.is_inference):
        shapes |= {key_of(entry.name, 0, s.name): s.shape for s in entry.outputs}
    expected = golden.expected
    return [key for key, shape in shapes.items() if key in expected and expected[key].shape == (SAMPLE,) != shape]


def _run(directory: Path, manifest: Manifest, golden: Golden, step_name: str, base: Path | None) -> Mapping[str, Array]:
    """Return what the entry points compute from the golden inputs, each from the initial state."""
    has = {e.name for e in manifest.entry_points}
    found: dict[str, Array] = {}
    for entry in (e for e in manifest.entry_points if e.is_inference):
        outputs = _loaded(directory, step_name, base).call(entry.name, golden.inputs_of(entry))
        found |= {key_of(entry.name, 0, s.name): a for s, a in zip(entry.outputs, outputs, strict=True)}
    if {"train_step", "export_state"} <= has:
        session = _loaded(directory, step_name, base)
        for step in range(golden.steps - 1):
            session.train_step(**golden.inputs_of(session.entry("train_step"), step), **golden.hypers_of(step))
            found |= {key_of("state", step + 1, n): a for n, a in session.state().items()}
    return found


def _loaded(directory: Path, step: str, base: Path | None) -> Session:
    session = load(directory, base=base, on_nonfinite="ignore")
    return session.step(step) if step else session
