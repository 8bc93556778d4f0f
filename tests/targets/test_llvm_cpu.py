"""Code for other CPUs is linked on this machine; code for aarch64 runs in qemu with IREE's runtime for aarch64."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from irongrad.pipeline.driver import build
from irongrad.pipeline.options import make_options
from irongrad.runtime import load
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest import GOLDEN
from irongrad.runtime.manifest_file import read_manifest

AARCH64 = Path(sys.prefix) / "aarch64" / "iree" / "_runtime_libs" / "iree-run-module"
ROOT = "/usr/aarch64-linux-gnu"  # where Debian's cross packages install the aarch64 libraries

# The values of e_machine in the header of an ELF file (System V ABI, the registered machines).
MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}

TARGETS = {
    "llvm-cpu:cpu=x86-64-v2": "x86_64",
    "llvm-cpu:arch=aarch64": "aarch64",
    "llvm-cpu:arch=riscv64": "riscv64",
    "llvm-cpu:arch=riscv64,features=+m+a+f+d+c+v": "riscv64",
    "llvm-cpu:triple=x86_64-pc-windows-msvc": "x86_64",
    "llvm-cpu:triple=arm64-apple-macosx14,cpu=apple-m1": "aarch64",
}


@pytest.fixture(scope="module")
def artifact(mlp_step, tmp_path_factory) -> Path:
    """A step for all targets; a folder per target, beside the artifact, holds its linked code."""
    folder = tmp_path_factory.mktemp("cross")
    options = make_options(folder / "step", list(TARGETS), entry_points=["train_step"])
    dumping = [
        replace(t, flags=(*t.flags, f"--iree-hal-dump-executable-binaries-to={folder / t.name}"))
        for t in options.targets
    ]
    build(mlp_step, replace(options, targets=tuple(dumping)))
    return folder / "step"


def test_the_code_is_linked_for_the_machine(artifact):
    found = {t.name: t.architecture for t in read_manifest(artifact).targets}
    assert list(found.values()) == list(TARGETS.values())
    for name, architecture in found.items():
        headers = [binary.read_bytes()[:20] for binary in artifact.with_name(name).glob("*.so")]
        assert {h[:5] for h in headers} == {b"\x7fELF\x02"}
        assert {struct.unpack_from("<HH", h, 16) for h in headers} == {(3, MACHINES[architecture])}


class Elf:
    """The dynamic linking data of a 64-bit shared object (System V ABI, "Program Loading and Dynamic Linking")."""

    NEEDED, HASH, STRINGS, SYMBOLS = 1, 4, 5, 6
    LOADED, DYNAMIC = 1, 2

    def __init__(self, data: bytes) -> None:
        self._data = data
        (self.flags,) = struct.unpack_from("<I", data, 48)
        (start,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
        self._segments = [struct.unpack_from("<IIQQQQQQ", data, start + i * size) for i in range(count)]
        (table,) = (s for s in self._segments if s[0] == self.DYNAMIC)
        self.dynamic = [struct.unpack_from("<QQ", data, at) for at in range(table[2], table[2] + table[5], 16)]

    def symbols(self) -> dict[str, int]:
        """The section of each dynamic symbol, 0 if it is undefined; the first symbol is a placeholder and left out."""
        tags = dict(self.dynamic)
        (count,) = struct.unpack_from("<I", self._data, self._at(tags[self.HASH]) + 4)
        entries = self._at(tags[self.SYMBOLS])
        named = [struct.unpack_from("<IBBH", self._data, entries + 24 * i) for i in range(1, count)]
        return {self._string(self._at(tags[self.STRINGS]) + name): section for name, _, _, section in named}

    def _at(self, address: int) -> int:
        """The file offset of a virtual address."""
        ((place, virtual),) = [
            (s[2], s[3]) for s in self._segments if s[0] == self.LOADED and s[3] <= address < s[3] + s[5]
        ]
        return address - virtual + place

    def _string(self, start: int) -> str:
        return self._data[start : self._data.index(0, start)].decode()


def test_the_code_needs_no_library_and_no_symbol(artifact):
    """On riscv64 it also has compressed instructions and passes floats in registers (RISC-V ELF psABI)."""
    targets = read_manifest(artifact).targets
    binaries = [(t, binary) for t in targets for binary in artifact.with_name(t.name).glob("*.so")]
    assert {t.name for t, _ in binaries} == {t.name for t in targets}
    for target, binary in binaries:
        elf = Elf(binary.read_bytes())
        assert not [tag for tag, _ in elf.dynamic if tag == Elf.NEEDED]
        symbols = elf.symbols()
        assert symbols["iree_hal_executable_library_query"] != 0
        assert all(symbols.values())
        assert target.architecture != "riscv64" or elf.flags & 0x7 == 0x1 | 0x4


def test_code_that_runs_here_is_verified_even_for_another_system(artifact):
    verified = {t.name for t in read_manifest(artifact).targets if t.certificate is not None}
    assert verified == {"llvm-cpu-x86-64-v2", "llvm-cpu-x86_64-pc-windows-msvc"}
    with pytest.raises(ArtifactError, match="compiled for riscv64, this machine is"):
        load(artifact, target="llvm-cpu-riscv64")


def test_aarch64_agrees_with_the_oracle(artifact, tmp_path):
    qemu = shutil.which("qemu-aarch64-static")
    assert qemu is not None, "install qemu-user-static, libc6-arm64-cross and libstdc++6-arm64-cross"
    assert AARCH64.is_file(), "scripts/test installs IREE's runtime for aarch64 there"
    manifest, golden = read_manifest(artifact), read_golden(artifact / GOLDEN)
    plan = make_plan(manifest, {"": golden}, initial_state(artifact), target="llvm-cpu-aarch64")
    write_files(plan, manifest, tmp_path)
    assert {c.name.partition(".")[2] for c in plan.checks} >= {"train_step", "train_step.from_step_2"}
    for check in plan.checks:
        command = [a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in check.command]
        emulated = [qemu, "-L", ROOT, str(AARCH64), *command[1:]]
        result = subprocess.run(emulated, capture_output=True, text=True, check=False)
        assert (result.returncode != 0) == bool(check.refusal), result.stderr + result.stdout
        assert check.refusal in result.stderr
