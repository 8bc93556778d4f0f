"""Calls in a step that a compiled step would lose: those that set or read PyTorch's generator, or open a file."""

from __future__ import annotations

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
# Files that read what their caller names.
_READERS = ("pathlib.py", "/numpy/lib/", "/torch/serialization.py", "/safetensors/", "/PIL/", "/pandas/")


class OutsideCalls:
    """Finds the first such call of each kind from the user's code, or from a library other than PyTorch."""

    def __init__(self) -> None:
        self._generator = self._opened = ""

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
        if self._opened:
            raise CaptureError(
                f"{self._opened}\n  the step opens a file in every call, and a compiled step opens none. Read it "
                "before the step: pass its contents as an input, or register them with self.register_buffer. Write "
                "what the step returns after it"
            )

    def _seen(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        name = getattr(called, "__name__", "")
        if name in _OF_GENERATORS and getattr(called, "__self__", None) is torch.default_generator:
            self._generator = self._generator or _line_that_seeds(frame)
        elif name == "open" and getattr(called, "__module__", "") in ("io", "_io"):
            self._opened = self._opened or _line_that_opens(frame)


def _line_that_seeds(frame: FrameType) -> str:
    """The user's line that reaches for the generator; empty if PyTorch does, as a checkpoint that draws again."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.endswith(_WRAPPERS):
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
