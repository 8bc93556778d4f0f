"""Refusals of code that cannot be compiled: found in many places, and reported to the user together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from irongrad.runtime.errors import UnsupportedOpError, UserError

MOST = 10  # the most refusals in one message
UNKNOWN = "(line unknown)"  # stands for the line of a refusal that has none

# A message begins with the line and its source, followed by a line break; or with the line only.
_PLACED = re.compile(r"(?P<line>\S+:\d+(?:: [^\n]*)?|\([^\n]*\))\n\s*(?P<rest>.*)", re.DOTALL)
_DEFINED = re.compile(r"(?P<line>\S+:\d+): (?P<rest>.*)", re.DOTALL)
_OPERATOR = re.compile(r"(?P<operator>\w+\.\w+(?:\.\w+)?)(?P<colon>:?) (?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True)
class Refusal:
    """An operator, a value or a line of Python that cannot be compiled.

    Attributes:
        operator: its name, such as `aten.unique_dim.default`; empty if it is not an operator.
        line: the user's line that it comes from. For an operator of the backward pass, the line of its forward.
        reason: why it cannot be compiled, as the predicate of a sentence that begins with the name.
        advice: what to use instead, a sentence without its full stop.
    """

    operator: str
    line: str
    reason: str
    advice: str

    def __str__(self) -> str:
        what = f"{self.operator} {self.reason}" if self.operator else self.reason
        return f"{self.line}: {what}. {self.advice}" if self.advice else f"{self.line}: {what}"


_found: ContextVar[list[Refusal] | None] = ContextVar("refusals", default=None)


def gathers() -> bool:
    """Whether refusals are being gathered, so that work which can continue after one should continue."""
    return _found.get() is not None


def refuse(found: Sequence[Refusal]) -> None:
    """Refuse all of `found`: at once, or together with all others if refusals are being gathered.

    Raises:
        UnsupportedOpError: refusals are not being gathered.
    """
    gathering = _found.get()
    if gathering is not None:
        gathering += found
    elif found:
        raise unsupported(found)


@contextmanager
def gathered() -> Iterator[list[Refusal]]:
    """While open, `refuse` adds to the list, and so does a `UserError` that ends the block.

    In that case the work inside the block is unfinished.
    """
    with _gathering() as found:
        try:
            yield found
        except UserError as error:
            found.append(refusal_of(error))
    found[:] = dict.fromkeys(found)


@contextmanager
def refused_together() -> Iterator[None]:
    """While open, refusals are gathered; at the end all of them are raised as one error.

    Raises:
        UnsupportedOpError: there are refusals.
    """
    with _gathering() as found:
        try:
            yield
        except Exception as error:
            if not found:
                raise
            last = [refusal_of(error)] if isinstance(error, UserError) else []
            raise unsupported(list(dict.fromkeys([*found, *last]))) from error
    if found:
        raise unsupported(list(dict.fromkeys(found)))


@contextmanager
def _gathering() -> Iterator[list[Refusal]]:
    found: list[Refusal] = []
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


def unsupported(found: Sequence[Refusal]) -> UnsupportedOpError:
    """Return one error for all of `found`."""
    if len(found) == 1:
        return UnsupportedOpError(str(found[0]))
    rows = [f"\n  {refusal}" for refusal in found[:MOST]]
    more = f"\n  and {len(found) - MOST} more" if len(found) > MOST else ""
    return UnsupportedOpError(f"{len(found)} operators cannot be compiled:{''.join(rows)}{more}")


def refusal_of(error: UserError, line: str = UNKNOWN) -> Refusal:
    """Split the message of `error` into a refusal; `line` is its place, unless the message says so itself."""
    text = str(error)
    if placed := _PLACED.fullmatch(text) or _DEFINED.fullmatch(text):
        line, text = placed["line"], placed["rest"]
    named = _OPERATOR.fullmatch(text)
    operator = named["operator"] if named else ""
    if named:
        text = f"cannot be compiled: {named['rest']}" if named["colon"] else named["rest"]
    reason, _, advice = text.partition(". ")
    return Refusal(operator, line, reason.rstrip("."), advice.rstrip("."))
