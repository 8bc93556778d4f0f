"""Steps and functions that draw random numbers: verified against the oracle, repeatable, and resumable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import irongrad as ig
from irongrad.operators.random.philox import philox
from irongrad.runtime import Session, load_function
from irongrad.runtime.errors import GuardError, UnsupportedOpError, UserError
from irongrad.runtime.manifest import DRAWS, SEED
from tests.operators.random.test_random import KNOWN

# A compiled function that was never saved deletes its artifact, with this warning.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


class Drops(nn.Module):
    """Attention with dropout, which the backward recomputes; a GRU; noise, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gru = nn.Linear(8, 24), nn.GRU(8, 8, batch_first=True)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(8, 3)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        rate = 0.25 if self.training else 0.0
        return x + self.drop(functional.scaled_dot_product_attention(q, k, v, dropout_p=rate).squeeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.attend, x, use_reentrant=False)
        x = self.gru(x + 0.1 * torch.randn_like(x))[0]
        return self.out(functional.rrelu(x[:, -1], training=self.training))


def make_step(seed: int = 0) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Drops()
    inputs = {"x": torch.randn(4, 3, 8), "y": torch.randint(0, 3, (4,))}
    return ig.TrainStep(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs, seed=seed)


BATCH = {n: t.numpy() for n, t in make_step().inputs.items()}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compilation verifies three steps of every entry point."""
    directory = tmp_path_factory.mktemp("random") / "artifact"
    ig.compile(make_step(seed=7), directory)
    return directory


@pytest.fixture
def session(artifact: Path) -> Session:
    return Session(artifact)


def losses(session: Session, count: int) -> list[float]:
    return [session.train_step(**BATCH, lr=0.0) for _ in range(count)]


def test_the_seed_is_state_and_in_the_manifest(session: Session) -> None:
    assert session.manifest.seed == 7
    losses(session, 2)
    assert session.state()[SEED] == 7
    assert session.state()[DRAWS] == 2


def test_every_step_draws_anew(session: Session) -> None:
    assert len(set(losses(session, 3))) == 3
    assert len({session.grad_step(**BATCH) for _ in range(3)}) == 3
    assert len({session.eval_step(**BATCH) for _ in range(3)}) == 3
    assert not np.array_equal(session.predict(x=BATCH["x"]), session.predict(x=BATCH["x"]))


def test_a_resumed_run_draws_the_same_numbers(session: Session, artifact: Path, tmp_path: Path) -> None:
    losses(session, 2)
    session.save(tmp_path / "two.safetensors")
    expected = losses(session, 3)
    session.restore(tmp_path / "two.safetensors")
    assert losses(session, 3) == expected
    assert losses(Session(artifact, checkpoint=tmp_path / "two.safetensors"), 3) == expected


def test_steps_in_one_call_draw_what_single_steps_draw(session: Session) -> None:
    expected = losses(session, 3)
    session.reset()
    stacked = {n: np.stack([a] * 3) for n, a in BATCH.items()}
    assert session.train_steps(**stacked, lr=0.0).tolist() == expected


def test_another_seed_begins_anew(session: Session) -> None:
    first = losses(session, 2)
    session.seed(8)
    other = losses(session, 2)
    session.seed(7)
    assert losses(session, 2) == first
    assert not set(first) & set(other)
    with pytest.raises(GuardError, match="a seed is an integer"):
        session.seed(-1)


def test_an_eager_run_goes_on_without_repeating_draws(artifact: Path, tmp_path: Path) -> None:
    step = make_step()
    ig.save_checkpoint(tmp_path / "eager.safetensors", step.model, None, artifact)
    assert Session(artifact, checkpoint=tmp_path / "eager.safetensors").state()[SEED] == 7


def test_a_step_that_draws_nothing_has_no_seed(mlp_artifact: Path) -> None:
    session = Session(mlp_artifact)
    assert session.manifest.seed is None
    assert SEED not in session.state()
    with pytest.raises(UserError, match="draws no random numbers"):
        session.seed(1)


def test_known_answers_compiled() -> None:
    columns = [torch.tensor(column) for column in zip(*((*c, *k) for c, k, _ in KNOWN), strict=True)]
    compiled = ig.compile_function(lambda *words: philox(words[:4], words[4:]), columns)
    assert np.stack(compiled(*(c.numpy() for c in columns)), axis=1).tolist() == [list(w) for _, _, w in KNOWN]


def draw_everything(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        functional.dropout(x, 0.3),
        functional.gumbel_softmax(x),
        torch.randn(100),
        torch.randint(-4, 9, (50,)),
        torch.empty(50).geometric_(0.2),
        torch.empty(50).cauchy_(),
        torch.empty(20, dtype=torch.int64).random_(),
        torch.randperm(20),
        torch.multinomial(x.softmax(-1), 3),
        torch.multinomial(x.softmax(-1), 5, replacement=True),
    ]


def test_draws_of_a_function_depend_on_its_seed_alone(tmp_path: Path) -> None:
    x = torch.randn(8, 8)
    compiled = ig.compile_function(draw_everything, (x,))
    default, third = compiled(x.numpy()), compiled(x.numpy(), seed=3)
    compiled.save(tmp_path / "function")
    loaded = load_function(tmp_path / "function")
    for a, b, c, d in zip(default, third, loaded(x.numpy(), seed=3), compiled(x.numpy(), seed=0), strict=True):
        assert not np.array_equal(a, b)
        assert np.array_equal(b, c)
        assert np.array_equal(a, d)


def test_gradients_of_a_function_that_draws_and_is_recomputed() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(lambda h: functional.dropout(torch.tanh(h @ w), 0.5), x, use_reentrant=False)
        return functional.alpha_dropout(x, 0.5, training=True).square().sum()

    compiled = ig.compile_function(function, (torch.randn(5, 8), torch.randn(8, 8)), gradients=True)
    with pytest.raises(GuardError, match="a seed is an integer"):
        compiled(np.zeros((5, 8), np.float32), np.zeros((8, 8), np.float32), seed=0.5)


def test_a_function_that_draws_nothing_takes_no_seed() -> None:
    compiled = ig.compile_function(torch.sin, (torch.ones(2),))
    with pytest.raises(GuardError, match="draws no random numbers"):
        compiled(np.ones(2, np.float32), seed=1)


def test_an_unsupported_distribution_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match=r"test_random.py:\d+: .*aten.poisson"):
        ig.compile_function(lambda x: torch.poisson(x), (torch.ones(3),))
