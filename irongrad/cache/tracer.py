"""Record what this process reads, so that a later process can tell whether it would read the same.

Python reports every file that is opened and every directory that is listed (its audit events, PEP 578). A finder in
front of all others sees each module that is looked for. While the user's code runs, functions that inspect a file
without opening it are recorded too. An action that leaves nothing to compare later, such as a connection or another
process, prevents a recording.

Native code could open files unseen. A package with native code is accepted only if its readers open files in Python or
are listed here. Any other package with native code prevents a recording.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, reduce, wraps
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from types import ModuleType
from typing import Any

from irongrad.cache.callers import IMPORTLIB, asker, is_importing_a_package, is_installed, package
from irongrad.cache.known_code import ENTROPY, KNOWN, LOOKS, READERS, REFUSED, UNFOLLOWED, UNKNOWN_MODULES
from irongrad.cache.machine import CPUINFO
from irongrad.cache.native_code import way_outside
from irongrad.cache.observations import ANSWERS, SPECIAL, Question, importable, names_in
from irongrad.cache.open_files import mapped_libraries, name_of
from irongrad.cache.recordings import Search, Trace
from irongrad.runtime.installed import PACKAGE
from irongrad.runtime.loaded_modules import module_globals
from irongrad.runtime.scratch import is_scratch

_LISTED = ("os.listdir", "os.scandir")
_EVENTS = frozenset({"open", *_LISTED, *REFUSED})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

# What the kernel says of the machine changes all the time, except for these: what is mounted, and by how much Linux
# limits the CPU time of a group of processes (its manual, cgroups(7)).
_CONSTANT = ("/proc/mounts", "/proc/self/mounts", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/")

_OWN = str(PACKAGE) + os.sep


class Tracer:
    """Records what this process reads between `start` and `finish`.

    Args:
        known: further packages with native code that is accepted, because the parts in use open files only in Python.

    Attributes:
        refusal: why nothing can be recorded, a verb with its object; empty if a recording is possible.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.refusal = ""
        self._known = KNOWN | {*known}
        self._answers: dict[Question, dict[str, str]] = {question: {} for question in Question}
        self._searched: dict[str, _Searched] = {}
        self._users = False
        self._thread = threading.local()
        self._finder = _Finder(self)

    def start(self) -> None:
        """Start recording; only one tracer runs at a time."""
        loaded = dict(module_globals())
        for name, names in loaded.items():
            parent = loaded.get(name.rpartition(".")[0])
            self.searched(name, sys.path if parent is None else parent.get("__path__", ()))
            if isinstance(file := names.get("__file__"), str):
                self._read(file)
        sys.meta_path.insert(0, self._finder)
        _install()
        _RUNNING.append(self)

    @contextmanager
    def users_code(self) -> Iterator[None]:
        """Surround the run of the user's code, which is recorded more closely."""
        if self not in _RUNNING:
            yield
            return
        with ExitStack() as replaced:
            for name in LOOKS:
                replaced.enter_context(_replaced(os, name, self._looking))
            watched = ((self._drawing, ENTROPY), (self._reading, READERS), (self._losing, UNFOLLOWED))
            for wrapped, places in watched:
                for owner, name in (found for place in places for found in self._places(*place)):
                    replaced.enter_context(_replaced(owner, name, wrapped))
            self._users = True
            try:
                yield
            finally:
                self._users = False

    def _places(self, module: str, path: str) -> list[tuple[Any, str]]:
        """Find a function to watch; a version of a package without it may open files by another one."""
        try:
            return _places(module, path)
        except AttributeError:
            self._refuse(
                f"may run a version of {module} without {path}, which reads files by functions that are not known"
            )
            return []

    def stop(self) -> None:
        """Stop recording."""
        if self in _RUNNING:
            _RUNNING.remove(self)
            sys.meta_path.remove(self._finder)

    def finish(self) -> Trace | None:
        """Stop recording and return what was read; None, with a `refusal`, if that does not determine a later run."""
        self.stop()
        for name, names in module_globals():
            if isinstance(file := names.get("__file__"), str):
                self._loaded(names.get("__name__", name), file)
        for library in mapped_libraries():
            self._mapped(library)
        if not self.refusal and not self.trace().holds():
            self.refusal = "reads files that changed meanwhile"
        return None if self.refusal else self.trace()

    def trace(self) -> Trace:
        """Return what was read so far."""
        searched = {d: Search(tuple(sorted(s.names)), importable(s.found, s.names)) for d, s in self._searched.items()}
        return Trace(self._answers, searched)

    def searched(self, name: str, directories: Iterable[object]) -> None:
        """Record that the module `name` is looked for in `directories`."""
        with self._unheard():
            for directory in directories:
                if isinstance(directory, str):
                    self._search(os.path.abspath(directory), name.rpartition(".")[2])

    def _search(self, directory: str, name: str) -> None:
        if directory in self._searched:
            self._searched[directory].names.add(name)
        elif is_installed(directory + os.sep):
            self._ask(Question.INSTALLED, directory)
        elif os.path.isfile(directory):  # an archive of modules
            self._ask(Question.CONTENT, directory)
        elif not (directory + os.sep).startswith(_OWN):
            self._searched[directory] = _Searched(names_in(directory), {name})

    def _loaded(self, module: str, file: str) -> None:
        self._read(file)
        if file.endswith(tuple(EXTENSION_SUFFIXES)):
            self._native(file)
        if module in UNKNOWN_MODULES:
            self._refuse(f"uses {module}")

    def _mapped(self, library: str) -> None:
        """Record a library of a package, which the package may have loaded without an import."""
        if is_installed(library) and package(library):
            self._read(library)
            self._native(library)

    def _native(self, file: str) -> None:
        if (name := package(file)) not in self._known and (way := way_outside(file)):
            self._refuse(f"imports {name}, whose own code may read files: it uses {way}")

    def heard(self, event: str, arguments: tuple[Any, ...], caller: str) -> None:
        """Record an audit event that the code in the file `caller` caused."""
        if self._is_asking():
            return
        with self._unheard():
            if event == "open":
                self._opened(*arguments, by_import=caller == IMPORTLIB)
            elif caller == IMPORTLIB:
                pass  # `searched` has recorded the import, and Python writes the bytecode
            elif event in _LISTED:
                self._list(arguments[0], caller)
            elif self._users:
                self._refuse(REFUSED[event])
                if event == "ctypes.dlopen" and self._is_strange(arguments[0]):
                    self._refuse("imports a package that loads a library of the system", at_import=True)

    def _is_strange(self, library: object) -> bool:
        """Whether a library that a package loads is none of a package: those are looked at in `finish`."""
        of_package = isinstance(library, str | os.PathLike) and is_installed(os.path.abspath(os.fspath(library)))
        return not of_package and package(asker()) not in self._known

    def _opened(self, path: object, mode: object, flags: int, *, by_import: bool) -> None:
        if by_import and flags & _WRITES:
            return
        name = name_of(path) if isinstance(path, int) else os.fsdecode(path)  # type: ignore[arg-type]
        if name is None:
            if self._users:
                self._refuse("reads what is no file")
        elif self._users and flags & _WRITES and name != os.devnull:
            self._refuse(f"writes {name}")
        elif self._users and mode is None and not os.path.isabs(name):
            self._refuse(f"opens {name} relative to a directory")  # the event of os.open does not name the directory
        elif not flags & _WRITES:
            self._read(name)

    def _list(self, directory: object, caller: str) -> None:
        if isinstance(directory, int):
            if not asker().startswith(_OWN):  # which so removes what killed processes left
                self._refuse("lists a directory that it has open")
            return
        path = os.path.abspath(os.fsdecode(directory or os.curdir))  # type: ignore[arg-type]
        if caller == importlib.metadata.__file__:
            self._search(path, "")
        elif not asker().startswith(_OWN) and self._matters(path):
            self._ask(Question.LISTING, path)

    def _read(self, name: str) -> None:
        path = self._source(os.path.abspath(name))
        if not self._matters(path):
            return
        if is_installed(path):
            self._ask(Question.INSTALLED, path)
        elif self._ask(Question.CONTENT, path) == SPECIAL and path != os.devnull:
            self._refuse(f"reads {path}")

    def _source(self, path: str) -> str:
        """Return the source of a bytecode file, whether or not the bytecode exists yet.

        Python compares their times only to the second, so source that is newer than its bytecode is refused.
        """
        if not path.endswith(".pyc"):
            return path
        with suppress(ValueError, OSError):
            source = importlib.util.source_from_cache(path)
            written = os.stat(source).st_mtime_ns
            if os.path.exists(path) and not is_installed(path) and os.stat(path).st_mtime_ns < written:
                self._refuse(f"imports {source}, which is newer than its bytecode")
            return source
        return path

    def _matters(self, path: str) -> bool:
        """Return whether the contents of `path` can make a difference that no key covers."""
        if path.startswith(_OWN) or path == CPUINFO or is_scratch(path):
            return False
        if path.startswith(_CONSTANT) or not path.startswith(("/proc/", "/sys/")):
            return True
        if self._users:  # what the kernel says of the machine changes all the time
            self._refuse(f"reads {path}")
        return False

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def look(path: Any, *arguments: Any, **options: Any) -> Any:
            # linecache inspects and reads source files only to print them.
            if not isinstance(path, int) and not self._is_asking() and _caller() != linecache.__file__:
                with self._unheard():
                    self._looked(os.fsdecode(path), options)
            return original(path, *arguments, **options)

        return look

    def _looked(self, name: str, options: dict[str, Any]) -> None:
        if options.get("dir_fd") is not None:
            self._refuse("looks for a file in a directory that it has open")
        path = os.path.abspath(name)
        if self._matters(path):  # IronGrad itself only checks which files exist, not how new they are
            self._ask(Question.KIND if asker().startswith(_OWN) else Question.STATUS, path)

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def read(*arguments: Any, **options: Any) -> Any:
            with self._unheard():
                for value in _leaves((*arguments, *options.values())):
                    if isinstance(value, str | os.PathLike):
                        self._read(os.fsdecode(value))
            # A class of C is made by __new__, and takes no arguments here.
            return original(*arguments, **options) if original is not object.__init__ else None

        return read

    def _losing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def lose(*arguments: Any, **options: Any) -> Any:
            self._refuse(f"calls {original.__qualname__}, which opens files unseen")
            return original(*arguments, **options)

        return lose

    def _drawing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*arguments: Any) -> Any:
            self._refuse("draws random numbers without a seed")
            return original(*arguments)

        return draw

    def _ask(self, question: Question, path: str) -> str:
        answers = self._answers[question]
        if path not in answers:
            answers[path] = ANSWERS[question](path)
        return answers[path]

    def _refuse(self, reason: str, *, at_import: bool = False) -> None:
        if not self.refusal and (at_import or not is_importing_a_package()):
            self.refusal = reason

    def _is_asking(self) -> bool:
        return getattr(self._thread, "asking", False)

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        """Do not record while the tracer itself reads."""
        before, self._thread.asking = self._is_asking(), True
        try:
            yield
        finally:
            self._thread.asking = before


