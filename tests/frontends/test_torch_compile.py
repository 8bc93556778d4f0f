"""`torch.compile(model, backend="irongrad")`: results, cache and refusals."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch.nn import functional as F

import irongrad as ig
from irongrad.frontends import torch_compile
from irongrad.operators.decompositions import registry as decompositions
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.runtime.errors import GuardError
from irongrad.runtime.tolerance import FACTOR, FLOOR_ULPS, NOISY_RUNS

# Dynamo itself warns if it resumes after a graph break with a tensor that is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Breaking(nn.Module):
    """Its graph breaks at a branch on a number, and at a print."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if hidden.mean().item() > 0.42:
            hidden = hidden * 0.5
        print("between")
        return self.last(hidden)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def _trained(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 6) -> list[np.ndarray]:
    """Train; return the losses, and then the parameters and buffers, as float64."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(steps):
        x, y = _batch(number)
        loss = F.cross_entropy(call(x.to(model.first.weight.dtype)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [np.array(losses), *(t.detach().double().numpy().copy() for t in model.state_dict().values())]


def test_a_model_that_breaks_its_graph_trains_as_eager_does(capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    model = _Breaking()
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return ig.torch_backend(graph, examples)

    def eager(dtype: torch.dtype, seed: int | None = None) -> list[np.ndarray]:
        twin = copy.deepcopy(model).to(dtype)
        with RoundingNoise(seed) if seed is not None else nullcontext():
            return _trained(twin, twin)

    exact = eager(torch.float64)
    samples = [eager(torch.float32, seed) for seed in (None, *range(NOISY_RUNS))]
    found = _trained(model, torch.compile(model, backend=counted))
    assert len(graphs) >= 3  # before the branch, and after each of its two ways
    assert capsys.readouterr().out.count("between") == 6 * (2 + NOISY_RUNS + 1)
    for i, (made, expected) in enumerate(zip(found, exact, strict=True)):
        spread = max(np.abs(s[i] - expected).max() for s in samples)
        allowed = FACTOR * spread + FLOOR_ULPS * np.finfo(np.float32).eps * np.abs(expected).max()
        assert np.abs(made - expected).max() <= allowed, i


def _several(x: Tensor) -> tuple[Tensor, ...]:
    """Results that are views or an argument, have other dtypes, or use a large constant; rounding is as in eager."""
    doubled = x * 2
    constant = torch.arange(600.0).reshape(100, 6)
    return doubled.t(), x, doubled.view(2, 12)[:, :3], doubled > 0, x.argmax(1), x + constant[:4]


def test_results_have_the_bits_and_strides_of_eager():
    """Results and gradients have eager's bits, and results have eager's strides."""
    made: list[list[Tensor]] = []
    for call in (torch.compile(_several, backend=ig.torch_backend), _several):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        results = call(x)
        (results[0].sum() + results[2].sum() + results[5].sum()).backward()
        made.append([*results, x.grad])
    for result, expected in zip(*made, strict=True):
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
        assert result.dtype == expected.dtype


def test_an_in_place_write_reaches_the_callers_tensor():
    def function(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    x, total = torch.ones(3), torch.zeros(3)
    compiled = torch.compile(function, backend=ig.torch_backend)
    for number in (1.0, 2.0):
        result = compiled(x, total)
        assert torch.equal(total, torch.full((3,), number))
        result.zero_()  # the caller may write into results
    assert torch.equal(x, torch.ones(3))


def test_every_size_and_number_has_its_graph():
    compiled = torch.compile(lambda x, scale: (x * scale * len(x)).sum(), backend=ig.torch_backend)
    for size, scale in ((3, 0.5), (4, 0.5), (5, 0.25)):
        x = torch.ones(size, requires_grad=True)
        compiled(x, scale).backward()
        assert torch.equal(x.grad, torch.full((size,), scale * size))


def test_dropout_follows_the_seed_of_pytorch():
    x = torch.ones(1000, requires_grad=True)
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend=ig.torch_backend)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(second, first)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())  # the backward has the mask of its forward


def test_an_operator_of_the_users_own_has_the_gradient_of_its_decomposition(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decompositions, "_USER", dict(decompositions._USER))

    @torch.library.custom_op("irongrad_tests::cubed", mutates_args=())
    def cubed(x: Tensor) -> Tensor:
        return x**3

    cubed.register_fake(torch.empty_like)
    ig.register_decomposition(cubed)(lambda x: x * x * x)
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    torch.compile(lambda x: cubed(x).sum(), backend=ig.torch_backend)(x).backward()
    assert torch.equal(x.grad, torch.tensor([12.0, 27.0]))


def test_an_operator_that_cannot_be_compiled_is_named():
    compiled = torch.compile(lambda x: torch.poisson(x), backend=ig.torch_backend)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"test_torch_compile\.py:\d+.*\n.*aten\.poisson\.default"
    ):
        compiled(torch.ones(3))


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="a tensor on meta cannot be compiled here"):
        torch.compile(lambda x: x + 1, backend=ig.torch_backend)(torch.ones(3, device="meta"))


def test_an_index_out_of_range_is_refused():
    compiled = torch.compile(F.embedding, backend=ig.torch_backend)
    with pytest.raises(GuardError, match=r"every value must be in \[0, 4\]"):
        compiled(torch.tensor([1, 7]), torch.ones(5, 2))


def test_dynamo_finds_the_backend_by_its_entry_point(monkeypatch: pytest.MonkeyPatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "torch_dynamo_backends"
    value = project["entry-points"][group]["irongrad"]
    monkeypatch.setitem(registry._BACKENDS, "irongrad", EntryPoint("irongrad", value, group))
    monkeypatch.delitem(registry._COMPILER_FNS, "irongrad", raising=False)
    assert registry.lookup_backend("irongrad") is torch_compile.torch_backend


_PROGRAM = """
import sys, torch, irongrad as ig
from irongrad.pipeline.iree import tools
if sys.argv[1] == "second":
    def refused(tool, arguments):
        raise AssertionError(f"{tool} was called")
    tools.run_tool = refused
x = torch.ones(4)
assert torch.allclose(torch.compile(lambda x: torch.sin(x) * 3, backend=ig.torch_backend)(x), torch.sin(x) * 3)
"""


def test_threads_share_a_compiled_function():
    """IREE's context must not run two calls at a time, and a result may lie in memory that the next call writes."""
    compiled = torch.compile(lambda x: torch.relu(x @ x.T).cumsum(0), backend="irongrad")
    given = [torch.randn(48, 48, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [compiled(x) for x in given]

    def is_as_alone(number: int) -> bool:
        return all(torch.equal(compiled(given[number]), expected[number]) for _ in range(200))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_as_alone, range(4)))


def test_a_second_process_compiles_nothing(tmp_path: Path):
    settings = {**os.environ, "IRONGRAD_CACHE_DIR": str(tmp_path), "IRONGRAD_CACHE_SIZE": "1GiB"}
    for number in ("first", "second"):
        command = [sys.executable, "-c", _PROGRAM, number]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "leaked" not in done.stderr
