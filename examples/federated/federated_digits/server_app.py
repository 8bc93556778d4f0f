"""The server: it averages what the clients send, by the strategy that the run's configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.serverapp.strategy import FedAvg, FedProx

from irongrad.integrations import flower


def strategy(run: Mapping[str, Any]) -> FedAvg:
    """Return `fedavg`, `fedprox` or `diloco`; a round needs `least-clients`, and takes all that are there."""
    least = int(run["least-clients"])
    options: dict[str, Any] = dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), least)
    options["fraction_evaluate"] = float(run["fraction-evaluate"])
    if run["strategy"] == "diloco":
        return flower.DiLoCo(run["artifact"], **options)
    return {"fedavg": FedAvg(**options), "fedprox": FedProx(proximal_mu=0.1, **options)}[run["strategy"]]


app = flower.server(lambda run: run["artifact"], strategy, checkpoint=lambda run: run["checkpoint"])
