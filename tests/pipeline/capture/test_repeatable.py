"""A step whose runs differ is refused at the line that draws a random number; a repeatable step is captured."""

from __future__ import annotations

import contextvars
import datetime
import inspect
import itertools
import os
import random
import socket
import statistics
import subprocess
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.capture import repeatable
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.repeatable import Kind, _difference, _Value
from irongrad.runtime.errors import CaptureError

OWN_PYTHON, OWN_NUMPY, OWN_OLD = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
COUNTER = itertools.count()

Body = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3))
        self.body = body
        self.drawn = random.random() + np.random.rand()  # at construction, once
        self.rng = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x @ self.w)


def of(body: Body, **settings: Any) -> ig.TrainStep:
    model = Model(body)
    step = ig.TrainStep(
        model, lambda y: y.square().sum(), torch.optim.SGD(model.parameters(), 0.1), {"x": torch.ones(2, 3)}
    )
    return replace(step, **settings)


def marked(function: object) -> str:
    """`file:line: ` of the line in `function` that ends with `# drawn`."""
    lines, start = inspect.getsourcelines(function)
    return next(f"{__file__}:{start + i}: " for i, text in enumerate(lines) if text.rstrip().endswith("# drawn"))


def python(model, y):
    return y * random.random()  # drawn


def python_gauss(model, y):
    y = y + 1
    y = y * random.gauss(1, 0.1)  # drawn
    return y.tanh()


def a_choice(model, y):
    return random.choice([y, y * 2, y * 3])  # drawn


def numpy_global(model, y):
    return y * np.random.rand()  # drawn


def numpy_array(model, y):
    return y + torch.from_numpy(np.random.standard_normal((2, 3)).astype(np.float32))  # drawn


def own_python(model, y):
    return y * OWN_PYTHON.uniform(1, 2)  # drawn


def own_numpy(model, y):
    return y * float(OWN_NUMPY.normal())  # drawn


def own_old(model, y):
    return y * OWN_OLD.rand()  # drawn


def of_the_model(model, y):
    return y * model.rng.random()  # drawn


def in_evaluation(model, y):
    if model.training:
        return y
    return y * random.random()  # drawn


def over_a_library(model, y):
    return y * statistics.NormalDist().samples(1)[0]  # drawn


def a_number_that_does_not_matter(model, y):
    random.random()  # drawn
    return y


@pytest.mark.parametrize(
    "body",
    [
        python,
        python_gauss,
        a_choice,
        numpy_global,
        numpy_array,
        own_python,
        own_numpy,
        own_old,
        of_the_model,
        in_evaluation,
        over_a_library,
        a_number_that_does_not_matter,
    ],
)
def test_a_number_from_outside_of_pytorch_is_refused_at_its_line(body: Body) -> None:
    step = of(body)
    before = random.getstate(), OWN_NUMPY.bit_generator.state
    with pytest.raises(CaptureError, match="random number") as caught:
        capture(step)
    assert str(caught.value).startswith(marked(body))
    assert (random.getstate(), OWN_NUMPY.bit_generator.state) == before


@pytest.mark.parametrize("seed", [2, 22, 23])
def test_a_draw_that_rejects_its_first_numbers_is_refused(seed: int) -> None:
    """With these seeds, a run that starts two numbers later chooses the same element, as `choice` rejects numbers."""
    before = random.getstate()
    random.seed(seed)
    try:
        with pytest.raises(CaptureError, match="random number"):
            capture(of(a_choice))
    finally:
        random.setstate(before)


def inner(y):
    return y * random.random()  # drawn


def test_the_innermost_line_of_the_user_is_named() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(of(lambda model, y: inner(y).tanh()))
    assert str(caught.value).startswith(marked(inner))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * random.random()  # drawn


def test_a_draw_in_a_backward_is_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(of(lambda model, y: Scaled.apply(y)))
    assert str(caught.value).startswith(marked(Scaled.backward))


