"""Every kind of target, and the syntax in which the command line names one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from irongrad.runtime.errors import UserError
from irongrad.runtime.suggestion import suggestion
from irongrad.targets.base import Kind, Target


def parse_target(text: str) -> Target:
    """Parse `llvm-cpu` or `llvm-cpu:cpu=x86-64-v3`.

    Raises:
        UserError: the target, an option or a value is unknown; lists the known ones.
    """
    name, _, tail = text.partition(":")
    known = {k.name: k for k in kinds()}
    if name not in known:
        meant = suggestion(name, known)
        raise UserError(f"unknown target {name!r}{meant}: this version compiles for {', '.join(known)}")
    kind = known[name]
    options: dict[str, str] = {}
    for item in filter(None, tail.split(",")):
        key, separator, value = item.partition("=")
        if not separator:
            raise UserError(f"target option {item!r} in {text!r} has no value; write {name}:{key}=VALUE")
        _check(kind, key, value)
        options[key] = value
    # IronGradConfig.cmake derives the same names.
    return kind.make(re.sub(r"[^\w.]+", "-", re.sub(r"[:,]\w+=", "-", text)), options)


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """Parse several targets of one artifact.

    Raises:
        UserError: as `parse_target`, or two targets would have the same file.
    """
    targets = tuple(parse_target(t) for t in texts)
    names = [t.name for t in targets]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the target {name!r} is named twice")
    return targets


def kinds() -> tuple[Kind, ...]:
    """Return all kinds of targets."""
    from irongrad.targets import cuda, llvm_cpu, vulkan

    return llvm_cpu.KIND, cuda.KIND, vulkan.KIND


def _check(kind: Kind, key: str, value: str) -> None:
    option = next((o for o in kind.options if o.name == key), None)
    if option is None:
        there = [o.name for o in kind.options]
        meant = suggestion(key, there)
        raise UserError(f"target {kind.name!r} has no option {key!r}{meant}; it has {', '.join(there)}")
    if option.values and value not in option.values:
        meant = suggestion(value, option.values)
        raise UserError(f"target {kind.name!r} has no {key} {value!r}{meant}; it has {', '.join(option.values)}")
