"""The tracer records everything that a process reads, and refuses actions that a later process cannot compare."""

from __future__ import annotations

import _json
import importlib
import os
import py_compile
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from irongrad.cache import callers
from irongrad.cache import tracer as module
from irongrad.cache.observations import Question
from irongrad.cache.tracer import Tracer


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    started = Tracer()
    started.start()
    yield started
    started.stop()


def answers(tracer: Tracer, question: Question, path: Path) -> str | None:
    return tracer.trace().answers[question].get(str(path))


def write(path: Path) -> None:
    path.write_text("x")


def read_number_of_a_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.close(os.open("data", os.O_RDONLY, dir_fd=directory))
    finally:
        os.close(directory)


REFUSED = {
    "writes": lambda path: write(path / "new"),
    "removes a file": lambda path: (path / "data").unlink(),
    "renames a file": lambda path: (path / "data").rename(path / "other"),
    "starts a process": lambda path: subprocess.run([sys.executable, "-c", ""], check=True),
    "uses the network": lambda path: socket.getaddrinfo("localhost", 80),
    "opens a database": lambda path: sqlite3.connect(":memory:").close(),
    "draws random numbers": lambda path: np.random.default_rng(),
    "draws random numbers without a seed": lambda path: torch.seed(),
    "reads /dev/urandom": lambda path: open("/dev/urandom", "rb").close(),
    "reads /proc/loadavg": lambda path: Path("/proc/loadavg").read_text(),
    "relative to a directory": read_number_of_a_directory,
    "in a directory that it has open": lambda path: os.stat("data", dir_fd=os.open(path, os.O_RDONLY)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_user_code_that_cannot_be_traced_is_refused(reason, tracer, tmp_path):
    (tmp_path / "data").write_text("1")
    state = torch.get_rng_state()
    with tracer.users_code():
        REFUSED[reason](tmp_path)
    torch.set_rng_state(state)
    assert reason in tracer.refusal


def test_the_compilers_own_writes_and_harmless_user_code_are_allowed(tracer, tmp_path):
    write(tmp_path / "new")
    os.urandom(4)
    with tracer.users_code():
        os.makedirs(tmp_path / "directory", exist_ok=True)
        with open(os.devnull, "w") as file:
            file.write("x")
    assert tracer.refusal == ""


def test_an_installed_package_may_do_anything_while_it_is_imported(tracer, tmp_path, monkeypatch):
    (tmp_path / "drawing.py").write_text("import os\nos.urandom(1)\ndef draw():\n    return os.urandom(1)\n")
    monkeypatch.setattr(callers, "_roots", lambda: ((), (f"{tmp_path}/",)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "drawing", raising=False)
    with tracer.users_code():
        drawing = importlib.import_module("drawing")
        assert tracer.refusal == ""
        drawing.draw()
    assert "random" in tracer.refusal


def test_files_that_native_code_opens_are_recorded(tracer, tmp_path):
    file = tmp_path / "weights.safetensors"
    with tracer.users_code():
        safetensors.numpy.save_file({"x": np.zeros(3)}, file)
        safetensors.numpy.load_file(file)
    assert answers(tracer, Question.CONTENT, file) not in (None, "absent")
    assert tracer.trace().holds()
    file.write_bytes(file.read_bytes() + b"x")
    assert not tracer.trace().holds()


def test_a_file_that_native_code_opened_for_python_is_recorded(tracer, tmp_path):
    """onnx opens the weights beside a model in this way."""
    (tmp_path / "weights").write_bytes(b"1")
    with tracer._unheard():
        number = os.open(tmp_path / "weights", os.O_RDONLY)
    assert answers(tracer, Question.CONTENT, tmp_path / "weights") is None
    with tracer.users_code(), os.fdopen(number, "rb") as file:
        assert file.read() == b"1"
    assert answers(tracer, Question.CONTENT, tmp_path / "weights") is not None
    assert tracer.refusal == ""


def test_reading_a_pipe_is_refused(tracer):
    end, other = os.pipe()
    os.close(other)
    with tracer.users_code(), os.fdopen(end) as file:
        file.read()
    assert tracer.refusal == "reads what is no file"


def test_files_that_pytorch_maps_into_memory_are_recorded(tracer, tmp_path):
    (tmp_path / "raw").write_bytes(bytes(16))
    with tracer.users_code():
        torch.from_file(str(tmp_path / "raw"), size=4)
        torch.UntypedStorage.from_file(str(tmp_path / "raw"), False, 16)
        torch.save(torch.ones(1), tmp_path / "saved.pt")
        torch.load(tmp_path / "saved.pt", mmap=True)
    assert answers(tracer, Question.CONTENT, tmp_path / "raw") is not None
    assert answers(tracer, Question.CONTENT, tmp_path / "saved.pt") is not None


def test_replaced_functions_are_restored():
    before = os.stat, os.urandom, safetensors.numpy.safe_open, torch.from_file, torch.UntypedStorage.from_file
    tracer = Tracer()
    tracer.start()
    with suppress(KeyError), tracer.users_code():
        assert os.stat is not before[0]
        raise KeyError
    tracer.stop()
    after = os.stat, os.urandom, safetensors.numpy.safe_open, torch.from_file, torch.UntypedStorage.from_file
    assert after == before
    assert module._RUNNING == []


def test_lookups_and_directory_listings_are_recorded(tracer, tmp_path):
    (tmp_path / "data").write_text("1")
    with tracer.users_code():
        assert not (tmp_path / "none").exists()
        assert os.path.getsize(tmp_path / "data") == 1
        assert len(list(tmp_path.glob("*"))) == 1
        with pytest.raises(FileNotFoundError):
            (tmp_path / "missing").read_text()
    trace = tracer.trace()
    assert trace.answers[Question.STATUS].keys() >= {str(tmp_path / "none"), str(tmp_path / "data")}
    assert str(tmp_path) in trace.answers[Question.LISTING]
    assert trace.answers[Question.CONTENT][str(tmp_path / "missing")] == "absent"


def test_a_file_that_changes_during_the_compilation_is_refused(tracer, tmp_path):
    """The tracer cannot know whether the process read the file before or after the change."""
    (tmp_path / "data").write_text("1")
    with tracer.users_code():
        (tmp_path / "data").read_text()
    (tmp_path / "data").write_text("2")
    assert tracer.finish() is None
    assert tracer.refusal


def test_native_code_of_unknown_packages_is_refused(tracer, tmp_path):
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    tracer._loaded("torch._C", torch._C.__file__)
    tracer._loaded("_json", _json.__file__)
    assert tracer.refusal == ""
    tracer._loaded("foreign", str(tmp_path / f"foreign{suffix}"))
    assert "whose own code may read files" in tracer.refusal


def test_a_command_may_declare_more_packages_as_known(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "package", lambda file: "mine")
    tracer = Tracer(known=["mine"])
    tracer._loaded("mine.code", str(tmp_path / f"code{importlib.machinery.EXTENSION_SUFFIXES[0]}"))
    assert tracer.refusal == ""


def test_native_code_that_only_computes_is_accepted(tracer):
    with tracer.users_code():
        regex = importlib.import_module("regex")
    tracer._loaded("regex._regex", importlib.import_module("regex._regex").__file__)
    assert regex.fullmatch("a+", "aa")
    assert tracer.refusal == ""


def test_the_refusal_names_what_native_code_calls(tracer, monkeypatch):
    monkeypatch.setattr(module, "KNOWN", frozenset())
    native = importlib.import_module("tokenizers.tokenizers").__file__
    Tracer()._native(native)
    strict = Tracer()
    strict._native(native)
    assert strict.refusal.startswith("imports tokenizers, whose own code may read files: it uses ")


def test_a_library_that_a_package_loads_while_it_is_imported_is_looked_at(tracer, tmp_path, monkeypatch):
    """ctypes reaches functions of the system, which open files unseen."""
    (tmp_path / "loading.py").write_text("import ctypes\nLIBRARY = ctypes.CDLL(None)\n")
    own, _ = callers._roots()
    monkeypatch.setattr(callers, "_roots", lambda: (own, (f"{tmp_path}/",)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loading", raising=False)
    with tracer.users_code():
        importlib.import_module("loading")
    assert tracer.refusal == "imports a package that loads a library of the system"


def test_libraries_that_packages_map_are_looked_at(tracer, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow.lib").__file__
    monkeypatch.setattr(module, "mapped_libraries", lambda: {pyarrow})
    monkeypatch.setattr(module, "module_globals", list)
    tracer._known -= {"pyarrow"}
    assert tracer.finish() is None
    assert "pyarrow" in tracer.refusal


def test_this_process_lists_its_libraries():
    mapped = module.mapped_libraries()
    assert torch._C.__file__ in mapped
    assert any("libtorch_cpu" in name for name in mapped)


@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "words.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "words.txt").write_text("a\nb\n")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    models = importlib.import_module("tokenizers.models")
    tokenizers = importlib.import_module("tokenizers")
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "whole.json"))
    return tmp_path


READING = {
    "whole.json": lambda t, folder: t.Tokenizer.from_file(str(folder / "whole.json")),
    "words.json": lambda t, folder: t.models.WordLevel.from_file(str(folder / "words.json")),
    "words.txt": lambda t, folder: t.models.WordPiece.read_file(str(folder / "words.txt")),
    "merges.txt": lambda t, folder: t.models.BPE.from_file(str(folder / "words.json"), str(folder / "merges.txt")),
}


@pytest.mark.parametrize("name", READING)
def test_files_of_tokenizers_are_recorded(name, tracer, vocabulary):
    tokenizers = importlib.import_module("tokenizers")
    with tracer.users_code():
        READING[name](tokenizers, vocabulary)
    assert answers(tracer, Question.CONTENT, vocabulary / name) not in (None, "absent")
    assert tracer.refusal == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_from_which_tokenizers_makes_a_model_are_recorded(tracer, vocabulary):
    models = importlib.import_module("tokenizers.models")
    before = models.BPE.__init__
    with tracer.users_code():
        models.BPE(str(vocabulary / "words.json"), str(vocabulary / "merges.txt"))
        models.WordPiece(vocab=str(vocabulary / "words.txt"))
        assert models.WordLevel({"a": 0}, "a").token_to_id("a") == 0
    assert models.BPE.__init__ is before
    for name in ("words.json", "merges.txt", "words.txt"):
        assert answers(tracer, Question.CONTENT, vocabulary / name) not in (None, "absent")


def test_files_that_tokenizers_trains_on_are_recorded(tracer, vocabulary):
    tokenizers = importlib.import_module("tokenizers")
    with tracer.users_code():
        trained = tokenizers.Tokenizer(tokenizers.models.BPE())
        trained.train([str(vocabulary / "words.txt")], tokenizers.trainers.BpeTrainer(show_progress=False))
    assert answers(tracer, Question.CONTENT, vocabulary / "words.txt") not in (None, "absent")


def test_a_tokenizer_from_the_hub_is_refused(tracer, monkeypatch):
    tokenizers = importlib.import_module("tokenizers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with tracer.users_code(), suppress(Exception):
        tokenizers.Tokenizer.from_pretrained("none/such")
    assert "from_pretrained" in tracer.refusal


WITH_ARROW = {
    "OSFile": lambda arrow, file: arrow.OSFile(file).read(),
    "memory_map": lambda arrow, file: arrow.memory_map(file).read(),
    "input_stream": lambda arrow, file: arrow.input_stream(file).read(),
    "ipc": lambda arrow, file: arrow.ipc.open_stream(file).read_all(),
    "csv": lambda arrow, file: importlib.import_module("pyarrow.csv").read_csv(file),
}


@pytest.mark.parametrize("way", WITH_ARROW)
def test_files_that_arrow_opens_are_recorded(way, tracer, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    file = tmp_path / "table"
    table = arrow.table({"a": [1, 2]})
    with arrow.OSFile(str(file), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with tracer.users_code():
        WITH_ARROW[way](arrow, str(file))
    assert answers(tracer, Question.CONTENT, file) not in (None, "absent")
    assert tracer.refusal == ""


@pytest.mark.parametrize("engine", ["c", "python", "pyarrow"])
def test_files_that_pandas_opens_are_recorded(engine, tracer, tmp_path):
    pandas = pytest.importorskip("pandas")
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    with tracer.users_code():
        assert pandas.read_csv(tmp_path / "table.csv", engine=engine).shape == (1, 2)
    assert answers(tracer, Question.CONTENT, tmp_path / "table.csv") not in (None, "absent")
    assert tracer.refusal == ""


def test_arrows_own_file_systems_are_refused(tracer):
    file_systems = pytest.importorskip("pyarrow._fs")
    tracer._loaded("pyarrow._fs", file_systems.__file__)
    assert tracer.refusal == "uses pyarrow._fs"


def test_a_version_without_a_known_reader_is_refused(tracer, monkeypatch):
    monkeypatch.setattr(module, "READERS", (("tokenizers", "Tokenizer.renamed"), ("uninstalled_package", "read")))
    with tracer.users_code():
        pass
    assert "without Tokenizer.renamed" in tracer.refusal
    assert "uninstalled_package" not in tracer.refusal


@pytest.mark.skipif(not Path("/proc/mounts").exists(), reason="needs /proc of Linux")
def test_the_table_of_mounts_is_recorded(tracer):
    """transformers reads it to choose how to load weights."""
    with tracer.users_code():
        Path("/proc/mounts").read_text()
    assert tracer.refusal == ""
    assert answers(tracer, Question.CONTENT, Path("/proc/mounts")) is not None


def test_bytecode_that_is_older_than_its_source_is_refused(tracer, tmp_path, monkeypatch):
    """Python compares only the size and the time in seconds, so it would run the old bytecode."""
    (tmp_path / "net.py").write_text("SIZE = 16\n")
    os.utime(tmp_path / "net.py", ns=(10**18, 10**18))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    bytecode = py_compile.compile(str(tmp_path / "net.py"))
    os.utime(bytecode, ns=(10**18 + 10**7, 10**18 + 10**7))
    (tmp_path / "net.py").write_text("SIZE = 32\n")
    os.utime(tmp_path / "net.py", ns=(10**18 + 10**8, 10**18 + 10**8))
    with tracer.users_code():
        assert importlib.import_module("net").SIZE == 16
    assert "newer than its bytecode" in tracer.refusal
