"""A command line that was run before, what it read then, and the artifact that came of it.

A process that compiles notes everything that it reads until its step is captured (`tracer.py`): the files that Python,
the step's code and the packages open, look for or list, and every directory in which a module is searched. As long as
all of that is as it was, capture would come to the same key, and the artifact under it is the result. Build Systems à
la Carte (Mokhov, Mitchell and Peyton Jones, ICFP 2018, section 4.2) calls such records constructive traces; ccache's
direct mode holds a compiler's command line and the hashes of the headers that it read in the same way (its manual, "How
ccache works"), without noticing a header that a new one hides, for which modules are listed here.

What a process could see otherwise is in the key of its record, the command line's and its surroundings', or makes that
there is none: the tracer says why.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from irongrad.cache.machine import host, sha256, sources
from irongrad.cache.observations import ANSWERS, Question, importable, names_in
from irongrad.cache.store import DIRECTORY_VARIABLE, SIZE_VARIABLE, Store, default_store

RECORDING = "recording"

_FILE = "recording.msgpack"
# Variables that say from where a command is called, or where the cache is; every other one is in the key.
_IRRELEVANT = frozenset(
    {"_", "OLDPWD", "SHLVL", "TERM", "TERM_SESSION_ID", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "GPG_TTY"}
    | {"SSH_AGENT_PID", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "STY", "TMUX", "TMUX_PANE"}
    | {"DBUS_SESSION_BUS_ADDRESS", "XDG_SESSION_ID", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    | {DIRECTORY_VARIABLE, SIZE_VARIABLE}
)


@dataclass(frozen=True)
class Search:
    """What modules were looked for in a directory.

    Attributes:
        names: the modules, by the last parts of their names.
        found: what the directory has for them; None where there is no such directory.
    """

    names: tuple[str, ...]
    found: tuple[str, ...] | None


@dataclass(frozen=True)
class Trace:
    """What a process read.

    Attributes:
        answers: to each question, by path (`observations.py`).
        searched: by directory, what was imported from there, or not found.
    """

    answers: dict[Question, dict[str, str]]
    searched: dict[str, Search]

    def holds(self) -> bool:
        """Whether a process would read the same now."""
        for question, answers in self.answers.items():
            ask = ANSWERS[question]
            if any(ask(path) != answer for path, answer in answers.items()):
                return False
        return all(importable(names_in(d), frozenset(s.names)) == s.found for d, s in self.searched.items())


@dataclass(frozen=True)
class Recording:
    """What a command line did.

    Attributes:
        artifact: the key of the artifact that it wrote.
        trace: what that depends on.
        result: what the command says of it, encoded.
    """

    artifact: str
    trace: Trace
    result: bytes


@dataclass(frozen=True)
class CommandPlace:
    """Where the record of a command line is kept.

    Attributes:
        store: the cache.
        key: the command line's.
    """

    store: Store
    key: str

    def recorded(self) -> Recording | None:
        """What the command line did, if it would do it again; None where it has to run."""
        with tempfile.TemporaryDirectory(prefix="irongrad-") as folder:
            if not self.store.get(RECORDING, self.key, Path(folder)):
                return None
            try:
                found = msgspec.msgpack.decode((Path(folder) / _FILE).read_bytes(), type=Recording)
            except (OSError, msgspec.DecodeError):
                return None
        return found if found.trace.holds() else None

    def record(self, recording: Recording) -> None:
        """Keep what the command line did, in place of what it did before."""
        self.store.put(RECORDING, self.key, {_FILE: msgspec.msgpack.encode(recording)})


def command_place(parameters: Mapping[str, object]) -> CommandPlace | None:
    """Where the record of this process's command line is kept; None where there can be none.

    A program that calls the command line as a function may have set up PyTorch in ways that no key has.

    Args:
        parameters: the command line's, as they were parsed.
    """
    store = default_store()
    if store is None or "torch" in sys.modules or os.name != "posix":  # elsewhere os.path looks at files unseen
        return None
    return CommandPlace(store, command_key(parameters))


def command_key(parameters: Mapping[str, object]) -> str:
    """The key of this process's command line: all that the process has before it reads a file."""
    environment = sorted(item for item in os.environ.items() if item[0] not in _IRRELEVANT)
    python = (sys.executable, sys.version, sys.flags, sys.orig_argv, sys.argv, sys.path, sys.warnoptions)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = sorted(str(p) for pattern in ("nvidia*", "dri/*", "kfd") for p in Path("/dev").glob(pattern))
    given = sorted((name, str(value)) for name, value in parameters.items())
    return sha256(given, os.getcwd(), environment, python, cores, devices, host(), sources())
