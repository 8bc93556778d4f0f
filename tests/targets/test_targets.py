"""Targets: their names and options, the target proposed for a device, and the target that a session picks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from irongrad.cli import targets, train, verify
from irongrad.runtime import cpu, devices, selection
from irongrad.runtime.devices import Device
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest_file import read_manifest, write_manifest
from irongrad.runtime.selection import check_device, choose_target
from irongrad.targets import Ability, kinds, parse_target, parse_targets
from irongrad.targets.vulkan import propose

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llvm-cpu", "llvm-cpu"),
        ("llvm-cpu:cpu=x86-64-v3", "llvm-cpu-x86-64-v3"),
        ("llvm-cpu:arch=riscv64,features=+m+v", "llvm-cpu-riscv64-m-v"),
        ("cuda:arch=sm_90", "cuda-sm_90"),
        ("vulkan:profile=desktop,subgroup=64", "vulkan-desktop-64"),
    ],
)
def test_a_target_is_named_after_its_options(text, name):
    assert parse_target(text).name == name


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["metal"], "unknown target 'metal': this version compiles for llvm-cpu, cuda, vulkan"),
        (["vulcan"], "did you mean 'vulkan'"),
        (["cuda:arch=sm_9"], r"target 'cuda' has no arch 'sm_9' \(did you mean 'sm_90'\?\); it has sm_70, "),
        (["vulkan:profil=desktop"], r"has no option 'profil' \(did you mean 'profile'\?\); it has profile, subgroup"),
        (["vulkan:subgroup=7"], "has no subgroup '7'"),
        (["llvm-cpu:cpu"], "write llvm-cpu:cpu=VALUE"),
        (["cuda", "llvm-cpu", "cuda"], "the target 'cuda' is named twice"),
    ],
)
def test_unknown_targets_and_options_are_refused(texts, message):
    with pytest.raises(UserError, match=message):
        parse_targets(texts)


def test_features_of_a_cpu_reach_the_compiler():
    flags = parse_target("llvm-cpu:arch=riscv64,features=+m+a+v").flags
    assert "--iree-llvmcpu-target-cpu-features=+m,+a,+v" in flags
    assert "--iree-llvmcpu-target-triple=riscv64-unknown-linux-gnu" in flags


def test_every_quirk_has_its_test():
    quirks = [q for kind in kinds() for q in kind.quirks]
    assert quirks
    assert [q.test for q in quirks if not (ROOT / q.test).is_file()] == []


SMALL_TYPES = "storageBuffer8BitAccess=yes storageBuffer16BitAccess=yes shaderInt8=yes shaderFloat16=yes"


@pytest.mark.parametrize(
    ("device", "target"),
    [
        (Device("vulkan://0", "llvmpipe (LLVM 15.0.6, 256 bits)", subgroup=(8, 8, 8)), "profile=lavapipe"),
        (Device("vulkan://0", "llvmpipe (LLVM 15.0.6, 128 bits)", subgroup=(4, 4, 4)), "profile=lavapipe,subgroup=4"),
        (
            Device("vulkan://0", "NVIDIA", subgroup=(32, 32, 32), details=f"{SMALL_TYPES}\noperations=0x000000ff"),
            "profile=desktop",
        ),
        (
            Device("vulkan://0", "RADV", subgroup=(64, 32, 64), details=f"{SMALL_TYPES}\noperations=0x000000ff"),
            "profile=desktop,subgroup=0",
        ),
        (
            Device("vulkan://0", "Adreno", subgroup=(64, 64, 128), details=f"{SMALL_TYPES}\nvendor_id: 0x5143"),
            "profile=mobile",
        ),
        (Device("vulkan://0", "V3D 7.1", subgroup=(16, 16, 16), details="shaderFloat16=no"), "profile=generic"),
    ],
)
def test_a_device_gets_the_profile_that_fits(device, target):
    assert propose(device) == f"vulkan:{target}"
    parse_target(propose(device))


@pytest.fixture
def on_device(monkeypatch):
    """`on_device(size, least, most)`: make `vulkan` a device with these subgroup sizes."""

    def use(size: int, least: int, most: int) -> None:
        found = Device("vulkan://GPU-0", "GPU", "driver 1", subgroup=(size, least, most))
        monkeypatch.setattr(selection, "find_device", lambda uri: found if uri.startswith("vulkan") else Device(uri))

    return use


def test_subgroups_of_another_or_no_fixed_size_are_refused(mlp_artifact, on_device):
    target = replace(read_manifest(mlp_artifact).targets[0], architecture="", subgroup=32)
    on_device(32, 32, 32)
    check_device(target, mlp_artifact, "vulkan")
    on_device(64, 64, 64)
    with pytest.raises(ArtifactError, match="compute wrong numbers. Compile it for 'vulkan:profile=desktop,sub"):
        check_device(target, mlp_artifact, "vulkan")
    check_device(replace(target, subgroup=0), mlp_artifact, "vulkan")
    on_device(32, 8, 32)
    with pytest.raises(ArtifactError, match="from 8 to 32. Verify it there first: irongrad verify"):
        check_device(target, mlp_artifact, "vulkan")
    check_device(target, mlp_artifact, "vulkan", verifying=True)
    signed = replace(target.certificate, device="vulkan", name="GPU", driver="driver 1")
    check_device(replace(target, verified=(signed,)), mlp_artifact, "vulkan")
    with pytest.raises(ArtifactError, match="Verify it there first"):
        check_device(replace(target, verified=(replace(signed, driver="driver 2"),)), mlp_artifact, "vulkan")


def test_the_first_target_that_can_run_here_is_picked(mlp_artifact):
    manifest = read_manifest(mlp_artifact)
    foreign = replace(manifest.targets[0], name="foreign", architecture="s390x")
    assert choose_target(replace(manifest, targets=(foreign, *manifest.targets)), mlp_artifact, None, None).name == (
        "llvm-cpu"
    )
    with pytest.raises(ArtifactError, match="compiled for s390x"):
        choose_target(replace(manifest, targets=(foreign,)), mlp_artifact, None, None)
    both = (foreign, replace(foreign, name="other"))
    with pytest.raises(ArtifactError, match=r"(?s)no target of .* can run here:.*foreign: .*other: "):
        choose_target(replace(manifest, targets=both), mlp_artifact, None, None)


@pytest.mark.parametrize(
    ("machine", "info", "feature"),
    [
        ("aarch64", "Features : fp asimd atomics", "dotprod"),
        ("riscv64", "isa : rv64imafdc_zicsr", "v"),
    ],
)
def test_features_that_a_cpu_lacks_are_named(mlp_artifact, monkeypatch, machine, info, feature):
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu.Path, "read_text", lambda self: info)
    target = replace(read_manifest(mlp_artifact).targets[0], architecture=machine, features=("lse",))
    cpu.check_cpu(target, mlp_artifact)
    with pytest.raises(ArtifactError, match=f"lacks: {feature}. .* --target llvm-cpu:arch={machine}"):
        cpu.check_cpu(replace(target, features=(feature,)), mlp_artifact)


def test_features_that_linux_spells_differently_are_recognised(mlp_artifact, monkeypatch):
    linux = "pni sse4_1 bmi1 abm avx512f avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vp2intersect avx_vnni amx_tile"
    llvm = "sse3 sse4.1 bmi lzcnt avx512f avx512bf16 avx512vbmi avx512vbmi2 avx512vp2intersect avxvnni amx-tile avx10.1"
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu.Path, "read_text", lambda self: f"flags : {linux}")
    target = replace(read_manifest(mlp_artifact).targets[0], architecture="x86_64", features=tuple(llvm.split()))
    cpu.check_cpu(target, mlp_artifact)
    with pytest.raises(ArtifactError, match="lacks: avx512fp16"):
        cpu.check_cpu(replace(target, features=("avx512fp16",)), mlp_artifact)


HALVES, TILES = {Ability.HALVES}, {Ability.HALVES, Ability.TILES}


@pytest.mark.parametrize(
    ("target", "flags", "abilities"),
    [
        ("llvm-cpu", "avx2 avx512f avx512_bf16", HALVES),
        ("llvm-cpu", "avx2 avx512f avx512_bf16 amx_bf16", TILES),
        ("llvm-cpu", "avx2 avx512f", set()),
        ("llvm-cpu:cpu=znver4", "avx2", HALVES),
        ("llvm-cpu:cpu=znver5", "amx_bf16", HALVES),
        ("llvm-cpu:cpu=sapphirerapids", "avx2", TILES),
        ("llvm-cpu:cpu=znver3", "avx512_bf16", set()),
        ("llvm-cpu:cpu=x86-64-v4", "avx512_bf16", set()),
        ("llvm-cpu:cpu=x86-64-v4,features=+avx512bf16", "avx2", HALVES),
        ("llvm-cpu:arch=aarch64", "avx512_bf16", set()),
        ("cuda", "avx512_bf16", set()),
    ],
)
def test_a_target_tells_how_its_cpu_multiplies_bfloat16(monkeypatch, target, flags, abilities):
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu.Path, "read_text", lambda self: f"flags : {flags}")
    assert parse_target(target).abilities & TILES == abilities


@pytest.mark.parametrize(
    ("target", "has_kernels"),
    [
        ("llvm-cpu:cpu=x86-64-v4", True),
        ("llvm-cpu:cpu=x86-64-v3", True),
        ("llvm-cpu:cpu=x86-64-v2", False),
        ("llvm-cpu:arch=aarch64", False),
        ("cuda", False),
    ],
)
def test_there_are_kernels_of_ours_for_vectors_of_256_bits_and_more(target, has_kernels):
    kernels = {Ability.CONVOLUTIONS, Ability.ATTENTION, Ability.LOOPS}
    assert parse_target(target).abilities & kernels == (kernels if has_kernels else set())


def test_an_unknown_driver_has_no_devices():
    assert devices.devices_of("no-such-driver") == ()


def test_the_targets_command_lists_targets_and_proposes_one(vulkan):
    result = CliRunner().invoke(targets.command, ["--json"], catch_exceptions=False)
    report = json.loads(result.output)
    assert [t["name"] for t in report["targets"]] == ["llvm-cpu", "cuda", "vulkan"]
    assert report["found"]["vulkan"][0]["uri"] == vulkan.uri
    assert f"--target {propose(vulkan)}" in CliRunner().invoke(targets.command, ["--probe"]).output
    listed = CliRunner().invoke(targets.command, []).output
    assert all(word in listed for word in ("sm_90", "lavapipe", "riscv64", vulkan.name))


def test_a_verification_is_signed_and_training_without_one_says_so(mlp_artifact, tmp_path, batches):
    artifact = Path(shutil.copytree(mlp_artifact, tmp_path / "mlp"))
    manifest = read_manifest(artifact)
    write_manifest(replace(manifest, targets=(replace(manifest.targets[0], certificate=None),)), artifact)
    np.savez(tmp_path / "data.npz", **{n: np.concatenate([b[n] for b in batches]) for n in batches[0]})
    training = [str(artifact), "--data", str(tmp_path / "data.npz")]
    assert "is not verified on local-sync" in CliRunner().invoke(train.command, training).stderr
    for _ in range(2):  # the second record replaces the first
        result = CliRunner().invoke(verify.command, [str(artifact), "--json"], catch_exceptions=False)
        (signed,) = read_manifest(artifact).targets[0].verified
    assert json.loads(result.output)["record"]["date"] == signed.date
    assert signed.versions.keys() == {"irongrad", "iree"}
    assert (signed.device, signed.name, signed.steps) == ("local-sync", cpu.cpu_name(), 3)
    assert signed.worst <= 1
    assert "not verified" not in CliRunner().invoke(train.command, training).stderr
