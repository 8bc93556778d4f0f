"""Makes every system call of saving, publishing, loading and caching fail once, and kills the process at each.

In the manner of SQLite's tests (sqlite.org/testing.html, "I/O Error Testing" and "Crash Testing"). It runs under
`failing_calls.c` (LD_PRELOAD), in one process: an error is undone by the next operation, and a kill hits a child.

    python tests/faults/campaign.py ARTIFACT LIBRARY [STRIDE]     prints the number of faults, by operation, as JSON
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from irongrad.cache.store import Store
from irongrad.runtime import Session
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest_file import read_manifest, write_manifest
from irongrad.runtime.staging import publish, staged

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE)
KILL = -1


@dataclass(frozen=True)
class Operation:
    """Something that reads or writes files.

    Attributes:
        prepare: puts the files as they are before it.
        run: runs it.
        check: checks the files afterwards; its argument tells whether `run` returned.
        allowed: the errors that it may raise.
        kills: whether to kill the process too.
    """

    prepare: Callable[[], object]
    run: Callable[[], object]
    check: Callable[[bool], object]
    allowed: tuple[type[Exception], ...]
    kills: bool = True


def names(directory: Path) -> list[str]:
    """The names in a directory."""
    return sorted(p.name for p in directory.iterdir())


def saving(session: Session, folder: Path) -> Operation:
    """Replace a checkpoint: the file is the old or the new one, and the next save leaves nothing beside it."""
    path, state = folder / "state.safetensors", session.state()
    old = {n: np.zeros_like(a) for n, a in state.items()}
    session.load_state(old)
    session.save(path)
    before = path.read_bytes()
    session.load_state(state)
    session.save(path)
    after = path.read_bytes()
    assert before != after

    def check(done: bool) -> None:
        assert path.read_bytes() in ((after,) if done else (before, after))
        session.save(path)
        assert path.read_bytes() == after
        assert names(folder) == [path.name]

    return Operation(lambda: path.write_bytes(before), lambda: session.save(path), check, (OSError,))


def publishing(artifact: Path, folder: Path, *, first: bool) -> Operation:
    """Publish an artifact: a reader sees none (the first time), the old or the new one."""
    new, output = folder.parent / "new", folder / "out"
    if not new.exists():
        shutil.copytree(artifact, new)
        manifest = read_manifest(new)
        write_manifest(replace(manifest, versions={**manifest.versions, "note": "new"}), new)
    digests = [read_manifest(artifact).digest, read_manifest(new).digest]

    def prepare() -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        if not first:
            shutil.copytree(artifact, output)

    def run() -> None:
        with staged(output) as staging:
            shutil.copytree(new, staging, dirs_exist_ok=True)
            publish(staging, output)

    def check(done: bool) -> None:
        if done or not first or output.exists():
            assert read_manifest(output).digest in (digests[1:] if done or first else digests)
            Session(output, device="local-sync").close()
        run()
        assert names(folder) == ["out"]

    return Operation(prepare, run, check, (OSError, shutil.Error))


def loading(artifact: Path, folder: Path) -> Operation:
    """Load an artifact: it loads, or is refused in words."""
    copy = folder / "out"
    shutil.copytree(artifact, copy)
    expected = Session(copy, device="local-sync").state()

    def check(_: bool) -> None:
        for name, value in Session(copy, device="local-sync").state().items():
            np.testing.assert_array_equal(value, expected[name])

    def run() -> None:
        for name, value in Session(copy, device="local-sync").state().items():
            np.testing.assert_array_equal(value, expected[name])

    return Operation(lambda: None, run, check, (ArtifactError,), kills=False)


def restoring(session: Session, folder: Path) -> Operation:
    """Restore a checkpoint: the state is the old one if it is refused, and the file's otherwise."""
    path, after = folder / "state.safetensors", session.state()
    session.save(path)
    before = {n: np.zeros_like(a) for n, a in after.items()}

    def check(done: bool) -> None:
        for name, value in session.state().items():
            np.testing.assert_array_equal(value, (after if done else before)[name])
        session.load_state(after)

    return Operation(
        lambda: session.load_state(before), lambda: session.restore(path), check, (ArtifactError,), kills=False
    )


def caching(folder: Path) -> Operation:
    """Put an entry into the cache and take it out: it is whole, or missing; nothing is raised."""
    store, key, into = Store(folder, 1 << 20), "ab" * 32, folder.parent / "into"
    files = {"a": b"first" * 1000, "b": b"second"}

    def run() -> None:
        into.mkdir(exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store.put("thing", key, files)
        if store.get("thing", key, into):
            assert {p.name: p.read_bytes() for p in into.iterdir()} == files

    return Operation(lambda: store.clear(), run, lambda _: run(), ())


def faults(operation: Operation, shim: ctypes.CDLL, stride: int) -> Iterator[tuple[int, int]]:
    """Yield every fault, as the number of the call and its error; `stride` leaves some out."""
    operation.prepare()
    shim.strike(0, 0)
    operation.run()
    calls = shim.calls()
    for nth in range(1, calls + 1):
        for number, error in enumerate((*ERRORS, *([KILL] if operation.kills else []))):
            if (nth + number) % stride == 0:
                yield nth, error


def outcome(operation: Operation, shim: ctypes.CDLL, nth: int, error: int) -> bool:
    """Run an operation with a fault; return whether it came to its end."""
    if error == KILL:
        if (child := os.fork()) == 0:
            shim.strike(nth, KILL)
            operation.run()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shim.strike(nth, error)
    try:
        operation.run()
    except operation.allowed:
        return False
    finally:
        shim.strike(0, 0)
    return True


def main(artifact: Path, library: str, stride: int = 1) -> None:
    """Run the campaign, and print the number of faults by operation."""
    shim = ctypes.CDLL(library)
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {n: Path(scratch) / n / "watched" for n in ("save", "publish", "first", "load", "restore", "cache")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        session = Session(artifact, device="local-sync")
        operations = {
            "save a checkpoint": (saving(session, folders["save"]), folders["save"]),
            "replace an artifact": (publishing(artifact, folders["publish"], first=False), folders["publish"]),
            "publish a first artifact": (publishing(artifact, folders["first"], first=True), folders["first"]),
            "load an artifact": (loading(artifact, folders["load"]), folders["load"]),
            "restore a checkpoint": (restoring(session, folders["restore"]), folders["restore"]),
            "store and read a cache entry": (caching(folders["cache"]), folders["cache"]),
        }
        for name, (operation, folder) in operations.items():
            shim.watch(os.fsencode(folder))
            count = counts[name] = {"errors": 0, "kills": 0, "went on": 0}
            for nth, error in faults(operation, shim, stride):
                operation.prepare()
                try:
                    done = outcome(operation, shim, nth, error)
                    operation.check(done)
                except BaseException as problem:
                    problem.add_note(f"{name}: call {nth}, error {error}")
                    raise
                count["kills" if error == KILL else "errors"] += 1
                count["went on"] += done
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
