"""The training loop: order, resuming in the middle of an epoch, evaluation, checkpoints, stops."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irongrad.runtime import Session
from irongrad.runtime.errors import ArtifactError, GuardError, UserError
from irongrad.training import (
    Arrays,
    Checkpoints,
    Evaluation,
    JsonLines,
    Position,
    Samples,
    Stop,
    Stream,
    read_position,
    restore,
    schedules,
    train,
)
from irongrad.training.events import Ended, Evaluated, Event, Saved, Stepped

Batches = list[dict[str, np.ndarray]]


@pytest.fixture
def arrays(batches: Batches) -> dict[str, np.ndarray]:
    """120 samples: 20 steps of 6."""
    return {n: np.concatenate([b[n] for b in batches]) for n in batches[0]}


@pytest.fixture
def new(mlp_artifact: Path) -> Callable[[], Session]:
    return lambda: Session(mlp_artifact)


def same(a: Session, b: Session) -> None:
    other = b.state()
    for name, value in a.state().items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def stop_after(step: int, stop: Stop) -> Callable[[Event], None]:
    def call(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == step:
            stop.request("enough")

    return call


def losses_of(session: Session, data: Any, **options: Any) -> list[float]:
    seen: list[float] = []
    train(session, data, callbacks=[lambda e: seen.append(e.loss) if isinstance(e, Stepped) else None], **options)
    return seen


def test_the_order_is_that_of_the_seed_and_the_epoch(new: Callable[[], Session], arrays: dict[str, Any]) -> None:
    ours, other = new(), new()
    losses = losses_of(ours, Arrays(arrays, 6, seed=3), epochs=2)
    expected = []
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(120)
        for rows in order.reshape(20, 6):
            expected.append(other.train_step(**{n: a[rows] for n, a in arrays.items()}))
    assert losses == expected
    same(ours, other)


SOURCES: dict[str, Callable[[dict[str, Any], Batches], Any]] = {
    "arrays": lambda a, b: Arrays(a, 6, seed=1),
    "accumulated arrays": lambda a, b: Arrays(a, 6, accumulate=2, seed=1),
    "list": lambda a, b: b,
    "samples": lambda a, b: Samples(rows_of(a), 6, seed=1),
    "samples by the batch": lambda a, b: Samples(ByTheBatch(rows_of(a)), 6, seed=1),
    "unknown length": lambda a, b: Endless(b),
    "DataLoader": lambda a, b: torch.utils.data.DataLoader(rows_of(a), batch_size=6),
}


def rows_of(arrays: dict[str, Any]) -> list[dict[str, Any]]:
    return [{n: a[i] for n, a in arrays.items()} for i in range(120)]


class ByTheBatch:
    """A data set that gives several samples at a time, as those of Hugging Face do."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("samples come several at a time")

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self.rows[i] for i in indices]


