"""`irongrad train`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from irongrad.cli.common import (
    console,
    device_option,
    directory_argument,
    error_console,
    json_option,
    numbers,
    print_json,
    refuse_unwritable,
    step_option,
    target_option,
    trusted_option,
)
from irongrad.runtime import Session, load
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.nonfinite import CHOICES, OnNonFinite
from irongrad.runtime.selection import is_verified
from irongrad.training.evaluation import Evaluation, InOrder
from irongrad.training.events import EpochEnded, Evaluated, Event, JsonLines, Started, Stepped
from irongrad.training.inputs import read_arrays, training_entry
from irongrad.training.loop import Result, last_step, train
from irongrad.training.mapped_rows import MappedRows
from irongrad.training.numpy_files import is_compressed, is_too_large
from irongrad.training.position import Position, position_of, read_position
from irongrad.training.saving import Checkpoints
from irongrad.training.schedule_text import NAMES, schedule_of
from irongrad.training.schedules import Schedule, rates_of
from irongrad.training.shards import Shards, map_shards, matching
from irongrad.training.sources import Arrays, Source
from irongrad.training.stop import SIGTERM
from irongrad.training.tensorboard import TensorBoard

# The batch of a step that takes any number of samples, if no size is asked for.
_USUAL_BATCH = 32
# The exit code after SIGTERM, as shells report it: 128 and the number of the signal.
_STOPPED = 128 + 15


@click.command(
    epilog="""\b
Example:
  irongrad train build/digits --data digits.npz --epochs 10 --lr 0.001 --checkpoint digits.safetensors
