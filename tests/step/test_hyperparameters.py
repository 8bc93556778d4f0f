"""Which numbers of an optimizer become run-time inputs, and under which names."""

from __future__ import annotations

import torch
from torch import nn, optim

from irongrad.step.hyperparameters import hyperparameters, with_values


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3))


def named(*optimizers: optim.Optimizer) -> dict[str, float]:
    return {h.name: h.default for h in hyperparameters(optimizers)}


def test_adamw() -> None:
    found = named(optim.AdamW([parameter()], lr=0.1))
    assert found == {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def test_integers_count_where_a_float_is_meant() -> None:
    found = named(optim.SGD([parameter()], lr=1, momentum=0, weight_decay=2))
    assert found == {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 2.0}


def test_tensor_learning_rate() -> None:
    assert named(optim.Adam([parameter()], lr=torch.tensor(0.25), capturable=True))["lr"] == 0.25


def test_pairs_with_none() -> None:
    found = named(optim.Adafactor([parameter()]))
    assert "eps1" not in found
    assert found["eps2"] == 1e-3


def test_groups_are_numbered_over_all_optimizers() -> None:
    first = optim.SGD([{"params": [parameter()], "lr": 0.1}, {"params": [parameter()], "lr": 0.2}])
    second = optim.Adam([parameter()], lr=0.3)
    found = named(first, second)
    assert (found["lr_0"], found["lr_1"], found["lr_2"]) == (0.1, 0.2, 0.3)
    assert "lr" not in found


def test_what_a_scheduler_adds_to_a_group_is_no_hyperparameter() -> None:
    optimizer = optim.SGD([parameter()], lr=0.1, momentum=0.9)
    before = set(named(optimizer))
    optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert set(named(optimizer)) == before


def test_only_a_momentum_of_zero_is_structural() -> None:
    found = hyperparameters([optim.SGD([parameter()], lr=0.0)])
    assert [h.name for h in found if h.structural] == ["momentum"]
    assert not any(h.structural for h in hyperparameters([optim.SGD([parameter()], momentum=0.9)]))


def test_with_values_copies() -> None:
    optimizer = optim.AdamW([parameter()], lr=0.1)
    group = optimizer.param_groups[0]
    changed = with_values(group, hyperparameters([optimizer]), lambda h: h.name)
    assert changed["lr"] == "lr"
    assert changed["betas"] == ("beta1", "beta2")
    assert group["betas"] == (0.9, 0.999)
