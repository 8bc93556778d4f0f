"""Compares the memory model with the memory that IREE allocates for a small graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from irongrad.memory_model.liveness import usage
from irongrad.mlir.walk import parsed
from irongrad.pipeline.dump import readable
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation
from irongrad.pipeline.iree.report.peak_transients import transients_of
from irongrad.pipeline.lower.importer import import_functions
from irongrad.targets import parse_target

# A CPU with AVX-512: the model uses its tile sizes.
TARGET = parse_target("llvm-cpu:triple=x86_64-unknown-linux-gnu,cpu=znver4")


@pytest.fixture(name="predicted_and_allocated", scope="session")
def predicted_and_allocated_fixture(step_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For a function of tensors: the bytes that the model predicts and those that IREE allocates, without results."""

    def run(function: Callable[..., Any], *examples: torch.Tensor) -> tuple[int, int]:
        step = step_of(function, *examples)
        scratch = tmp_path_factory.mktemp("stream")
        source = scratch / "step.mlir"
        text = dict(readable(import_functions(step, scratch)))[".linalg.mlir"]
        source.write_text(text.replace("@graph.call", "@call"))
        flags = [*COMMON_FLAGS, *TARGET.flags]
        compilation = Compilation.of(source, TARGET, flags)
        compilation.to_flow()
        with parsed(compilation.to_stream()) as stream:
            (allocated,) = transients_of(stream).values() or (0,)
        return usage(step.functions["call"].graph.graph).total, allocated

    return run
