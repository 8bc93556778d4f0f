"""The cache directory gives whole entries or none, under damage, concurrency, kills and a size limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from irongrad.cache.store import _ABANDONED_SECONDS, Store, default_store
from irongrad.cli.cache import command
from irongrad.runtime.errors import UserError

KEY = "ab" * 32


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache", 10_000)


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def test_an_entry_is_found_only_under_its_key_and_kind(store, into, tmp_path):
    (tmp_path / "file").write_bytes(b"on disk")
    assert not store.get("thing", KEY, into)
    store.put("thing", KEY, {"a": tmp_path / "file", "b": b"in memory"})
    assert not store.get("other", KEY, into)
    assert not store.get("thing", "cd" * 32, into)
    assert list(into.iterdir()) == []
    assert store.get("thing", KEY, into)
    assert {p.name: p.read_bytes() for p in into.iterdir()} == {"a": b"on disk", "b": b"in memory"}


@pytest.mark.parametrize("keep", [0, 1, 30, 60, 500, -1])
def test_a_truncated_entry_is_a_miss_and_is_removed(store, into, keep):
    store.put("thing", KEY, {"a": b"x" * 1000})
    (entry,) = store.entries()
    entry.path.write_bytes(entry.path.read_bytes()[:keep])
    assert not store.get("thing", KEY, into)
    assert store.entries() == []
    store.put("thing", KEY, {"a": b"y"})
    assert store.get("thing", KEY, into)
    assert (into / "a").read_bytes() == b"y"


def test_any_flipped_byte_of_the_contents_is_a_miss(store, into):
    content = os.urandom(200)
    store.put("thing", KEY, {"a": content})
    (entry,) = store.entries()
    whole = entry.path.read_bytes()
    start = whole.index(content)
    for position in range(start, start + len(content), 20):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        entry.path.write_bytes(damaged)
        assert not store.get("thing", KEY, into)


def test_the_least_recently_used_entry_is_evicted_first(tmp_path, into):
    store = Store(tmp_path / "cache", 10_000)
    for number in range(4):
        store.put("thing", f"{number:064d}", {"a": bytes(2000)})
        os.utime(store.entries()[-1].path, (number, number))
    assert store.get("thing", f"{0:064d}", into)  # now entry 1 is the least recently used
    store.put("thing", f"{4:064d}", {"a": bytes(2000)})
    assert sum(e.size for e in store.entries()) <= store.limit
    kept = {int(e.path.name) for e in store.entries()}
    assert kept == {0, 2, 3, 4}


def test_an_entry_larger_than_the_cache_is_not_kept(store):
    store.put("thing", KEY, {"a": b"small"})
    store.put("thing", "cd" * 32, {"a": bytes(20_000)})
    assert [e.path.name for e in store.entries()] == [KEY]


WRITER = """
import sys
from pathlib import Path
from irongrad.cache.store import Store
store, into = Store(Path(sys.argv[1]), 100_000), Path(sys.argv[2])
into.mkdir()
hits = 0
for number in range(150):
    key = f"{number % 5:064d}"
    if store.get("thing", key, into):
        assert (into / "a").read_bytes() == key.encode() * 500, "a half entry"
        hits += 1
    else:
        store.put("thing", key, {"a": key.encode() * 500})
print(hits)
"""


def test_concurrent_processes_see_whole_entries(tmp_path):
    """Five entries exceed the limit, so the processes write, read and evict the same entries at the same time."""
    arguments = [[sys.executable, "-c", WRITER, str(tmp_path / "c"), str(tmp_path / f"into{i}")] for i in range(4)]
    processes = [subprocess.Popen(a, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in arguments]
    results = [p.communicate(timeout=60) for p in processes]
    assert [p.returncode for p in processes] == [0] * 4, results
    assert sum(int(out) for out, _ in results) > 0
    assert not list((tmp_path / "c").rglob(".new-*"))


KILLED = """
import sys
from pathlib import Path
from irongrad.cache.store import Store
Store(Path(sys.argv[1]), 10_000).put("thing", "ab" * 32, {"a": b"whole", "b": Path(sys.argv[2])})
"""


def test_a_killed_writer_leaves_no_entry(store, into, tmp_path):
    os.mkfifo(tmp_path / "endless")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(store.directory), str(tmp_path / "endless")])
    with (tmp_path / "endless").open("wb"):  # returns once the writer is in the middle of its entry
        process.send_signal(signal.SIGKILL)
        process.wait()
    (left,) = store.directory.rglob(".new-*")
    assert not store.get("thing", KEY, into)
    assert store.entries() == []
    store.put("thing", KEY, {"a": b"again"})
    assert left.exists()  # another process might be writing it
    old = time.time() - _ABANDONED_SECONDS - 1
    os.utime(left, (old, old))
    store.put("thing", KEY, {"a": b"again"})
    assert not left.exists()
    assert store.get("thing", KEY, into)


def test_a_directory_that_cannot_be_written_gives_a_warning(tmp_path, into):
    (tmp_path / "file").write_text("no directory")
    store = Store(tmp_path / "file", 1000)
    with pytest.warns(UserWarning, match="cannot be written"):
        store.put("thing", KEY, {"a": b"x"})
    assert not store.get("thing", KEY, into)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_cache_command_shows_and_clears_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IRONGRAD_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "2MiB")
    store = default_store()
    assert store == Store(tmp_path / "here", 2**21)
    store.put("artifact", KEY, {"a": bytes(2**20)})
    store.put("module", KEY, {"a": b"x"})
    report = json.loads(run("--json"))
    assert (report["directory"], report["limit"]) == (str(tmp_path / "here"), 2**21)
    assert report["kinds"]["artifact"]["entries"] == 1
    assert report["kinds"]["artifact"]["bytes"] > 2**20
    assert "module" in run()
    assert "MiB of 2.0MiB" in run()
    assert run("--path").strip() == str(tmp_path / "here")
    assert "removed 2 entries" in run("clear")
    assert store.entries() == []


def test_a_size_of_zero_turns_the_cache_off(tmp_path, monkeypatch):
    monkeypatch.setenv("IRONGRAD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "0")
    assert default_store() is None
    assert "turned off" in run()
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "plenty")
    with pytest.raises(UserError, match="'plenty' is no amount of memory"):
        default_store()
    monkeypatch.setenv("IRONGRAD_CACHE_SIZE", "50%")
    with pytest.raises(UserError, match="must be an amount"):
        default_store()
    monkeypatch.delenv("IRONGRAD_CACHE_SIZE")
    assert default_store().limit == 10 * 2**30


def test_the_cache_command_imports_no_compiler():
    code = "import irongrad.cli.cache, sys; print([n for n in ('torch', 'iree.compiler') if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_an_entry_with_any_flipped_byte_is_whole_or_missing(store, into):
    """Some damage makes zipfile raise NotImplementedError or RuntimeError; the entry must not stay in the way."""
    store.put("thing", KEY, {"a": b"first" * 20, "b": b"second"})
    (path,) = (p for p in store.directory.rglob(KEY))
    good = path.read_bytes()
    for place in range(len(good)):
        for mask in (0x01, 0x80, 0xFF):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(good[:place] + bytes([good[place] ^ mask]) + good[place + 1 :])
            if store.get("thing", KEY, into):
                assert (into / "a").read_bytes() == b"first" * 20
                assert (into / "b").read_bytes() == b"second"
            else:
                assert not path.exists()
    store.put("thing", KEY, {"a": b"again"})
    assert store.get("thing", KEY, into)
