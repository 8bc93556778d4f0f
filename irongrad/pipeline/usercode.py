"""Pointing at the user's own source: lines for nodes and exceptions, and side effects of a capture."""

from __future__ import annotations

import inspect
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType

import torch
from torch import nn

import irongrad
from irongrad.runtime.errors import CaptureError

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.*))?')
_OURS = tuple(str(Path(p).resolve()) for p in (Path(irongrad.__file__).parent, Path(torch.__file__).parent))
_LIBRARIES = tuple({sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_user_file(path: str) -> bool:
    """Whether `path` is neither PyTorch, IronGrad, the standard library nor another installed package."""
    return not path.startswith("<") and not path.startswith(_OURS) and not path.startswith(_LIBRARIES)


def line_of(node: torch.fx.Node) -> str:
    """`file:line: source` of the user's line that made `node`, as far as it is known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    if not frames:
        return "(line unknown)"
    mine = [f for f in frames if is_user_file(f[0])] or [f for f in frames if not f[0].startswith(_OURS)] or frames
    path, line, _, source = mine[-1]
    return f"{path}:{line}: {source.strip()}" if source else f"{path}:{line}"


def where(thing: object) -> str:
    """`file:line` of the definition of a module's forward or of a function."""
    function = thing.forward if isinstance(thing, nn.Module) else thing
    try:
        code = inspect.unwrap(function).__code__  # type: ignore[arg-type]
    except AttributeError:
        return type(thing).__name__
    return f"{code.co_filename}:{code.co_firstlineno}"


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence what torch.export and AOTAutograd log and warn about graphs that are then checked here."""
    loggers = [logging.getLogger(n) for n in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def capture_error(error: Exception, module: nn.Module) -> CaptureError:
    """Translate what torch.export raised into the user's line and what to write instead."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if is_user_file(f.filename)]
    place = (
        f"{mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}" if mine else where(getattr(module, "model", module))
    )
    text = str(error).strip()
    return CaptureError(f"{place}\n  {_advice(type(error).__name__, text)}")


def _advice(kind: str, text: str) -> str:
    first = text.splitlines()[0] if text else kind
    if "data-dependent" in text or "GuardOnDataDependent" in kind or "control flow" in text.lower():
        return (
            "a Python decision (if, while, bool(), int()) depends on the value of a tensor, which is not known at "
            "compile time. Write it with torch.where(condition, a, b), a mask, or torch.cond"
        )
    if ".item()" in text or "_local_scalar_dense" in text:
        return "a tensor's value is taken out with .item(), int() or float(). Keep it a tensor"
    if "were assigned during export" in text:
        return f"{first}. Register it with self.register_buffer(...) and update it in place, or return it"
    return f"the step could not be captured: {kind}: {first}"


# A side effect on a Python object runs once, at capture, and never again: find it by comparing simple values.
_Snapshot = dict[tuple[str, str], tuple[object, str]]


def python_state(module: nn.Module) -> _Snapshot:
    """Record the plain Python values that a forward could change: attributes, and what its functions close over."""
    state: _Snapshot = {}
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if not name.startswith("_") and name != "training":
                state[path, name] = (_fingerprint(value), f"self.{name}")
        for function in _functions(submodule):
            for name, value in _outer_values(function).items():
                state[where(function), name] = (_fingerprint(value), name)
    return state


def check_unchanged(module: nn.Module, before: _Snapshot) -> None:
    """Raise if the forward changed a plain Python value.

    Raises:
        CaptureError: with the line that changes it, where it can be found, and what to write instead.
    """
    after = python_state(module)
    for key, (value, spelled) in after.items():
        if key in before and before[key][0] == value:
            continue
        if key not in before and not spelled.startswith("self."):
            continue
        owner = dict(module.named_modules()).get(key[0])
        place = _find_line(owner, spelled) if owner is not None else key[0]
        raise CaptureError(
            f"{place}: running the step changes {spelled}, a Python value. That would happen once, at capture, and in "
            "no compiled step. Keep such state in a buffer (self.register_buffer) and update it in place, or return it"
        )


def _fingerprint(value: object) -> object:
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple, set, dict)):
        return (type(value).__name__, len(value), tuple(_fingerprint(v) for v in list(value)[:100]))
    return type(value).__name__ if isinstance(value, torch.Tensor) else None


def _functions(module: nn.Module) -> list[FunctionType]:
    if not is_user_file(inspect.getfile(type(module))) and not hasattr(module, "_loss"):
        return []
    candidates = [getattr(type(module), "forward", None), vars(module).get("_loss")]
    return [f for f in candidates if isinstance(f, FunctionType)]


def _outer_values(function: FunctionType) -> dict[str, object]:
    code: CodeType = function.__code__
    found = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    found.update({name: cell.cell_contents for name, cell in cells})
    return {n: v for n, v in found.items() if isinstance(v, (bool, int, float, str, list, dict, set))}


def _find_line(module: nn.Module, spelled: str) -> str:
    forward: Callable[..., object] = module.forward
    try:
        lines, start = inspect.getsourcelines(type(module))
    except (OSError, TypeError):
        return where(forward)
    assigns = re.compile(re.escape(spelled) + r"\s*([+\-*/|&]?=[^=]|\.(append|extend|add|update|pop|insert)\(|\[)")
    init = False
    for offset, line in enumerate(lines):
        if re.match(r"\s*def ", line):
            init = "__init__" in line
        if not init and assigns.search(line):
            return f"{inspect.getfile(type(module))}:{start + offset}: {line.strip()}"
    return where(forward)
