"""Golden values as checks that iree-run-module runs alone: plain files and command lines, no Python at test time.

A process of iree-run-module calls one function, and its state ends with it. So a later step is checked from a
checkpoint of the golden state before it. The update itself is checked by `train_steps`, whose losses depend on it.
Further checks require that a bad input is refused, and compare the text of the refusal.

Commands refer to the artifact's directory as `${IRONGRAD_ARTIFACT}`, to its base file as `${IRONGRAD_BASE}`, and to the
golden files' directory as `${IRONGRAD_GOLDEN}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.bad_inputs import bad_inputs
from irongrad.runtime.commands import file_value, run_module
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import OF_STATE, STACKED, STEPS_DIM, EntryPoint, Manifest, TargetSpec, TensorSpec
from irongrad.runtime.safetensors_file import numpy_dtype

ARTIFACT = "${IRONGRAD_ARTIFACT}"
BASE = "${IRONGRAD_BASE}"
FILES = "${IRONGRAD_GOLDEN}"

_THRESHOLDS = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}

# All other dtypes are stored as raw bytes. iree-run-module reads integers from .npy as signed (si64), but an entry
# point's results are signless (i64), so the two never compare equal. bfloat16 has no .npy format at all.
_COMPARED_AS_NPY = ("float64", "float32", "float16", "bool")

# The error of an entry point that continues another one. A process calls only one entry point, so the earlier call's
# state is gone.
_NEEDS_A_CALL_BEFORE = {"apply_step": "no gradients are accumulated", "finish_step": "no forward is open"}


@dataclass(frozen=True)
class Check:
    """One run of iree-run-module.

    Attributes:
        name: unique in the plan: target, entry point and, for all but the plain call, a suffix for the special case.
        target: the name of the artifact's target.
        command: the argument list, the program first.
        refusal: text that the error message must contain; empty if the run must succeed.
        optional: whether the check is skipped on a machine without the device.
    """

    name: str
    target: str
    command: tuple[str, ...]
    refusal: str
    optional: bool


@dataclass(frozen=True)
class Plan:
    """All checks, and the files that they need.

    Attributes:
        checks: the runs of iree-run-module.
        arrays: contents of the .npy and .bin files, by relative path.
        states: contents of the checkpoints, by relative path.
    """

    checks: tuple[Check, ...]
    arrays: Mapping[str, Array]
    states: Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True)
class _Expected:
    value: Array
    allowed: float


def make_plan(
    manifest: Manifest,
    goldens: Mapping[str, Golden],
    initial: Mapping[str, Array],
    *,
    target: str | None = None,
    device: str | None = None,
) -> Plan:
    """Plan the checks of every entry point.

    Args:
        manifest: the artifact's manifest.
        goldens: whole golden values (`irongrad.runtime.golden_whole`) of each step by name, or of the only step under
            an empty name; values that are missing are not checked.
        initial: the artifact's initial state, by name.
        target: the name of the only target to check; all targets by default.
        device: an IREE device URI; each target's own by default.
    """
    planners = [_Planner(manifest, name, golden, initial) for name, golden in goldens.items() if not golden.order]
    for spec in manifest.targets:
        for planner in planners if target in (None, spec.name) else ():
            planner.plan(spec, device)
    arrays = {path: array for planner in planners for path, array in planner.arrays.items()}
    states = {path: state for planner in planners for path, state in planner.states.items()}
    return Plan(tuple(check for planner in planners for check in planner.checks), arrays, states)


class _Planner:
    """The checks of one step, with their files in a folder of its name."""

    def __init__(self, manifest: Manifest, step: str, golden: Golden, initial: Mapping[str, Array]) -> None:
        self.checks: list[Check] = []
        self.arrays: dict[str, Array] = {}
        self.states: dict[str, dict[str, Array]] = {}
        self._whole = manifest
        self._manifest = manifest.of_step(step) if step else manifest
        self._folder = f"{step}/" if step else ""
        self._golden = golden
        self._initial = initial

    def plan(self, target: TargetSpec, device: str | None) -> None:
        """Add the checks of every entry point of one target."""
        self._target, self._device = target, device
        for point in self._manifest.entry_points:
            inputs = self._inputs(point)
            if (refusal := _NEEDS_A_CALL_BEFORE.get(point.name)) is not None:
                self._add(point, "", inputs, refusal=refusal)
                continue
            hypers: Mapping[str, float | Sequence[float]] = self._golden.hypers_of(0)
            if point.is_stacked:
                hypers = self._golden.stacked_hypers(self._manifest.hypers)
            self._matches(point, "", inputs, self._expected(point), hypers=hypers)
            if point.name not in OF_STATE:
                for bad in bad_inputs(self._manifest, self._golden, point, inputs):
                    self._add(point, f".{bad.what}", {**inputs, **bad.values}, refusal=bad.refusal)
            if point.name == "train_step":
                for step in filter(self._has_state, range(1, self._golden.steps)):
                    reported, given = self._reported(point, step), self._inputs(point, step)
                    self._matches(point, f".from_step_{step}", given, reported, self._state(step))

    def _inputs(self, point: EntryPoint, step: int = 0) -> dict[str, Path | str]:
        """Return the files that hold the golden inputs of an entry point in a step, by name."""
        if point.name == "import_state":
            return {s.name: self._file("state", s, self._initial[s.name], compared=True) for s in point.inputs}
        if point.name == "import_gradients":
            return {}
        golden = self._golden
        inputs = golden.stacked_inputs_of(point) if point.is_stacked else golden.inputs_of(point, step)
        files: dict[str, Path | str] = {}
        for spec in [s for s in point.inputs if s.name in inputs]:
            key = point.key(spec.name)
            folder = "stacked" if point.is_stacked else "later" if step and key in golden.later else "inputs"
            files[spec.name] = self._file(folder, replace(spec, name=key), inputs[spec.name], compared=False)
        return files

    def _expected(self, point: EntryPoint) -> dict[str, _Expected]:
        """Return the outputs that a fresh process must give, by name."""
        match point.name:
            case "train_step" | "grad_step":
                return self._reported(point, 0)
            case name if name in STACKED:
                return self._stacked(point)
            case "eval_step":
                keys = {s.name: key_of("eval", 0, s.name if number else "") for number, s in enumerate(point.outputs)}
                return {name: self._value(key) for name, key in keys.items()}
            case "forward":
                *outputs, ticket = point.outputs
                return self._outputs(point.name, outputs) | {ticket.name: _Expected(np.array(1), 0.0)}
            case "export_state":
                return {s.name: _Expected(self._initial[s.name], 0.0) for s in point.outputs}
            case _:
                return self._outputs(point.name, point.outputs) if point.is_inference else {}

    def _reported(self, point: EntryPoint, step: int) -> dict[str, _Expected]:
        """The loss of a step and the values beside it, by the names of the outputs of an entry point."""
        loss, *values = point.outputs
        expected = {s.name: self._value(key_of("value", step, s.name)) for s in values}
        return {loss.name: self._value(key_of("loss", step)), **expected}

    def _stacked(self, point: EntryPoint) -> dict[str, _Expected]:
        losses = replace(point, outputs=tuple(s for s in point.outputs if s.shape[:1] == (STEPS_DIM,)))
        steps = [self._reported(losses, step) for step in range(self._golden.steps)]
        return {
            name: _Expected(np.stack([s[name].value for s in steps]), max(s[name].allowed for s in steps))
            for name in steps[0]
        }

    def _outputs(self, kind: str, specs: Sequence[TensorSpec]) -> dict[str, _Expected]:
        keys = {s.name: key_of(kind, 0, s.name) for s in specs}
        return {name: self._value(key) for name, key in keys.items() if key in self._golden.expected}

    def _value(self, key: str) -> _Expected:
        return _Expected(self._golden.expected[key], self._golden.allowed[key])

    def _has_state(self, step: int) -> bool:
        return all(key_of("state", step, s.name) in self._golden.expected for s in self._manifest.state)

    def _state(self, step: int) -> Path:
        """Return the checkpoint of the golden state before `step`."""
        path = f"{self._folder}state.{step}.safetensors"
        self.states[path] = {
            s.name: _cast(self._golden.expected[key_of("state", step, s.name)], s.dtype) for s in self._manifest.state
        }
        return Path(FILES, path)

    def _file(self, folder: str, spec: TensorSpec, array: Array, *, compared: bool) -> Path:
        npy = spec.dtype in _COMPARED_AS_NPY if compared else spec.dtype != "bfloat16"
        path = f"{self._folder}{folder}/{spec.name}{'.npy' if npy else '.bin'}"
        self.arrays[path] = _cast(array, spec.dtype)
        return Path(FILES, path)

    def _matches(
        self,
        point: EntryPoint,
        suffix: str,
        inputs: Mapping[str, Path | str],
        expected: Mapping[str, _Expected],
        state: Path | None = None,
        hypers: Mapping[str, float | Sequence[float]] | None = None,
    ) -> None:
        """Check outputs in one run, or each in its own run if their tolerances differ: a run takes one tolerance."""
        single = len({e.allowed for e in expected.values()}) < 2
        for names in [list(expected)] if single else [[n] for n in expected]:
            flags = self._comparison(point, suffix, {n: expected[n] for n in names}) if names else []
            own = suffix if single else f"{suffix}.{names[0]}"
            self._add(point, own, inputs, flags=flags, state=state, hypers=hypers)

    def _comparison(self, point: EntryPoint, suffix: str, expected: Mapping[str, _Expected]) -> list[str]:
        folder = "state" if point.name == "export_state" else f"expected/{point.name}{suffix}"
        flags: dict[str, None] = {"--expected_rtol=0": None}
        values = []
        for spec in point.outputs:
            if spec.name not in expected:
                values.append("--expected_output=(ignored)")
                continue
            file = self._file(folder, spec, expected[spec.name].value, compared=True)
            values.append(f"--expected_output={file_value(spec, file, self._golden.steps)}")
            if spec.dtype in _THRESHOLDS:
                flags[f"--expected_{_THRESHOLDS[spec.dtype]}_threshold={expected[spec.name].allowed!r}"] = None
        return [*flags, *values]

    def _add(
        self,
        point: EntryPoint,
        suffix: str,
        inputs: Mapping[str, Path | str],
        *,
        flags: list[str] | None = None,
        state: Path | None = None,
        hypers: Mapping[str, float | Sequence[float]] | None = None,
        refusal: str = "",
    ) -> None:
        device = self._device
        if device is None and self._target.device == "local-task" and (refusal or not point.outputs):
            # IREE 3.13.0 does not wait for a call that fails or has no results, and local-task may then hang at exit
            # (one run in 300 or 1500).
            device = "local-sync"
        command = run_module(
            self._whole,
            Path(ARTIFACT),
            point.symbol,
            inputs=inputs,
            hypers=hypers,
            state=state,
            base=Path(BASE),
            target=self._target.name,
            device=device,
            size=self._golden.steps,
        )
        folder = self._folder.replace("/", ".") if not point.step else ""
        name = f"{self._target.name}.{folder}{point.symbol}{suffix}"
        optional = self._target.certificate is None
        self.checks.append(Check(name, self._target.name, (*command, *(flags or ())), refusal, optional))


def _cast(array: Array, dtype: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array).astype(numpy_dtype(dtype))
