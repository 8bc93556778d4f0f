"""`irongrad train`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from irongrad.cli.common import (
    base_option,
    console,
    device_option,
    directory_argument,
    json_option,
    print_json,
    step_option,
    target_option,
    trusted_option,
)
from irongrad.cli.ranks import common_errors_said_once, on_all, world
from irongrad.cli.train_plan import Asked, Plan, planned, quiet
from irongrad.cli.train_progress import Display
from irongrad.distributed.sync_text import FORMS
from irongrad.runtime.nonfinite import CHOICES
from irongrad.training.events import Callback, EpochEnded, Evaluated, Event, JsonLines, Saved
from irongrad.training.loop import Result, train
from irongrad.training.mlflow import MLflow
from irongrad.training.schedule_text import NAMES
from irongrad.training.stop import SIGTERM
from irongrad.training.tensorboard import TensorBoard
from irongrad.training.trackio import Trackio

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
@click.option("--lr", type=click.FloatRange(min=0), help="Learning rate; the compiled default otherwise.")
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
@click.option("--mlflow", metavar="EXPERIMENT", help="An experiment of MLflow; needs mlflow-skinny.")
@click.option("--trackio", metavar="PROJECT", help="A project of trackio; needs trackio.")
@click.option(
    "--prefetch",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Read the data of so many steps in advance.",
)
@click.option(
    "--ema",
    type=float,
    metavar="DECAY",
    help="Average the parameters, as with 0.999. Evaluates the averages, and saves them as NAME.ema.SUFFIX.",
)
@click.option("--sync", metavar="HOW", help=f"Train with the other ranks that mpirun started: {FORMS}.")
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
@base_option
@trusted_option
@target_option
@device_option
@json_option
def command(**given: Any) -> int:
    """Train the artifact in DIRECTORY on arrays in files; needs no PyTorch.

    The order of samples depends only on the seed and the step count, and random numbers depend on the checkpoint. So a
    resumed run continues as the first run would have, also from the middle of an epoch.

    SIGTERM ends training after the running step: the checkpoint is written, and the exit code is 143.
    """
    asked = Asked(**given)
    if asked.sync is None:
        return _run(asked, planned(asked))
    ranks = world()
    plan = on_all(ranks, lambda: planned(asked, ranks))
    together = common_errors_said_once(ranks) if asked.sync == "gradients" else nullcontext()
    with together:
        return _run(asked if ranks.rank == 0 else quiet(asked), plan, says=ranks.rank == 0)


def _run(asked: Asked, plan: Plan, *, says: bool = True) -> int:
    """Train, and report it; of several ranks, the first says something."""
    if plan.factor > 1 and says and not asked.as_json:
        console.print(
            f"each step accumulates {plan.factor} batches of {plan.batch}; BatchNorm sees {plan.batch} at a time"
        )
    written: list[Saved] = []
    with _interrupt_explained(asked, written, says=says), ExitStack() as opened:
        callbacks = _callbacks(asked, plan, opened)
        callbacks.append(partial(_note_saved, written))
        result = _trained(plan, asked, callbacks)
    if says:
        if result.step == plan.start.step and not asked.as_json:
            console.print(f"nothing was left to train: the run is at step {result.step} already")
        _report(result, asked.checkpoint, asked.eval_every, asked.as_json)
    return _STOPPED if result.reason == SIGTERM else 0


def _note_saved(written: list[Saved], event: Event) -> None:
    """Keep the latest checkpoint that a run has written."""
    if isinstance(event, Saved):
        written[:] = [event]


@contextmanager
def _interrupt_explained(asked: Asked, written: Sequence[Saved], *, says: bool) -> Iterator[None]:
    """After Ctrl-C, say which checkpoint the run can go on from."""
    try:
        yield
    except KeyboardInterrupt:
        if says and asked.checkpoint is not None:
            click.echo(_where_it_stands(asked.checkpoint, written), err=True)
        raise


def _where_it_stands(checkpoint: Path, written: Sequence[Saved]) -> str:
    if not written:
        return "no checkpoint was written yet: --save-every writes one every so many steps, and SIGTERM one at once"
    return f"{checkpoint} has the state after {written[-1].step} steps: --resume {checkpoint} goes on from there"


def _callbacks(asked: Asked, plan: Plan, opened: ExitStack) -> list[Callback]:
    callbacks: list[Callback] = [opened.enter_context(Display(plan.epochs, quiet=asked.as_json))]
    if asked.log is not None:
        callbacks.append(opened.enter_context(JsonLines(asked.log)))
    if asked.tensorboard is not None:
        callbacks.append(opened.enter_context(TensorBoard(asked.tensorboard)))
    if asked.mlflow is not None:
        callbacks.append(opened.enter_context(MLflow(asked.mlflow)))
    if asked.trackio is not None:
        callbacks.append(opened.enter_context(Trackio(asked.trackio)))
    return callbacks


def _trained(plan: Plan, asked: Asked, callbacks: list[Callback]) -> Result:
    return train(
        plan.session,
        plan.source,
        epochs=plan.epochs,
        steps=asked.steps,
        hypers=plan.hypers,
        schedule=plan.schedule,
        prefetch=asked.prefetch,
        ema=asked.ema,
        evaluation=plan.evaluation,
        checkpoints=plan.checkpoints,
        start=plan.start,
        sync=plan.sync,
        callbacks=callbacks,
    )


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
