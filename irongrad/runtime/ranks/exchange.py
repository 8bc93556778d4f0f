"""The module `comm`, which a compiled step imports to exchange gradients between ranks while it runs.

The step calls it from IREE's virtual machine (`irongrad.pipeline.assemble.exchange` writes the calls):

* `begin(samples: i64) -> i32` starts the exchange of a step;
* `allreduce(view, wait, signal) -> view` returns at once, and fills its result after the fence `wait`;
* `reduce(view, wait, signal, shard: i32) -> view` is the same for the rank alone that holds a shard;
* `moments(view, wait, signal) -> view` is the same for the moments of a batch, [1 + 2C]: the number of elements of a
  channel, the mean of each channel and the sum of its squared deviations, which become those of all ranks' elements;
* `gradient(view, wait, signal) -> view` is the same for gradients of these, [C]: the sum over all ranks, each weighted
  by its batch, divided by the weight of this rank's batch;
* `owns(shard: i32) -> i32` returns whether this rank holds a shard of the optimizer's state;
* `share(view, shard: i32) -> view` returns at once, and fills its result with the values of the rank that holds it;
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import iree.runtime as ireert
import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, IronGradError, RankLostError, UserError
from irongrad.runtime.ranks.communicator import Communicator, Request, as_bytes, as_text
from irongrad.runtime.ranks.owners import owners
from irongrad.runtime.transfer import is_mappable, to_host

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
        calls: the reductions, to all ranks or to one.
        nbytes: the bytes of the tensors that it handed over; what crosses a wire depends on the engine's algorithm.
        shared: the bytes of parameters that it has sent to all others, as the rank that updates them.
        seconds: the seconds in which `finish` waited: the communication that no computation hid.
    """

    steps: int = 0
    calls: int = 0
    nbytes: int = 0
    shared: int = 0
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


@dataclass(frozen=True)
class _Operand:
    """What a reduction takes and gives.

    Attributes:
        device: the device of both.
        given: this rank's values.
        ready: the fence after which they exist.
        result: the values of all ranks, once the reduction is complete.
        done: the fence that tells so.
    """

    device: Any
    given: Any
    ready: Any
    result: Any
    done: Any


def _unchanged(summed: Array) -> Array:
    return summed


@dataclass
class _Reduction:
    """A reduction under way: the sum is in `array`. What `finished` makes of it goes to `result`, if that is wanted."""

    request: Request
    array: Array
    result: Array | None
    signal: Any
    finished: Callable[[Array], Array] = _unchanged

    def complete(self) -> None:
        """Hand the result over."""
        if self.result is not None and (made := self.finished(self.array)) is not self.result:
            self.result[...] = made
        self.signal.signal()

    def fail(self, reason: str) -> None:
        """Tell the module that there is no result."""
        self.signal.fail(reason)


@dataclass
class _Broadcast:
    """A broadcast under way, from or to `array`; the module waits for it in `finish`."""

    request: Request
    array: Array

    def complete(self) -> None:
        """There is nothing to do: the values are in place."""

    def fail(self, reason: str) -> None:
        """There is nothing to do: `finish` tells the module."""


def _parts_of_moments(moments: Array) -> tuple[Array, Array, Array]:
    """The number of elements of a channel, and two values of each channel."""
    channels = len(moments) // 2
    return moments[:1], moments[1 : 1 + channels], moments[1 + channels :]


def _pooled(summed: Array) -> Array:
    """The moments of all elements, from their number, sums and sums of squares."""
    count, sums, squares = _parts_of_moments(summed)
    mean = sums / count
    return np.concatenate([count, mean, np.maximum(squares - count * mean**2, 0)])


