"""A base that is the model's own file, `.safetensors` or `.gguf`, with any names and any alignment."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.choices import completed
from irongrad.pipeline.driver import build
from irongrad.pipeline.options import make_options
from irongrad.runtime import load
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.parameter_archive import ALIGNMENT, write_archive
from irongrad.runtime.parameter_files import parameter_index, read_parameters

WIDTH = 256


class Adapted(nn.Module):
    """A frozen body, a frozen buffer that no file of the model has, and a small adapter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.body.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.adapter = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.body(x) * self.scale)


def compiled(directory: Path, base: Path | None, model: nn.Module | None = None) -> Path:
    made = Adapted() if model is None else model
    optimizer = torch.optim.Adam([p for p in made.parameters() if p.requires_grad], lr=0.01)
    inputs = {"x": torch.randn(4, WIDTH), "y": torch.tensor([0, 1, 0, 1])}
    step = ig.TrainStep(made, nn.functional.cross_entropy, optimizer, inputs)
    return ig.compile(step, directory, base=base, entry_points=["train_step", "predict"]).directory


def model_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of the body, by the names of another library; and one more."""
    body = Adapted(seed).body
    return {f"encoder.{name}": t.numpy() for name, t in body.state_dict().items()} | {"other": np.ones(3, np.float32)}


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], shift: int = 0) -> None:
    """Write a file whose data begins `shift` bytes after a multiple of the alignment."""
    entries, end = {}, 0
    for name, array in arrays.items():
        entries[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT + shift)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values()))


def write_gguf(path: Path, arrays: Mapping[str, np.ndarray], **stored: np.ndarray) -> None:
    """Write a file; `stored` are tensors of BF16, as bytes."""
    writer = gguf.GGUFWriter(path, "any")
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    for name, array in stored.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same step with each base: its artifact and its file have the name of the case."""
    place = tmp_path_factory.mktemp("formats")
    write_safetensors(place / "aligned.safetensors", model_tensors())
    write_safetensors(place / "shifted.safetensors", model_tensors(), shift=8)
    write_gguf(place / "aligned.gguf", model_tensors())
    for name in FILES:
        compiled(place / name.replace(".", "-"), place / name)
    compiled(place / "plain", None)
    return place


FILES = ["aligned.safetensors", "shifted.safetensors", "aligned.gguf"]


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((4, WIDTH)).astype(np.float32), "y": rng.integers(0, 2, 4)}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_a_session_trains_as_without_a_base(place: Path, file: str, device: str):
    with load(place / file.replace(".", "-"), device=device) as session, load(place / "plain", device=device) as plain:
        for seed in range(3):
            assert session.train_step(**batch(seed)) == plain.train_step(**batch(seed))
        expected = plain.predict(x=batch(0)["x"])
        np.testing.assert_array_equal(session.predict(x=batch(0)["x"]), expected)


@pytest.mark.parametrize("file", FILES)
def test_tensors_are_found_by_their_bytes(place: Path, file: str):
    directory = place / file.replace(".", "-")
    spec = read_manifest(directory).base_file
    assert spec.path == f"../{file}"
    assert spec.tensors == {f"body.{n}": f"encoder.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert not spec.tensors.keys() & read_parameters(directory / "state.irpa").keys()
    assert "scale" in read_parameters(directory / "state.irpa")
    expected = initial_state(place / "plain")
    for name, array in initial_state(directory).items():
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("file", FILES)
def test_iree_run_module_takes_the_models_own_file(place: Path, tmp_path: Path, file: str):
    directory = place / file.replace(".", "-")
    np.save(tmp_path / "x.npy", batch(0)["x"])
    manifest = read_manifest(directory)
    (output,) = manifest.entry_point("predict").outputs
    files = {"x": tmp_path / "x.npy"}
    command = run_module(manifest, directory, "predict", inputs=files, outputs={output.name: tmp_path / "y.npy"})
    assert f"--parameters=base={directory}/../{file}" in command
    subprocess.run(command, capture_output=True, check=True)
    with load(directory) as session:
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), session.predict(x=batch(0)["x"]))


@pytest.mark.parametrize("file", FILES)
def test_aligned_tensors_are_mapped_and_others_read(place: Path, file: str):
    index = parameter_index(place / file, file.split(".")[1], mapped=True)
    mapped = {entry.file_storage[0].is_host_allocation for name, entry in index.items()}
    assert mapped == {"shifted" not in file}
    index = parameter_index(place / file, file.split(".")[1], mapped=False)
    assert all(entry.file_storage[0].is_fd for _, entry in index.items())


def refusal(base: Path, tmp_path: Path, model: nn.Module | None = None) -> str:
    """Why compiling over a base is refused; the file and an older artifact stay as they were."""
    old = tmp_path / "net"
    old.mkdir()
    (old / "manifest.json").write_text("{}")
    before = base.read_bytes() if base.exists() else None
    with pytest.raises((ArtifactError, UserError)) as error:
        compiled(old, base, model)
    assert (base.read_bytes() if base.exists() else None) == before
    assert [path.name for path in old.iterdir()] == ["manifest.json"]
    return str(error.value)


