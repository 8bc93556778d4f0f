"""Calls in a step by which it acts on, or looks at, what lies outside of it, and which a compiled step would lose.

Those that set or read PyTorch's generator, open a file, start a process or use the network are refused. A look at the
environment variables or at the file system is told: its outcome is compiled in.
"""

from __future__ import annotations

import os
import warnings
from _socket import socket as _Socket  # the class whose methods are functions of C
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from irongrad.diagnostics.source_lines import is_standard_file, is_user_file, source_line
from irongrad.pipeline.capture.profiled import profiled
from irongrad.runtime.errors import CaptureError

_OF_GENERATORS = frozenset({"manual_seed", "seed", "initial_seed", "get_state", "set_state", "set_offset"})
_CONTEXTS = "contextlib.py"
# Files that only pass a call on: `torch.random` itself, context managers, and Dynamo's decorators.
_WRAPPERS = ("/torch/random.py", _CONTEXTS, "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
# Files whose code opens another one for its own purposes: the source of a line for a warning, a log.
_FOR_THEMSELVES = ("warnings.py", "linecache.py", "traceback.py", "tokenize.py", "inspect.py", "/logging/")
# Functions of C that start a process, or use the network, by module.
_STARTS = frozenset(
    {("fork_exec", "_posixsubprocess"), *((n, "posix") for n in ("system", "fork", "posix_spawn", "execv"))}
)
_SENDS = frozenset({"connect", "connect_ex", "sendto", "send", "sendall", "bind", "recv"})
# Functions of C whose results another machine, or a later time, may change.
_LOOKS = frozenset({(n, "posix") for n in ("stat", "lstat", "access", "listdir", "scandir", "getcwd", "uname")})
_LOOKS |= {("gethostname", "_socket")}
_READS_VARIABLE = type(os.environ).__getitem__.__code__
# Files that read what their caller names.
_READERS = ("pathlib.py", "/numpy/lib/", "/torch/serialization.py", "/safetensors/", "/PIL/", "/pandas/")


class OutsideCalls:
    """Finds the first such call of each kind from the user's code, or from a library other than PyTorch."""

    def __init__(self) -> None:
        self._generator = self._opened = self._started = self._sent = ""
        self._looks: dict[str, str] = {}

    @contextmanager
    def over(self, generators: object) -> Iterator[None]:
        """While open, watch this thread."""
        with profiled(self._seen):
            yield

    def refuse(self) -> None:
        """Refuse a call that was found.

        Raises:
            CaptureError: with the line of the call.
        """
        if self._generator:
            raise CaptureError(
                f"{self._generator}\n  the step sets or reads the state of PyTorch's random generator. A compiled step "
                "draws from a generator of its own, which the forward cannot reach. Leave the call out: the seed is "
                "TrainStep.seed and Session.seed. Draw numbers that stay the same once, into a buffer "
                "(self.register_buffer)"
            )
        if self._started:
            raise CaptureError(
                f"{self._started}\n  the step starts a process in every call, and a compiled step starts none. Run it "
                "before the step, and pass its output as an input"
            )
        if self._sent:
            raise CaptureError(
                f"{self._sent}\n  the step uses the network in every call, and a compiled step does not. Receive "
                "before the step, and pass what came as an input; send what the step returns after it"
            )
        if self._opened:
            raise CaptureError(
                f"{self._opened}\n  the step opens a file in every call, and a compiled step opens none. Read it "
                "before the step: pass its contents as an input, or register them with self.register_buffer. Write "
                "what the step returns after it"
            )

    def _seen(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_code is _READS_VARIABLE:
            self._look(frame, f"the environment variable {frame.f_locals.get('key')}")
        if event != "c_call":
            return
        name, module = getattr(called, "__name__", ""), getattr(called, "__module__", None)
        if name in _OF_GENERATORS and getattr(called, "__self__", None) is torch.default_generator:
            self._generator = self._generator or _line_that_seeds(frame)
        elif name == "open" and module in ("io", "_io"):
            self._opened = self._opened or _line_that_opens(frame)
        elif (name, module) in _STARTS:
            self._started = self._started or _line_that_calls(frame)
        elif name in _SENDS and isinstance(getattr(called, "__self__", None), _Socket):
            self._sent = self._sent or _line_that_calls(frame)
        elif (name, module) in _LOOKS:
            self._look(frame, f"what {name} says of this machine")

    def _look(self, frame: FrameType, what: str) -> None:
        if line := _line_that_calls(frame):
            self._looks.setdefault(line, what)

    def tell(self) -> None:
        """Warn of each line that looks at what lies outside of the step."""
        for line, what in self._looks.items():
            warnings.warn(f"{line}: the compiled step keeps {what}, as it is now", stacklevel=2)


def _line_that_seeds(frame: FrameType) -> str:
    """The user's line that reaches for the generator; empty if PyTorch does, as a checkpoint that draws again."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.endswith(_WRAPPERS):
        caller = caller.f_back
    if caller is None or not is_user_file(caller.f_code.co_filename):
        return ""
    return source_line(caller.f_code.co_filename, caller.f_lineno)


def _line_that_calls(frame: FrameType) -> str:
    """The user's line that calls a function, by way of the standard library at most; empty if another library does."""
    caller: FrameType | None = frame
    while caller is not None and (is_standard_file(path := caller.f_code.co_filename) or path.startswith("<frozen")):
        if any(part in path for part in (*_FOR_THEMSELVES, "importlib")):
            return ""
        caller = caller.f_back
    if caller is None or not is_user_file(caller.f_code.co_filename):
        return ""
    return source_line(caller.f_code.co_filename, caller.f_lineno)


def _line_that_opens(frame: FrameType) -> str:
    """The user's line that has a file opened; empty if a library opens one for itself."""
    caller: FrameType | None = frame
    while caller is not None and not is_user_file(path := caller.f_code.co_filename):
        reads = any(part in path for part in _READERS) or path.endswith(_CONTEXTS)
        if not reads and (not is_standard_file(path) or any(part in path for part in _FOR_THEMSELVES)):
            return ""
        caller = caller.f_back
    return source_line(caller.f_code.co_filename, caller.f_lineno) if caller is not None else ""
