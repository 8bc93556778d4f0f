"""Golden values as checks that iree-run-module makes alone: plain files and command lines, no Python at test time.

A process of iree-run-module calls one function, and the state ends with it. So a later step is checked from a
checkpoint of the golden state before it, and the update itself by `train_steps`, whose losses depend on it. What must
be refused is checked as well, by the text of the refusal.

Commands name the artifact's directory `${IRONGRAD_ARTIFACT}` and that of the golden files `${IRONGRAD_GOLDEN}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np

from irongrad.runtime import checkpoint
from irongrad.runtime.arrays import Array
from irongrad.runtime.commands import file_value, filled_value, run_module
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import OF_STATE, TICKET, EntryPoint, Manifest, TargetSpec, TensorSpec
from irongrad.runtime.refusals import NOT_RUN, mismatch, out_of_range

ARTIFACT = "${IRONGRAD_ARTIFACT}"
FILES = "${IRONGRAD_GOLDEN}"

_THRESHOLDS = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}

# iree-run-module reads integers from .npy as signed (si64), and an entry point's results have no sign (i64): they
# never compare equal. bfloat16 has no .npy at all. Those are stored as raw bytes.
_COMPARED_AS_NPY = ("float64", "float32", "float16", "bool")

# What a process says that calls an entry point alone which goes on from another; its state ends with it.
_NEEDS_A_CALL_BEFORE = {"apply_step": "no gradients are accumulated", "finish_step": "no forward is open"}

# What a machine without the device says; a target that never ran where it was compiled is skipped there.
_NO_DEVICE = "creating (driver for )?device '"


@dataclass(frozen=True)
class Check:
    """One run of iree-run-module.

    Attributes:
        name: unique in the plan: target, entry point and, for all but the plain call, what is special.
        target: of the artifact.
        command: the arguments, the program first.
        refusal: what the error message must contain; empty where the run must succeed.
        optional: whether a machine without the device may skip it.
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
        checks: the runs.
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
    golden: Golden,
    initial: Mapping[str, Array],
    *,
    target: str | None = None,
    device: str | None = None,
) -> Plan:
    """Plan the checks of every entry point.

    Args:
        manifest: of the artifact.
        golden: its golden values, whole (`irongrad.runtime.golden_whole`); what they lack is not checked.
        initial: its initial state, by name.
        target: the only target to check; all of them otherwise.
        device: an IREE device URI; the target's own otherwise.
    """
    planner = _Planner(manifest, golden, initial)
    for spec in manifest.targets:
        if target in (None, spec.name):
            planner.plan(spec, device)
    return Plan(tuple(planner.checks), planner.arrays, planner.states)