def test_the_file_of_another_model_is_refused(tmp_path: Path):
    base = tmp_path / "model.safetensors"
    write_safetensors(base, model_tensors(seed=1))
    said = refusal(base, tmp_path)
    assert "has 0.0KiB of the 514.1KiB of frozen tensors: its tensors have other values, or are stored in" in said
    assert "body.0.weight is not in it. Give another file" in said


def test_a_tensor_of_the_same_name_has_the_same_values(tmp_path: Path):
    base = tmp_path / "model.safetensors"
    tensors = {name.replace("encoder", "body"): array for name, array in model_tensors().items()}
    write_safetensors(base, tensors | {"body.2.bias": np.zeros(WIDTH, np.float32)})
    assert "is that of another model: body.2.bias has other values. Give another file" in refusal(base, tmp_path)


def test_tensors_in_half_precision_are_not_those_of_a_model_in_float32(tmp_path: Path):
    base = tmp_path / "model.gguf"
    write_gguf(base, {name: array.astype(np.float16) for name, array in model_tensors().items()})
    assert "or are stored in another way" in refusal(base, tmp_path)


def test_a_base_in_half_precision_is_read_as_it_is(tmp_path: Path):
    base = tmp_path / "model.gguf"
    write_gguf(base, {name: array.astype(np.float16) for name, array in model_tensors().items()})
    made = Adapted()
    made.body.half()
    made.forward = lambda x: made.adapter(made.body(x.half()).float() * made.scale)
    directory = compiled(tmp_path / "net", base, made)
    assert len(read_manifest(directory).base_file.tensors) == 4
    plain = compiled(tmp_path / "plain", None, made)
    with load(directory) as session, load(plain) as expected:
        np.testing.assert_array_equal(session.predict(x=batch(0)["x"]), expected.predict(x=batch(0)["x"]))


def test_a_missing_file_is_refused(tmp_path: Path):
    assert "model.gguf does not exist; a file is written if" in refusal(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "model.gguf", "model.irpa"])
def test_a_damaged_file_is_refused(tmp_path: Path, file: str):
    base = tmp_path / file
    match base.suffix:
        case ".safetensors":
            write_safetensors(base, model_tensors())
        case ".gguf":
            write_gguf(base, model_tensors())
        case _:
            write_archive(base, model_tensors())
    whole = base.read_bytes()
    base.write_bytes(whole[:-4096])  # a tensor ends outside of the file
    assert re.search(r"model\.\w+ (cannot be read as a file of|is damaged)", refusal(base, tmp_path))
    (tmp_path / "net/manifest.json").unlink()
    (tmp_path / "net").rmdir()
    base.write_bytes(b"no" + whole[2:])
    assert f"{base} cannot be read as a file of {base.suffix[1:]}: " in refusal(base, tmp_path)


def test_a_file_with_a_tensor_twice_is_refused(tmp_path: Path):
    base = tmp_path / "model.safetensors"
    write_safetensors(base, model_tensors())
    text = base.read_bytes()
    base.write_bytes(text.replace(b"encoder.2.bias", b"encoder.0.bias"))
    assert "is damaged: it has the tensor encoder.0.bias twice" in refusal(base, tmp_path)


def test_a_file_that_changes_while_the_step_is_compiled_is_refused(tmp_path: Path):
    base = tmp_path / "model.safetensors"
    write_safetensors(base, model_tensors())

    def replaced(stage: str) -> AbstractContextManager[object]:
        if stage == "package":
            write_safetensors(base, model_tensors(seed=1))
        return nullcontext()

    model = Adapted()
    optimizer = torch.optim.Adam(model.adapter.parameters(), lr=0.01)
    inputs = {"x": torch.randn(4, WIDTH), "y": torch.tensor([0, 1, 0, 1])}
    step = ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs)
    choices = completed({"base": base, "entry_points": ["predict"]})
    with pytest.raises(UserError, match=r"was replaced while the step was compiled: encoder\.0\.weight differs"):
        build(step, make_options(tmp_path / "net", on_stage=replaced, **choices))
    assert not (tmp_path / "net").exists()


def test_a_file_that_was_damaged_later_is_refused(place: Path, tmp_path: Path):
    directory = place / "aligned-safetensors"
    damaged = tmp_path / "aligned.safetensors"
    damaged.write_bytes((place / "aligned.safetensors").read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="is not the base of"):
        load(directory, base=damaged)


def test_iree_reads_no_bfloat16_of_a_gguf_file(tmp_path: Path):
    """IREE 3.13.0 (runtime/src/iree/io/formats/gguf/gguf_parser.c) knows no tensors of BF16.

    If this fails, tell so in docs/finetune.md.
    """
    base = tmp_path / "model.gguf"
    write_gguf(base, model_tensors(), half=np.zeros((4, 2 * WIDTH), np.uint8))
    assert "cannot be read as a file of gguf: GGML tensor type 30 not supported" in refusal(base, tmp_path)
