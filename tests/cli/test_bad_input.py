"""What the command line says about files, disks, numbers and interrupts: one line, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

STRICT = {"parse_constant": lambda text: pytest.fail(f"{text} is no JSON")}


@pytest.fixture
def data(batches, tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, **{n: np.concatenate([b[n] for b in batches]) for n in batches[0]})
    return path


def irongrad(*arguments: object, code: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "irongrad", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def refusal(*arguments: object) -> str:
    """Run a command that is refused; return its message, which must be one line, and the same as JSON."""
    error = json.loads(irongrad(*arguments, "--json").stdout, **STRICT)["error"]
    printed = irongrad(*arguments).stderr
    assert printed == f"error: {error['message']}\nsee {error['section']}\n"
    return error["message"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_learning_rate_that_is_not_finite_trains_nothing(mlp_artifact, data, tmp_path, value):
    checkpoint = tmp_path / "state.safetensors"
    said = refusal("train", mlp_artifact, "--data", data, "--lr", value, "--checkpoint", checkpoint)
    assert said == f"train_step: lr is {value}: it must be finite"
    assert not checkpoint.exists()


@pytest.mark.parametrize("value", ["-inf", "-0.1"])
def test_a_negative_learning_rate_is_a_wrong_option(mlp_artifact, data, value):
    done = irongrad("train", mlp_artifact, "--data", data, "--lr", value)
    assert f"Invalid value for '--lr': {value} is not in the range x>=0." in done.stderr


def test_a_checkpoint_that_cannot_be_written_is_refused_at_the_start(mlp_artifact, data, tmp_path):
    said = refusal("train", mlp_artifact, "--data", data, "--checkpoint", data / "below" / "state")
    assert said.endswith("cannot be written: Not a directory")
    assert "Is a directory" in refusal("train", mlp_artifact, "--data", data, "--checkpoint", tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_full_disk_is_one_line(mlp_artifact, batches, tmp_path):
    np.save(tmp_path / "x.npy", batches[0]["x"])
    said = refusal("run", mlp_artifact, "predict", "--input", f"x={tmp_path / 'x.npy'}", "--output", "/dev/full")
    assert "No space left on device" in said


def test_files_that_are_no_data_are_refused(mlp_artifact, data, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert "it is one array (.npy)" in refusal("train", mlp_artifact, "--data", tmp_path / "x.npy")
    for content in (b"", b"PK", data.read_bytes()[:-30]):
        (tmp_path / "bad.npz").write_bytes(content)
        assert "cannot be read as an .npz file" in refusal("train", mlp_artifact, "--data", tmp_path / "bad.npz")
    np.savez(tmp_path / "scalar.npz", x=np.float32(1), y=1)
    assert "x is a single number" in refusal("train", mlp_artifact, "--data", tmp_path / "scalar.npz")


def test_names_are_no_markup(mlp_artifact, data):
    assert "takes no argument '[/x]'" in refusal("train", mlp_artifact, "--data", data, "--set", "[/x]=1")
    assert "[/red]" in refusal("inspect", "[/red]")


def test_json_has_no_nan(mlp_artifact, data, tmp_path):
    arrays = dict(np.load(data))
    arrays["x"][7] = np.nan
    np.savez(tmp_path / "nan.npz", **arrays)
    done = irongrad("train", mlp_artifact, "--data", tmp_path / "nan.npz", "--json", code=0)
    assert json.loads(done.stdout, **STRICT)["epochs"][0]["loss"] is None
    assert "warning: train_step: the loss is nan" in done.stderr
    stop = ("--on-nonfinite", "stop")
    assert "the loss is nan" in refusal("train", mlp_artifact, "--data", tmp_path / "nan.npz", *stop)


def test_an_artifact_is_signed_and_checked(mlp_artifact, data, tmp_path):
    import shutil

    copy, key = shutil.copytree(mlp_artifact, tmp_path / "copy"), tmp_path / "key"
    train = ("train", copy, "--data", data, "--trusted", f"{key}.pub")
    made = json.loads(irongrad("sign", "--new-key", key, "--json", code=0).stdout)
    assert made == {"key": str(key), "public_key": f"{key}.pub"}
    assert "is not signed" in refusal(*train)
    irongrad("sign", copy, "--key", key, code=0)
    irongrad(*train, code=0)
    assert "give the private key" in refusal("sign", copy)
    assert "give the artifact" in refusal("sign")


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_an_interrupt_of_training_names_the_checkpoint(mlp_artifact, data, tmp_path, seconds):
    command = [sys.executable, "-m", "irongrad", "train", mlp_artifact, "--data", data, "--epochs", "100000"]
    command += ["--checkpoint", tmp_path / "state.safetensors"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A process that ignores Ctrl-C, such as a worker of pytest-xdist, hands that on to its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if seconds > 1:  # before that, Python itself may be interrupted while it starts
        assert process.returncode == 1
        said, *_, aborted = errors.strip().splitlines()
        assert "goes on from there" in said or "no checkpoint was written yet" in said
        assert aborted == "Aborted!"
    left = {p.name for p in tmp_path.iterdir()} - {"data.npz", "state.safetensors"}
    assert not left


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_refused(mlp_artifact, data, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    said = refusal("train", mlp_artifact, "--data", data, "--checkpoint", tmp_path / "locked" / "state")
    assert "Permission denied" in said


@pytest.mark.parametrize(
    "arguments", [["train"], ["nosuch"], ["train", "x", "--data", "y", "--epochs", "0"], ["opt", "x"]]
)
def test_usage_errors_are_json_too(arguments):
    assert json.loads(irongrad(*arguments, "--json").stdout, **STRICT)["error"]["class"] == "UserError"
