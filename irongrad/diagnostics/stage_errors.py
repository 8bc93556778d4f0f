"""Errors that no stage expected: every one reaches the user as an IronGradError with the stage and the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from irongrad.diagnostics.advice import refused_at_capture
from irongrad.diagnostics.capture_errors import by_values
from irongrad.diagnostics.source_lines import LONGEST, is_user_file, lines_in, names_a_line, source_line
from irongrad.runtime.errors import CaptureError, InternalError, IronGradError, UnsupportedOpError, UserError
from irongrad.runtime.installed import PACKAGE

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def reported(stage: Callable[[], str], made_at: str = "") -> Iterator[None]:
    """While open, an exception that is no IronGradError becomes one, and a refusal names a line of the user's.

    Args:
        stage: returns what runs, for the message: `the stage 'guards'`.
        made_at: the user's line that makes the step, for a refusal that knows no better one.

    Raises:
        CaptureError: the user's own code raised, or needs values of tensors while it is traced.
        UnsupportedOpError: PyTorch names an operator of the user's that it cannot trace.
        InternalError: IronGrad, or a library that it called, raised.
    """
    try:
        with refusals_name(made_at):
            yield
    except IronGradError:
        raise
    except Exception as error:
        raise _described(error, stage()) from error


def reported_as(stage: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function whose exceptions are `reported` as those of `stage`.

    A call with wrong arguments raises Python's own TypeError: it is the caller's mistake.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        """The decorated function."""

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                signature(function).bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)
            with reported(lambda: stage):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def refusals_name(made_at: str) -> Iterator[None]:
    """While open, a refusal that names no line gets the user's line that makes the step, unless that is empty."""
    try:
        yield
    except UserError as error:
        if made_at and not names_a_line(str(error)):
            error.args = (f"{error}\n  in the step that is made at {made_at}",)
        raise


def _described(error: Exception, stage: str) -> IronGradError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_user_file(f.filename) or _is_ours(f.filename)]
    mine = [f for f in frames if is_user_file(f.filename)]
    text = str(error).strip()
    # torch.fx puts the line of a node into the message, when an operator of a traced graph fails.
    place = source_line(mine[-1].filename, mine[-1].lineno or 0) if mine else next(iter(lines_in(text)[-1:]), "")
    what = f"{type(error).__name__}: {text.splitlines()[0][:LONGEST]}" if text else type(error).__name__
    start = f"{place}\n  " if place else ""
    if place and (refused := refused_at_capture(error)):
        return UnsupportedOpError(f"{start}{refused}")
    if place and (advice := by_values(error)):
        return CaptureError(f"{start}{advice}")
    if mine and own[-1] is mine[-1]:
        return CaptureError(f"{start}this line fails in {stage}: {what}")
    return InternalError(
        f"{start}{stage} failed: {what}. This is a bug in IronGrad or its toolchain. Please report it with the model"
    )


def _is_ours(path: str) -> bool:
    return path.startswith(str(PACKAGE))
