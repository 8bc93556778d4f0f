"""`irongrad compile`."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from irongrad.analysis.timeline import recorded
from irongrad.cli.common import (
    choice_options,
    fallback_option,
    given_choices,
    json_option,
    precision_option,
    print_json,
    refuse_unwritable,
    step_argument,
    targets_option,
)
from irongrad.cli.outcome import print_outcome
from irongrad.cli.recorded import compile_or_repeat
from irongrad.pipeline.choices import OF_PASSES
from irongrad.reports.perfetto import write_trace
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import MANIFEST

if TYPE_CHECKING:
    from irongrad.step.steps import Steps
    from irongrad.step.train_step import TrainStep


@click.command(
    epilog="""\b
Example:
  irongrad compile examples/digits.py:make_step -o build/digits --target llvm-cpu
"""
)
@step_argument
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact's directory.")
@targets_option
@choice_options(*OF_PASSES)
@click.option("--pass-report", is_flag=True, help="Show what every pass did, and how long it took.")
@choice_options("entry_points", "communicate", "bucket_size", "shard", "sync_batch_norm", "place", "base")
@precision_option
@fallback_option
@choice_options("dump_dir")
@click.option("--stop-after", metavar="STAGE", help="Stop after this stage.")
@choice_options("cache")
@click.option("--trace", type=click.Path(path_type=Path), help="Write what ran when, for ui.perfetto.dev.")
@click.option("--depfile", type=click.Path(path_type=Path), help="Write the source files this depends on, for builds.")
@json_option
def command(
    source: str,
    output: Path,
    targets: tuple[str, ...],
    pass_report: bool,
    precision: str | None,
    bucket_fallback: str | None,
    stop_after: str | None,
    trace: Path | None,
    depfile: Path | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Compile the training step that FUNCTION in the Python file FILE returns.

    The result is verified against eager float64 before it is written.
    """
    options = given_choices(choices) | {"stop_after": stop_after}
    if trace is not None:
        refuse_unwritable(trace, "--trace")
        options["cache"] = False  # else there would be nothing to see
    load = partial(load_step, source, precision, bucket_fallback)
    with _traced(trace, f"irongrad compile {source}"):
        outcome = compile_or_repeat(load, output, targets, options, click.get_current_context().params, quiet=as_json)
    if depfile is not None and outcome.manifest is not None:
        _write_depfile(depfile, output, [Path(f) for f in outcome.files])
    if as_json:
        print_json(outcome.summary)
    else:
        print_outcome(outcome, output, pass_report=pass_report)


@contextmanager
def _traced(path: Path | None, title: str) -> Iterator[None]:
    """Record what the block runs, and write it to `path`, if it is given and the block succeeds."""
    if path is None:
        yield
        return
    with recorded() as timeline:
        yield
    write_trace(timeline.slices, path, title)


def load_step(source: str, precision: str | None = None, bucket_fallback: str | None = None) -> TrainStep | Steps:
    """Import FILE and call FUNCTION.

    Args:
        source: `FILE:FUNCTION`.
        precision: replaces the step's own precision; None to keep it.
        bucket_fallback: replaces the step's own fallback; None to keep it.

    Raises:
        UserError: the file or function does not exist, or the function does not return a `TrainStep` or `Steps`.
    """
    from irongrad.step.steps import Steps
    from irongrad.step.train_step import TrainStep

    step = load_function(source)()
    if not isinstance(step, TrainStep | Steps):
        raise UserError(f"{source} returned a {type(step).__name__}; it must return an irongrad.TrainStep or Steps")
    given = {"precision": precision, "bucket_fallback": bucket_fallback}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(step, Steps):
        return Steps({name: replace(one, **changed) for name, one in step.steps.items()})
    return replace(step, **changed)


def load_one_step(source: str, name: str | None, **changed: str | None) -> TrainStep:
    """Import FILE and call FUNCTION, as `load_step` does; of several steps, take the one called `name`.

    Raises:
        UserError: as `load_step`; or there are several steps, and no such one.
    """
    from irongrad.step.steps import named_steps

    steps = named_steps(load_step(source, **changed))
    chosen = steps.get(name or "")
    if chosen is None:
        listed = ", ".join(n for n in steps if n)
        raise UserError(
            f"{source} returns several steps: give --step, one of {listed}"
            if listed
            else f"{source} returns one step without a name: leave out --step"
        )
    return chosen


def load_function(source: str) -> Callable[..., Any]:
    """Import FILE, and return FUNCTION.

    Raises:
        UserError: the file or function does not exist.
    """
    path, _, name = source.rpartition(":")
    if not path or not name:
        raise UserError(f"{source!r} is not FILE:FUNCTION; write for instance examples/digits.py:make_step")
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"{path} does not exist")
    _seed()
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        there = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"{path} has no function {name!r}; it has {', '.join(there)}")
    return function


def _seed() -> None:
    """Seed every generator, so that a step without a seed has the same numbers in every compilation."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _write_depfile(path: Path, output: Path, files: Sequence[Path]) -> None:
    """Write a Makefile rule, like `cc -MD`; Ninja and Make read it."""
    target, *needed = (_make_path(f) for f in (output / MANIFEST, *files))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{target}: {' '.join(needed)}\n")


def _make_path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "\\ ").replace("#", "\\#")
