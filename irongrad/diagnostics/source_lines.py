"""Find the user's source lines behind graph nodes and exceptions."""

from __future__ import annotations

import inspect
import linecache
import logging
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import CodeType, FrameType
from unittest import mock

import torch
from torch import nn

from irongrad.runtime.errors import UnsupportedOpError
from irongrad.runtime.installed import PACKAGE

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(.*))?')
_PLACE = re.compile(r"([^\s'\"(]+\.\w+):(\d+)")


def _folders(*paths: str | Path) -> tuple[str, ...]:
    """Folders as Python spells them, and without links: a virtual environment may lie behind one."""
    return tuple({text for path in paths for text in (str(path), str(Path(path).resolve()))})


_OURS = _folders(PACKAGE, Path(torch.__file__).parent)
_PACKAGES = _folders(*(sysconfig.get_paths()[k] for k in ("purelib", "platlib")))
_STANDARD = _folders(*(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib")))
_SCRIPTS = _folders(sysconfig.get_path("scripts"))  # commands of installed packages, such as `irongrad` itself
_LIBRARIES = (*_PACKAGES, *_STANDARD, *(f"{folder}/" for folder in _SCRIPTS))
_LAYERS = str(Path(torch.__file__).parent / "nn")
# The files that call the user's code: the model and the loss, functions, and optimizers.
_CALLERS = (
    "pipeline/capture/capture.py",
    "pipeline/capture/step_modules.py",
    "frontends/compile_function.py",
    "pipeline/optimizer/trace.py",
    "pipeline/optimizer/optimizer_step.py",
    "pipeline/optimizer/step_hooks.py",
    "step/after_step.py",
)
_ENTRIES = tuple(str(PACKAGE / name) for name in _CALLERS)
LONGEST = 300
NODE = "\n\nWhile executing"  # torch.fx appends this to an exception, then the node and its stack trace
_LOCATED = re.compile(r"\S*:\d+: |\(\w")  # a message that begins with a line, or with "(line unknown)"


def is_user_file(path: str) -> bool:
    """Whether `path` is neither of PyTorch, IronGrad, the standard library nor of an installed package."""
    return not path.startswith("<") and not path.startswith(_OURS) and not path.startswith(_LIBRARIES)


def is_standard_file(path: str) -> bool:
    """Whether `path` is of the standard library, whose folder holds those of installed packages."""
    return path.startswith(_STANDARD) and not path.startswith(_PACKAGES)


def is_user_class(kind: type) -> bool:
    """Whether `kind` is defined in the user's own code."""
    try:
        return is_user_file(inspect.getfile(kind))
    except (OSError, TypeError):  # a built-in class, or one made in an interactive session
        return kind.__module__ == "__main__"


def line_of(node: torch.fx.Node, otherwise: str = "(line unknown)") -> str:
    """Return `file:line: source` of the user's line that created `node`.

    Code of an installed package between that line and the operator is named before it. If neither lies between the
    model and the operator, as in an `nn.Sequential` of layers, return the path and class of the layer. Return
    `otherwise` if that is unknown too.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.stack_trace or "")
    if place := _place([(path, int(line), source) for path, line, _, source in frames]):
        return place
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


def _is_package_file(path: str) -> bool:
    """Whether `path` belongs to an installed package, PyTorch and IronGrad left out."""
    return path.startswith(_PACKAGES) and not path.startswith(_OURS)


def _place(frames: Sequence[tuple[str, int, str | None]]) -> str:
    """The innermost line that is not PyTorch's, then the user's line that led there, if that is another; or nothing."""
    told = [f for f in frames if is_user_file(f[0]) or _is_package_file(f[0])]
    if not told:
        return ""
    callers = [f for f in told if is_user_file(f[0])]
    called = f" (called from {callers[-1][0]}:{callers[-1][1]})" if callers and told[-1] != callers[-1] else ""
    return _spelled(*told[-1]) + called


def _spelled(path: str, line: int, source: str | None) -> str:
    return f"{path}:{line}: {source.strip()}" if source else f"{path}:{line}"


def here(otherwise: str = "(line unknown)") -> str:
    """Return the user's line that is running now, as `line_of` does."""
    places = [(f.f_code.co_filename, f.f_lineno) for f in running(sys._getframe(1))]
    return _place([(*place, linecache.getline(*place)) for place in places[::-1]]) or otherwise


def running(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames that run, from the innermost one to the one that IronGrad called."""
    frame = innermost
    while frame is not None and frame.f_code.co_filename not in _ENTRIES:
        yield frame
        frame = frame.f_back


def caller() -> str:
    """Return the user's line that is running now, also where it only calls IronGrad; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return source_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def names_a_line(message: str) -> bool:
    """Whether a message names a line of a user's file, which a line of an installed package is not."""
    return any(is_user_file(path) for path, _ in _PLACE.findall(message))


def without_folders(line: str) -> str:
    """`file:line: source` without the file's folders, which mean nothing on another machine."""
    file, separator, rest = line.partition(":")
    return PurePath(file).name + separator + rest


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
def failed_forward() -> Iterator[Callable[[], str]]:
    """While open, note the forward operator whose gradient fails under autograd's anomaly detection.

    Yields:
        Returns the user's line of that operator; nothing if no gradient has failed.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message="Error detected in")

        def line() -> str:
            text = str(said[-1].message).partition(" (Triggered internally")[0] if said else ""
            found = _FRAME.findall(text)
            return _place([(path, int(number), source) for path, number, _, source in found])

        yield line


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
    frames = [(f.filename, f.lineno or 0, f.line) for f in traceback.extract_tb(error.__traceback__)]
    entries = [i for i, (path, *_) in enumerate(frames) if path in _ENTRIES]
    inner = frames[entries[-1] + 1 :] if entries else frames
    layers = [f for f in frames if f[0].startswith(_LAYERS)]
    traced = _FRAME.findall(str(error).partition(NODE)[2])  # of the node that failed, in an interpreted graph
    if place := _place(inner) or _place([(path, int(line), source) for path, line, _, source in traced]):
        return place
    defined = where(thing)
    return _spelled(*layers[-1]) if layers and ":" not in defined else defined


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
    place = _place([(path, int(line), source) for path, line, _, source in _FRAME.findall(node)])
    return UnsupportedOpError(f"{place or otherwise}\n  {text}")
