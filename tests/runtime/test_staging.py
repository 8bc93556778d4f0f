"""Publishing: a reader sees the old or the new artifact, whatever the writers do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace

import pytest

from irongrad.runtime import Session, staging
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest_file import read_manifest, write_manifest
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.staging import check_output, publish, staged


def publish_copy(source, output):
    with staged(output) as new:
        shutil.copytree(source, new, dirs_exist_ok=True)
        publish(new, output)


@pytest.fixture(params=["exchange", "link"])
def way(request, monkeypatch):
    """Publishing on a file system that can exchange directories, and on one that cannot."""
    if request.param == "link":
        monkeypatch.setattr(staging, "exchange", lambda *_: False)
        monkeypatch.setattr(staging, "_moved", lambda *_: False)
    return request.param


def test_an_artifact_replaces_another_and_leaves_nothing(mlp_artifact, tmp_path, way):
    output = tmp_path / "out"
    for _ in range(3):
        publish_copy(mlp_artifact, output)
        Session(output)
    assert output.is_symlink() == (way == "link")
    versions = [p for p in tmp_path.iterdir() if p != output]
    assert len(versions) == (way == "link")


def test_a_link_of_the_user_is_followed(mlp_artifact, tmp_path):
    publish_copy(mlp_artifact, tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    publish_copy(mlp_artifact, tmp_path / "current")
    assert os.readlink(tmp_path / "current") == "v1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["current", "v1"]


def test_an_artifact_that_was_exchanged_becomes_a_link(mlp_artifact, tmp_path, monkeypatch):
    output = tmp_path / "out"
    publish_copy(mlp_artifact, output)
    monkeypatch.setattr(staging, "exchange", lambda *_: False)
    publish_copy(mlp_artifact, output)
    assert output.is_symlink()
    Session(output)


_PUBLISHER = """
import shutil, sys
from pathlib import Path
from irongrad.runtime.staging import publish, staged
one, other, output, count = sys.argv[1:]
for number in range(int(count)):
    with staged(Path(output)) as new:
        shutil.copytree(one if number % 2 else other, new, dirs_exist_ok=True)
        publish(new, Path(output))
"""


def test_readers_see_the_old_or_the_new_one(mlp_artifact, tmp_path):
    """200 times three processes publish one of two artifacts, while three threads load them."""
    other = shutil.copytree(mlp_artifact, tmp_path / "other")
    manifest = read_manifest(other)
    write_manifest(replace(manifest, versions={**manifest.versions, "note": "other"}), other)
    known = {read_manifest(mlp_artifact).digest, read_manifest(other).digest}
    output = tmp_path / "out"
    publish_copy(mlp_artifact, output)
    command = [sys.executable, "-c", _PUBLISHER, mlp_artifact, other, output, "67"]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    seen: set[str] = set()
    errors: list[Exception] = []

    def read() -> None:
        while any(w.poll() is None for w in writers):
            try:
                with Session(output) as session:
                    seen.add(session.manifest.digest)
            except Exception as error:
                errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [w.communicate()[1] for w in writers] == ["", "", ""]
    assert not errors, errors[0]
    assert seen == known
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def test_what_a_killed_writer_left_is_removed_by_the_next(mlp_artifact, tmp_path):
    output = tmp_path / "out"
    program = """
import sys, time
from pathlib import Path
from irongrad.runtime.staging import staged
with staged(Path(sys.argv[1])) as new:
    (new / "half").write_text("half")
    print("written", flush=True)
    time.sleep(100)
"""
    command = [sys.executable, "-c", program, output]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout.readline() == "written\n"
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout.readline() == "written\n"
            killed.kill()
        publish_copy(mlp_artifact, output)
        assert len([p for p in tmp_path.iterdir() if p != output]) == 1
        living.kill()
    publish_copy(mlp_artifact, output)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_nothing_is_compiled_for_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a directory that you may write to"):
        check_output(tmp_path / "file" / "below")
    with pytest.raises(UserError, match="is a file"):
        check_output(tmp_path / "file")


def test_new_directories_have_the_permissions_of_any_new_directory(tmp_path, mlp_artifact):
    plain = tmp_path / "plain"
    plain.mkdir()
    publish_copy(mlp_artifact, tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode


def test_scratch_directories_of_killed_processes_are_removed_by_the_next(tmp_path, monkeypatch):
    program = """
import time
from irongrad.runtime.scratch import scratch_directory
with scratch_directory() as folder:
    (folder / "half").write_text("half")
    print("written", flush=True)
    time.sleep(100)
"""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "irongrad-of-the-user").mkdir()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        process.kill()
    assert len(list(tmp_path.iterdir())) == 2
    with scratch_directory() as folder:
        assert [p for p in tmp_path.iterdir() if p != folder] == [tmp_path / "irongrad-of-the-user"]
    assert [p.name for p in tmp_path.iterdir()] == ["irongrad-of-the-user"]


def test_what_else_is_in_the_directory_is_kept(mlp_artifact, tmp_path, way):
    output = tmp_path / "out"
    publish_copy(mlp_artifact, output)
    (output / "state.safetensors").write_text("a checkpoint")
    (output / "nested").mkdir()
    (output / "nested" / "notes").write_text("notes")
    (output / "step.old.vmfb").write_text("unknown to the manifest, so it is the user's")
    for _ in range(2):
        publish_copy(mlp_artifact, output)
    assert (output / "state.safetensors").read_text() == "a checkpoint"
    assert (output / "nested" / "notes").read_text() == "notes"
    assert (output / "step.old.vmfb").exists()
    Session(output)


@pytest.mark.parametrize("name", ["n" * 250, "\udcff"])
def test_names_that_cannot_be_made_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="give"):
        check_output(tmp_path / name)


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="cannot be made"):
        check_output(tmp_path / "loop")
