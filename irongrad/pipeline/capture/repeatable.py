"""Refuse a step that changes from run to run: it draws numbers outside of PyTorch, or reads the time.

torch.export runs the user's Python once, so a number that Python draws becomes a constant of the compiled step. The
oracle would not tell: where its runs disagree, their spread only widens the tolerance. So before the export the step
runs eagerly twice from the same state, on the same inputs, with the same random numbers of the compiled step.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

import numpy as np
import torch

from irongrad.diagnostics.source_lines import is_of_a_model, is_standard_file, is_user_file, source_line, where
from irongrad.pipeline.capture.elsewhere import elsewhere
from irongrad.pipeline.capture.later import later as later_clocks
from irongrad.pipeline.capture.later import users_namespaces
from irongrad.pipeline.capture.outside_calls import OutsideCalls
from irongrad.pipeline.capture.profiled import profiled
from irongrad.runtime.errors import CaptureError
from irongrad.step.borrow import Generator, Record, state_of


class Kind(Enum):
    """What a value of a run is; the value of a member is the place that a message names."""

    RESULT = "in a result"
    LOSS = "in the loss"
    GRADIENT = "in a gradient"
    LATER = "in the loss of the second step"


# Takes a value of a run.
Recorder = Callable[[torch.Tensor, Kind], None]

# A step with more elements than this in its state runs once, and again only if it drew a number.
LARGE = 10_000_000

_ULPS = 64  # another alignment of memory may select other kernels, which round differently
_GRADIENTS = 1e-2  # of the largest element: a gradient may be zero but for rounding
_LATER = 1e-4  # the update before it amplifies the rounding of gradients

_PYTHON: Any = random.random
_NUMPY: Any = np.random.random_sample
# The generators behind the functions of the modules `random` and `numpy.random`.
_GLOBAL = {id(_PYTHON.__self__): "Python's random module", id(_NUMPY.__self__): "NumPy's global generator"}

_SEED = 0x1D0C5EED

# Functions of C that give another result in every run, by name and module.
_SOURCES = frozenset(
    {("urandom", "posix"), ("urandom", "nt"), ("getrandom", "posix")}
    | {(n, "posix") for n in ("getpid", "getppid", "getloadavg")}
    | {("get_ident", "_thread"), ("get_native_id", "_thread"), ("data_ptr", None)}
    | {(n, "time") for n in ("time", "monotonic", "perf_counter", "process_time", "thread_time")}
    | {(f"{n}_ns", "time") for n in ("time", "monotonic", "perf_counter", "process_time", "thread_time")}
    | {(n, "time") for n in ("localtime", "gmtime", "ctime", "strftime", "asctime")}
    | {(n, None) for n in ("now", "utcnow", "today")}
    | {("id", "builtins"), ("hash", "builtins")}
)


@dataclass(frozen=True)
class Program:
    """What runs twice.

    Attributes:
        what: what it is, for a message: `the step`, `the evaluation`.
        thing: the module or function whose line stands for it.
        lend: while open, the program may run, and on exit everything is as before; says whether tensors keep their
            memory meanwhile.
        run: runs it, and hands every value that must not differ to a recorder.
        twice: whether it runs a second time although it drew no number.
        again: its first values once more, right after the second run, from the same tensors but with all else as that
            run left it; None for no such run.
    """

    what: str
    thing: object
    lend: Callable[[bool], AbstractContextManager[Record]]
    run: Callable[[Recorder], None]
    twice: bool = True
    again: Callable[[Recorder], None] | None = None


def refuse_unrepeatable(program: Program) -> CaptureError | None:
    """Refuse a program whose result depends on more than its state, its inputs and PyTorch's random numbers.

    A run ends at its first error, about which the export says more.

    Returns:
        The refusal of a program that changes a Python value and depends on it. The export may know its line.

    Raises:
        CaptureError: the program draws numbers outside of PyTorch, with the line that does; or two runs differ.
    """
    calls = OutsideCalls()
    first = _run(program, watch=calls, later=False, in_place=True)
    calls.refuse()
    calls.tell()
    drawn = {key for key in first.before if first.before[key] != first.after[key]}
    if not drawn and not program.twice:
        return None
    second = _run(program, reseeded=drawn, again=True)
    # A program that seeds a generator itself ends in the same state, from whichever state it began.
    if left := [key for key in drawn if first.after[key] != second.after.get(key)]:
        raise CaptureError(_drawn(program, left))
    if difference := _difference(first.values, second.values):
        if drawn:
            raise CaptureError(_drawn(program, drawn))
        raise CaptureError(
            f"{_source(program) or where(program.thing)}\n  two eager runs of {program.what} from the same state, on "
            f"the same inputs and with the same seed differ {difference}. It depends on something that a compiled "
            "step would keep for ever: the time, random numbers of the operating system (os.urandom, uuid, secrets), "
            "an id, a hash, an address, a counter outside of the model, or a NumPy array over the memory of a "
            "parameter. Pass it as an input of the step, or draw it with torch.rand"
        )
    if difference := _difference(second.values, second.again):
        changed = f" ({second.changed})" if second.changed else ""
        return CaptureError(
            f"{where(program.thing)}\n  {program.what} changes a Python value and depends on it{changed}: two runs one "
            f"after the other, from the same tensors, differ {difference}. A compiled step would keep the value for "
            "ever. Keep it in a buffer (self.register_buffer) and update it in place, or pass it as an input of the "
            "step"
        )
    return None


@dataclass(frozen=True)
class _Value:
    """A value of a run."""

    tensor: torch.Tensor
    kind: Kind


@dataclass(frozen=True)
class _Run:
    """One run.

    Attributes:
        values: what it recorded.
        before: the state of each random generator before the run, by the generator's id.
        after: the same after the run.
        again: the first values of a run right after it, if there was one.
        changed: a container, an attribute or a variable that this run changed.
    """

    values: list[_Value]
    before: dict[int, bytes]
    after: dict[int, bytes]
    again: list[_Value] = field(default_factory=list)
    changed: str = ""


def _run(
    program: Program,
    reseeded: Collection[int] = (),
    watch: _Watch | _Calls | OutsideCalls | None = None,
    *,
    later: bool = True,
    again: bool = False,
    in_place: bool = False,
) -> _Run:
    """Run a program; the generators in `reseeded` start from another state, and the process may be a later one.

    Tensors have other memory meanwhile, unless the run is `in_place`. So memory that the step sees otherwise, such as
    that of a NumPy array, differs between two runs.
    """
    values: list[_Value] = []
    repeated: list[_Value] = []
    changed = ""
    with program.lend(in_place) as record, warnings.catch_warnings(), _another_process() if later else nullcontext():
        warnings.simplefilter("ignore")
        generators = _generators(record)
        for key in reseeded:
            _reseed(generators[key])
        before, put_back = _states(generators), record.values()
        with suppress(Exception), watch.over(generators) if watch is not None else nullcontext():
            program.run(lambda tensor, kind: values.append(_Value(tensor.detach().clone(), kind)))
        after = _states(generators)
        if again and program.again is not None:
            put_back()
            for key in reseeded:
                _reseed(generators[key])
            latest = record.renewed()
            with suppress(Exception):
                program.again(lambda tensor, kind: repeated.append(_Value(tensor.detach().clone(), kind)))
            changed = latest.changed()
        return _Run(values, before, after, repeated, changed)


@contextmanager
def _another_process() -> Iterator[None]:
    """While open, clocks, ids and the like are those of a later run in another process."""
    namespaces = users_namespaces()
    with later_clocks(namespaces), elsewhere(namespaces):
        yield


def _generators(record: Record) -> dict[int, Generator]:
    """Random generators that the program may use, by id; PyTorch's are refused elsewhere, or drawn from Philox."""
    found = [_PYTHON.__self__, _NUMPY.__self__, *record.generators]
    return {id(g): g for g in found if not isinstance(g, torch.Generator)}


