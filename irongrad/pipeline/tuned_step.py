"""Measure a whole step with tuned forms beside the same step without them, and keep the faster one."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from irongrad.analysis.machine import threads
from irongrad.cache import Store
from irongrad.pipeline.kept_times import keep, key_of, known
from irongrad.pipeline.package import Artifact
from irongrad.pipeline.timed_calls import Call, bound, paired
from irongrad.pipeline.tuning_budget import TuningBudget
from irongrad.runtime.devices import is_local
from irongrad.runtime.golden import Golden, read_goldens
from irongrad.runtime.manifest import (
    OF_GRADIENTS,
    OF_STATE,
    TUNED,
    UNTUNED,
    ChoiceSpec,
    StepTimes,
    TuningSpec,
)
from irongrad.runtime.manifest_file import write_manifest
from irongrad.runtime.session import Session
from irongrad.runtime.staging import publish, staged

# How long a whole step is measured, at most about, in seconds.
_SECONDS = 10.0

# The tuned step must take this much less time. If one step is loaded twice, one of the two may be faster by 1.4 % all
# the time, by the places of its values in memory (docs/dev/measurements/2026-11-27-xeon.md).
_MARGIN = 0.02


def is_tuned(artifact: Artifact) -> bool:
    """Whether any form differs from the default."""
    return any(choice.chosen != choice.default for choice in artifact.manifest.tuned)


def step_times(tuned: Artifact, untuned: Artifact, store: Store | None, budget: TuningBudget) -> StepTimes:
    """Measure a whole step of both artifacts in turns; the times on several targets, and of several steps, are added.

    Args:
        tuned: the step with tuned forms.
        untuned: the same step without them.
        store: the cache of times; None for no cache.
        budget: shows the progress. The whole step is measured even if the budget is spent.
    """
    key = key_of("whole step", (TUNED, UNTUNED), _files(tuned), _files(untuned))
    if (times := known(store, key, StepTimes)) is None:
        with budget.measuring("the whole step, tuned and untuned"):
            times = times_of(paired(_all(tuned), _all(untuned), _SECONDS))
        keep(store, key, times)
    return times


def times_of(rounds: Sequence[tuple[float, float]]) -> StepTimes:
    """The summary of the seconds of a tuned and an untuned step, in rounds in turn."""
    ratios = [tuned / untuned for tuned, untuned in rounds]
    least = [min(column) for column in zip(*rounds, strict=True)]
    return StepTimes(least[0], least[1], statistics.median(ratios), bound(ratios))


def is_faster(times: StepTimes) -> bool:
    """Whether the tuned step is faster by more than the noise of the measurement."""
    return times.bound < 1 - _MARGIN


def _files(artifact: Artifact) -> list[tuple[str, str]]:
    """What decides how long a step takes: the compiled modules."""
    manifest = artifact.manifest
    return [(target.device, manifest.files[target.file].sha256) for target in manifest.targets]


def _all(artifact: Artifact) -> Call:
    """A call that runs each step on each target."""
    calls = list(_calls(artifact))

    def run() -> None:
        for call in calls:
            call()

    return run


def _calls(artifact: Artifact) -> Iterator[Call]:
    """A call of each step, on each target."""
    manifest = artifact.manifest
    goldens = read_goldens(artifact.directory, manifest)
    for target in manifest.targets:
        device = "local-sync" if threads() == 1 and is_local(target.device) else None  # as `timed_calls.device_of`
        session = Session(artifact.directory, target=target.name, device=device, on_nonfinite="ignore")
        for name in manifest.steps or ("",):
            yield _call(session.step(name) if name else session, goldens[name])


def _call(session: Session, golden: Golden) -> Call:
    """A call of what users call most: a training step, whole or in pieces, or else the first entry point."""
    entries = {entry.name: entry for entry in session.manifest.entry_points}
    if "finish_step" in entries and "train_step" not in entries:
        return partial(_in_pieces, session, *(golden.inputs_of(entries[n]) for n in ("forward", "finish_step")))
    computing = [entry for name, entry in entries.items() if name not in (*OF_STATE, *OF_GRADIENTS)]
    entry = entries.get("train_step", computing[0])
    inputs = golden.inputs_of(entry)
    if entry.is_stacked:
        inputs = {name: value[None] for name, value in inputs.items()}
    return partial(_run, session, entry.name, {**inputs, **(golden.hypers if entry.hypers else {})})


def _in_pieces(session: Session, inputs: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    _, ticket = session.forward(**inputs)
    session.finish_step(ticket, **rest)


def _run(session: Session, name: str, arguments: Mapping[str, Any]) -> None:
    session.call(name, **arguments)


def keep_faster(tuned: Artifact, untuned: Artifact | None, times: StepTimes | None, budget: TuningBudget) -> Artifact:
    """Write what was measured into the artifact, and put the untuned one in its place unless the tuned one is faster.

    Args:
        tuned: the step with tuned forms, in its place.
        untuned: the step without them, in another directory; None if all forms are the default ones.
        times: the times of a step of both; None without `untuned`.
        budget: what was measured.
    """
    keeps_tuned = times is not None and is_faster(times)
    better = tuned if untuned is None or keeps_tuned else untuned
    choices = tuned.manifest.tuned if keeps_tuned else tuple(map(_as_default, tuned.manifest.tuned))
    kept = TUNED if keeps_tuned else UNTUNED
    measured = {(choice.target, choice.what) for choice in choices}  # functions share the times of equal computations
    about = TuningSpec(int(budget.seconds), len(measured), budget.left_out, times, kept)
    manifest = replace(better.manifest, tuned=choices, tuning=about, base_file=tuned.manifest.base_file)
    with staged(tuned.directory) as staging:
        shutil.copytree(better.directory, staging, dirs_exist_ok=True)
        manifest = write_manifest(manifest, staging)
        publish(staging, tuned.directory)
    return Artifact(tuned.directory, manifest, better.reports)


def _as_default(choice: ChoiceSpec) -> ChoiceSpec:
    return replace(choice, chosen=choice.default)
