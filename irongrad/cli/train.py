"""`irongrad train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
from irongrad.runtime.errors import GuardError, UserError
from irongrad.runtime.manifest import steps_of
from irongrad.runtime.nonfinite import CHOICES, OnNonFinite
from irongrad.runtime.selection import is_verified
from irongrad.training.numpy_files import read_npz

Data = dict[str, np.ndarray[Any, Any]]

# The batch of a step that takes any number of samples, if no size is asked for.
_USUAL_BATCH = 32


@click.command(
    epilog="""\b
Example:
  irongrad train build/digits --data digits.npz --epochs 10 --lr 0.001 --checkpoint digits.safetensors
"""
)
@directory_argument
@click.option("--data", required=True, type=click.Path(path_type=Path), help="An .npz with one array per input.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1), help="Passes over the data.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Samples in a step: the compiled number, or a multiple of it, which is accumulated. Where the number varies, "
    "any; by default that of the largest bucket, or 32.",
)
@click.option("--lr", type=float, help="Learning rate; the compiled default otherwise.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another hyperparameter; repeatable.")
@click.option("--validation", type=click.Path(path_type=Path), help="An .npz for the evaluation loss after each epoch.")
@click.option("--resume", type=click.Path(path_type=Path), help="A checkpoint to start from.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Where to save the state after each epoch.")
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
    data: Path,
    epochs: int,
    batch_size: int | None,
    lr: float | None,
    settings: tuple[str, ...],
    validation: Path | None,
    resume: Path | None,
    checkpoint: Path | None,
    seed: int | None,
    on_nonfinite: OnNonFinite,
    strict: bool,
    step_name: str | None,
    trusted: tuple[Path, ...],
    target: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Train the artifact in DIRECTORY on the arrays in an .npz file; needs no PyTorch.

    The order of samples depends only on the seed and the step count, and random numbers depend on the checkpoint. So a
    resumed run continues as the first run would have.
    """
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
    training = _Training(
        session=session,
        data=read_data(data, session),
        held_out=read_data(validation, session) if validation is not None else None,
        sizes=_batch(session, batch_size),
        hypers=numbers(settings, "--set") | ({"lr": lr} if lr is not None else {}),
        seed=seed or 0,
    )
    if training.per_epoch == 0:
        raise GuardError(f"{data} has {training.samples} samples, fewer than one batch of {training.batch}")
    compiled, factor = training.sizes
    if factor > 1 and not as_json:
        console.print(f"each step accumulates {factor} batches of {compiled}; BatchNorm sees {compiled} at a time")
    report = _trained(training, epochs, checkpoint, quiet=as_json)
    if as_json:
        print_json({"epochs": report, "checkpoint": str(checkpoint) if checkpoint else None})
    elif checkpoint is not None:
        console.print(f"saved {checkpoint}")


def _view(session: Session, name: str | None) -> Session:
    """The session of the step to train, of an artifact of several."""
    if name is None and not session.manifest.steps:
        return session
    if name is None:
        raise UserError(f"the artifact has several steps: give --step, one of {', '.join(session.manifest.steps)}")
    return session.step(name)


def _trained(training: _Training, epochs: int, checkpoint: Path | None, *, quiet: bool) -> list[dict[str, Any]]:
    """Train `epochs` epochs, save the state after each, and return a record of each."""
    report: list[dict[str, Any]] = []
    step = int(training.session.state()[steps_of(training.session.step_name)])
    with _progress(quiet) as progress:
        for epoch in range(1, epochs + 1):
            task = progress.add_task(f"epoch {epoch}/{epochs}", total=training.per_epoch, loss="")
            record = training.epoch(step, partial(progress.update, task))
            report.append({"epoch": epoch, **record})
            step = record["steps"]
            if checkpoint is not None:
                training.session.save(checkpoint)
    return report


