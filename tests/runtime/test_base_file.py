"""A base file: frozen tensors in one place for several artifacts, in one memory for several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.parameter_files import read_parameters

WIDTH = 1024


class Adapted(nn.Module):
    """A frozen base of 8 MiB, a buffer, and a small adapter."""

    def __init__(self, seed: int = 0, classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.base.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.adapter = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x) * self.scale)


def compiled(directory: Path, base: Path | None, model: nn.Module | None = None) -> Path:
    made = Adapted() if model is None else model
    optimizer = torch.optim.Adam([p for p in made.parameters() if p.requires_grad], lr=0.01)
    inputs = {"x": torch.randn(4, WIDTH), "y": torch.tensor([0, 1, 0, 1])}
    entry_points = ["train_step", "train_and_export", "predict", "reset"]
    step = ig.TrainStep(made, nn.functional.cross_entropy, optimizer, inputs)
    ig.compile(step, directory, base=base, entry_points=entry_points)
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`net` and `plain`, of the same step with and without a base; `other`, of another head on the same base."""
    place = tmp_path_factory.mktemp("base")
    compiled(place / "net", place / "model.irpa")
    written = (place / "model.irpa").read_bytes()
    compiled(place / "other", place / "model.irpa", Adapted(classes=3))
    assert (place / "model.irpa").read_bytes() == written
    compiled(place / "plain", None)
    return place


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((4, WIDTH)).astype(np.float32), "y": rng.integers(0, 2, 4)}


def test_the_base_lies_in_its_own_file(place):
    names = {"base.0.weight", "base.0.bias", "base.2.weight", "base.2.bias", "scale"}
    assert read_parameters(place / "model.irpa").keys() == names
    assert not names & read_parameters(place / "net/state.irpa").keys()
    assert (place / "net/state.irpa").stat().st_size < 20_000
    assert read_manifest(place / "net").base_file.path == "../model.irpa"
    for name, array in initial_state(place / "plain").items():
        assert initial_state(place / "net")[name].tobytes() == array.tobytes()


def test_a_session_trains_as_without_a_base(place):
    with load(place / "net") as session, load(place / "plain") as plain:
        for seed in range(4):
            assert session.train_step(**batch(seed)) == plain.train_step(**batch(seed))
        expected = plain.state()
        for name, array in session.state().items():
            assert array.tobytes() == expected[name].tobytes(), name
        session.reset()
        plain.reset()
        assert session.train_step(**batch(0)) == plain.train_step(**batch(0))


HELD = """
import sys
from irongrad.runtime import load

with load(sys.argv[1], device="local-sync") as session:
    held = session._module._device.allocator.statistics
    print(held["device_bytes_allocated"] - held["device_bytes_freed"])
"""


def test_a_module_with_reset_holds_one_copy_of_its_state(place):
    command = [sys.executable, "-c", HELD, str(place / "plain")]
    held = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    own = sum(array.nbytes for array in initial_state(place / "plain").values())
    assert own <= held < 1.5 * own


def test_checkpoints_with_and_without_the_base_are_taken(place, tmp_path):
    with load(place / "net") as session:
        session.train_step(**batch(0))
        session.save(tmp_path / "part.safetensors", trainable=True)
        session.save(tmp_path / "whole.safetensors", trainable=False)
        expected = session.train_step(**batch(1))
    for name in ("part", "whole"):
        with load(place / "net", checkpoint=tmp_path / f"{name}.safetensors") as session:
            assert session.train_step(**batch(1)) == expected
            session.restore(tmp_path / f"{name}.safetensors")
            assert session.train_step(**batch(1)) == expected
    with load(place / "plain", checkpoint=tmp_path / "part.safetensors") as plain:
        assert plain.train_step(**batch(1)) == expected


