"""The parts of one step run on a CPU and on a Vulkan device."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.pipeline.package import Artifact
from irongrad.runtime.manifest import PASSED
from irongrad.targets.vulkan import propose

GROUPED = """
import sys
import iree.runtime as ireert
devices = [ireert.get_device(uri) for uri in ("local-sync", sys.argv[1])]
ireert.create_hal_module(ireert.VmInstance(), devices=devices)
"""


class Model(nn.Module):
    """A table for the CPU, and the products for the other device."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.encoder(i)).mean(1))


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    inputs = {"i": torch.randint(0, 9, (6, 4)), "y": torch.randint(0, 3, (6,))}
    return ig.TrainStep(model, F.cross_entropy, optimizer, inputs, clip_grad_norm=0.2)


@pytest.fixture(scope="module")
def artifact(vulkan, tmp_path_factory) -> Artifact:
    """Verified against eager float64 on both devices together."""
    place = {"encoder": "llvm-cpu", "head": propose(vulkan)}
    return ig.compile(make_step(), tmp_path_factory.mktemp("placed") / "a", place=place, entry_points=("train_step",))


def test_each_part_is_compiled_and_verified_for_its_device(artifact, vulkan):
    cpu, gpu = artifact.manifest.targets
    assert cpu.name == "encoder-llvm-cpu"
    assert gpu.name.startswith("head-vulkan")
    assert cpu.certificate is not None
    assert gpu.certificate is not None
    assert (gpu.certificate.name, gpu.certificate.worst) == (vulkan.name, cpu.certificate.worst)
    encoder, head = artifact.manifest.placement.parts
    assert {n for n in head.state if not n.startswith("irongrad/")} == {
        "head.weight",
        "head.bias",
        "optimizer/momentum_buffer/head.weight",
        "optimizer/momentum_buffer/head.bias",
    }
    assert "encoder.0.weight" in encoder.state


def test_only_the_cut_is_passed_between_devices(artifact):
    calls = artifact.manifest.placement.programs["train_step"]
    # The last two follow the norm of all gradients, which the head computes.
    assert [c.part for c in calls] == ["encoder", "head", "encoder", "head", "encoder"]
    given: dict[str, tuple[str, tuple[int | str, ...]]] = {}
    crossing: list[tuple[int | str, ...]] = []
    for call in calls:
        crossing += [given[s.name][1] for s in call.entry.inputs if s.name in given and given[s.name][0] != call.part]
        given |= {s.name: (call.part, s.shape) for s in call.entry.outputs if s.name.startswith(PASSED)}
    assert (6, 8) in crossing  # the mean of the embeddings, or its gradient
    assert sum(int(np.prod(shape)) for shape in crossing) < 6 * 4 * 8 * 4


def test_it_learns_as_eager_does(artifact):
    session, step = artifact.load(), make_step()
    inputs = {name: value.numpy() for name, value in step.inputs.items()}
    step.model.train()
    for _ in range(10):
        loss = session.train_step(**inputs)
        step.optimizer.zero_grad()
        eager = F.cross_entropy(step.model(step.inputs["i"]), step.inputs["y"])
        eager.backward()
        torch.nn.utils.clip_grad_norm_(step.model.parameters(), 0.2)
        step.optimizer.step()
        assert loss == pytest.approx(eager.item(), rel=1e-4)
    state = session.state()
    for name, value in step.model.state_dict().items():
        np.testing.assert_allclose(state[name], value.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)


def test_iree_still_cannot_group_a_vulkan_device_with_another(vulkan):
    """So each part has a module of its own (`docs/placement.md`).

    HalDevice of IREE 3.13.0 is in a group of its own from the beginning (runtime/bindings/python/hal.cc), and a
    queue of Vulkan takes one group only (iree_hal_vulkan_queue_assign_frontier).
    """
    # In a process of its own, because the devices are of no use afterwards.
    found = subprocess.run([sys.executable, "-c", GROUPED, vulkan.uri], capture_output=True, text=True, check=False)
    assert "Vulkan queue frontier already assigned" in found.stderr