class Langevin(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(random.gauss(0, 0.1))  # drawn


def test_a_draw_in_an_optimizer_is_refused() -> None:
    step = of(lambda model, y: y)
    with pytest.raises(CaptureError) as caught:
        capture(replace(step, optimizer=Langevin(step.model.parameters(), 0.1)))
    assert str(caught.value).startswith(marked(Langevin.step))


def noisy_loss(y):
    return y.sum() * np.random.rand()  # drawn


def test_a_draw_in_the_loss_is_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(of(lambda model, y: y, loss=noisy_loss))
    assert str(caught.value).startswith(marked(noisy_loss))


@pytest.mark.parametrize(
    "number",
    [
        lambda: os.urandom(1)[0] + 1 + os.urandom(1)[0] / 256,
        lambda: uuid.uuid4().int % 1000,
        lambda: time.time() % 60,
        lambda: time.localtime(time.time()).tm_min + 1,
        lambda: datetime.datetime.now().hour + 1,
        lambda: datetime.date.today().day,
        lambda: time.localtime().tm_mon,
        lambda: next(COUNTER) + 1,
        lambda: random.SystemRandom().random(),
    ],
    ids=["urandom", "uuid", "time", "minute", "hour", "day", "month", "counter", "system"],
)
def test_a_number_that_no_generator_draws_and_that_differs_is_refused(number: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match="two eager runs of the training step") as caught:
        capture(of(lambda model, y: y * number()))
    assert str(caught.value).startswith(f"{__file__}:")


def an_identifier(model, y):
    y = y + 1
    y = y * (uuid.uuid4().int % 1000 / 1000)  # drawn
    return y.tanh()


def test_the_line_that_asks_the_operating_system_is_named() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(of(an_identifier))
    assert str(caught.value).startswith(marked(an_identifier))


CALLS = contextvars.ContextVar("CALLS", default=1)


def of_a_context(model, y):
    CALLS.set(CALLS.get() + 1)
    return y * CALLS.get()


def of_a_default(model, y, calls=[0]):  # noqa: B006
    calls[0] += 1
    return y * calls[0]


def of_an_array(model, y, calls=np.zeros(1)):  # noqa: B008
    calls[0] += 1
    return y * calls[0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (of_a_context, "two eager runs"),
        (of_a_default, "changes calls, a Python"),
        (of_an_array, "changes calls, a Python"),
    ],
)
def test_a_step_that_depends_on_its_own_last_run_is_refused(body: Body, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(of(body))
    assert f"{__file__}:" in str(caught.value)


def test_an_array_over_the_memory_of_a_parameter_is_refused() -> None:
    step = of(lambda model, y: y)
    array = step.model.w.detach().numpy()
    with pytest.raises(CaptureError, match="NumPy array over the memory"):
        capture(replace(step, loss=lambda y: y.square().sum() * (1 + float(abs(array).sum()))))


def seeds_itself(model, y):
    random.seed(4)
    return y * random.random()


def draws_before_it_seeds(model, y):
    number = random.random()
    random.seed(4)
    return y * number


def test_a_forward_that_seeds_a_generator_itself_is_captured() -> None:
    capture(of(seeds_itself))


def test_a_draw_before_the_forward_seeds_is_refused() -> None:
    with pytest.raises(CaptureError, match="random number"):
        capture(of(draws_before_it_seeds))


@pytest.mark.parametrize(
    "body",
    [
        lambda model, y: y * torch.rand(3),
        lambda model, y: nn.functional.dropout(y, 0.5, model.training),
        lambda model, y: y * model.drawn,
        lambda model, y: y * np.random.default_rng(5).random(),
        lambda model, y: y + (y * float("nan")).nan_to_num(),
    ],
)
def test_a_step_that_repeats_is_captured(body: Body) -> None:
    capture(of(body))


def test_a_large_model_runs_once_unless_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    run = repeatable._run

    def counted(program: repeatable.Program, *args: Any, **kwargs: Any) -> Any:
        runs.append(program.what)
        return run(program, *args, **kwargs)

    monkeypatch.setattr(repeatable, "_run", counted)
    monkeypatch.setattr(repeatable, "LARGE", 8)  # the model has 9 elements
    capture(of(lambda model, y: y))
    assert runs == ["the training step", "the evaluation"]
    with pytest.raises(CaptureError, match="random number"):
        capture(of(python))
    runs.clear()
    monkeypatch.setattr(repeatable, "LARGE", 9)
    capture(of(lambda model, y: y))
    assert runs == ["the training step"] * 2 + ["the evaluation"] * 2


def seeds_pytorch(model, y):
    torch.manual_seed(0)  # drawn
    return y + torch.randn(3)


def forks(model, y):
    with torch.random.fork_rng(devices=[]):  # drawn
        torch.manual_seed(1)
        return y + torch.randn(3)


def reads_the_seed(model, y):
    return y * (torch.initial_seed() % 7 + 1)  # drawn


def reads_the_state(model, y):
    return y + torch.random.get_rng_state()[0]  # drawn


def draws_again(model, y):
    state = torch.default_generator.get_state()  # drawn
    y = y + torch.randn(3)
    torch.set_rng_state(state)
    return y


def seeds_in_evaluation(model, y):
    if not model.training:
        torch.default_generator.manual_seed(3)  # drawn
    return y


@pytest.mark.parametrize(
    "body", [seeds_pytorch, forks, reads_the_seed, reads_the_state, draws_again, seeds_in_evaluation]
)
def test_a_step_that_reaches_for_the_generator_of_pytorch_is_refused_at_its_line(body: Body) -> None:
    state = torch.get_rng_state()
    with pytest.raises(CaptureError) as caught:
        capture(of(body))
    assert str(caught.value).startswith(marked(body))
    assert "TrainStep.seed" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


def checkpointed(model, y):
    return torch.utils.checkpoint.checkpoint(lambda h: (h + torch.randn(3)).tanh(), y, use_reentrant=False)


def test_a_checkpoint_that_draws_its_numbers_again_is_captured() -> None:
    capture(of(checkpointed))


def of_a_process(model, y):
    return y * (os.getpid() % 17 + 1)  # drawn


def of_a_thread(model, y):
    return y * (threading.get_ident() % 17 + 1)  # drawn


def of_a_name(model, y):
    return y * (hash("a name") % 2 + 1)  # drawn


def of_an_object(model, y):
    return y * (hash(model) % 17 + 1)  # drawn


def of_an_address(model, y):
    return y * (y.data_ptr() % 17 + 1)  # drawn


def of_an_id_as_text(model, y):
    return y * float(f"{id(model)}"[-1:])  # drawn


@pytest.mark.parametrize("body", [of_a_process, of_a_thread, of_a_name, of_an_object, of_an_address, of_an_id_as_text])
def test_a_number_that_another_process_would_not_see_is_refused_at_its_line(body: Body) -> None:
    with pytest.raises(CaptureError, match="two eager runs") as caught:
        capture(of(body))
    assert str(caught.value).startswith(marked(body))


SCALES: dict[int, float] = {}


def looks_up_by_id(model, y):
    return y * SCALES[id(model)] * (2 if id(model.w) in {id(p) for p in model.parameters()} else 3) * hash(2)


def test_ids_that_only_find_objects_again_are_captured() -> None:
    step = of(looks_up_by_id)
    SCALES[id(step.model)] = 2.0
    capture(step)


def opens(model, y):
    with open(__file__) as file:  # drawn
        return y * len(file.readline())


def reads_by_path(model, y):
    return y * len(Path(__file__).read_text())  # drawn


def loads_an_array(model, y):
    return y + torch.from_numpy(np.load(os.environ["AN_ARRAY"]))  # drawn


@pytest.mark.parametrize("body", [opens, reads_by_path, loads_an_array])
def test_a_step_that_opens_a_file_is_refused_at_its_line(
    body: Body, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "array.npy", np.ones(3, np.float32))
    monkeypatch.setenv("AN_ARRAY", str(tmp_path / "array.npy"))
    with pytest.raises(CaptureError, match="opens a file in every call") as caught:
        capture(of(body))
    assert str(caught.value).startswith(marked(body))


def warns(model, y):
    warnings.warn("a warning, whose line Python looks up in this file", stacklevel=1)
    return y


def test_a_warning_opens_no_file_of_the_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        capture(of(warns))


def runs_a_program(model, y):
    return y * len(subprocess.run(["true"], capture_output=True, check=True).stdout)  # drawn


def runs_a_shell(model, y):
    with os.popen("echo 2") as pipe:  # drawn
        return y * float(pipe.read())


@pytest.mark.parametrize("body", [runs_a_program, runs_a_shell])
def test_a_step_that_starts_a_process_is_refused_at_its_line(body: Body) -> None:
    with pytest.raises(CaptureError, match="starts a process in every call") as caught:
        capture(of(body))
    assert str(caught.value).startswith(marked(body))


def sends(model, y):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"", ("127.0.0.1", 9))  # drawn
    return y