@dataclass(frozen=True)
class _Training:
    """A session and its training data.

    Attributes:
        session: the session, which holds the state.
        data: the arrays of all samples, by the input's name.
        held_out: the arrays for the evaluation loss; None to skip the evaluation.
        sizes: the compiled batch size, and the number of such batches in one step.
        hypers: the hyperparameters that differ from the compiled defaults.
        seed: the seed of the order of the samples.
    """

    session: Session
    data: Data
    held_out: Data | None
    sizes: tuple[int, int]
    hypers: dict[str, float]
    seed: int

    @property
    def batch(self) -> int:
        """The number of samples in a step."""
        return self.sizes[0] * self.sizes[1]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(next(iter(self.data.values())))

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch; samples that do not fill a step are left out."""
        return self.samples // self.batch

    def epoch(self, first: int, show: Callable[..., None]) -> dict[str, Any]:
        """Train one epoch from step `first` on, and evaluate.

        Returns:
            The number of steps so far, and the mean losses.
        """
        steps: list[Reported] = []
        for number in range(first, first + self.per_epoch):
            steps.append(self._step(number))
            show(advance=1, loss=_listed(mean_of(steps)))
        means = mean_of(steps)
        record = {"steps": first + self.per_epoch, **_record(means)}
        if self.held_out is not None:
            held_out = evaluate(self.session, self.held_out, self.sizes[0])
            record |= {f"validation_{name}": value for name, value in _record(held_out).items()}
            show(loss=f"{_listed(means)}, validation {_listed(held_out)}")
        return record

    def _step(self, number: int) -> Reported:
        """Run step `number`, counted from the beginning of the first run; it and the seed determine the samples."""
        epoch, place = divmod(number, self.per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        compiled, factor = self.sizes
        rows = order[place * self.batch :][: self.batch].reshape(factor, compiled)
        batches: Iterator[Data] = ({n: a[part] for n, a in self.data.items()} for part in rows)
        if factor == 1:
            return reported(self.session.train_step(**next(batches), **self.hypers))
        parts = [reported(self.session.grad_step(**batch)) for batch in batches]
        self.session.apply_step(**self.hypers)
        return mean_of(parts)


# The loss, as `loss`, and the values beside it by name.
Reported = dict[str, float]


def reported(result: Any) -> Reported:
    """Return what a training or evaluation step returned, by name."""
    loss, values = result if isinstance(result, tuple) else (result, {})
    return {"loss": loss, **values}


def mean_of(results: Sequence[Reported], weights: Sequence[int] | None = None) -> Reported:
    """Return the means of what several steps returned."""
    return {n: float(np.average([r[n] for r in results], weights=weights)) for n in results[0]}


def _record(means: Reported) -> dict[str, Any]:
    """The loss and the values beside it, as `--json` prints them."""
    values = {n: v for n, v in means.items() if n != "loss"}
    return {"loss": means["loss"], **({"values": values} if values else {})}


def _listed(means: Reported) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in means.items())


def _warn_unless_verified(session: Session) -> None:
    if is_verified(session.target, session.device):
        return
    error_console.print(
        f"warning: the target {session.target.name} is not verified on {session.device}; its numbers may be wrong. "
        f"Verify it: irongrad verify {session.directory} --target {session.target.name} --device {session.device}",
        highlight=False,
        soft_wrap=True,
    )


def read_data(path: Path, session: Session) -> Data:
    """Read the arrays with the names of the step's inputs from an .npz file.

    Raises:
        GuardError: the file cannot be read, lacks an input, or its arrays differ in length.
    """
    entry = session.manifest.entry_point("train_step") or session.manifest.entry_point("grad_step")
    if entry is None:
        raise GuardError("this artifact was compiled without train_step and without grad_step")
    chosen = read_npz(path, [s.name for s in entry.inputs])
    if scalars := [n for n, a in chosen.items() if not a.ndim]:
        raise GuardError(f"{path}: {scalars[0]} is a single number; the first dimension of an array counts samples")
    if len({len(a) for a in chosen.values()}) > 1:
        lengths = ", ".join(f"{n}: {len(a)}" for n, a in chosen.items())
        raise GuardError(f"{path}: the arrays have different numbers of samples ({lengths})")
    sizes: dict[str, int] = {}
    for spec in entry.inputs:
        array = chosen[spec.name]
        if array.dtype.name != spec.dtype or not _fits(array.shape[1:], spec.shape[1:], sizes):
            known = "".join(f" with {name} = {size}" for name, size in sizes.items() if name in spec.shape)
            raise GuardError(
                f"{path}: {spec.name} is {array.dtype}[{', '.join(map(str, array.shape))}], the step takes "
                f"{spec.dtype}[N{''.join(f', {d}' for d in spec.shape[1:])}]{known}; convert it before saving"
            )
    return chosen


def _fits(shape: Sequence[int], wanted: Sequence[int | str], sizes: dict[str, int]) -> bool:
    """Whether a sample has a wanted shape; the size of each named dimension is that in `sizes`, or is added there."""
    return len(shape) == len(wanted) and all(
        size == (sizes.setdefault(want, size) if isinstance(want, str) else want)
        for size, want in zip(shape, wanted, strict=True)
    )


def evaluate(session: Session, data: Data, batch: int) -> Reported:
    """The mean evaluation loss over the samples of `data`, `batch` at a time, and the means of the values beside it.

    The samples of a last smaller batch count as much as the others. A step of one batch size leaves them out.
    """
    samples = len(next(iter(data.values())))
    entry = session.manifest.entry_point("eval_step")
    varies = entry is not None and isinstance(entry.inputs[0].shape[0], str)
    starts = range(0, samples if varies else samples // batch * batch, batch)
    parts = [{n: a[start : start + batch] for n, a in data.items()} for start in starts]
    if not parts:
        return {"loss": float("nan")}
    weights = [len(next(iter(part.values()))) for part in parts]
    return mean_of([reported(session.eval_step(**part)) for part in parts], weights)


def _batch(session: Session, wanted: int | None) -> tuple[int, int]:
    """The number of samples in a call, and the number of such calls in one step of the wanted size.

    Raises:
        GuardError: the artifact takes no batches of which the wanted size is a multiple.
    """
    entry = session.manifest.entry_point("train_step") or session.manifest.entry_point("grad_step")
    assert entry is not None
    size = entry.inputs[0].shape[0]
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


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
        disable=quiet,
    )