@dataclass
class _Searched:
    """A directory in which modules were looked for.

    Attributes:
        found: the names in the directory at the first search; None if there is no such directory.
        names: the names of the modules.
    """

    found: tuple[str, ...] | None
    names: set[str]


_RUNNING: list[Tracer] = []


@cache
def _install() -> None:
    """Install the audit hook; Python cannot remove it again."""
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if _RUNNING and event in _EVENTS:
        _RUNNING[-1].heard(event, arguments, sys._getframe(1).f_code.co_filename)


class _Finder:
    """A finder that sees every import and finds nothing."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        self._tracer.searched(name, sys.path if path is None else path)
        return None


def _leaves(values: Iterable[object]) -> Iterator[object]:
    """Yield values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _caller() -> str:
    """Return the file of the code that called the caller of this function."""
    return sys._getframe(2).f_code.co_filename


def _places(module: str, path: str) -> list[tuple[Any, str]]:
    """Return each owner of the object at `path` in `module`, with its name there.

    Modules that have imported the object are owners too. A package that is not installed has none.

    Raises:
        AttributeError: the module has no such object.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return []
    *parents, name = path.split(".")
    owner = reduce(getattr, parents, import_module(module))
    value = getattr(owner, name)
    if parents:
        return [(owner, name)]
    return [(sys.modules[m], name) for m, names in module_globals() if names.get(name) is value]


@contextmanager
def _replaced(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, wrapped(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