def test_a_step_that_uses_the_network_is_refused_at_its_line() -> None:
    with pytest.raises(CaptureError, match="uses the network in every call") as caught:
        capture(of(sends))
    assert str(caught.value).startswith(marked(sends))


def reads_a_variable(model, y):
    return y * float(os.environ.get("IRONGRAD_TEST_SCALE", "2"))  # drawn


def looks_for_a_file(model, y):
    return y * (2 if Path("no such file").exists() else 3)  # drawn


@pytest.mark.parametrize(
    ("body", "what"), [(reads_a_variable, "IRONGRAD_TEST_SCALE"), (looks_for_a_file, "what stat says")]
)
def test_what_a_step_sees_outside_of_it_and_keeps_is_told(body: Body, what: str) -> None:
    with pytest.warns(UserWarning, match=f"the compiled step keeps .*{what}") as told:
        capture(of(body))
    assert any(str(w.message).startswith(marked(body)) for w in told)


def reads_an_address(model, y):
    return y * (int(repr(model.rng).rpartition("0x")[2].rstrip(">"), 16) // 16 % 97)


def test_an_address_in_a_text_is_found() -> None:
    with pytest.raises(CaptureError, match="two eager runs"):
        capture(of(reads_an_address))


def casts_a_layer(model, y):
    return model.layer.half()(y.half()).float()  # drawn


def casts_a_layer_there_and_back(model, y):
    h = model.layer.double()(y.double()).float()  # drawn
    model.layer.float()
    return h


@pytest.mark.parametrize("body", [casts_a_layer, casts_a_layer_there_and_back])
def test_a_cast_of_a_module_is_refused_at_its_line(body: Body) -> None:
    step = of(body)
    step.model.layer = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match="casts or moves a module") as caught:
        capture(replace(step, optimizer=torch.optim.Adam(step.model.parameters())))
    assert str(caught.value).startswith(marked(body))