class _Planner:
    def __init__(self, manifest: Manifest, golden: Golden, initial: Mapping[str, Array]) -> None:
        self.checks: list[Check] = []
        self.arrays: dict[str, Array] = {}
        self.states: dict[str, dict[str, Array]] = {}
        self._manifest = manifest
        self._golden = golden
        self._initial = initial

    def plan(self, target: TargetSpec, device: str | None) -> None:
        """Add the checks of one target, every entry point in turn."""
        self._target, self._device = target, device
        for point in self._manifest.entry_points:
            inputs = self._inputs(point)
            if (refusal := _NEEDS_A_CALL_BEFORE.get(point.name)) is not None:
                self._add(point, "", inputs, refusal=refusal)
                continue
            self._matches(point, "", inputs, self._expected(point))
            if point.name not in OF_STATE:
                self._refusals(point, inputs)
            if point.name == "train_step":
                for step in filter(self._has_state, range(1, self._golden.steps)):
                    loss = {point.outputs[0].name: self._value(key_of("loss", step))}
                    self._matches(point, f".from_step_{step}", inputs, loss, self._state(step))

    def _inputs(self, point: EntryPoint) -> dict[str, Path | str]:
        """Files with golden values for the inputs that have one."""
        if point.name == "import_state":
            return {s.name: self._file("state", s, self._initial[s.name], compared=True) for s in point.inputs}
        if point.name == "import_gradients":
            return {}
        stack = self._golden.steps if point.name == "train_steps" else 0
        files: dict[str, Path | str] = {}
        for spec in [s for s in point.inputs if s.name != TICKET]:
            value = self._golden.inputs[spec.name]
            array = np.stack([value] * stack) if stack else value
            files[spec.name] = self._file("stacked" if stack else "inputs", spec, array, compared=False)
        return files

    def _expected(self, point: EntryPoint) -> dict[str, _Expected]:
        """What a fresh process must return, by output name."""
        match point.name:
            case "train_step" | "grad_step":
                return {point.outputs[0].name: self._value(key_of("loss", 0))}
            case "train_steps":
                losses = [self._value(key_of("loss", k)) for k in range(self._golden.steps)]
                stacked = _Expected(np.stack([e.value for e in losses]), max(e.allowed for e in losses))
                return {point.outputs[0].name: stacked}
            case "eval_step":
                return {point.outputs[0].name: self._value(key_of("eval", 0))}
            case "predict":
                return self._outputs(point.name, point.outputs)
            case "forward":
                *outputs, ticket = point.outputs
                return self._outputs(point.name, outputs) | {ticket.name: _Expected(np.array(1), 0.0)}
            case "export_state":
                return {s.name: _Expected(self._initial[s.name], 0.0) for s in point.outputs}
            case _:
                return {}

    def _outputs(self, kind: str, specs: Sequence[TensorSpec]) -> dict[str, _Expected]:
        keys = {s.name: key_of(kind, 0, s.name) for s in specs}
        return {name: self._value(key) for name, key in keys.items() if key in self._golden.expected}

    def _value(self, key: str) -> _Expected:
        return _Expected(self._golden.expected[key], self._golden.allowed[key])

    def _has_state(self, step: int) -> bool:
        return all(key_of("state", step, s.name) in self._golden.expected for s in self._manifest.state)

    def _state(self, step: int) -> Path:
        """A checkpoint of the golden state before `step`."""
        path = f"state.{step}.safetensors"
        self.states[path] = {
            s.name: _cast(self._golden.expected[key_of("state", step, s.name)], s.dtype) for s in self._manifest.state
        }
        return Path(FILES, path)

    def _file(self, folder: str, spec: TensorSpec, array: Array, *, compared: bool) -> Path:
        npy = spec.dtype in _COMPARED_AS_NPY if compared else spec.dtype != "bfloat16"
        path = f"{folder}/{spec.name}{'.npy' if npy else '.bin'}"
        self.arrays[path] = _cast(array, spec.dtype)
        return Path(FILES, path)

    def _matches(
        self,
        point: EntryPoint,
        suffix: str,
        inputs: Mapping[str, Path | str],
        expected: Mapping[str, _Expected],
        state: Path | None = None,
    ) -> None:
        """Check the results, each in a run of its own if they differ in what is allowed: a run takes one tolerance."""
        single = len({e.allowed for e in expected.values()}) < 2
        for names in [list(expected)] if single else [[n] for n in expected]:
            flags = self._comparison(point, suffix, {n: expected[n] for n in names}) if names else []
            own = suffix if single else f"{suffix}.{names[0]}"
            self._add(point, own, inputs, flags=flags, state=state)

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

    def _refusals(self, point: EntryPoint, inputs: Mapping[str, Path | str]) -> None:
        """Check that a wrong shape and a value out of range are refused, one input at a time, and then wrong sizes."""
        for spec in point.inputs:
            if spec.name not in inputs:
                continue
            own = self._sized(spec, {})
            value, refusal = _wrong_shape(spec, own, self._golden.steps)
            self._add(point, f".wrong_shape.{spec.name}", {**inputs, spec.name: value}, refusal=refusal)
            if (wrong := _outside(spec)) is not None:
                value = filled_value(own, wrong, self._golden.steps)
                refusal = out_of_range(spec, wrong)
                self._add(point, f".out_of_range.{spec.name}", {**inputs, spec.name: value}, refusal=refusal)

        for name, (_, most) in self._manifest.sizes.items():
            if most is not None:
                self._too_large(point, inputs, name, most)

        for number, constraint in enumerate(self._manifest.constraints):
            given = [s for s in point.inputs if set(s.shape) & set(constraint.broken) and s.name in inputs]
            if constraint.broken and constraint.broken.keys() <= {d for s in given for d in s.shape}:
                values = {s.name: self._filled(s, constraint.broken) for s in given}
                self._add(point, f".constraint.{number}", {**inputs, **values}, refusal=constraint.refusal)

    def _filled(self, spec: TensorSpec, sizes: Mapping[str, int]) -> str:
        """A value of these sizes that is in its range."""
        return filled_value(self._sized(spec, sizes), spec.minimum or 0, self._golden.steps)

    def _too_large(self, point: EntryPoint, inputs: Mapping[str, Path | str], name: str, most: int) -> None:
        """Check that a size is refused that is one larger than the largest, with the size that was given."""
        given = [s for s in point.inputs if name in s.shape and s.name in inputs]
        if not given:
            return
        values = {s.name: self._filled(s, {name: most + 1}) for s in given}
        dim = given[0].shape.index(name)
        refusal = f"{NOT_RUN}; {mismatch(dim, most, most + 1)}"
        self._add(point, f".too_large.{name}", {**inputs, **values}, refusal=refusal)

    def _sized(self, spec: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
        """`spec` with `sizes` for its named dimensions, or those of the golden inputs; that of a stack stays."""
        own = self._golden.inputs[spec.name].shape if spec.name in self._golden.inputs else ()
        named = dict(zip(reversed(spec.shape), reversed(own), strict=False))
        known = named | dict(sizes)
        return replace(spec, shape=tuple(known.get(d, d) if isinstance(d, str) else d for d in spec.shape))

    def _add(
        self,
        point: EntryPoint,
        suffix: str,
        inputs: Mapping[str, Path | str],
        *,
        flags: list[str] | None = None,
        state: Path | None = None,
        refusal: str = "",
    ) -> None:
        device = self._device
        if device is None and not point.outputs and self._target.device == "local-task":
            # IREE 3.13.0 does not wait for a call without results, and local-task may then hang at exit (one in 1500).
            device = "local-sync"
        command = run_module(
            self._manifest,
            Path(ARTIFACT),
            point.name,
            inputs=inputs,
            state=state,
            target=self._target.name,
            device=device,
            size=self._golden.steps,
        )
        name = f"{self._target.name}.{point.name}{suffix}"
        optional = self._target.certificate is None
        self.checks.append(Check(name, self._target.name, (*command, *(flags or ())), refusal, optional))


def _cast(array: Array, dtype: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(array).astype(checkpoint.numpy_dtype(dtype))


def _wrong_shape(spec: TensorSpec, own: TensorSpec, size: int) -> tuple[str, str]:
    """A value like `own` whose last fixed dimension is one too large, or whose rank is if `spec` fixes none.

    And the refusal of it.
    """
    fixed = [i for i, d in enumerate(spec.shape) if isinstance(d, int)]
    shape = list(own.shape)
    if not fixed:
        return filled_value(replace(spec, shape=(1, *shape)), 0, size), f"{spec.name} shape rank mismatch"
    shape[fixed[-1]] = int(shape[fixed[-1]]) + 1
    wrong = replace(spec, shape=tuple(shape))
    return filled_value(wrong, spec.minimum or 0, size), f"{spec.name} shape dimension {fixed[-1]} mismatch"


def _outside(spec: TensorSpec) -> int | None:
    """A value that the input must not hold whatever the sizes, None where its dtype has none."""
    if spec.minimum is None or spec.maximum is None:
        return None
    limits = np.iinfo(spec.dtype)
    above = () if spec.limits else (spec.maximum + 1, spec.maximum + 2)
    candidates = (*above, spec.minimum - 1, spec.minimum - 2)
    return next((c for c in candidates if c != spec.exempt and limits.min <= c <= limits.max), None)


def write_files(plan: Plan, manifest: Manifest, directory: Path) -> None:
    """Write the plan's arrays and checkpoints below `directory`."""
    for name, array in plan.arrays.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npy":
            np.save(path, array)
        else:
            array.tofile(path)
    for name, state in plan.states.items():
        checkpoint.write(directory / name, state, manifest)


def ctest_script(plan: Plan, artifact: PurePath, prefix: str) -> str:
    """The plan as a `CTestTestfile.cmake`.

    Whoever includes it may set the variables that it has defaults for.

    Args:
        plan: the plan.
        artifact: the artifact's directory, relative to the script's.
        prefix: of the tests' names.
    """
    defaults = {
        "IRONGRAD_ARTIFACT": artifact.as_posix(),
        "IRONGRAD_GOLDEN": ".",
        "IRONGRAD_RUN_MODULE": "iree-run-module",
        "IRONGRAD_TEST_PREFIX": prefix,
    }
    lines = ["# Made by 'irongrad golden': 'ctest' in this directory runs it, with no Python."]
    for name, value in defaults.items():
        lines += [f"if(NOT DEFINED {name})", f"  set({name} {_quoted(value)})", "endif()"]
    for check in plan.checks:
        name = _quoted(f"${{IRONGRAD_TEST_PREFIX}}{check.name}")
        arguments = " ".join(_quoted(a) for a in ("${IRONGRAD_RUN_MODULE}", *check.command[1:]))
        lines.append(f"add_test({name} {arguments})")
        properties = {"LABELS": f"irongrad;{check.target}"}
        if check.refusal:
            properties["PASS_REGULAR_EXPRESSION"] = re.sub(r"([][().*+?^$|\\;])", r"\\\1", check.refusal)
        if check.optional:
            properties["SKIP_REGULAR_EXPRESSION"] = _NO_DEVICE
        listed = " ".join(f"{k} {_quoted(v)}" for k, v in properties.items())
        lines.append(f"set_tests_properties({name} PROPERTIES {listed})")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
