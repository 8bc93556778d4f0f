"""The module `comm`, which a compiled step imports to exchange gradients between ranks while it runs.

The step calls it from IREE's virtual machine (`irongrad.pipeline.assemble.exchange` writes the calls):

* `begin(samples: i64) -> i32` starts the exchange of a step;
* `allreduce(view, wait, signal) -> view` returns at once, and fills its result after the fence `wait`;
* `finish() -> i32` waits for all exchanges of the step, and returns 1 if they succeeded;
* `rank() -> i32` returns the number of this rank.

One thread starts the collectives, in the order of the calls, which is the same on all ranks. Another polls those that
were started, so several are under way at once.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import iree.runtime as ireert
import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, IronGradError, RankLostError, UserError
from irongrad.runtime.ranks.communicator import Communicator, Request, as_bytes, as_text
from irongrad.runtime.transfer import to_host

MODULE = "comm"
_RUNS, _REFUSES = 0, 1
_TEXT = 400  # the bytes of a refusal that the other ranks see
_SLEEP = 5e-5  # the seconds between two looks at the collectives under way
_RESULT = int(ireert.MemoryType.HOST_LOCAL | ireert.MemoryType.DEVICE_VISIBLE)
_USAGE = int(ireert.BufferUsage.DEFAULT | ireert.BufferUsage.MAPPING)


@dataclass
class Traffic:
    """What this rank has exchanged so far.

    Attributes:
        steps: the steps.
        calls: the all-reduces.
        nbytes: the bytes of the tensors that it handed over; what crosses a wire depends on the engine's algorithm.
        seconds: the seconds in which `finish` waited: the communication that no computation hid.
    """

    steps: int = 0
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class _Call:
    """One call of an entry point.

    Attributes:
        what: identifies the entry point and its numbers, equal on all ranks that make the same call.
        steps: the steps that it began.
    """

    what: int = 0
    steps: int = 0


@dataclass
class _Reduction:
    """An all-reduce under way: the sum is in `array`, and goes to `result` if that has another dtype."""

    request: Request
    array: Array
    result: Array
    signal: Any


class Exchange:
    """Exchanges the gradients of one session with the other ranks.

    Attributes:
        traffic: what was exchanged so far.
    """

    def __init__(self, communicator: Communicator, artifact: str) -> None:
        """
        Args:
            communicator: the ranks.
            artifact: identifies the artifact; the ranks must have the same.

        Raises:
            UserError: the ranks have different artifacts.
        """
        self.traffic = Traffic()
        self._ranks = communicator
        self._check_artifact(artifact)
        self._call: _Call | None = None
        self._weight = 1.0
        self._error: IronGradError | None = None
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._under_way: deque[_Reduction] = deque()
        self._started = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(target=run, name=f"irongrad-{name}", daemon=True)
            for name, run in (("start", self._start_all), ("poll", self._poll_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def communicator(self) -> Communicator:
        """The ranks."""
        return self._ranks

    def _check_artifact(self, artifact: str) -> None:
        mine = np.frombuffer(hashlib.sha256(artifact.encode()).digest(), np.int64)
        others = self._ranks.gather(mine)
        different = [i for i in range(self._ranks.size) if (others[i] != mine).any()]
        if different:
            names = ", ".join(map(str, different[:8]))
            raise UserError(
                f"rank {names} has another artifact than rank {self._ranks.rank}: copy one artifact to all machines"
            )

    # --- the session's side ---------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a call of an entry point that exchanges; every rank makes it.

        Raises:
            GuardError: this rank or another one refuses the call; the state of all ranks is as before.
            RankLostError: a rank is gone; the state of this one is as before the step.
        """
        self._call, self._error = _Call(), None
        try:
            yield
        except Exception as error:
            if self._error is not None:
                raise self._error from None
            if self._call.steps == 0:
                self._refuse(error)
            raise
        finally:
            self._call = None

    def expect(self, entry: str, numbers: Sequence[Any]) -> None:
        """Say what has to be equal on all ranks that make this call.

        Args:
            entry: the entry point.
            numbers: its hyperparameters, and the number of steps.
        """
        assert self._call is not None
        described = f"{entry} {[np.asarray(n).tolist() for n in numbers]}"
        self._call.what = int.from_bytes(hashlib.sha256(described.encode()).digest()[:7], "little")

    def _refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one does not run the step."""
        self._ranks.gather(self._row(_REFUSES, 0))
        self._ranks.gather(as_bytes(str(error), _TEXT))

    def _row(self, kind: int, samples: int) -> Array:
        assert self._call is not None
        return np.array([kind, samples, self._call.what, self._call.steps], np.int64)

    def recover(self) -> None:
        """Go on with the ranks that are left.

        Raises:
            RankLostError: the engine cannot.
        """
        self._ranks = self._ranks.without_lost()

    def close(self) -> None:
        """End the threads. One that waits inside IREE while Python ends makes the process abort."""
        self._closing = True
        self._jobs.put(None)
        with self._started:
            self._started.notify()
        for thread in self._threads:
            thread.join()

    # --- the module's side ----------------------------------------------------------------------------------------

    def module(self, device: Any) -> Any:
        """Make the module `comm` for a context on `device`; a VmInstance must exist."""
        exchange = self

        class Methods:
            """The functions of the module; IREE makes one object per context."""

            def __init__(self, interface: Any) -> None:
                pass

            def begin(self, samples: int) -> int:
                """Start a step."""
                return exchange._begin(samples)

            def allreduce(self, view: Any, wait: Any, signal: Any) -> Any:
                """Start an exchange."""
                return exchange._allreduce(device, view, wait, signal)

            def finish(self) -> int:
                """Wait for all exchanges of the step."""
                return exchange._finish()

            def rank(self) -> int:
                """The number of this rank."""
                return exchange._ranks.rank

        interface = ireert.PyModuleInterface(MODULE, Methods)
        for name, signature in (("begin", "0I_i"), ("allreduce", "0rrr_r"), ("finish", "0v_i"), ("rank", "0v_i")):
            interface.export(name, signature, getattr(Methods, name))
        return interface.create()

    def _begin(self, samples: int) -> int:
        assert self._call is not None
        self._jobs.put((self._agree, self._row(_RUNS, samples)))
        self._call.steps += 1
        self.traffic.steps += 1
        return 1

    def _allreduce(self, device: Any, view: Any, wait: Any, signal: Any) -> Any:
        given, ready, done = (
            view.deref(ireert.HalBufferView),
            wait.deref(ireert.HalFence),
            signal.deref(ireert.HalFence),
        )
        # A new buffer: the module may still read the one that it gave.
        buffer = device.allocator.allocate_buffer(_RESULT, _USAGE, given.byte_length)
        result = ireert.HalBufferView(buffer, given.shape, given.element_type)
        self._jobs.put((self._start, device, given, ready, result, done))
        self.traffic.calls += 1
        self.traffic.nbytes += given.byte_length
        return result.ref

    def _finish(self) -> int:
        begun, complete = time.perf_counter(), threading.Event()
        self._jobs.put((self._complete, complete))
        complete.wait()
        self.traffic.seconds += time.perf_counter() - begun
        return int(self._error is None)

    # --- the threads' side ----------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, *arguments = job
            work(*arguments)

    def _agree(self, row: Array) -> None:
        """Agree that all ranks run the same step, and on the weight of this rank's batch."""
        if self._error is not None:
            return
        try:
            rows = self._ranks.gather(row)
            if (rows[:, 0] == _REFUSES).any():
                texts = self._ranks.gather(as_bytes("", _TEXT))
                refusing = int(np.argmax(rows[:, 0] == _REFUSES))
                self._error = GuardError(f"rank {refusing} refuses this step: {as_text(texts[refusing])}")
            elif (rows[:, 2:] != row[2:]).any():
                other = int(np.argmax((rows[:, 2:] != row[2:]).any(axis=1)))
                self._error = GuardError(
                    f"rank {other} makes another call than rank {self._ranks.rank}: all ranks have to call the same "
                    "entry point, with the same hyperparameters, for the same number of steps"
                )
            else:
                self._weight = float(row[1] / max(int(rows[:, 1].sum()), 1))
        except RankLostError as error:
            self._error = error

    def _start(self, device: Any, given: Any, ready: Any, result: Any, done: Any) -> None:
        """Start one all-reduce, once the module has computed its operand."""
        if self._error is None:
            try:
                ready.wait()
                source = to_host(device, given)
                target = result.map().asarray(given.shape, source.dtype)
                array = target if source.dtype in (np.float32, np.float64) else np.empty(source.shape, np.float32)
                np.multiply(source, array.dtype.type(self._weight), out=array, casting="unsafe")
                reduction = _Reduction(self._ranks.start_sum(array), array, target, done)
                with self._started:
                    self._under_way.append(reduction)
                    self._started.notify()
                return
            except RankLostError as error:
                self._error = error
        done.fail(str(self._error))

    def _complete(self, event: threading.Event) -> None:
        """Set `event` once nothing is under way; later calls start nothing before that."""
        with self._started:
            self._started.wait_for(lambda: not self._under_way)
        event.set()

    def _poll_all(self) -> None:
        while True:
            with self._started:
                self._started.wait_for(lambda: self._under_way or self._closing)
                if not self._under_way:
                    return
                waiting = list(self._under_way)
            for reduction in [r for r in waiting if self._is_complete(r)]:
                with self._started:
                    self._under_way.remove(reduction)
                    self._started.notify_all()
            time.sleep(_SLEEP)

    def _is_complete(self, reduction: _Reduction) -> bool:
        try:
            if not reduction.request.test():
                return False
        except RankLostError as error:
            self._error = self._error or error
            reduction.signal.fail(str(error))
            return True
        if reduction.array is not reduction.result:
            reduction.result[...] = reduction.array
        reduction.signal.signal()
        return True
