"""Files that are written atomically: their permissions, links, and what killed writers left."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from irongrad.runtime.atomic_files import atomic_write, check_writable


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_mode_is_kept_and_a_link_is_followed(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    real.chmod(0o600)
    link.symlink_to("real")
    atomic_write(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert mode(real) == 0o600


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    atomic_write(tmp_path / "new", b"")
    assert mode(tmp_path / "new") == mode(tmp_path / "plain")


@pytest.mark.parametrize("name", ["n" * 255, "é" * 125 + ".bin"])
def test_a_file_may_have_the_longest_name_there_is(tmp_path, name):
    for data in (b"one", b"two"):
        atomic_write(tmp_path / name, data)
        check_writable(tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"two"
    assert os.listdir(tmp_path) == [name]


def test_the_umask_of_other_threads_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask was set"))
    atomic_write(tmp_path / "file", b"")


def test_many_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path, errors = tmp_path / "file", []

    def write(number):
        try:
            for _ in range(50):
                atomic_write(path, bytes([number]) * 1000)
                data = path.read_bytes()
                assert len(data) == 1000
                assert len(set(data)) == 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    program = """
import os, sys, time
from pathlib import Path
from irongrad.runtime import atomic_files
os.replace = lambda *_: (print("written", flush=True), time.sleep(100))
atomic_files.atomic_write(Path(sys.argv[1]), b"half")
"""
    path = tmp_path / "file"
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "written\n"
        atomic_write(path, b"whole")
        assert len(list(tmp_path.iterdir())) == 2  # the other writer lives
        writer.kill()
    atomic_write(path, b"whole")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_interrupt_after_the_file_is_in_place_is_an_interrupt(tmp_path, monkeypatch):
    replace = os.replace

    def interrupted(*paths):
        replace(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "file", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("write", [lambda path: atomic_write(path, b"new"), check_writable])
@pytest.mark.parametrize("call", ["open", "close"])
def test_an_interrupt_as_soon_as_the_file_exists_leaves_nothing(tmp_path, monkeypatch, write, call):
    """Python raises it when a call of the system returns, before the result is kept."""
    called = getattr(os, call)

    def interrupted(*arguments):
        called(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with suppress(KeyboardInterrupt):
        write(tmp_path / "file")
    assert {p.name for p in tmp_path.iterdir()} <= {"file"}


def test_what_cannot_be_written_is_known_before(tmp_path):
    with pytest.raises(IsADirectoryError):
        check_writable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        check_writable(tmp_path / "file" / "below")
    check_writable(tmp_path / "new" / "file")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for write in (check_writable, lambda path: atomic_write(path, b"")):
        with pytest.raises(OSError, match="Not a regular file"):
            write(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
