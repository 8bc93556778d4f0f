"""What `irongrad train` was asked for, as arguments of `irongrad.training.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from irongrad.cli.common import error_console, numbers, refuse_unwritable
from irongrad.distributed.gradients import Gradients
from irongrad.distributed.local_steps import LocalSteps
from irongrad.distributed.sync_text import sync_of
from irongrad.runtime import Session, load
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.nonfinite import OnNonFinite
from irongrad.runtime.ranks.communicator import Communicator
from irongrad.runtime.selection import is_verified
from irongrad.training.evaluation import Evaluation, InOrder
from irongrad.training.inputs import read_arrays, training_entry
from irongrad.training.loop import last_step
from irongrad.training.mapped_rows import MappedRows
from irongrad.training.numpy_files import is_compressed, is_too_large
from irongrad.training.position import Position, position_of, read_position
from irongrad.training.saving import Checkpoints
from irongrad.training.schedule_text import schedule_of
from irongrad.training.schedules import Schedule, rates_of
from irongrad.training.shards import Shards, map_shards, matching
from irongrad.training.sources import Arrays, Source
from irongrad.training.sync import dealt

# The batch of a step that takes any number of samples, if no size is asked for.
_USUAL_BATCH = 32


@dataclass(frozen=True)
class Asked:
    """The parameters of the command line, by the names of its options."""

    directory: Path
    data: tuple[str, ...]
    epochs: int | None
    steps: int | None
    batch_size: int | None
    lr: float | None
    schedule: str | None
    warmup: int | None
    settings: tuple[str, ...]
    validation: tuple[str, ...]
    eval_every: int | None
    patience: int | None
    min_delta: float
    monitor: str
    mode: Literal["min", "max"]
    resume: Path | None
    fresh: bool
    checkpoint: Path | None
    save_every: int | None
    keep: int
    keep_best: bool
    log: Path | None
    tensorboard: Path | None
    mlflow: str | None
    trackio: str | None
    prefetch: int
    ema: float | None
    sync: str | None
    seed: int | None
    on_nonfinite: OnNonFinite
    strict: bool
    step_name: str | None
    base: Path | None
    trusted: tuple[Path, ...]
    target: str | None
    device: str | None
    as_json: bool


@dataclass(frozen=True)
class Plan:
    """A training run, ready to begin.

    Attributes:
        session: the session; a view of one step if there are several.
        source: the batches.
        batch: the number of samples in a call of the step.
        factor: the number of such calls in one step.
        epochs: the number of epochs to end; None if only steps are counted.
        hypers: hyperparameters that differ from the compiled ones.
        schedule: the schedule; None if there is none.
        evaluation: the evaluation; None if there is none.
        checkpoints: the checkpoints to write; None for none.
        start: where the run stands.
        sync: the ranks that train together; None for one process.
    """

    session: Session
    source: Source
    batch: int
    factor: int
    epochs: int | None
    hypers: Mapping[str, float]
    schedule: Schedule | None
    evaluation: Evaluation | None
    checkpoints: Checkpoints | None
    start: Position
    sync: Gradients | LocalSteps | None = None


def quiet(asked: Asked) -> Asked:
    """The same for a rank that leaves every record of the run to the first one."""
    return replace(asked, log=None, tensorboard=None, mlflow=None, trackio=None, as_json=True)


def planned(asked: Asked, ranks: Communicator | None = None) -> Plan:
    """Load the artifact, open the data, and check what was asked for; `ranks` if several processes train together.

    Raises:
        UserError: options do not go together, or do not fit the artifact or the data.
        ArtifactError: the artifact or the checkpoint to resume is missing or damaged.
    """
    _refuse_useless(asked)
    sync = None if ranks is None or asked.sync is None else sync_of(asked.sync, ranks)
    if asked.checkpoint is not None:
        refuse_unwritable(asked.checkpoint, "--checkpoint")
    session = _session(asked)
    batch, factor = _batch(session, asked.batch_size)
    source = _source(asked.data, session, batch, factor, asked.seed or 0)
    if sync is not None:
        source = dealt(source, sync, 0)
        _refuse_without_exchange(sync, session)
    epochs = 1 if asked.epochs is None and asked.steps is None else asked.epochs
    start = _start(session, asked.resume, asked.fresh)
    hypers = numbers(asked.settings, "--set") | ({"lr": asked.lr} if asked.lr is not None else {})
    schedule = _schedule(asked, session, hypers, last_step(source, start, epochs, asked.steps))
    return Plan(
        session, source, batch, factor, epochs, hypers, schedule,
        evaluation=_evaluation(asked, session, batch),
        checkpoints=_checkpoints(asked),
        start=start,
        sync=sync,
    )  # fmt: skip


def _refuse_without_exchange(sync: Gradients | LocalSteps, session: Session) -> None:
    if isinstance(sync, Gradients) and not session.manifest.exchange:
        raise UserError(
            "--sync gradients needs an artifact that exchanges them: compile it with --communicate, or train with "
            "--sync local:STEPS"
        )


def _refuse_useless(asked: Asked) -> None:
    """Refuse options that do nothing without another one."""
    best = {"--keep-best": asked.keep_best}
    for option, value, needing in (
        ("--validation", asked.validation, {"--eval-every": asked.eval_every, "--patience": asked.patience, **best}),
        ("--checkpoint", asked.checkpoint, {"--save-every": asked.save_every, "--keep": asked.keep, **best}),
        ("--checkpoint or --validation", asked.checkpoint or asked.validation, {"--ema": asked.ema}),
        ("--resume", asked.resume, {"--fresh": asked.fresh}),
    ):
        if not value and (useless := [name for name, setting in needing.items() if setting]):
            raise UserError(f"{useless[0]} needs {option}")


def _session(asked: Asked) -> Session:
    session = load(
        asked.directory,
        target=asked.target,
        device=asked.device,
        checkpoint=asked.resume,
        base=asked.base,
        strict=asked.strict,
        on_nonfinite=asked.on_nonfinite,
        trusted=asked.trusted or None,
    )
    session = _view(session, asked.step_name)
    _warn_unless_verified(session)
    if asked.seed is not None and asked.resume is None and session.manifest.seed is not None:
        session.seed(asked.seed)
    return session


def _evaluation(asked: Asked, session: Session, batch: int) -> Evaluation | None:
    if not asked.validation:
        return None
    arrays, varies = _arrays(asked.validation, session), _varies(session)
    _refuse_too_few(asked.validation, arrays, 1 if varies else batch, "")
    held_out = InOrder(arrays, batch, partial=varies)
    return Evaluation(held_out, asked.eval_every, asked.monitor, asked.mode, asked.patience, asked.min_delta)


def _checkpoints(asked: Asked) -> Checkpoints | None:
    if asked.checkpoint is None:
        return None
    return Checkpoints(asked.checkpoint, asked.save_every, asked.keep, asked.keep_best)


def _view(session: Session, name: str | None) -> Session:
    """The session of the step to train, of an artifact of several."""
    if name is None and not session.manifest.steps:
        return session
    if name is None:
        raise UserError(f"the artifact has several steps: give --step, one of {', '.join(session.manifest.steps)}")
    return session.step(name)


def _warn_unless_verified(session: Session) -> None:
    if is_verified(session.target, session.device):
        return
    error_console.print(
        f"warning: the target {session.target.name} is not verified on {session.device}; its numbers may be wrong. "
        f"Verify it: irongrad verify {session.directory} --target {session.target.name} --device {session.device}",
        highlight=False,
        soft_wrap=True,
    )


def _source(data: Sequence[str], session: Session, batch: int, accumulate: int, seed: int) -> Source:
    arrays = _arrays(data, session)
    any_size = isinstance(training_entry(session.manifest).inputs[0].shape[0], str)
    _refuse_too_few(data, arrays, batch * accumulate, "; give a smaller --batch-size" if any_size else "")
    kind: Callable[..., Source] = Shards if isinstance(arrays, MappedRows) else Arrays
    return kind(arrays, batch, accumulate=accumulate, seed=seed)


def _refuse_too_few(data: Sequence[str], arrays: dict[str, Array] | MappedRows, least: int, way_out: str) -> None:
    samples = arrays.samples if isinstance(arrays, MappedRows) else len(next(iter(arrays.values())))
    if samples < least:
        raise GuardError(f"{', '.join(data)} has {samples} samples, fewer than one batch of {least}{way_out}")


def _arrays(patterns: Sequence[str], session: Session) -> dict[str, Array] | MappedRows:
    """The arrays in one file, read whole if there is memory for them; those in several files are mapped."""
    files = matching(patterns, [s.name for s in training_entry(session.manifest).inputs])
    if isinstance(files, list) and len(files) == 1 and (not is_too_large(files[0]) or is_compressed(files[0])):
        return read_arrays(files[0], session.manifest)
    return map_shards(files, session.manifest)


def _start(session: Session, resume: Path | None, fresh: bool) -> Position:
    """Where the run stands: at the record in its checkpoint, at the session's number of updates, or at a beginning."""
    if fresh:
        return Position(name=session.step_name)
    recorded = None if resume is None else read_position(resume, session)
    return position_of(session) if recorded is None else recorded