class Exchange:
    """Exchanges the gradients of one session with the other ranks.

    Attributes:
        traffic: what was exchanged so far.
        owners: the rank that holds each shard of the optimizer's state.
    """

    def __init__(self, communicator: Communicator, artifact: str, shards: Sequence[int] = ()) -> None:
        """
        Args:
            communicator: the ranks.
            artifact: identifies the artifact; the ranks must have the same.
            shards: the bytes of each shard of the optimizer's state; none if every rank holds it whole.

        Raises:
            UserError: the ranks have different artifacts.
        """
        self.traffic = Traffic()
        self._ranks = communicator
        self._check_artifact(artifact)
        self.owners = owners(shards, communicator.size)
        self._call: _Call | None = None
        self._weight = 1.0
        self._error: IronGradError | None = None
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._under_way: deque[_Reduction | _Broadcast] = deque()
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
            RankLostError: a rank is gone; the state of this one is as before the step. If ranks divide the optimizer's
                state, some parameters may be new.
        """
        self._call, self._error = _Call(), None
        try:
            yield
        except Exception as error:
            if self._error is not None:
                self._drain()  # nothing of this call may meet the exchanges of the next one
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

    def meet(self, what: str) -> None:
        """Agree with the other ranks that all of them do the same outside an entry point.

        Raises:
            GuardError: one of them does not.
            RankLostError: a rank is gone.
        """
        with self.call():
            self.expect(what, [])
            assert self._call is not None
            self._call.steps = 1  # a refusal of this call has been told
            self._agree(np.array([_RUNS, 0, self._call.what, 0], np.int64))
            if self._error is not None:
                raise self._error

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
        """Make the module `comm` for a context on `device`."""
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
                return exchange._reduce(device, view, wait, signal, None)

            def reduce(self, view: Any, wait: Any, signal: Any, shard: int) -> Any:
                """Start an exchange whose result one rank needs."""
                return exchange._reduce(device, view, wait, signal, exchange.owners[shard])

            def moments(self, view: Any, wait: Any, signal: Any) -> Any:
                """Start an exchange of the moments of a batch."""
                return exchange._queue(device, view, wait, signal, exchange._start_moments)

            def gradient(self, view: Any, wait: Any, signal: Any) -> Any:
                """Start an exchange of gradients of moments."""
                return exchange._queue(device, view, wait, signal, exchange._start_gradient)

            def owns(self, shard: int) -> int:
                """Whether this rank holds a shard."""
                return int(exchange.owners[shard] == exchange._ranks.rank)

            def share(self, view: Any, shard: int) -> Any:
                """Start to give all ranks the values of the one that holds a shard."""
                return exchange._share(device, view, exchange.owners[shard])

            def finish(self) -> int:
                """Wait for all exchanges of the step."""
                return exchange._finish()

            def rank(self) -> int:
                """The number of this rank."""
                return exchange._ranks.rank

        interface = ireert.PyModuleInterface(MODULE, Methods)
        signatures = {"begin": "0I_i", "allreduce": "0rrr_r", "reduce": "0rrri_r", "owns": "0i_i", "share": "0ri_r"}
        signatures |= {"moments": "0rrr_r", "gradient": "0rrr_r"}
        for name, signature in {**signatures, "finish": "0v_i", "rank": "0v_i"}.items():
            interface.export(name, signature, getattr(Methods, name))
        return interface.create()

    def _begin(self, samples: int) -> int:
        assert self._call is not None
        self._jobs.put((self._agree, self._row(_RUNS, samples)))
        self._call.steps += 1
        self.traffic.steps += 1
        return 1

    def _reduce(self, device: Any, view: Any, wait: Any, signal: Any, root: int | None) -> Any:
        taken = root in (None, self._ranks.rank)
        return self._queue(device, view, wait, signal, partial(self._start_mean, root=root), taken=taken)

    def _queue(
        self,
        device: Any,
        view: Any,
        wait: Any,
        signal: Any,
        start: Callable[[_Operand], _Reduction],
        *,
        taken: bool = True,
    ) -> Any:
        """Queue a reduction; a rank that does not take the result gets its own values in its place."""
        given, ready, done = (
            view.deref(ireert.HalBufferView),
            wait.deref(ireert.HalFence),
            signal.deref(ireert.HalFence),
        )
        result = given
        if taken:  # a new buffer: the module may still read the one that it gave
            buffer = device.allocator.allocate_buffer(_RESULT, _USAGE, given.byte_length)
            result = ireert.HalBufferView(buffer, given.shape, given.element_type)
        self._jobs.put((self._start, _Operand(device, given, ready, result, done), start))
        self.traffic.calls += 1
        self.traffic.nbytes += given.byte_length
        return result.ref

    def _share(self, device: Any, view: Any, root: int) -> Any:
        """Broadcast the bytes, so that all ranks have the same bits; in place if the host can access them."""
        given = result = view.deref(ireert.HalBufferView)
        if not is_mappable(given.get_buffer()):
            buffer = device.allocator.allocate_buffer(_RESULT, _USAGE, given.byte_length)
            result = ireert.HalBufferView(buffer, given.shape, given.element_type)
        array = result.map().asarray((given.byte_length,), np.dtype(np.uint8))
        if root == self._ranks.rank:
            self.traffic.shared += given.byte_length
            if result is not given:
                array[...] = to_host(device, given).reshape(-1).view(np.uint8)
        self._jobs.put((self._start_broadcast, array, root))
        return result.ref

    def _finish(self) -> int:
        begun = time.perf_counter()
        self._drain()
        self.traffic.seconds += time.perf_counter() - begun
        return int(self._error is None)

    def _drain(self) -> None:
        """Wait until nothing that the module handed over is under way."""
        complete = threading.Event()
        self._jobs.put((self._complete, complete))
        complete.wait()

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

    def _start(self, operand: _Operand, start: Callable[[_Operand], _Reduction]) -> None:
        """Start one reduction, once the module has computed its operand."""
        if self._error is None:
            try:
                operand.ready.wait()
                self._add(start(operand))
                return
            except RankLostError as error:
                self._error = error
        operand.done.fail(str(self._error))

    def _start_mean(self, operand: _Operand, root: int | None) -> _Reduction:
        """Start the weighted mean over all ranks: for the rank `root` alone, or for all."""
        source = to_host(operand.device, operand.given)
        taken = operand.result is not operand.given
        target = operand.result.map().asarray(operand.given.shape, source.dtype) if taken else None
        dtype = source.dtype if source.dtype in (np.float32, np.float64) else np.dtype(np.float32)
        array: Array = np.empty(source.shape, dtype) if target is None or target.dtype != dtype else target
        np.multiply(source, array.dtype.type(self._weight), out=array, casting="unsafe")
        summed = self._ranks.start_sum(array) if root is None else self._ranks.start_sum_to(array, root)
        return _Reduction(summed, array, target, operand.done)

    def _start_moments(self, operand: _Operand) -> _Reduction:
        """Start to pool moments: as sums and sums of squares, whose difference needs the digits of float64."""
        count, mean, squares = _parts_of_moments(to_host(operand.device, operand.given).astype(np.float64))
        return self._wide_sum(operand, np.concatenate([count, count * mean, squares + count * mean**2]), _pooled)

    def _start_gradient(self, operand: _Operand) -> _Reduction:
        """Start the sum of gradients: the loss of all is the mean of the ranks' losses by these weights."""
        given, weight = to_host(operand.device, operand.given).astype(np.float64), self._weight
        return self._wide_sum(operand, given * weight, lambda summed: summed / weight)

    def _wide_sum(self, operand: _Operand, array: Array, finished: Callable[[Array], Array]) -> _Reduction:
        dtype = ireert.HalElementType.map_to_dtype(operand.given.element_type)
        target = operand.result.map().asarray(operand.given.shape, dtype)
        return _Reduction(self._ranks.start_sum(array), array, target, operand.done, finished)

    def _start_broadcast(self, array: Array, root: int) -> None:
        if self._error is None:
            try:
                self._add(_Broadcast(self._ranks.start_broadcast(array, root), array))
            except RankLostError as error:
                self._error = error

    def _add(self, collective: _Reduction | _Broadcast) -> None:
        with self._started:
            self._under_way.append(collective)
            self._started.notify()

    def _complete(self, event: threading.Event) -> None:
        """Set `event` once nothing is under way; later calls start nothing before that."""
        with self._started:
            self._started.wait_for(lambda: not self._under_way)
        event.set()

    def _poll_all(self) -> None:
        while self._poll():
            time.sleep(_SLEEP)

    def _poll(self) -> bool:
        """Look at all collectives under way; return whether there may be more. Keeps none of them in memory."""
        with self._started:
            self._started.wait_for(lambda: self._under_way or self._closing)
            waiting = list(self._under_way)
        for collective in [c for c in waiting if self._is_complete(c)]:
            with self._started:
                self._under_way.remove(collective)
                self._started.notify_all()
        return bool(waiting)

    def _is_complete(self, collective: _Reduction | _Broadcast) -> bool:
        try:
            if not collective.request.test():
                return False
        except RankLostError as error:
            self._error = self._error or error
            collective.fail(str(error))
            return True
        collective.complete()
        return True