def _states(generators: dict[int, Generator]) -> dict[int, bytes]:
    return {key: pickle.dumps(state_of(generator)) for key, generator in generators.items()}


def _reseed(generator: Any) -> None:
    """Give a generator an unrelated state. From a later one, draws that reject numbers could end at the same number."""
    if isinstance(generator, random.Random):
        generator.seed(_SEED)
        return
    bits = generator._bit_generator if isinstance(generator, np.random.RandomState) else generator.bit_generator
    bits.state = type(bits)(_SEED).state


def _difference(one: list[_Value], other: list[_Value]) -> str:
    """What differs by more than rounding between two runs; empty if nothing does.

    A run that ended early is compared as far as it came. A gradient that is zero but for rounding, as of a bias before
    a normalisation, may differ as a whole where threads add in another order. Then it differs by less than other
    gradients are rounded.
    """
    gradients = [v.tensor for v in one if v.kind is Kind.GRADIENT]
    rounding = _ULPS * torch.finfo(torch.float32).eps * max(map(_largest, gradients), default=0.0)
    for a, b in zip(one, other, strict=False):
        if a.kind is Kind.GRADIENT:
            most = max(_GRADIENTS * _largest(a.tensor), rounding)
        elif a.kind is Kind.LATER:
            most = _LATER * _largest(a.tensor)
        else:
            most = _ULPS * _epsilon(a.tensor) * _largest(a.tensor)
        if _differ(a.tensor, b.tensor, most):
            return a.kind.value
    return ""


