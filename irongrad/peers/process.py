"""A compiler in a process of its own: its thread pool, its caches and its memory meet no other's."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from irongrad.peers.kernels import Compiled
from irongrad.runtime.errors import UserError
from irongrad.step.train_step import TrainStep

# Each name is a file of this folder with a function `compiled`.
PEERS = ("irongrad", "inductor", "xla")
_LOG = "log"
_FILES = {"irongrad": "own", "inductor": "inductor", "xla": "xla"}


@dataclass(frozen=True)
class Seconds:
    """The time of a step.

    Attributes:
        wall: by the clock.
        cpu: of all threads of the process.
    """

    wall: float
    cpu: float


@dataclass
class Peer:
    """A running process that has compiled the step."""

    name: str
    compiled: Compiled
    connection: Connection
    process: multiprocessing.process.BaseProcess

    def seconds_of(self, count: int) -> Seconds:
        """The mean time of `count` steps."""
        self.connection.send(count)
        found: Seconds = self.connection.recv()
        return found

    def end(self) -> None:
        """End the process."""
        self.connection.send(0)
        self.process.join()


def start(name: str, load: Callable[[], TrainStep], folder: Path, *, one_thread: bool) -> Peer:
    """Start a process that compiles the step with a compiler, and wait until it has taken its first steps.

    Args:
        name: one of `PEERS`.
        load: makes the step in the other process, so it must be importable there.
        folder: an empty directory for the process's files.
        one_thread: whether the step runs on one thread.

    Raises:
        UserError: it could not; the message is one line.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, load, folder, one_thread), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = mine.recv()
    except EOFError:
        process.join()
        said = (folder / _LOG).read_text(errors="replace").splitlines() if (folder / _LOG).exists() else []
        last = f": {said[-1]}" if said else ""
        raise UserError(f"its process ended with exit status {process.exitcode}{last}") from None
    if isinstance(answer, str):
        process.join()
        raise UserError(answer)
    return Peer(name, answer, mine, process)


def _serve(connection: Connection, name: str, load: Callable[[], TrainStep], folder: Path, one_thread: bool) -> None:
    """Compile, send what came of it, then run as many steps as asked, answering with the time of each."""
    with (folder / _LOG).open("w") as log:  # compilers print, and the output of the parent may be JSON
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        peer = importlib.import_module(f"irongrad.peers.{_FILES[name]}")
        compiled, run = peer.compiled(load(), folder, one_thread=one_thread)
    except Exception as error:
        connection.send(_in_one_line(error))
        return
    connection.send(compiled)
    while count := connection.recv():
        before = time.perf_counter(), time.process_time()
        for _ in range(count):
            run()
        wall, cpu = time.perf_counter() - before[0], time.process_time() - before[1]
        connection.send(Seconds(wall / count, cpu / count))


def _in_one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
