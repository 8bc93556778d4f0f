"""Tests that need a new process: the runtime imports no torch, training resumes, iree-run-module agrees."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from irongrad.runtime import Session
from irongrad.runtime.commands import run_module
from irongrad.runtime.manifest_file import read_manifest

FORBIDDEN = ("torch", "torch_mlir", "iree.compiler")


def run_python(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


IMPORTED = f"""
import sys
print([name for name in {FORBIDDEN!r} if name in sys.modules])
"""

DEPLOYED = """
import sys
import numpy as np
import irongrad.runtime
session = irongrad.runtime.load(sys.argv[1])
session.train_step(x=np.zeros((6, 8), np.float32), y=np.zeros(6, np.int64))
"""


def test_the_runtime_imports_no_compiler(mlp_artifact):
    assert run_python(DEPLOYED + IMPORTED, mlp_artifact).strip() == "[]"


def test_an_imported_compiler_is_noticed(mlp_artifact):
    assert run_python(DEPLOYED + "import irongrad.step.train_step\n" + IMPORTED, mlp_artifact).strip() != "[]"


@pytest.mark.parametrize("verb", ["train", "run", "inspect", "verify"])
def test_deployment_verbs_import_no_compiler(verb):
    code = f"import irongrad.cli.main, irongrad.cli.{verb}\n" + IMPORTED
    assert run_python(code).strip() == "[]"


RESUMED = """
import sys
import numpy as np
import irongrad.runtime
directory, checkpoint, data, output = sys.argv[1:]
session = irongrad.runtime.load(directory)
session.restore(checkpoint)
arrays = np.load(data)
for x, y in zip(arrays["x"], arrays["y"]):
    session.train_step(x=x, y=y)
session.save(output)
"""


def test_resuming_in_a_new_process_is_bitwise(mlp_artifact, batches, tmp_path):
    whole = Session(mlp_artifact)
    for batch in batches[:10]:
        whole.train_step(**batch)
    whole.save(tmp_path / "ten.safetensors")
    half = Session(mlp_artifact)
    for batch in batches[:5]:
        half.train_step(**batch)
    half.save(tmp_path / "five.safetensors")
    rest = {n: np.stack([b[n] for b in batches[5:10]]) for n in ("x", "y")}
    np.savez(tmp_path / "rest.npz", **rest)
    run_python(
        RESUMED, mlp_artifact, tmp_path / "five.safetensors", tmp_path / "rest.npz", tmp_path / "out.safetensors"
    )
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "ten.safetensors").read_bytes()


def iree_run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def files(batches, tmp_path):
    for name, array in batches[0].items():
        np.save(tmp_path / f"{name}.npy", array)
    return {name: tmp_path / f"{name}.npy" for name in batches[0]}


@pytest.mark.parametrize("device", ["local-sync", "local-task"])
def test_iree_run_module_gives_the_same_numbers_from_a_checkpoint(mlp_artifact, batches, tmp_path, files, device):
    session = Session(mlp_artifact, device=device)
    session.train_step(**batches[1], lr=0.1)
    checkpoint = tmp_path / "one.safetensors"
    session.save(checkpoint)
    manifest = read_manifest(mlp_artifact)
    predicted = session.predict(x=batches[0]["x"])
    evaluated = session.eval_step(**batches[0])
    trained = session.train_step(**batches[0], lr=0.5)
    for entry, expected, output in (("predict", predicted, "output"), ("eval_step", evaluated, "loss")):
        path = tmp_path / f"{entry}.npy"
        given = {"inputs": files, "state": checkpoint, "device": device}
        result = iree_run(run_module(manifest, mlp_artifact, entry, outputs={output: path}, **given))
        assert result.returncode == 0, result.stderr
        np.testing.assert_array_equal(np.load(path), np.asarray(expected, np.float32))
    path = tmp_path / "loss.npy"
    command = run_module(
        manifest,
        mlp_artifact,
        "train_step",
        inputs=files,
        hypers={"lr": 0.5},
        state=checkpoint,
        outputs={"loss": path},
        device=device,
    )
    assert iree_run(command).returncode == 0
    assert np.load(path) == np.float32(trained)


def test_the_pasted_commands_run(mlp_artifact):
    manifest = read_manifest(mlp_artifact)
    for entry in manifest.entry_points:
        result = iree_run(run_module(manifest, mlp_artifact, entry.name))
        if entry.name == "apply_step":
            assert "no gradients are accumulated; call grad_step first" in result.stderr
        else:
            assert result.returncode == 0, f"{entry.name}: {result.stderr}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("6x7xf32=0", "x shape dimension 1 mismatch"),
        ("6x8xf64=0", "x element type mismatch"),
        ("8xf32=0", "rank mismatch"),
    ],
)
def test_iree_run_module_refuses_in_the_same_words(mlp_artifact, value, message):
    command = run_module(read_manifest(mlp_artifact), mlp_artifact, "train_step")
    position = next(i for i, a in enumerate(command) if a.startswith("--input="))
    result = iree_run([*command[:position], f"--input={value}", *command[position + 1 :]])
    assert result.returncode != 0
    assert message in result.stderr


def test_iree_run_module_refuses_a_class_index_out_of_range(mlp_artifact):
    command = run_module(read_manifest(mlp_artifact), mlp_artifact, "train_step")
    command = [a.replace("6xi64=0", "6xi64=4") for a in command]
    result = iree_run(command)
    assert result.returncode != 0
    assert "y: every value must be in [0, 3] (or -100); the step was not run" in result.stderr


def test_the_checkpoint_has_pytorch_names(session, tmp_path):
    session.save(tmp_path / "state.safetensors")
    names = safetensors.numpy.load_file(tmp_path / "state.safetensors").keys()
    assert {"0.weight", "1.running_mean", "3.bias", "optimizer/exp_avg/0.weight", "optimizer/step/3.bias"} <= names
