"""Find the user's source lines behind graph nodes and exceptions."""

from __future__ import annotations

import inspect
import linecache
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from unittest import mock

import torch
from torch import nn

from irongrad.runtime.errors import UnsupportedOpError
from irongrad.runtime.installed import PACKAGE

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.*))?')
_OURS = tuple(str(Path(p).resolve()) for p in (PACKAGE, Path(torch.__file__).parent))
_LIBRARIES = tuple({sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")})
_LAYERS = str(Path(torch.__file__).parent / "nn")
# The files that call the user's code: the model and the loss, functions, and optimizers.
_CALLERS = ("pipeline/capture/capture.py", "frontends/compile_function.py", "pipeline/optimizer/trace.py")
_ENTRIES = tuple(str(PACKAGE / name) for name in _CALLERS)
LONGEST = 300
NODE = "\n\nWhile executing"  # torch.fx appends this to an exception, then the node and its stack trace
_LOCATED = re.compile(r"\S*:\d+: |\(\w")  # a message that begins with a line, or with "(line unknown)"


def is_user_file(path: str) -> bool:
    """Whether `path` is neither of PyTorch, IronGrad, the standard library nor another installed package."""
    return not path.startswith("<") and not path.startswith(_OURS) and not path.startswith(_LIBRARIES)


def is_user_class(kind: type) -> bool:
    """Whether `kind` is defined in the user's own code."""
    try:
        return is_user_file(inspect.getfile(kind))
    except (OSError, TypeError):  # a built-in class, or one made in an interactive session
        return kind.__module__ == "__main__"


def line_of(node: torch.fx.Node, otherwise: str = "(line unknown)") -> str:
    """Return `file:line: source` of the user's line that created `node`.

    If no user code lies between the model and the operator, as in an `nn.Sequential` of layers, return the path and
    class of the layer. Return `otherwise` if that is unknown too.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    if mine := [f for f in frames if is_user_file(f[0])]:
        path, line, _, source = mine[-1]
        return f"{path}:{line}: {source.strip()}" if source else f"{path}:{line}"
    layers = [(path, kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values() if path]
    if layers:
        path, kind = layers[-1]
        return f"{path} ({kind if isinstance(kind, str) else kind.__qualname__})"
    return otherwise


def lines_in(text: str) -> list[str]:
    """Return `file:line: source` of each of the user's frames in a printed stack trace, the innermost last."""
    return [source_line(path, int(number)) for path, number, *_ in _FRAME.findall(text) if is_user_file(path)]


def source_line(path: str, number: int) -> str:
    """Return `file:line: source` of a line of a file."""
    text = linecache.getline(path, number).strip()
    return f"{path}:{number}: {text}" if text else f"{path}:{number}"


def where(thing: object) -> str:
    """Return `file:line` of the definition of a function or of a module's forward; its name if a library defines it."""
    function = thing.forward if isinstance(thing, nn.Module) else thing
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)  # type: ignore[arg-type]
    if code is None or not is_user_file(code.co_filename):
        return type(thing).__name__ if isinstance(thing, nn.Module) else getattr(thing, "__name__", str(thing))
    return f"{code.co_filename}:{code.co_firstlineno}"


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence what torch.export and AOTAutograd log, print and warn about graphs that are checked here anyway."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch("torch.export._trace.print", create=True):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def user_frames() -> Iterator[None]:
    """While open, traced nodes keep the stack frames of all code from the model or the loss inward.

    PyTorch's tracer itself only keeps those of forwards.
    """

    def kept(tracer: object, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(_inner(frames))

    with mock.patch("torch.fx.proxy.TracerBase._filter_traceback_frames", kept):
        yield


def _inner(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames after the entry into the user's code, without IronGrad's, and of PyTorch's only those of layers."""
    end = len(frames)
    while end and not is_of_a_model(frames[end - 1].filename):  # the innermost may be the callers' dispatch modes
        end -= 1
    entries = [i for i, f in enumerate(frames[:end]) if f.filename in _ENTRIES]
    inner = frames[entries[-1] + 1 : end] if entries else frames[:end]
    return [f for f in inner if is_of_a_model(f.filename)]


def is_of_a_model(path: str) -> bool:
    """Whether `path` belongs to the user, to another library, or to PyTorch's layers."""
    return path.startswith(_LAYERS) or not path.startswith(_OURS)


def place_of(error: Exception, thing: object) -> str:
    """Return `file:line: source` of the user's line from which an error came, or where `thing` is defined."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if is_user_file(f.filename)] or [f for f in frames if f.filename.startswith(_LAYERS)]
    return f"{mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}" if mine else where(thing)


@contextmanager
def forward_frames() -> Iterator[None]:
    """While open, the backward operators of a traced function keep the stack frames of their forward operators.

    Autograd's anomaly mode asks torch.fx.traceback for the stack, which only knows that of an interpreted graph.
    """

    def stack() -> list[str]:
        return traceback.format_list(_inner(traceback.extract_stack()[:-1]))

    with mock.patch("torch.fx.traceback.format_stack", stack):
        yield


def located(error: UnsupportedOpError, otherwise: str = "(line unknown)") -> UnsupportedOpError:
    """Return `error` with the user's line before its message, unless the message begins with a line."""
    text, _, node = str(error).partition(NODE)
    if _LOCATED.match(text):
        return UnsupportedOpError(text)
    mine = [f for f in _FRAME.findall(node) if is_user_file(f[0])]
    place = f"{mine[-1][0]}:{mine[-1][1]}: {mine[-1][3].strip()}" if mine else otherwise
    return UnsupportedOpError(f"{place}\n  {text}")
