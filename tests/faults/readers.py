"""Every reader of files that come from elsewhere, with a good file to begin with.

python tests/faults/readers.py NAME FILE RUNS      fuzzes one reader with atheris (github.com/google/atheris)
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from irongrad.runtime.errors import IronGradError

# No reader may take more than this for a file of a few kilobytes.
MEMORY = 2048


def read_manifest(path: Path) -> object:
    """Read a manifest; one whose digest fits is what an attacker would write, so the digest is made to fit too."""
    from irongrad.runtime import manifest_file

    path = path.rename(path.with_name("manifest.json"))
    with mock.patch.object(manifest_file, "_check_digest"):
        return manifest_file.read_manifest(path.parent)


def read_safetensors(path: Path) -> object:
    """Read a checkpoint."""
    from irongrad.runtime.safetensors_file import read_arrays

    return read_arrays(path)


def read_golden(path: Path) -> object:
    """Read golden values."""
    from irongrad.runtime.golden import read_golden

    return read_golden(path)


def read_npz(path: Path) -> object:
    """Read training data."""
    from irongrad.training.numpy_files import read_npz

    return read_npz(path, ["x", "y"])


def read_npy(path: Path) -> object:
    """Read one input."""
    from irongrad.cli.common import load_npy

    return load_npy("x", str(path))


def read_onnx(path: Path) -> object:
    """Read an ONNX model."""
    from irongrad.onnx.load import load

    return load(path)


def read_bundle(path: Path) -> object:
    """Read the index of a JAX bundle."""
    from irongrad.jax.bundle import INDEX, read_bundle

    return read_bundle(path.rename(path.with_name(INDEX)).parent)


def read_cache(path: Path) -> object:
    """Read an entry of the cache."""
    from irongrad.cache.store import Store

    place = path.parent / "v1" / "thing" / "ab" / ("ab" * 32)
    place.parent.mkdir(parents=True, exist_ok=True)
    path.rename(place)
    (path.parent / "into").mkdir(exist_ok=True)
    return Store(path.parent, 1 << 30).get("thing", "ab" * 32, path.parent / "into")


READERS: dict[str, Callable[[Path], object]] = {
    "manifest": read_manifest,
    "safetensors": read_safetensors,
    "golden": read_golden,
    "npz": read_npz,
    "npy": read_npy,
    "onnx": read_onnx,
    "bundle": read_bundle,
    "cache": read_cache,
}


def accepts(name: str, data: bytes, folder: Path) -> bool:
    """Give a file to a reader; return whether it read it. Any error but ours comes out."""
    path = folder / "file"
    path.write_bytes(data)
    try:
        READERS[name](path)
    except IronGradError:
        return False
    return True


def main(name: str, seed: str, runs: str) -> None:
    """Fuzz the reader `name` for `runs` inputs, beginning with the file `seed`."""
    import atheris

    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        corpus, folder = Path(scratch) / "corpus", Path(scratch) / "folder"
        corpus.mkdir()
        folder.mkdir()
        (corpus / "seed").write_bytes(Path(seed).read_bytes())
        with atheris.instrument_imports(include=["irongrad", "json", "zipfile", "numpy.lib", "onnx"]):
            accepts(name, Path(seed).read_bytes(), folder)  # imports the reader

        count = itertools.count(1)

        def one(data: bytes) -> None:
            accepts(name, data, folder)
            if next(count) == int(runs):
                print(f"{runs} inputs", flush=True)

        options = [f"-runs={runs}", "-seed=1", f"-rss_limit_mb={MEMORY}", "-max_len=40000", "-timeout=20"]
        atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={tempfile.gettempdir()}/", str(corpus)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
