"""A target as data, and the syntax `NAME:option=value,option=value` in which the command line names one."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from irongrad.runtime.errors import UserError


@dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
        name: such as `llvm-cpu`; names the .vmfb.
        device: the IREE device that runs it.
        flags: for iree-compile.
        host: whether the compiling machine itself can run the result.
    """

    name: str
    device: str
    flags: tuple[str, ...]
    host: bool


def parse_target(text: str) -> Target:
    """Parse `llvm-cpu` or `llvm-cpu:cpu=x86-64-v3`.

    Raises:
        UserError: an unknown target or option, with what there is.
    """
    name, _, tail = text.partition(":")
    options: dict[str, str] = {}
    for item in filter(None, tail.split(",")):
        key, separator, value = item.partition("=")
        if not separator:
            raise UserError(f"target option {item!r} in {text!r} has no value; write {name}:{key}=VALUE")
        options[key] = value
    targets = _targets()
    if name not in targets:
        close = difflib.get_close_matches(name, targets, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"unknown target {name!r}: this version compiles for {', '.join(targets)}{hint}")
    return targets[name](options)


def _targets() -> dict[str, Callable[[dict[str, str]], Target]]:
    from irongrad.targets import llvm_cpu

    return {"llvm-cpu": llvm_cpu.target}


def take_option(options: dict[str, str], target: str, allowed: tuple[str, ...]) -> None:
    """Refuse options that `target` does not have.

    Raises:
        UserError: with the ones it has.
    """
    for key in options:
        if key not in allowed:
            raise UserError(f"target {target!r} has no option {key!r}; it has {', '.join(allowed)}")
