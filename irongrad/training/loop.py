"""`train`: the training loop, for the command line and for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from irongrad.runtime.arguments import check_whole
from irongrad.runtime.errors import GuardError, RankLostError, UserError
from irongrad.training.average import MovingAverage
from irongrad.training.evaluation import Evaluation, Monitor, evaluate, refuse_unknown_monitor
from irongrad.training.events import Callback, Ended, EpochEnded, Evaluated, Event, Recorder, Saved, Started, Stepped
from irongrad.training.means import Batch, Reported, mean_of, reported, samples_in, values_of
from irongrad.training.position import Position, position_of
from irongrad.training.prefetch import read_ahead
from irongrad.training.saving import Checkpoints, Saver
from irongrad.training.schedules import Schedule, compiled_rates
from irongrad.training.sources import Parts, Source, source_of
from irongrad.training.stop import Stop, on_sigterm
from irongrad.training.sync import Sync, dealt

if TYPE_CHECKING:
    from irongrad.runtime.session import Session

COMPLETE, NO_IMPROVEMENT = "complete", "no improvement"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Result:
    """What a training run came to.

    Attributes:
        step: the number of steps of the run, those before a resumed checkpoint included.
        reason: why training ended: `complete`, `no improvement`, `SIGTERM`, or the reason of another request to stop.
        epochs: the epochs, the last of which may be a part.
        evaluations: the evaluations.
        best: the best value of an evaluation; None if there was none.
    """

    step: int
    reason: str
    epochs: tuple[EpochEnded, ...]
    evaluations: tuple[Evaluated, ...]
    best: float | None


def train(
    session: Session,
    data: Source | Iterable[Batch],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    hypers: Mapping[str, float] = MappingProxyType({}),
    schedule: Callable[[int], Mapping[str, float]] | None = None,
    accumulate: int = 1,
    prefetch: int = 0,
    ema: float | None = None,
    evaluation: Evaluation | None = None,
    checkpoints: Checkpoints | None = None,
    start: Position | None = None,
    sync: Sync | None = None,
    before_update: Callable[[Session], None] | None = None,
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
) -> Result:
    """Train, until the epochs or the steps are over, evaluations stop improving, or a stop is requested.

    A resumed run continues to the bit as the first would have, also from the middle of an epoch, if `data` yields the
    same batches for the same epoch. SIGTERM is a request to stop: the running step ends, and the checkpoint is written.

    Args:
        session: the session, which holds the state; a view of one step (`session.step`) if there are several.
        data: the batches: `Arrays`, `Samples` or `Shards`, or any iterable of dictionaries of arrays.
        epochs: the number of epochs to end; a resumed run first ends the epoch that it is in, which counts as one.
        steps: the number of steps of the whole run, those before a resumed checkpoint included.
        hypers: hyperparameters that differ from the compiled defaults.
        schedule: the hyperparameters of a step by name, as a function of its number from 0 on; they come before
            `hypers`.
        accumulate: the number of batches of an iterable whose gradients make one step.
        prefetch: the number of steps whose batches a thread reads in advance.
        ema: the decay of a moving average of the trained parameters, such as 0.999. Evaluations, and the best
            checkpoint, are of the averages then; the state trains on as it would without.
        evaluation: the evaluation of held-out data.
        checkpoints: the checkpoints to write.
        start: where the run stands, from `restore`; by default it is at the number of updates of the session's state.
        sync: the ranks of a run of several processes, such as `irongrad.distributed.Gradients(...)`. Numbered samples
            are dealt to the ranks; an iterable is this rank's own part. The first rank writes the checkpoints.
        before_update: a function that may change the gradients of a step before the update, by `session.gradients` and
            `session.load_gradients`. Each step is then a `grad_step` and an `apply_step`.
        callbacks: functions that are called with each event.
        stop: an object with which another thread or a callback asks for a stop.

    Raises:
        GuardError: a batch or a hyperparameter is not what the step takes.
        NonFiniteError: the loss or the state is NaN or infinite, and the session was told to stop then.
        RankLostError: a rank is gone, and the engine cannot go on without it.
        UserError: the run has no end, the schedule ends before it does, or the data cannot be read again.
        OSError: a checkpoint cannot be written; an old one is unchanged.
    """
    given = (("epochs", epochs), ("steps", steps))
    epochs, steps = (None if value is None else check_whole(name, value, 1) for name, value in given)
    if epochs is None and steps is None:
        raise UserError("training has no end: give epochs or steps")
    if session.manifest.steps and not session.step_name:
        raise UserError(
            f"the artifact has several steps: train session.step(NAME), of {', '.join(session.manifest.steps)}"
        )
    if stop is None:
        stop = Stop()
    given_source, ahead = source_of(data, accumulate), check_whole("prefetch", prefetch)

    def own_source() -> Source:
        return read_ahead(given_source, ahead) if sync is None else dealt(given_source, sync, ahead)

    start = start or position_of(session)
    average = _average(session, ema, start)
    if sync is not None:
        sync.begin(session, start.outer)
    run = _Run(
        session, own_source, hypers, schedule, evaluation, checkpoints, callbacks, stop, average, sync, before_update
    )
    with on_sigterm(stop):
        return run.to_end(start, epochs, steps)


def _average(session: Session, decay: float | None, start: Position) -> MovingAverage | None:
    if decay is not None:
        return MovingAverage(session, decay, start.averages)
    if start.averages:
        raise UserError(
            "the checkpoint has moving averages, which a run without them would lose: give their decay (ema), or begin "
            "a new run with its state"
        )
    return None


def last_step(source: Source, start: Position, epochs: int | None, steps: int | None) -> int | None:
    """Return the number of steps at which a run ends; None if that is not known before an epoch ends.

    Raises:
        GuardError: the run cannot go on with this data.
    """
    _, batch = source.place(start)
    if epochs is None or source.steps is None:
        return steps
    by_epochs = start.step + epochs * source.steps - batch
    return by_epochs if steps is None else min(steps, by_epochs)


class _Run:
    """A training run between its beginning and its end."""

    def __init__(
        self,
        session: Session,
        own_source: Callable[[], Source],
        hypers: Mapping[str, float],
        schedule: Callable[[int], Mapping[str, float]] | None,
        evaluation: Evaluation | None,
        checkpoints: Checkpoints | None,
        callbacks: Sequence[Callback],
        stop: Stop,
        average: MovingAverage | None,
        sync: Sync | None,
        before_update: Callable[[Session], None] | None,
    ) -> None:
        self._session, self._own_source, self._stop = session, own_source, stop
        self._source = own_source()
        self._hypers, self._schedule, self._before_update = dict(hypers), schedule, before_update
        self._evaluation = evaluation
        self._every = None if checkpoints is None else checkpoints.every
        self._keep_best = checkpoints is not None and checkpoints.best
        self._sync = sync
        self._saver = None if checkpoints is None else Saver(session, checkpoints, average, sync)
        self._average = average
        self._recorder = Recorder()
        self._callbacks: tuple[Callback, ...] = (self._recorder, *callbacks)
        self._rates = compiled_rates(session.manifest)
        if self._keep_best and evaluation is None:
            raise UserError("the best checkpoint is that of the best evaluation: give data to evaluate")
        if evaluation is not None:
            refuse_unknown_monitor(session, evaluation)

    def to_end(self, start: Position, epochs: int | None, steps: int | None) -> Result:
        """Train from `start` on; see `train`."""
        epoch, batch = self._source.place(start)
        # A place that was found by the number of steps belongs to this source's order.
        self._at = replace(start, epoch=epoch, batch=batch, order=self._source.order, name=self._session.step_name)
        self._monitor = Monitor(self._evaluation, start)
        self._final_step, self._final_epoch = steps, None if epochs is None else epoch + epochs
        last = last_step(self._source, start, epochs, steps)
        self._refuse_early_end(last)
        self._tell(Started(start.step, epoch, batch, last, self._source.steps))
        reason = COMPLETE
        while not self._complete:
            reason = self._one_epoch()
            if reason != COMPLETE:
                break
        self._tell(Ended(self._at.step, reason))
        recorded = self._recorder
        return Result(self._at.step, reason, tuple(recorded.epochs), tuple(recorded.evaluations), self._monitor.best)

    @property
    def _complete(self) -> bool:
        """Whether the epochs or the steps are over."""
        final_step, final_epoch = self._final_step, self._final_epoch
        over = final_epoch is not None and self._epoch >= final_epoch
        return over or (final_step is not None and self._at.step >= final_step)

    @property
    def _epoch(self) -> int:
        assert self._at.epoch is not None
        return self._at.epoch

    def _one_epoch(self) -> str:
        """Train to the end of the epoch, or of training; return why training ends, or `COMPLETE`."""
        results: list[Reported] = []
        epoch, begun = self._epoch, time.monotonic()
        for parts, is_last in _with_last(self._source.epoch(epoch, self._at.batch)):
            try:
                results.append(self._step(parts))
            except RankLostError:
                self._recover()
                return COMPLETE
            now = time.monotonic()
            self._tell_step(results[-1], sum(map(samples_in, parts)), now - begun)
            begun = now
            source = self._source
            reason = self._after_step(results, is_last)
            if reason is not None:
                return reason
            if self._source is not source:
                return COMPLETE  # a rank was lost, so the rest of the epoch is divided anew
        if not results:
            raise GuardError(f"the data has no batch for epoch {epoch}, or fewer than one step takes")
        return COMPLETE

    def _step(self, parts: Parts) -> Reported:
        """Run a step, and move on by one."""
        hypers = self._hypers if self._schedule is None else {**self._hypers, **self._schedule(self._at.step)}
        if len(parts) == 1 and self._before_update is None:
            result = reported(self._session.train_step(**parts[0], **hypers))
        else:
            result = mean_of([reported(self._session.grad_step(**part)) for part in parts])
            if self._before_update is not None:
                self._before_update(self._session)
            self._session.apply_step(**hypers)
        if self._average is not None:
            self._average.update()
        self._used = hypers
        self._at = replace(self._at, step=self._at.step + 1, batch=self._at.batch + 1)
        return result

    def _after_step(self, results: Sequence[Reported], is_last: bool) -> str | None:
        """Evaluate, report and save, where it is time to; return why training ends, or None."""
        at, every = self._at, None if self._evaluation is None else self._evaluation.every
        due = is_last if every is None else at.step % every == 0
        stop = self._synchronised(due=due or is_last or self._complete or self._is_saved(at.step))
        evaluated = self._evaluate() if self._evaluation is not None and due else None
        if is_last:
            self._at = replace(self._at, epoch=self._epoch + 1, batch=0)
        ended = self._reason(stop)
        if is_last or ended is not None:
            means = mean_of(results)
            at_end = evaluated if every is None else None
            epoch = self._epoch - is_last  # that which has ended
            self._tell(EpochEnded(at.step, epoch, means["loss"], values_of(means), at_end, is_last))
        latest = is_last or ended is not None or self._is_saved(at.step)
        self._save(latest=latest, best=evaluated is not None and evaluated.best and self._keep_best)
        return ended

    def _synchronised(self, *, due: bool) -> str | None:
        """Synchronise with the other ranks after a step; return why they want to stop, for all ranks alike."""
        if self._sync is None:
            return None
        while True:
            try:
                self._sync.after_step(self._at.step, due=due)
                return self._sync.agreed(self._stop.reason)
            except RankLostError:
                self._recover()

    def _reason(self, stop: str | None) -> str | None:
        """Why training ends after this step; None if it goes on. `stop` is why the ranks want to."""
        if self._complete:
            return COMPLETE
        if self._monitor.exhausted:
            return NO_IMPROVEMENT
        return self._stop.reason if self._sync is None else stop

    def _is_saved(self, step: int) -> bool:
        """Whether the state after a step is written, even inside an epoch."""
        return self._every is not None and step % self._every == 0

    def _recover(self) -> None:
        """Go on in the same epoch with the ranks that are left; the samples of the lost step are passed over."""
        assert self._sync is not None
        self._sync.recover()
        self._source = self._own_source()
        epoch, batch = self._source.place(self._at)
        self._at = replace(self._at, epoch=epoch, batch=batch, order=self._source.order)

    def _evaluate(self) -> Evaluated:
        assert self._evaluation is not None
        with nullcontext() if self._average is None else self._average.in_place():
            means = evaluate(self._session, self._evaluation.batches)
        best = self._monitor.improved(means)
        evaluated = Evaluated(self._at.step, self._epoch, means["loss"], values_of(means), best)
        self._tell(evaluated)
        return evaluated

    def _save(self, *, latest: bool, best: bool) -> None:
        follows = self._sync is not None and self._sync.rank > 0
        if self._saver is None or not (latest or best) or (follows and not self._session.is_sharded):
            return
        monitor = self._monitor
        position = replace(self._at, best=monitor.best, reference=monitor.reference, waited=monitor.waited)
        paths = self._saver.save(position, latest=latest, best=best)
        if not follows:
            self._tell(Saved(position.step, tuple(paths)))

    def _tell_step(self, result: Reported, samples: int, seconds: float) -> None:
        rates = {n: self._used.get(n, self._used.get(n.rpartition("_")[0], v)) for n, v in self._rates.items()}
        at = self._at
        self._tell(Stepped(at.step, self._epoch, result["loss"], values_of(result), rates, samples, seconds))

    def _tell(self, event: Event) -> None:
        for callback in self._callbacks:
            callback(event)

    def _refuse_early_end(self, last: int | None) -> None:
        if not isinstance(self._schedule, Schedule) or self._schedule.total is None:
            return
        if last is None:
            raise UserError(
                f"the schedule {self._schedule.name} ends after {self._schedule.total} steps, and the data does not "
                "say how many steps an epoch has: give steps"
            )
        self._schedule.refuse_end_before(last)


def _with_last(items: Iterator[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item, and whether it is the last."""
    missing: Any = object()
    item = next(items, missing)
    while item is not missing:
        following = next(items, missing)
        yield item, following is missing
        item = following
