"""Verification: run the golden steps through a loaded artifact and compare every value; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.devices import find_device, is_local
from irongrad.runtime.golden import SAMPLE, Golden, key_of, sampled
from irongrad.runtime.manifest import Certificate
from irongrad.runtime.session import Session

_SIGNED_WITH = {"irongrad": "irongrad", "iree": "iree-base-runtime"}


@dataclass(frozen=True)
class Comparison:
    """One compared value.

    Attributes:
        entry_point: the entry point that computed it.
        key: the key of the value (`irongrad.runtime.golden.key_of`).
        error: the largest absolute difference from the oracle.
        allowed: the largest acceptable difference.
    """

    entry_point: str
    key: str
    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        """The error as a fraction of its tolerance; infinite for NaN against a number.

        The tolerance is infinite for gradients that overflow in eager runs: their update is skipped.
        """
        if self.error == 0.0 or self.allowed == float("inf"):
            return 0.0
        return self.error / self.allowed if self.allowed > 0 else float("inf")


@dataclass(frozen=True)
class Report:
    """All comparisons of a verification.

    Attributes:
        comparisons: the compared values.
        steps: the number of training steps.
        oracle: the dtype of the eager reference run.
    """

    comparisons: tuple[Comparison, ...]
    steps: int
    oracle: str

    @property
    def worst(self) -> Comparison:
        """The comparison with the largest ratio."""
        return max(self.comparisons, key=lambda c: c.ratio)

    @property
    def passed(self) -> bool:
        """Whether every error is within its tolerance."""
        return self.worst.ratio <= 1.0


def verify(session: Session, golden: Golden) -> Report:
    """Run `golden_steps` from the initial state, whatever state the session holds, and restore that state."""
    if session.manifest.entry_point("export_state") is None:  # a function has no state
        return golden_steps(session, golden)
    before = session.state()
    try:
        session.load_state(session.initial_state())
        return golden_steps(session, golden)
    finally:
        session.load_state(before)


def golden_steps(session: Session, golden: Golden) -> Report:
    """Run the golden steps through every entry point that the artifact has.

    Compares the losses, every gradient and every state tensor of each step, from `train_step`, from `grad_step` with
    `apply_step`, from `train_steps`, and from `forward` with `finish_step`. The session keeps the state of the last
    run.

    Args:
        session: a session at the artifact's initial state.
        golden: the expected values.
    """
    found: list[Comparison] = []
    for number, run in enumerate(_runs(session)):
        # Each run starts from the initial state: even in evaluation mode, a forward may write buffers and draw random
        # numbers.
        if number:
            session.load_state(session.initial_state())
        run(session, golden, found)
    return Report(tuple(found), golden.steps, golden.oracle)


def _runs(session: Session) -> Iterator[Callable[[Session, Golden, list[Comparison]], None]]:
    """Yield the runs, in order."""
    has = {e.name for e in session.manifest.entry_points}
    if "call" in has:
        yield partial(_call, "call")
    if "eval_step" in has:
        yield _eval_step
    if "predict" in has:
        yield partial(_call, "predict")
    if "train_step" in has:
        yield _train_step
    if "finish_step" in has:
        yield _in_pieces
    if "grad_step" in has:
        yield partial(_accumulation, has)
    if "train_steps" in has:
        yield _train_steps


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
    )


def signed(report: Report, device: str) -> Certificate:
    """Return a certificate that also has the CPU's name, the versions that made the report, and today's date."""
    found = find_device(device)
    versions = {name: version(package) for name, package in _SIGNED_WITH.items()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    name = found.name if found is not None else ""
    return replace(certificate(report, device), name=name, versions=versions, date=date)


def _eval_step(session: Session, golden: Golden, found: list[Comparison]) -> None:
    loss = session.eval_step(**golden.inputs)
    _compare(found, golden, "eval_step", key_of("eval", 0), np.asarray(loss))


def _train_step(session: Session, golden: Golden, found: list[Comparison]) -> None:
    for step in range(golden.steps):
        loss = session.train_step(**golden.inputs)
        _compare(found, golden, "train_step", key_of("loss", step), np.asarray(loss))
        _compare_state(found, golden, "train_step", step + 1, session)


def _train_steps(session: Session, golden: Golden, found: list[Comparison]) -> None:
    stacked = {n: np.stack([a] * golden.steps) for n, a in golden.inputs.items()}
    for step, loss in enumerate(session.train_steps(**stacked)):
        _compare(found, golden, "train_steps", key_of("loss", step), np.asarray(loss))
    _compare_state(found, golden, "train_steps", golden.steps, session)


def _accumulation(has: set[str], session: Session, golden: Golden, found: list[Comparison]) -> None:
    for step in range(golden.steps if "apply_step" in has else 1):
        loss = session.grad_step(**golden.inputs)
        _compare(found, golden, "grad_step", key_of("loss", step), np.asarray(loss))
        if "export_gradients" in has:
            for name, gradient in session.gradients()[0].items():
                _compare(found, golden, "grad_step", key_of("gradient", step, name), gradient)
        if "apply_step" in has:
            session.apply_step()
            _compare_state(found, golden, "apply_step", step + 1, session)


def _in_pieces(session: Session, golden: Golden, found: list[Comparison]) -> None:
    forward, finish = session.manifest.entry_point("forward"), session.manifest.entry_point("finish_step")
    assert forward is not None
    assert finish is not None
    for step in range(golden.steps):
        outputs, ticket = session.forward(**{s.name: golden.inputs[s.name] for s in forward.inputs})
        for name, value in outputs.items():
            _compare(found, golden, "forward", key_of("forward", step, name), value)
        loss = session.finish_step(ticket, **{s.name: golden.inputs[s.name] for s in finish.inputs[1:]})
        _compare(found, golden, "finish_step", key_of("loss", step), np.asarray(loss))
        _compare_state(found, golden, "finish_step", step + 1, session)


def _call(name: str, session: Session, golden: Golden, found: list[Comparison]) -> None:
    entry = session.manifest.entry_point(name)
    assert entry is not None
    outputs = session.call(name, {s.name: golden.inputs[s.name] for s in entry.inputs})
    for spec, output in zip(entry.outputs, outputs, strict=True):
        _compare(found, golden, name, key_of(name, 0, spec.name), output)


def _compare_state(found: list[Comparison], golden: Golden, entry: str, step: int, session: Session) -> None:
    state = session.state()
    for name in (spec.name for spec in session.manifest.state):
        _compare(found, golden, entry, key_of("state", step, name), state[name])


def _compare(found: list[Comparison], golden: Golden, entry: str, key: str, value: Array) -> None:
    found.append(Comparison(entry, key, largest_error(value, golden.expected[key]), golden.allowed[key]))


def largest_error(value: Array, expected: Array) -> float:
    """Return the largest absolute difference; equal infinities, and NaN in the same place, count as equal.

    `expected` may be a sample of a large tensor (`irongrad.runtime.golden.sampled`).
    """
    found = np.asarray(value)
    if found.size > expected.size == SAMPLE:
        found = sampled(found)
    if found.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.subtract(found, expected, dtype=np.float64))
    largest = float(np.max(difference, initial=0.0))
    if np.isfinite(largest):
        return largest
    wide = found.astype(np.float64)
    same = (wide == expected) | (np.isnan(wide) & np.isnan(expected))
    difference = np.where(same, 0.0, difference)
    return float(np.max(np.where(np.isnan(difference), np.inf, difference), initial=0.0))