def test_an_artifact_that_only_predicts_shares_the_base(place, tmp_path):
    model = Adapted()
    optimizer = torch.optim.Adam(model.adapter.parameters(), lr=0.01)
    inputs = {"x": torch.randn(4, WIDTH), "y": torch.tensor([0, 1, 0, 1])}
    step = ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)
    ig.compile(step, tmp_path / "predict", base=place / "model.irpa", entry_points=["predict"])
    with load(place / "net") as session:
        session.train_step(**batch(0))
        session.save(tmp_path / "part.safetensors", trainable=True)
        expected = session.predict(x=batch(0)["x"])
    with load(tmp_path / "predict", checkpoint=tmp_path / "part.safetensors") as session:
        np.testing.assert_array_equal(session.predict(x=batch(0)["x"]), expected)


def test_iree_run_module_takes_the_base_too(place, tmp_path):
    np.save(tmp_path / "x.npy", batch(0)["x"])
    manifest = read_manifest(place / "net")
    files = {"x": tmp_path / "x.npy"}
    (output,) = manifest.entry_point("predict").outputs
    command = run_module(manifest, place / "net", "predict", inputs=files, outputs={output.name: tmp_path / "y.npy"})
    subprocess.run(command, capture_output=True, check=True)
    with load(place / "net") as session:
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), session.predict(x=batch(0)["x"]))


def test_another_base_is_refused(place, tmp_path):
    compiled(tmp_path / "net", tmp_path / "model.irpa", Adapted(seed=1))
    with pytest.raises(ArtifactError, match="is not the base of .*: its sha256 is"):
        load(place / "net", base=tmp_path / "model.irpa")
    with pytest.raises(UserError, match=r"is that of another model: base\.0\.weight has other values"):
        compiled(tmp_path / "again", place / "model.irpa", Adapted(seed=1))
    with load(tmp_path / "net") as other:
        other.save(tmp_path / "whole.safetensors", trainable=False)
    with pytest.raises(ArtifactError, match="has other values for base"):
        load(place / "net", checkpoint=tmp_path / "whole.safetensors")
    with load(place / "net") as session, pytest.raises(ArtifactError, match="has other values for base"):
        session.load_state(session.state() | {"base.0.bias": np.zeros(WIDTH, np.float32)})


def test_a_base_that_moved_is_found_where_the_caller_says(place, tmp_path):
    (tmp_path / "net").symlink_to(place / "net")
    moved = tmp_path / "elsewhere.irpa"
    moved.write_bytes((place / "model.irpa").read_bytes())
    with load(place / "net") as here, load(tmp_path / "net", base=moved) as there:
        assert here.train_step(**batch(0)) == there.train_step(**batch(0))
    with pytest.raises(ArtifactError, match="holds all of its state"):
        load(place / "plain", base=moved)


def test_a_base_needs_something_frozen_and_a_name(tmp_path):
    model = Adapted()
    model.requires_grad_(requires_grad=True)
    del model.scale
    model.scale = 0.5
    with pytest.raises(UserError, match="would be empty"):
        compiled(tmp_path / "net", tmp_path / "model.irpa", model)
    assert not (tmp_path / "model.irpa").exists()
    with pytest.raises(UserError, match=r"whose name ends in \.irpa"):
        compiled(tmp_path / "net", tmp_path / "model.bin")


PROCESS = """
import sys
import numpy as np
from irongrad.runtime import load

session = load(sys.argv[1])
session.train_step(x=np.ones((4, 1024), np.float32), y=np.zeros(4, np.int64))
print("ready", flush=True)
sys.stdin.readline()
mapped, sizes = False, {}
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        mapped = line.rstrip().endswith("model.irpa")
    elif mapped and line.split()[0] in ("Rss:", "Pss:", "Private_Dirty:"):
        sizes[line.split()[0]] = sizes.get(line.split()[0], 0) + int(line.split()[1])
print(sizes["Rss:"], sizes["Pss:"], sizes["Private_Dirty:"], flush=True)
sys.stdin.readline()
"""


def test_two_processes_share_the_memory_of_the_base(place):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(place / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("net", "other")
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            rss, pss, dirty = map(int, process.stdout.readline().split())
            assert rss > 8 * 1024
            assert pss < 0.6 * rss
            assert dirty == 0
    finally:
        for process in processes:
            process.communicate("\n")
