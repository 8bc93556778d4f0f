"""The state of an optimizer before its next step, found without a change to the user's optimizer."""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from irongrad.pipeline.optimizer.state import initial_state

PAGE = resource.getpagesize()


class Shrinking(optim.SGD):
    """Writes into its parameters and gradients in `step` itself, outside of torch.optim's functions."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(1.0)
                parameter.sub_(parameter.grad)
        super().step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.AdamW(p, amsgrad=True),
        optim.Rprop,
        optim.ASGD,
        optim.Adafactor,
        lambda p: Shrinking(p, lr=0.1, momentum=0.9),
    ],
    ids=["sgd", "adamw", "rprop", "asgd", "adafactor", "shrinking"],
)
@pytest.mark.parametrize("started", [False, True])
def test_the_users_tensors_stay_as_they_are(
    make: Callable[[list[nn.Parameter]], optim.Optimizer], started: bool
) -> None:
    torch.manual_seed(0)
    parameters = {"a": nn.Parameter(torch.randn(4, 3)), "b": nn.Parameter(torch.randn(5))}
    optimizer = make(list(parameters.values()))
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    if started:
        optimizer.step()
    before = copy.deepcopy((list(parameters.values()), [p.grad for p in parameters.values()], optimizer.state_dict()))
    found = initial_state([optimizer], parameters)
    after = list(parameters.values()), [p.grad for p in parameters.values()], optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    own = {id(v.untyped_storage()) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)}
    assert own.isdisjoint(id(t.initial.untyped_storage()) for t in found.values())
    assert all(t.initial.is_contiguous() for t in found.values())


def test_hooks_of_the_user_are_not_called() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optim.Adam([parameter])
    optimizer.register_step_post_hook(lambda *arguments: parameter.data.zero_())
    initial_state([optimizer], {"a": parameter})
    assert bool((parameter == 1).all())


def test_only_the_state_takes_memory() -> None:
    """The search for the state copies neither parameters nor gradients."""
    parameter = nn.Parameter(torch.zeros(2**22))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    initial_state([optim.SGD([parameter], lr=0.1, momentum=0.9)], {"a": parameter})
    touched = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * PAGE
    assert touched < 1.5 * 4 * 2**22