"""
)
@directory_argument
@click.option(
    "--data",
    required=True,
    multiple=True,
    metavar="FILES",
    help="An .npz with one array per input, or many: 'shards/*.npz'. NAME='x-*.npy' are .npy files of one input. "
    "Repeatable.",
)
@click.option("--epochs", type=click.IntRange(1), help="Passes over the data; 1 without --steps.")
@click.option(
    "--steps", type=click.IntRange(1), help="End after so many steps of the run, those before --resume included."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Samples in a step: the compiled number, or a multiple of it, which is accumulated. Where the number varies, "
    "any; by default that of the largest bucket, or 32.",
)
@click.option("--lr", type=float, help="Learning rate; the compiled default otherwise.")
@click.option(
    "--schedule",
    metavar="NAME[:OPTION=VALUE,…]",
    help=f"How the learning rate changes: {', '.join(NAMES)}. It ends with training, or after total=N steps.",
)
@click.option("--warmup", type=click.IntRange(0), help="Steps in which the learning rate rises from 0.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another hyperparameter; repeatable.")
@click.option("--validation", multiple=True, metavar="FILES", help="As --data, to evaluate after each epoch.")
@click.option("--eval-every", type=click.IntRange(1), help="Evaluate every so many steps, instead of after each epoch.")
@click.option("--patience", type=click.IntRange(1), help="Stop after so many evaluations in a row without improvement.")
@click.option("--min-delta", type=float, default=0.0, help="By how much an improvement must be better, for --patience.")
@click.option("--monitor", default="loss", show_default=True, help="The value of an evaluation that must improve.")
@click.option(
    "--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Which value is the best."
)
@click.option("--resume", type=click.Path(path_type=Path), help="A checkpoint to start from.")
@click.option("--fresh", is_flag=True, help="Take only the state from --resume, and begin a new run with it.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Where to save the state after each epoch.")
@click.option("--save-every", type=click.IntRange(1), help="Save the state every so many steps, too.")
@click.option(
    "--keep", default=0, type=click.IntRange(0), help="Keep the last so many checkpoints, as NAME.step-N.SUFFIX."
)
@click.option("--keep-best", is_flag=True, help="Keep the state of the best evaluation, as NAME.best.SUFFIX.")
@click.option("--log", type=click.Path(path_type=Path), help="A file to which a line of JSON is added for each step.")
@click.option("--tensorboard", type=click.Path(path_type=Path), help="A folder for TensorBoard; needs tensorboardX.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Seed of the order of the samples (0 by default) and of the random numbers that the step draws (the compiled "
    "seed by default).",
)
@click.option(
    "--on-nonfinite",
    type=click.Choice(CHOICES),
    default="warn",
    show_default=True,
    help="What to do when the loss or the state becomes NaN or infinite. The last finite checkpoint is kept.",
)
@click.option("--strict", is_flag=True, help="Refuse inputs that are NaN or infinite.")
@step_option
@trusted_option
@target_option
@device_option
@json_option
def command(
    directory: Path,
    data: tuple[str, ...],
    epochs: int | None,
    steps: int | None,
    batch_size: int | None,
    lr: float | None,
    schedule: str | None,
    warmup: int | None,
    settings: tuple[str, ...],
    validation: tuple[str, ...],
    eval_every: int | None,
    patience: int | None,
    min_delta: float,
    monitor: str,
    mode: Literal["min", "max"],
    resume: Path | None,
    fresh: bool,
    checkpoint: Path | None,
    save_every: int | None,
    keep: int,
    keep_best: bool,
    log: Path | None,
    tensorboard: Path | None,
    seed: int | None,
    on_nonfinite: OnNonFinite,
    strict: bool,
    step_name: str | None,
    trusted: tuple[Path, ...],
    target: str | None,
    device: str | None,
    as_json: bool,
) -> int:
    """Train the artifact in DIRECTORY on arrays in files; needs no PyTorch.

    The order of samples depends only on the seed and the step count, and random numbers depend on the checkpoint. So a
    resumed run continues as the first run would have, also from the middle of an epoch.

    SIGTERM ends training after the running step: the checkpoint is written, and the exit code is 143.
    """
    _refuse_useless(
        {"--eval-every": eval_every, "--patience": patience, "--keep-best": keep_best}, "--validation", validation
    )
    _refuse_useless({"--save-every": save_every, "--keep": keep, "--keep-best": keep_best}, "--checkpoint", checkpoint)
    _refuse_useless({"--fresh": fresh}, "--resume", resume)
    if checkpoint is not None:
        refuse_unwritable(checkpoint, "--checkpoint")
    session = load(
        directory,
        target=target,
        device=device,
        checkpoint=resume,
        strict=strict,
        on_nonfinite=on_nonfinite,
        trusted=trusted or None,
    )
    session = _view(session, step_name)
    _warn_unless_verified(session)
    if seed is not None and resume is None and session.manifest.seed is not None:
        session.seed(seed)
    compiled, factor = _batch(session, batch_size)
    source = _source(data, session, compiled, factor, seed or 0)
    evaluation = None
    if validation:
        held_out = InOrder(_arrays(validation, session), compiled, partial=_varies(session))
        evaluation = Evaluation(held_out, eval_every, monitor, mode, patience, min_delta)
    if epochs is None and steps is None:
        epochs = 1
    start = _start(session, resume, fresh)
    hypers = numbers(settings, "--set") | ({"lr": lr} if lr is not None else {})
    planned = _schedule(schedule, session, hypers, warmup, last_step(source, start, epochs, steps))
    if factor > 1 and not as_json:
        console.print(f"each step accumulates {factor} batches of {compiled}; BatchNorm sees {compiled} at a time")
    with ExitStack() as opened:
        callbacks: list[Any] = [opened.enter_context(_Display(epochs, quiet=as_json))]
        if log is not None:
            callbacks.append(opened.enter_context(JsonLines(log)))
        if tensorboard is not None:
            callbacks.append(opened.enter_context(TensorBoard(tensorboard)))
        result = train(
            session,
            source,
            epochs=epochs,
            steps=steps,
            hypers=hypers,
            schedule=planned,
            evaluation=evaluation,
            checkpoints=None if checkpoint is None else Checkpoints(checkpoint, save_every, keep, keep_best),
            start=start,
            callbacks=callbacks,
        )
    _report(result, checkpoint, eval_every, as_json)
    return _STOPPED if result.reason == SIGTERM else 0


def _refuse_useless(given: Mapping[str, Any], option: str, value: Any) -> None:
    """Refuse options that do nothing without another one."""
    if not value and (useless := [name for name, setting in given.items() if setting]):
        raise UserError(f"{useless[0]} needs {option}")


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
    samples = arrays.samples if isinstance(arrays, MappedRows) else len(next(iter(arrays.values())))
    if samples < batch * accumulate:
        listed = ", ".join(data)
        raise GuardError(f"{listed} has {samples} samples, fewer than one batch of {batch * accumulate}")
    kind: Callable[..., Source] = Shards if isinstance(arrays, MappedRows) else Arrays
    return kind(arrays, batch, accumulate=accumulate, seed=seed)


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


def _schedule(
    text: str | None, session: Session, hypers: dict[str, float], warmup: int | None, last: int | None
) -> Schedule | None:
    """The schedule, which takes the learning rates out of `hypers`; None if there is none."""
    if text is None and warmup is None:
        return None
    rates = rates_of(session.manifest, hypers.get("lr"))
    rates |= {name: hypers[name] for name in rates if name in hypers}
    for name in ("lr", *rates):
        hypers.pop(name, None)
    return schedule_of(text or "constant", session.manifest, rates, warmup=warmup, last=last)


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


def _report(result: Result, checkpoint: Path | None, eval_every: int | None, as_json: bool) -> None:
    stopped = {} if result.reason == "complete" else {"stopped": result.reason}
    if as_json:
        epochs = [{"epoch": n, **_record(e)} for n, e in enumerate(result.epochs, 1)]
        evaluations = [{"steps": e.step, **_listed_values(e)} for e in result.evaluations]
        report = {"epochs": epochs, "checkpoint": str(checkpoint) if checkpoint else None}
        print_json(report | ({"evaluations": evaluations} if eval_every else {}) | stopped)
        return
    if stopped:
        console.print(f"stopped after {result.step} steps: {result.reason}")
    if checkpoint is not None:
        console.print(f"saved {checkpoint}")


def _record(epoch: EpochEnded) -> dict[str, Any]:
    """An epoch as `--json` prints it."""
    record = {"steps": epoch.step, **_listed_values(epoch)}
    if epoch.evaluated is not None:
        record |= {f"validation_{name}": value for name, value in _listed_values(epoch.evaluated).items()}
    return record


def _listed_values(means: EpochEnded | Evaluated) -> dict[str, Any]:
    """The loss and the values beside it, as `--json` prints them."""
    return {"loss": means.loss, **({"values": dict(means.values)} if means.values else {})}


class _Display:
    """A callback that shows the progress of each epoch: the loss, samples a second, and the time to the end."""

    def __init__(self, epochs: int | None, *, quiet: bool) -> None:
        self._epochs = epochs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[pace]}"),
            console=console,
            disable=quiet,
        )
        self._task: TaskID | None = None
        self._number = 0

    def __enter__(self) -> _Display:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started, self._begun, self._samples = event, time.monotonic(), 0
            self._batch = event.batch
        elif isinstance(event, Stepped):
            self._stepped(event)
        elif isinstance(event, Evaluated) and self._task is not None:
            text = _shown({"loss": event.loss, **event.values})
            self._progress.update(self._task, loss=f"{_shown(self._means())}, validation {text}")
        elif isinstance(event, EpochEnded):
            self._task, self._batch = None, 0

    def _stepped(self, step: Stepped) -> None:
        if self._task is None:
            self._number += 1
            total = "" if self._epochs is None else f"/{self._epochs}"
            self._task = self._progress.add_task(
                f"epoch {self._number}{total}", total=self._started.per_epoch, completed=self._batch, loss="", pace=""
            )
            self._sums: dict[str, float] = {}
            self._count = 0
        for name, value in {"loss": step.loss, **step.values}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._count += 1
        self._samples += step.samples
        seconds = max(time.monotonic() - self._begun, 1e-9)
        pace = f"{self._samples / seconds:,.0f} samples/s"
        if self._started.last is not None:
            left = (self._started.last - step.step) * seconds / (step.step - self._started.step)
            pace += f", {_duration(left)} to the end"
        self._progress.update(self._task, advance=1, loss=_shown(self._means()), pace=pace)

    def _means(self) -> dict[str, float]:
        return {name: value / self._count for name, value in self._sums.items()}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _shown(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in means.items())