def _schedule(asked: Asked, session: Session, hypers: dict[str, float], last: int | None) -> Schedule | None:
    """The schedule, which takes the learning rates out of `hypers`; None if there is none."""
    if asked.schedule is None and asked.warmup is None:
        return None
    rates = rates_of(session.manifest, hypers.get("lr"))
    rates |= {name: hypers[name] for name in rates if name in hypers}
    for name in ("lr", *rates):
        hypers.pop(name, None)
    return schedule_of(asked.schedule or "constant", session.manifest, rates, warmup=asked.warmup, last=last)


def _batch(session: Session, wanted: int | None) -> tuple[int, int]:
    """The number of samples in a call, and the number of such calls in one step of the wanted size.

    Raises:
        GuardError: the artifact takes no batches of which the wanted size is a multiple.
    """
    size = training_entry(session.manifest).inputs[0].shape[0]
    if isinstance(size, str):
        return _varying_batch(session, size, wanted)
    if wanted is None or wanted == size:
        return size, 1
    if wanted % size or not _accumulates(session):
        raise GuardError(
            f"--batch-size {wanted}: the step is compiled for batches of {size}; use that, or a multiple of it"
        )
    return size, wanted // size


def _varying_batch(session: Session, name: str, wanted: int | None) -> tuple[int, int]:
    """As `_batch`, for a step whose batch is the dimension `name`: as few calls as its largest size allows."""
    smallest, largest = session.manifest.sizes.get(name, (1, None))
    if wanted is None:
        return max(smallest, _USUAL_BATCH if largest is None else largest), 1
    for count in range(1, wanted + 1 if _accumulates(session) else 2):
        if wanted % count == 0 and smallest <= wanted // count <= (largest or wanted):
            return wanted // count, count
    most = "" if largest is None else f" to {largest}"
    raise GuardError(
        f"--batch-size {wanted}: the step takes {name} from {smallest}{most}, and {wanted} is no "
        "multiple of such a size"
    )


def _accumulates(session: Session) -> bool:
    return session.manifest.entry_point("grad_step") is not None


def _varies(session: Session) -> bool:
    """Whether the evaluation takes batches of any size."""
    entry = session.manifest.entry_point("eval_step")
    return entry is not None and isinstance(entry.inputs[0].shape[0], str)
