"""Recordings of command lines: what each read when it ran, and its result.

A process that compiles records everything that it reads until its step is captured (`tracer.py`). That is every file
that Python, the step's code or a package opens, looks for or lists, and every directory that is searched for a module.
While none of this changes, capture would produce the same key, so the artifact under that key is the result. A process
that checks a step records what it reads until the end, and its report.

Build Systems à la Carte (Mokhov, Mitchell and Peyton Jones, ICFP 2018, section 4.2) calls such records constructive
traces. ccache's direct mode works in the same way: it keeps a compiler's command line and the hashes of the headers
that it read (its manual, "How ccache works"). It does not notice a new header that hides an old one. For modules this
is noticed here, because the searched directories are listed.

Everything else that a process can see is either in the key of its recording (the command line and its environment), or
prevents a recording. The tracer gives the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from irongrad.cache.machine import host, sha256, sources
from irongrad.cache.observations import ANSWERS, Question, importable, names_in
from irongrad.cache.store import DIRECTORY_VARIABLE, SIZE_VARIABLE, Store, default_store
from irongrad.runtime.scratch import scratch_directory

RECORDING = "recording"

_FILE = "recording.msgpack"
# Environment variables of the terminal, the session and make, and those that locate the cache. All others are in the
# key.
_IRRELEVANT = frozenset(
    {"_", "OLDPWD", "SHLVL", "TERM", "TERM_SESSION_ID", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "GPG_TTY"}
    | {"SSH_AGENT_PID", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "STY", "TMUX", "TMUX_PANE"}
    | {"DBUS_SESSION_BUS_ADDRESS", "XDG_SESSION_ID", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    | {DIRECTORY_VARIABLE, SIZE_VARIABLE}
)


@dataclass(frozen=True)
class Search:
    """The modules that were looked for in a directory.

    Attributes:
        names: the last parts of the modules' names.
        found: the directory's entries for these modules; None if there is no such directory.
    """

    names: tuple[str, ...]
    found: tuple[str, ...] | None


@dataclass(frozen=True)
class Trace:
    """Everything that a process read.

    Attributes:
        answers: the answer to each question, by path (`observations.py`).
        searched: the modules that were looked for, found or not, by directory.
    """

    answers: dict[Question, dict[str, str]]
    searched: dict[str, Search]

    def holds(self) -> bool:
        """Return whether a process would read the same now."""
        for question, answers in self.answers.items():
            ask = ANSWERS[question]
            if any(ask(path) != answer for path, answer in answers.items()):
                return False
        return all(importable(names_in(d), frozenset(s.names)) == s.found for d, s in self.searched.items())


@dataclass(frozen=True)
class Recording:
    """The result of a command line.

    Attributes:
        artifact: the key of the artifact that it wrote; empty if it writes none.
        trace: everything that the result depends on.
        result: what the command has to report, encoded.
    """

    artifact: str
    trace: Trace
    result: bytes


@dataclass(frozen=True)
class CommandPlace:
    """The place of a command line's recording.

    Attributes:
        store: the cache.
        key: the key of the command line.
    """

    store: Store
    key: str

    def recorded(self) -> Recording | None:
        """Return the recording if the command line would do the same again; None if it has to run."""
        with scratch_directory() as folder:
            if not self.store.get(RECORDING, self.key, folder):
                return None
            try:
                found = msgspec.msgpack.decode((folder / _FILE).read_bytes(), type=Recording)
            except (OSError, msgspec.DecodeError):
                return None
        return found if found.trace.holds() else None

    def record(self, recording: Recording) -> None:
        """Store a recording in place of the last one."""
        self.store.put(RECORDING, self.key, {_FILE: msgspec.msgpack.encode(recording)})


def command_place(parameters: Mapping[str, object]) -> CommandPlace | None:
    """Return the place of the recording of this process's command line; None if it cannot be recorded.

    A program that calls the command line as a function may have set up PyTorch in ways that no key covers.

    Args:
        parameters: the parsed parameters of the command line.
    """
    store = default_store()
    # elsewhere os.path inspects files without the tracer
    if store is None or "torch" in sys.modules or os.name != "posix":
        return None
    return CommandPlace(store, command_key(parameters))


def command_key(parameters: Mapping[str, object]) -> str:
    """Return the key of this process's command line: everything that the process has before it reads a file."""
    environment = sorted(item for item in os.environ.items() if item[0] not in _IRRELEVANT)
    python = (sys.executable, sys.version, sys.flags, sys.orig_argv, sys.argv, sys.path, sys.warnoptions)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = sorted(str(p) for pattern in ("nvidia*", "dri/*", "kfd") for p in Path("/dev").glob(pattern))
    options = sorted((name, str(value)) for name, value in parameters.items())
    return sha256(options, os.getcwd(), environment, python, cores, devices, host(), sources())