def _epsilon(tensor: torch.Tensor) -> float:
    """The distance from 1 to the next number of a tensor's dtype; zero for integers."""
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor; zero for a sparse one."""
    if tensor.is_sparse or not tensor.numel():
        return 0.0
    return float(torch.nan_to_num(_wide(tensor).abs(), nan=0.0, posinf=0.0).max())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _differ(a: torch.Tensor, b: torch.Tensor, most: float) -> bool:
    """Whether two tensors differ by more than `most`."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if a.is_sparse or not a.numel() or torch.equal(a, b):
        return False
    return not torch.allclose(_wide(a), _wide(b), rtol=0.0, atol=most, equal_nan=True)


def _drawn(program: Program, drawn: Collection[int]) -> str:
    """Run a program once more, and say which line draws from one of the generators `drawn`."""
    watch = _Watch(drawn)
    _run(program, watch=watch)
    what = _GLOBAL.get(watch.key, "a generator of Python or NumPy")
    return (
        f"{watch.place or where(program.thing)}\n  a random number is drawn from {what}. A compiled step would "
        "repeat the one number of its capture for ever. Draw it with torch.rand, torch.randn or torch.randint, which "
        "a compiled step draws anew in every call, or pass it as an input of the step"
    )


def _source(program: Program) -> str:
    """Run a program once more, and say which line calls a function that gives another result in every run."""
    watch = _Calls()
    _run(program, watch=watch, later=False)
    return watch.place


class _Calls:
    """Finds the first call of a function in `_SOURCES` from the user's code, or from a library that it calls.

    Attributes:
        place: `file:line: source` of the user's line; empty if there is none.
    """

    def __init__(self) -> None:
        self.place = ""

    @contextmanager
    def over(self, generators: object) -> Iterator[None]:
        """While open, watch this thread."""
        with profiled(self._seen):
            yield

    def _seen(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or self.place:
            return
        name, module = getattr(called, "__name__", ""), getattr(called, "__module__", None)
        caller: FrameType | None = frame
        if name not in ("id", "hash"):  # libraries call them for nothing that matters
            while caller is not None and is_standard_file(caller.f_code.co_filename):
                caller = caller.f_back
        if (name, module) in _SOURCES and caller is not None and is_user_file(caller.f_code.co_filename):
            self.place = source_line(caller.f_code.co_filename, caller.f_lineno)


class _Watch:
    """Finds the line that draws: compares the states of generators whenever a line of a model's code ends.

    A profiler that sees calls would miss the generators of NumPy, whose methods are no functions to it.

    Attributes:
        place: `file:line: source` of the user's line that draws; of a library's line if none of the user's runs then.
        key: the id of the generator.
    """

    def __init__(self, keys: Collection[int]) -> None:
        self.place = ""
        self.key = next(iter(keys), 0)
        self._keys = keys
        self._generators: dict[int, Generator] = {}
        self._before: dict[int, bytes] = {}
        self._line = ("", 0)

    @contextmanager
    def over(self, generators: dict[int, Generator]) -> Iterator[None]:
        """While open, watch this thread."""
        self._generators = {key: generators[key] for key in self._keys if key in generators}
        self._before = _states(self._generators)
        outer = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(outer)
            self._compare()

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        watched = not self.place and is_of_a_model(path) and not path.startswith("<") and not is_standard_file(path)
        return self._step if watched else None

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.place:
            return None
        if event in ("line", "return"):
            self._compare()
            self._line = _line_of(frame if event == "line" else frame.f_back)
        return self._step

    def _compare(self) -> None:
        if self.place or not self._line[0]:
            return
        now = _states(self._generators)
        for key, state in now.items():
            if state != self._before[key]:
                self.place, self.key = source_line(*self._line), key


def _line_of(frame: FrameType | None) -> tuple[str, int]:
    """The innermost user's line at or around a frame; the frame's own if there is none."""
    inner = frame
    while inner is not None and not is_user_file(inner.f_code.co_filename) and inner.f_code.co_filename != __file__:
        inner = inner.f_back
    found = inner if inner is not None and inner.f_code.co_filename != __file__ else frame
    return (found.f_code.co_filename, found.f_lineno) if found is not None else ("", 0)