def test_a_cast_that_changes_nothing_is_taken() -> None:
    step = of(lambda model, y: model.layer.to(y)(y))
    step.model.layer = nn.Linear(3, 3)
    capture(replace(step, optimizer=torch.optim.Adam(step.model.parameters())))


@pytest.mark.parametrize(("difference", "differs"), [(1e-10, False), (1e-4, True)])
@pytest.mark.parametrize("beside", [torch.tensor(1.0), torch.tensor(1e6), torch.tensor(True)])
def test_a_gradient_that_is_zero_but_for_rounding_may_differ_as_a_whole(
    beside: torch.Tensor, difference: float, differs: bool
) -> None:
    """Of a bias before a normalisation, where threads add gradients of looked up rows in another order."""
    first = [_Value(beside, Kind.RESULT), _Value(torch.full((4,), 0.01), Kind.GRADIENT)]
    one, other = (_Value(torch.full((4,), sign * difference), Kind.GRADIENT) for sign in (1, -1))
    assert (_difference([*first, one], [*first, other]) != "") == differs


@pytest.mark.parametrize("results", [(1e6, 1e-4), (1e-4, 1e6), (True, False), (3 + 4j, 0.0)])
def test_results_are_no_gradients(results: tuple[complex, complex]) -> None:
    one = [_Value(torch.tensor(r), Kind.RESULT) for r in results]
    other = [
        one[0],
        _Value(one[1].tensor.logical_not() if results[0] is True else one[1].tensor * 1.001 + 1e-6, Kind.RESULT),
    ]
    assert not _difference(one, one)
    assert _difference(one, other) == "in a result"