class Endless:
    """Batches of an order that the epoch decides, and no length."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.number = batches, 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        order = np.random.default_rng(self.number).permutation(len(self.batches))
        return (self.batches[i] for i in order)


@pytest.mark.parametrize("stop_at", [1, 7, 10, 13])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_resumed_run_continues_to_the_bit(
    new: Callable[[], Session], arrays: dict[str, Any], batches: Batches, tmp_path: Path, kind: str, stop_at: int
) -> None:
    path = tmp_path / "state.safetensors"
    rate = schedules.cosine(1e-2, 60, warmup=3)
    whole = new()
    losses = losses_of(whole, SOURCES[kind](arrays, batches), steps=25, schedule=rate)
    stop = Stop()
    first = train(
        new(), SOURCES[kind](arrays, batches), steps=25, schedule=rate, checkpoints=Checkpoints(path),
        callbacks=[stop_after(stop_at, stop)], stop=stop,
    )  # fmt: skip
    assert (first.step, first.reason) == (stop_at, "enough")
    resumed = new()
    start = restore(resumed, path)
    assert start.step == stop_at
    rest = losses_of(resumed, SOURCES[kind](arrays, batches), steps=25, schedule=rate, start=start)
    assert rest == losses[stop_at:]
    same(whole, resumed)


def test_epochs_end_where_those_of_the_whole_run_end(
    new: Callable[[], Session], arrays: dict[str, Any], tmp_path: Path
) -> None:
    paths = [tmp_path / "whole.safetensors", tmp_path / "rest.safetensors"]
    train(new(), Arrays(arrays, 6), epochs=3, checkpoints=Checkpoints(paths[0]))
    train(new(), Arrays(arrays, 6), steps=27, checkpoints=Checkpoints(paths[1]))
    resumed = new()
    result = train(
        resumed, Arrays(arrays, 6), epochs=2, start=restore(resumed, paths[1]), checkpoints=Checkpoints(paths[1])
    )
    assert [(e.step, e.epoch) for e in result.epochs] == [(40, 1), (60, 2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_middle_of_another_order_is_refused(
    new: Callable[[], Session], arrays: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    train(new(), Arrays(arrays, 6, seed=1), steps=3, checkpoints=Checkpoints(path))
    session = new()
    start = restore(session, path)
    with pytest.raises(GuardError, match=r"other data or another order \(seed 1, .*and this is seed 2"):
        train(session, Arrays(arrays, 6, seed=2), steps=9, start=start)
    short = {n: a[:60] for n, a in arrays.items()}
    with pytest.raises(GuardError, match="samples 120, .*samples 60"):
        train(session, Arrays(short, 6, seed=1), steps=9, start=start)
    with pytest.raises(GuardError, match="after 3 steps of an epoch, and the data has fewer"):
        train(session, [], steps=9, start=start)
    assert train(session, Arrays(arrays, 6, seed=2), steps=2, start=Position()).step == 2


def test_another_batch_size_goes_on_at_the_number_of_steps(
    new: Callable[[], Session], arrays: dict[str, Any], tmp_path: Path
) -> None:
    """As the command line always did: 20 steps of 6, then steps of 24 (4 batches), 5 an epoch, and so on."""
    path = tmp_path / "state.safetensors"
    few = {n: a[:114] for n, a in arrays.items()}  # 19 steps of 6, or 4 of 24
    train(new(), Arrays(few, 6), epochs=1, checkpoints=Checkpoints(path))
    session, expected = new(), new()
    result = train(
        session, Arrays(few, 6, accumulate=4), epochs=1, start=restore(session, path), checkpoints=Checkpoints(path)
    )
    assert result.step == 23
    train(expected, Arrays(few, 6), epochs=1)
    for number in range(19, 23):
        epoch, place = divmod(number, 4)
        rows = np.random.default_rng((0, epoch)).permutation(114)[place * 24 :][:24].reshape(4, 6)
        for part in rows:
            expected.grad_step(**{n: a[part] for n, a in few.items()})
        expected.apply_step()
    same(session, expected)
    again = new()
    start = restore(again, path)
    train(again, Arrays(few, 6, accumulate=4), steps=25, start=start)
    assert start.order is not None
    assert start.order["offset"] == 3


def test_a_second_run_of_a_session_goes_on(new: Callable[[], Session], arrays: dict[str, Any]) -> None:
    twice, whole = new(), new()
    train(twice, Arrays(arrays, 6), epochs=1)
    train(twice, Arrays(arrays, 6), epochs=1)
    train(whole, Arrays(arrays, 6), epochs=2)
    same(twice, whole)


def test_evaluations_pick_the_best_and_end_training(
    new: Callable[[], Session], batches: Batches, tmp_path: Path
) -> None:
    """A rate that destroys what was learnt: the best evaluation is the second."""
    path, session = tmp_path / "state.safetensors", new()
    events: list[Event] = []
    states: dict[int, dict[str, np.ndarray]] = {}

    def keep(event: Event) -> None:
        events.append(event)
        if isinstance(event, Stepped):
            states[event.step] = session.state()

    result = train(
        session, batches, epochs=9, schedule=lambda step: {"lr": 1e-2 if step < 8 else 30.0},
        evaluation=Evaluation(batches[:4], every=4, patience=3),
        checkpoints=Checkpoints(path, best=True, last=2, every=2), callbacks=[keep],
    )  # fmt: skip
    values = [e.loss for e in result.evaluations]
    assert values[1] == min(values) == result.best
    assert (result.reason, result.step, len(values)) == ("no improvement", 20, 5)
    assert [e.best for e in result.evaluations] == [True, True, False, False, False]
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {path.name, "state.best.safetensors", "state.step-18.safetensors", "state.step-20.safetensors"}
    for step, name in ((20, path.name), (8, "state.best.safetensors"), (18, "state.step-18.safetensors")):
        other = new()
        assert restore(other, tmp_path / name).step == step
        for key, value in other.state().items():
            np.testing.assert_array_equal(value, states[step][key])
    assert isinstance(events[-1], Ended)
    assert sum(isinstance(e, Saved) for e in events) == 10


def test_patience_survives_a_resume(new: Callable[[], Session], batches: Batches, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    evaluation = Evaluation(batches[:1], every=2, patience=4, min_delta=100.0)
    first = train(new(), batches, steps=7, evaluation=evaluation, checkpoints=Checkpoints(path))
    assert first.reason == "complete"
    session = new()
    rest = train(session, batches, steps=30, evaluation=evaluation, start=restore(session, path))
    assert (rest.step, rest.reason) == (10, "no improvement")
    assert rest.best == min(e.loss for e in (*first.evaluations, *rest.evaluations))


def test_larger_may_be_better(new: Callable[[], Session], batches: Batches) -> None:
    learns = {"schedule": lambda step: {"lr": 1e-3}, "hypers": {"weight_decay": 0.0}}
    result = train(new(), batches[:1], epochs=90, evaluation=Evaluation(batches[:1], mode="max", patience=2), **learns)
    values = [e.loss for e in result.evaluations]
    assert result.best == max(values)
    assert result.reason == "no improvement"
    assert max(values[-2:]) <= values[-3] == result.best
    with pytest.raises(UserError, match="no value 'accuracy'; the step returns loss"):
        train(new(), batches, epochs=1, evaluation=Evaluation(batches[:2], monitor="accuracy"))


def test_nan_is_never_the_best(new: Callable[[], Session], batches: Batches, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    result = train(
        new(), batches[:1], epochs=3, evaluation=Evaluation([], patience=2), checkpoints=Checkpoints(path, best=True)
    )
    assert (result.best, result.reason, len(result.evaluations)) == (None, "no improvement", 2)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_sigterm_stops_after_the_step_and_writes_the_checkpoint(
    new: Callable[[], Session], batches: Batches, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"

    def terminate(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(new(), batches, epochs=2, checkpoints=Checkpoints(path), callbacks=[terminate])
    assert (result.step, result.reason) == (5, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not result.epochs[0].whole
    session = new()
    position = restore(session, path)
    assert (position.step, position.epoch, position.batch) == (5, 0, 5)


def test_a_stop_in_the_last_step_is_the_end(new: Callable[[], Session], batches: Batches) -> None:
    stop = Stop()
    assert train(new(), batches, epochs=1, callbacks=[stop_after(20, stop)], stop=stop).reason == "complete"


def test_a_handler_of_the_program_stays(new: Callable[[], Session], batches: Batches) -> None:
    def mine(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    try:
        seen = []
        train(new(), batches, steps=1, callbacks=[lambda e: seen.append(signal.getsignal(signal.SIGTERM))])
        assert set(seen) == {mine}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_may_be_changed_before_the_update(
    new: Callable[[], Session], arrays: dict[str, Any], accumulate: int
) -> None:
    def reverse(session: Session) -> None:
        sums, count = session.gradients()
        assert count == accumulate
        session.load_gradients({n: -g for n, g in sums.items()}, count)

    def data() -> Arrays:
        return Arrays(arrays, 6, accumulate=accumulate)

    changed, plain, by_hand = new(), new(), new()
    train(changed, data(), steps=3, before_update=reverse)
    train(plain, data(), steps=3)
    for parts in list(data().epoch(0, 0))[:3]:
        for part in parts:
            by_hand.grad_step(**part)
        reverse(by_hand)
        by_hand.apply_step()
    same(changed, by_hand)
    assert np.abs(changed.state()["0.weight"] - plain.state()["0.weight"]).max() > 1e-2


def test_events_are_lines_of_json(new: Callable[[], Session], batches: Batches, tmp_path: Path) -> None:
    path, state = tmp_path / "logs" / "run.jsonl", tmp_path / "state.safetensors"
    for _ in range(2):  # a second run adds its lines
        session = new()
        start = restore(session, state) if state.exists() else None
        with JsonLines(path) as log:
            train(
                session, batches, epochs=1, schedule=schedules.linear(1e-2, 40), evaluation=Evaluation(batches[:1]),
                checkpoints=Checkpoints(state), callbacks=[log], start=start,
            )  # fmt: skip
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines[:2]] == ["started", "stepped"]
    assert [line["event"] for line in lines[21:25]] == ["evaluated", "epoch_ended", "saved", "ended"]
    steps = [line for line in lines if line["event"] == "stepped"]
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert [line["lr"] for line in steps] == [schedules.linear(1e-2, 40)(n)["lr"] for n in range(40)]
    assert all(line["samples"] == 6 and line["samples_per_second"] > 0 and line["loss"] > 0 for line in steps)


def test_the_compiled_rate_is_logged(new: Callable[[], Session], batches: Batches) -> None:
    seen: list[Any] = []
    train(new(), batches, steps=1, callbacks=[lambda e: seen.append(dict(e.rates)) if isinstance(e, Stepped) else 0])
    assert seen == [{"lr": 1e-2}]


REFUSED: dict[str, tuple[Callable[[Batches], dict[str, Any]], str]] = {
    "no end": (lambda b: {"data": b}, "training has no end: give epochs or steps"),
    "zero": (lambda b: {"data": b, "epochs": 0}, "epochs is 0: it must be a whole number of 1 or more"),
    "short schedule": (
        lambda b: {"data": b, "epochs": 2, "schedule": schedules.cosine(0.1, 39)},
        "the schedule cosine ends after 39 steps, and training ends after 40",
    ),
    "unknown length": (
        lambda b: {"data": Endless(b), "epochs": 2, "schedule": schedules.cosine(0.1, 39)},
        "the data does not say how many steps an epoch has: give steps",
    ),
    "one dictionary": (lambda b: {"data": b[0], "epochs": 1}, "the data is a dict; it must be an iterable of dict"),
    "tuples": (lambda b: {"data": [(1, 2)], "epochs": 1}, "the data yields a tuple; it must yield dictionaries"),
    "nothing": (lambda b: {"data": [], "epochs": 1}, "the data has no batch for epoch 0"),
    "an iterator": (lambda b: {"data": iter(b), "epochs": 2}, "an iterator, which can be read once"),
    "accumulated twice": (
        lambda b: {"data": Arrays(b[0], 6), "epochs": 1, "accumulate": 2},
        "give accumulate to Arrays, which makes the batches",
    ),
    "nothing to be best": (
        lambda b: {"data": b, "epochs": 1, "checkpoints": Checkpoints("x", best=True)},
        "the best checkpoint is that of the best evaluation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(new: Callable[[], Session], batches: Batches, case: str) -> None:
    make, message = REFUSED[case]
    options = make(batches)
    with pytest.raises(UserError, match=message):
        train(new(), options.pop("data"), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Evaluation([], every=0), "every is 0"),
        (lambda: Evaluation([], patience=True), "patience is True"),
        (lambda: Evaluation([], mode="least"), "mode is 'least': it must be 'min' or 'max'"),  # type: ignore[arg-type]
        (lambda: Evaluation([], min_delta=-1), "min_delta is -1"),
        (lambda: Evaluation(iter([])), "the batches are an iterator"),
        (lambda: Checkpoints("x", last=-1), "last is -1"),
        (lambda: Checkpoints(3), "a checkpoint must be a path"),  # type: ignore[arg-type]
        (lambda: Arrays({"x": np.zeros(3), "y": np.zeros(4)}, 1), "different numbers of samples"),
        (lambda: Arrays({}, 1), "there are none"),
        (lambda: Arrays({"x": np.zeros(3)}, 2, accumulate=2), "3 samples, fewer than one batch of 4"),
        (lambda: Samples(iter([]), 2), "has no length or no items"),
        (lambda: Samples([{}], 1, seed=-1), "seed is -1"),
        (lambda: Stream([], accumulate=0), "accumulate is 0"),
    ],
)
def test_settings_without_meaning_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_whole_numbers_of_numpy_are_taken(new: Callable[[], Session], arrays: dict[str, Any], tmp_path: Path) -> None:
    """They come from arithmetic with lengths and shapes."""
    path, log = tmp_path / "net.safetensors", tmp_path / "log.jsonl"
    with JsonLines(log) as lines:
        result = train(
            new(), Arrays(arrays, np.int64(6), accumulate=np.int64(2), seed=np.int64(1)), steps=np.int64(5),
            prefetch=np.int64(1), checkpoints=Checkpoints(path, every=np.int64(2), last=np.int64(1)), callbacks=[lines],
        )  # fmt: skip
    assert result.step == 5
    assert json.loads(log.read_text().splitlines()[0])["last"] == 5
    assert restore(new(), path).order == {"seed": 1, "samples": 120, "batch": 6, "accumulate": 2, "offset": 0}


def test_ragged_samples_need_a_collate_function(new: Callable[[], Session]) -> None:
    ragged = [{"x": np.zeros(n, np.float32)} for n in range(6)]
    with pytest.raises(GuardError, match="x: the samples of a batch differ"):
        train(new(), Samples(ragged, 6), epochs=1)


@pytest.mark.parametrize("record", [{"step": -1}, {"step": 1.5}, {"stop": 1}, {"best": "x"}, {"order": {"seed": None}}])
def test_a_damaged_record_is_refused_and_the_state_stays(
    new: Callable[[], Session], tmp_path: Path, record: dict[str, Any]
) -> None:
    session = new()
    session.save(tmp_path / "state", about={"training": {"name": "", **record}})
    with pytest.raises(ArtifactError, match="its record of the training run is damaged"):
        restore(session, tmp_path / "state")
    session.save(tmp_path / "state", about={"training": {"name": "generator"}})
    assert read_position(tmp_path / "state", session) is None


def test_evaluations_are_events(new: Callable[[], Session], batches: Batches) -> None:
    seen: list[Event] = []
    train(new(), batches, steps=2, evaluation=Evaluation(batches[:3], every=1), callbacks=[seen.append])
    found = [e for e in seen if isinstance(e, Evaluated)]
    assert [e.step for e in found] == [1, 2]
