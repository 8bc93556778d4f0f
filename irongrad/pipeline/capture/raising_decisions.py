"""Python decisions of a traced function that only raise: `assert`, `torch._assert`, and `if … : raise …`.

A trace does not know the condition. It takes the way that goes on, and records the condition as an assertion, which
`irongrad.pipeline.guards` checks at the start of a call. An exception that the user's code catches again is no such
decision, for then both ways go on.
"""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from types import CodeType

import torch
from torch import Tensor, nn

from irongrad.diagnostics.source_lines import here, is_of_a_model, running

_CALLS = nn.Module.__call__.__code__.co_filename  # raises again what it catches
# Instructions after which another one than the next may run, or none.
_LEAVES = frozenset({"RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "SEND", "RERAISE"})


def asserted(condition: Tensor, message: str = "") -> None:
    """Record an assertion in the trace; its message gets the user's line as a first line.

    Args:
        condition: a tensor with one element, which must not be zero.
        message: what to say where it is.
    """
    torch.ops.aten._assert_async.msg(condition, f"{here()}\n{message}")


def decided(condition: Tensor) -> object:
    """Return the truth value of `condition` with which the user's code goes on, and record that it is this one.

    Returns:
        A bool; NotImplemented if the code may go on with either value.
    """
    frames = [f for f in running(sys._getframe(1)) if is_of_a_model(f.f_code.co_filename)]
    if not frames or condition.numel() != 1:
        return NotImplemented
    found = _raising(frames[0].f_code, frames[0].f_lasti)
    if found is None or any(_catches(f.f_code, f.f_lasti) for f in frames if f.f_code.co_filename != _CALLS):
        return NotImplemented
    value, message = found
    asserted(condition == 0 if value else condition, message)
    return not value


@lru_cache(maxsize=256)
def _raising(code: CodeType, offset: int) -> tuple[bool, str] | None:
    """The truth value for which the jump at `offset` only raises, and the text that it raises if that is a constant.

    None if the instruction is no jump that depends on a truth value, or if both ways go on.
    """
    steps = list(dis.get_instructions(code))
    at = {step.offset: number for number, step in enumerate(steps)}
    number = at.get(offset)
    if number is None or "POP_JUMP" not in steps[number].opname or "NONE" in steps[number].opname:
        return None
    jumps_if = steps[number].opname.endswith("_TRUE")
    ahead = {jumps_if: at[steps[number].argval], not jumps_if: number + 1}
    raising = {value: text for value, start in ahead.items() if (text := _raised(steps, start)) is not None}
    return next(iter(raising.items())) if len(raising) == 1 else None


def _raised(steps: list[dis.Instruction], start: int) -> str | None:
    """The constant text of the exception that the instructions from `start` on raise; None if they do not only raise.

    The text is empty if it is not a constant.
    """
    texts: list[str] = []
    for step in steps[start:]:
        if step.opname == "RAISE_VARARGS":
            return texts[0] if len(texts) == 1 else ""
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs or step.opname in _LEAVES:
            return None
        if step.opname == "LOAD_CONST" and isinstance(step.argval, str):
            texts.append(step.argval)
        if step.opname in ("FORMAT_VALUE", "FORMAT_SIMPLE", "BUILD_STRING"):
            texts += ["", ""]
    return None


@lru_cache(maxsize=256)
def _catches(code: CodeType, offset: int) -> bool:
    """Whether `code` handles an exception that the instruction at `offset` raises, other than by a `with`."""
    steps = {step.offset: step for step in dis.get_instructions(code)}
    targets = [e.target for e in dis._parse_exception_table(code) if e.start <= offset < e.end]  # type: ignore[attr-defined]
    return any(not _closes_a_with(steps, target) for target in targets)


def _closes_a_with(steps: dict[int, dis.Instruction], target: int) -> bool:
    following = [steps[offset].opname for offset in sorted(steps) if offset >= target][:2]
    return following == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]
