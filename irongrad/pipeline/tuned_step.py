"""Measure a whole step with tuned forms beside the same step without them, and keep the faster one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from irongrad.cache import Store
from irongrad.pipeline.kept_times import keep, key_of, known
from irongrad.pipeline.package import Artifact
from irongrad.pipeline.timed_calls import Call, fastest
from irongrad.pipeline.tuning_budget import TuningBudget
from irongrad.runtime.golden import read_goldens
from irongrad.runtime.manifest import OF_GRADIENTS, OF_STATE, TUNED, UNTUNED, ChoiceSpec, EntryPoint, TuningSpec
from irongrad.runtime.manifest_file import write_manifest
from irongrad.runtime.session import Session
from irongrad.runtime.staging import publish, staged

# How long a whole step is measured, at most about, in seconds.
_SECONDS = 10.0


def is_tuned(artifact: Artifact) -> bool:
    """Whether any form differs from the default."""
    return any(choice.chosen != choice.default for choice in artifact.manifest.tuned)


def step_times(tuned: Artifact, untuned: Artifact, store: Store | None, budget: TuningBudget) -> dict[str, float]:
    """The seconds of a whole step of both artifacts, measured in turns; the times on several targets are added.

    Args:
        tuned: the step with tuned forms.
        untuned: the same step without them.
        store: the cache of times; None for no cache.
        budget: shows the progress. The whole step is measured even if the budget is spent.
    """
    key = key_of("whole step", (TUNED, UNTUNED), _files(tuned), _files(untuned))
    if (times := known(store, key)) is None:
        with budget.measuring("the whole step, tuned and untuned"):
            calls = [{UNTUNED: one, TUNED: other} for one, other in zip(_calls(untuned), _calls(tuned), strict=True)]
            each = [fastest(of_both, _SECONDS / len(calls)) for of_both in calls]
        times = {name: sum(of_both[name] for of_both in each) for name in (TUNED, UNTUNED)}
        keep(store, key, times)
    return times


def _files(artifact: Artifact) -> list[tuple[str, str]]:
    """What decides how long a step takes: the compiled modules."""
    manifest = artifact.manifest
    return [(target.device, manifest.files[target.file].sha256) for target in manifest.targets]


def _calls(artifact: Artifact) -> Iterator[Call]:
    """A call of the main entry point of each step, on each target."""
    manifest = artifact.manifest
    for target in manifest.targets:
        session = Session(artifact.directory, target=target.name, on_nonfinite="ignore")
        goldens = read_goldens(artifact.directory, manifest)
        for name in manifest.steps or ("",):
            view = session.step(name) if name else session
            entry = _main_entry(view.manifest.entry_points)
            golden = goldens[name]
            arguments: dict[str, Any] = {**golden.inputs_of(entry), **(golden.hypers if entry.hypers else {})}
            yield partial(_run, view, entry.name, arguments)


def _main_entry(entries: tuple[EntryPoint, ...]) -> EntryPoint:
    """The entry point that users call most: the first of those that compute, and `train_step` if there is one."""
    computing = [entry for entry in entries if entry.name not in (*OF_STATE, *OF_GRADIENTS)]
    return next((entry for entry in computing if entry.name == "train_step"), computing[0])


def _run(session: Session, name: str, arguments: dict[str, Any]) -> None:
    session.call(name, **arguments)


def keep_faster(tuned: Artifact, untuned: Artifact | None, times: dict[str, float], budget: TuningBudget) -> Artifact:
    """Write what was measured into the artifact, and put the untuned one in its place if that is as fast.

    Args:
        tuned: the step with tuned forms, in its place.
        untuned: the step without them, in another directory; None if all forms are the default ones.
        times: the seconds of a step of both, by `TUNED` and `UNTUNED`.
        budget: what was measured.
    """
    is_faster = untuned is not None and times[TUNED] < times[UNTUNED]
    better = untuned if untuned is not None and not is_faster else tuned
    choices = tuned.manifest.tuned if is_faster else tuple(map(_as_default, tuned.manifest.tuned))
    kept = TUNED if is_faster else UNTUNED
    about = TuningSpec(int(budget.seconds), len(choices), budget.left_out, times, kept)
    manifest = replace(better.manifest, tuned=choices, tuning=about, base_file=tuned.manifest.base_file)
    with staged(tuned.directory) as staging:
        shutil.copytree(better.directory, staging, dirs_exist_ok=True)
        manifest = write_manifest(manifest, staging)
        publish(staging, tuned.directory)
    return Artifact(tuned.directory, manifest, better.reports)


def _as_default(choice: ChoiceSpec) -> ChoiceSpec:
    return replace(choice, chosen=choice.default)
