"""Where a node comes from: its function, phase, module and line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from torch._ops import OperatorBase
from torch.fx import Node

from irongrad.analysis.records import SEPARATOR, Source
from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.step_graph import base_name

# The phases of functions whose nodes all have one; other functions are phases of their own.
_PHASES: Mapping[str, str] = {
    "update": "update",
    "accumulate": "update",
    "mean": "update",
    "eval": "evaluation",
    "predict": "evaluation",
    "forward": "forward",
    "finish": "backward",
    "check": "check",
}
_JOINT = "joint"

# The key in `Node.meta` of the phase of a node in a function that consists of several.
_PHASE = "irongrad_phase"

MODEL = "(model)"

_LINE = re.compile(r"(.+?):(\d+)(?:: (.*))?", re.DOTALL)


def source_of(function: str, node: Node, prefix: str = "") -> Source:
    """Where `node` of the function `function` of a step graph comes from; `prefix` is the step graph's."""
    place, _ = place_of(node)
    return Source(prefix + function, phase_of(function, node), _operator(node), module_of(node), place)


def place_of(node: Node) -> tuple[str, str]:
    """The user's line of `node`, as `net.py:12`, and its text; both empty if unknown."""
    found = _LINE.fullmatch(line_of(node, otherwise=""))
    if found is None:
        return "", ""
    file, number, text = found.groups()
    return f"{PurePath(file).name.replace(SEPARATOR, '_')}:{number}", text or ""


def phase_of(function: str, node: Node) -> str:
    """The phase of a step in which `node` runs, as in `Source.phase`."""
    if (kept := node.meta.get(_PHASE)) is not None:
        return str(kept)
    base = base_name(function)
    kind = base.partition(".")[0]
    if kind == _JOINT:
        return "backward" if node.meta.get("autograd_backward") else "forward"
    return _PHASES.get(kind, base)


def keep_phase(function: str, node: Node) -> None:
    """Note the phase of a node of `function`, before the node moves to a function that consists of several."""
    node.meta[_PHASE] = phase_of(function, node)


def module_of(node: Node) -> str:
    """The path of the module that called the operator of `node`, as in `Source.module`."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    whole = paths[-1] if paths else ""
    root, _, path = whole.partition(".")
    if root == "model":
        return path or MODEL
    return f"(loss).{path}".rstrip(".") if root else ""


def _operator(node: Node) -> str:
    """The name of the operator of `node`: PyTorch's for its own, and Python's for functions such as `getitem`."""
    return str(node.target) if isinstance(node.target, OperatorBase | str) else getattr(node.target, "__name__", "")
