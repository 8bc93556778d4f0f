"""Verification: run the golden steps through a loaded artifact and compare every value; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.devices import find_device, is_local
from irongrad.runtime.golden import SAMPLE, Golden, Resting, key_of, sampled
from irongrad.runtime.manifest import STACKED, TRAIN_AND_EXPORT, Certificate, Role, trained_state
from irongrad.runtime.report import Comparison, Report, combined
from irongrad.runtime.session import Session
from irongrad.runtime.undecided import unforgiven

_BLOCK = 1 << 16  # elements
_WITHOUT_GRADIENTS = {"apply_step", "export_gradients", "import_gradients"}  # takes a step whose gradients are zero
_SIGNED_WITH = {"irongrad": "irongrad", "iree": "iree-base-runtime"}


def verify(session: Session, goldens: Mapping[str, Golden]) -> Report:
    """Compare with golden values from the initial state, whatever state the session holds, and restore that state.

    Args:
        session: a session.
        goldens: the golden values of each step by name; those of the only step, or of several in turn, have an empty
            name (`irongrad.runtime.golden.read_goldens`).
    """
    if session.manifest.entry_point("export_state") is None:  # a function has no state
        return golden_steps(session, goldens[""])
    before = _state(session)
    reports: dict[str, Report] = {}
    try:
        for name, golden in goldens.items():
            session.load_state(session.initial_state())
            run = alternating_steps if golden.order else golden_steps
            reports[name] = run(session.step(name) if name else session, golden)
        return combined(reports)
    finally:
        session.load_state(before)


def alternating_steps(session: Session, golden: Golden) -> Report:
    """Run several steps over one state in the order of the golden values; compare the losses, and the state at the end.

    Args:
        session: a session at the artifact's initial state.
        golden: the expected values; nothing is compared unless every step has `train_step`.
    """
    found: list[Comparison] = []
    views = {name: session.step(name) for name in golden.order}
    if all(view.manifest.entry_point("train_step") is not None for view in views.values()):
        for position, name in enumerate(golden.order):
            inputs = {n.removeprefix(f"{name}."): a for n, a in golden.inputs.items() if n.startswith(f"{name}.")}
            loss, *_ = views[name].call("train_step", inputs)
            _compare(found, golden, "in turn", key_of("loss", position), loss)
        _compare_state(found, golden, "in turn", golden.steps, _state(session))
    return Report(tuple(found), golden.steps, golden.oracle)


def golden_steps(session: Session, golden: Golden, *, is_fresh: bool = False) -> Report:
    """Run the golden steps through every entry point that the artifact has.

    Compares the losses, every gradient and every state tensor of each step, from `train_step`, from `grad_step` with
    `apply_step`, from `train_steps`, from `train_and_export`, and from `forward` with `finish_step`. The two that take
    several steps must also give what as many calls of `train_step` give, and at rest nothing may move (`Resting`). The
    session keeps the state of the last run.

    Args:
        session: a session at the artifact's initial state.
        golden: the expected values.
        is_fresh: whether the session was loaded from the artifact alone. Its entry point `reset` then puts it back to
            the initial state between the runs, but once, when `import_state` does.
    """
    found: list[Comparison] = []
    for number, run in enumerate(_runs(session, golden)):
        # Each run starts from the initial state: even in evaluation mode, a forward may write buffers and draw random
        # numbers.
        if number > 1 and is_fresh:
            restart(session)
        elif number:
            session.load_state(session.initial_state())
        run(session, golden, found)
    return Report(tuple(found), golden.steps, golden.oracle)


def restart(session: Session) -> None:
    """Put a session that was loaded from its artifact alone back to the initial state.

    Its entry point `reset` copies the state in memory. Reading the file and checking its hash takes as long as a step.
    """
    if any(entry.name == "reset" for entry in session.manifest.entry_points):
        session.reset()
    else:
        session.load_state(session.initial_state())


def _runs(session: Session, golden: Golden) -> Iterator[Callable[[Session, Golden, list[Comparison]], None]]:
    """Yield the runs, in order."""
    has = {e.name for e in session.manifest.entry_points}
    results: dict[str, Array] = {}  # of train_step, for train_steps
    if "call" in has:
        yield partial(_call, "call", 0)
    for number in golden.batches:
        if "eval_step" in has:
            yield partial(_eval_step, number)
        for name in (e.name for e in session.manifest.entry_points if e.is_inference):
            yield partial(_call, name, number)
    if "train_step" in has:
        yield partial(_train_step, results)
    if "finish_step" in has:
        yield _in_pieces
    if "grad_step" in has:
        yield partial(_accumulation, has)
    for name in STACKED:
        if name in has and not (session.is_sharded and name == TRAIN_AND_EXPORT):  # it exports the state of all ranks
            yield partial(_stacked_steps, name, results)
    rests = has >= _WITHOUT_GRADIENTS or ("train_step" in has and not golden.first_hypers)
    if golden.resting is not None and "export_state" in has and rests:
        yield partial(_at_rest, golden.resting)


def certificate(report: Report, device: str) -> Certificate:
    """Return the manifest's record of a report.

    A CPU is not named, so that every CPU makes the same manifest.
    """
    worst, found = report.worst, None if is_local(device) else find_device(device)
    return Certificate(
        device=device,
        steps=report.steps,
        worst=worst.ratio,
        tensor=f"{worst.entry_point} {worst.key}",
        oracle=report.oracle,
        name=found.name if found is not None else "",
        driver=found.driver if found is not None else "",
        unjudged=report.unjudged_values,
    )


def signed(report: Report, device: str) -> Certificate:
    """Return a certificate that also has the CPU's name, the versions that made the report, and today's date."""
    found = find_device(device)
    versions = {name: version(package) for name, package in _SIGNED_WITH.items()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    name = found.name if found is not None else ""
    return replace(certificate(report, device), name=name, versions=versions, date=date)


def _eval_step(number: int, session: Session, golden: Golden, found: list[Comparison]) -> None:
    for name, value in _reported(session, golden, "eval_step", number).items():
        _compare(found, golden, "eval_step", key_of("eval", number, name), value)


def _reported(session: Session, golden: Golden, entry: str, step: int = 0) -> dict[str, Array]:
    """The loss that an entry point returns in a step, under an empty name, and the values beside it by name."""
    point = session.entry(entry)
    inputs = golden.stacked_inputs_of(point) if point.is_stacked else golden.inputs_of(point, step)
    hypers: Mapping[str, object] = golden.hypers_of(step)
    if point.is_stacked:
        hypers = golden.stacked_hypers(session.manifest.hypers)
    loss, *values = session.call(entry, {**inputs, **(hypers if point.hypers else {})})
    return {"": loss} | dict(zip([s.name for s in point.outputs[1:]], values, strict=True))


def _keyed(reported: Mapping[str, Array], step: int) -> dict[str, Array]:
    """The loss of a step and the values beside it, by golden key."""
    return {key_of("value" if name else "loss", step, name): value for name, value in reported.items()}


def _train_step(results: dict[str, Array], session: Session, golden: Golden, found: list[Comparison]) -> None:
    rests = golden.resting is not None and bool(golden.first_hypers)
    before = session.state(_parameters(session)) if rests else {}
    for step in range(golden.steps):
        state: dict[str, Array] = {}  # the next one takes its memory
        values = _keyed(_reported(session, golden, "train_step", step), step)
        results |= values
        for key, value in values.items():
            _compare(found, golden, "train_step", key, value)
        state = _state(session)
        _compare_state(found, golden, "train_step", step + 1, state)
        if golden.resting is not None and before:
            found += _moved("train_step, lr=0", golden.resting, before, state)
            before = {}
    if any(session.manifest.entry_point(name) is not None for name in STACKED):
        results |= {key_of("state", golden.steps, name): value for name, value in state.items()}


def _stacked_steps(
    entry: str, results: Mapping[str, Array], session: Session, golden: Golden, found: list[Comparison]
) -> None:
    """Compare with the golden values, and with as many calls of `train_step`: both are right within one tolerance.

    The state that `train_and_export` returns is the session's, bit for bit.
    """
    columns = _reported(session, golden, entry)
    state = _state(session)
    if entry == TRAIN_AND_EXPORT:
        for spec in trained_state(session.manifest.state):
            exported, key = columns.pop(spec.name), key_of("state", golden.steps, spec.name)
            error = largest_error(exported, state[spec.name])
            found.append(Comparison(f"{entry}, export_state", key, error, 0.0, exported.size))
    values: dict[str, Array] = {}
    for step in range(golden.steps):
        values |= _keyed({name: np.asarray(column[step]) for name, column in columns.items()}, step)
    values |= {key_of("state", golden.steps, name): value for name, value in state.items()}
    for key, value in values.items():
        _compare(found, golden, entry, key, value)
        if key in results and key in golden.expected:
            found.append(_comparison(golden, f"{entry}, train_step", key, value, results[key].astype(np.float64)))


def _at_rest(at_rest: Resting, session: Session, golden: Golden, found: list[Comparison]) -> None:
    """Take the steps of `Resting`: without gradients from the initial state, and without a learning rate later."""
    parameters, has = _parameters(session), {e.name for e in session.manifest.entry_points}
    if has >= _WITHOUT_GRADIENTS:
        for hypers, name in ((at_rest.hypers, "apply_step, gradients=0, lr=0"), ({}, "apply_step, gradients=0")):
            session.load_gradients({n: np.zeros_like(a) for n, a in session.gradients()[0].items()}, 1)
            before = session.state(parameters) if hypers else {}
            session.apply_step(**hypers)
            found += _moved(name, at_rest, before, _state(session))
    if "train_step" in has and not golden.first_hypers:  # or the first golden step is this one
        inputs = golden.inputs_of(session.entry("train_step"))
        session.train_step(**inputs)
        before = session.state(parameters)
        session.train_step(**inputs, **at_rest.hypers)
        found += _moved("train_step, lr=0", at_rest, before, _state(session))


def _parameters(session: Session) -> frozenset[str]:
    return frozenset(s.name for s in session.manifest.state if s.role is Role.PARAMETER)


def _moved(
    entry: str, at_rest: Resting, before: Mapping[str, Array], after: Mapping[str, Array]
) -> Iterator[Comparison]:
    """Compare the parameters that are given with those before, bit for bit; all other state only has to be finite."""
    for name, value in after.items():
        key = key_of("state", 0, name)
        if name in before and name not in at_rest.moving:
            yield Comparison(entry, key, largest_error(value, before[name]), 0.0, value.size)
        if name not in at_rest.unbounded:
            yield Comparison(entry, key, _unbounded(value), 0.0)


def _accumulation(has: set[str], session: Session, golden: Golden, found: list[Comparison]) -> None:
    for step in range(golden.steps if "apply_step" in has else 1):
        for key, value in _keyed(_reported(session, golden, "grad_step", step), step).items():
            _compare(found, golden, "grad_step", key, value)
        if "export_gradients" in has:
            for name, gradient in session.gradients()[0].items():
                _compare(found, golden, "grad_step", key_of("gradient", step, name), gradient)
        if "apply_step" in has:
            session.apply_step(**golden.hypers_of(step))
            _compare_state(found, golden, "apply_step", step + 1, _state(session))


def _in_pieces(session: Session, golden: Golden, found: list[Comparison]) -> None:
    forward, finish = session.entry("forward"), session.entry("finish_step")
    for step in range(golden.steps):
        outputs, ticket = session.forward(**golden.inputs_of(forward, step))
        for name, value in outputs.items():
            _compare(found, golden, "forward", key_of("forward", step, name), value)
        rest = golden.inputs_of(finish, step)
        loss = session.finish_step(ticket, **rest, **golden.hypers_of(step))
        _compare(found, golden, "finish_step", key_of("loss", step), np.asarray(loss))
        _compare_state(found, golden, "finish_step", step + 1, _state(session))


def _call(name: str, number: int, session: Session, golden: Golden, found: list[Comparison]) -> None:
    entry = session.entry(name)
    outputs = session.call(name, golden.inputs_of(entry, number))
    for spec, output in zip(entry.outputs, outputs, strict=True):
        _compare(found, golden, name, key_of(name, number, spec.name), output)


def _state(session: Session) -> dict[str, Array]:
    """The state, with each tied tensor under one name."""
    state = session.state(writable=False)
    return {spec.name: state[spec.name] for spec in session.manifest.state}


def _compare_state(found: list[Comparison], golden: Golden, entry: str, step: int, state: Mapping[str, Array]) -> None:
    for name, value in state.items():
        _compare(found, golden, entry, key_of("state", step, name), value)


def _compare(found: list[Comparison], golden: Golden, entry: str, key: str, value: Array) -> None:
    if key in golden.expected:
        found.append(_comparison(golden, entry, key, value, golden.expected[key]))
    else:  # eager has no such value at a chosen step, or none to compare with
        found.append(Comparison(entry, key, _unbounded(value), 0.0))


def _comparison(golden: Golden, entry: str, key: str, value: Array, expected: Array) -> Comparison:
    magnitude = max(map(_largest_finite, _blocks(expected)), default=0.0)
    return Comparison(entry, key, error_of(golden, key, value, expected), golden.allowed[key], expected.size, magnitude)


def error_of(golden: Golden, key: str, value: Array, expected: Array) -> float:
    """Return the error of a value by which it is judged: `largest_error`, but for undecided updates."""
    error = largest_error(value, expected)
    if error <= golden.allowed[key] or not np.isfinite(error) or key not in golden.moves:
        return error
    found = sampled(value) if value.size > expected.size else value
    difference = np.abs(np.subtract(found, expected, dtype=np.float64))
    return float(unforgiven(golden, key, difference).max())


def _unbounded(value: Array) -> float:
    """Infinity for an array that holds NaN or infinity."""
    wide = np.asarray(value)
    bounded = wide.dtype.kind in "biu" or all(np.isfinite(b.astype(np.float64)).all() for b in _blocks(wide))
    return 0.0 if bounded else float("inf")


def largest_error(value: Array, expected: Array) -> float:
    """Return the largest absolute difference; equal infinities, and NaN in the same place, count as equal.

    `expected` may be a sample of a large tensor (`irongrad.runtime.golden.sampled`).
    """
    found = np.asarray(value)
    if found.size > expected.size == SAMPLE:
        found = sampled(found)
    if found.shape != expected.shape:
        return float("inf")
    return max(map(_largest_of_block, _blocks(found), _blocks(expected)), default=0.0)


def _blocks(array: Array) -> Iterator[Array]:
    """The elements in pieces that stay in a cache; whole copies in float64 would fill the memory."""
    flat = np.asarray(array).reshape(-1)
    return (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))


def _largest_of_block(found: Array, expected: Array) -> float:
    with np.errstate(invalid="ignore"):
        difference = np.subtract(found, expected, dtype=np.float64)
        largest = float(np.abs(difference, out=difference).max())
    if np.isfinite(largest):
        return largest
    wide = found.astype(np.float64)
    same = (wide == expected) | (np.isnan(wide) & np.isnan(expected))
    difference = np.where(same, 0.0, difference)
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def _largest_finite(block: Array) -> float:
    magnitude = np.abs(block)
    return float(np.max(magnitude, initial=0.0, where=np.isfinite(magnitude)))
