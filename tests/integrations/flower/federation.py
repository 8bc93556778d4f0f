"""Federations in one process, over Flower's own classes: `python federation.py TASK PLAN` prints what it found.

A plan is a JSON file. The network is left out: `Loopback` hands each message to the node's ClientApp, as
`flwr-clientapp` does, and makes an exception an error reply.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedProx
from flwr.supercore.task_identity import TaskIdentity

from irongrad.integrations.flower import DiLoCo, client, server
from irongrad.runtime.errors import IronGradError
from irongrad.training import Arrays, InOrder

PLAN = json.loads(Path(sys.argv[2]).read_text())
BATCH = 8
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1  # as Flower's processes have them


def context(node: int) -> Context:
    config: Any = {"node": node}
    return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config=config)


class Loopback:
    """A grid over ClientApps, of which those of one round may be others than those of the next."""

    def __init__(self, apps: dict[int, ClientApp], rounds: Sequence[Sequence[int]]) -> None:
        self._nodes = {number: (app, context(number)) for number, app in apps.items()}
        self._rounds = list(rounds)
        self.errors: list[str] = []

    def get_node_ids(self) -> list[int]:
        return list(self._rounds[0])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = [self._replied(message) for message in messages]
        if replies:
            self._rounds = self._rounds[1:] or self._rounds
        return replies

    def _replied(self, message: Message) -> Message:
        app, state = self._nodes[message.metadata.dst_node_id]
        try:
            return app(message, state)
        except Exception as error:
            self.errors.append(str(error))
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)


def data_of(config: Any) -> Arrays:
    with np.load(PLAN["data"]) as file:
        node = config["node"]
        return Arrays({name: file[f"{name}{node}"] for name in ("x", "y")}, BATCH)


def strategy_of(name: str) -> FedAvg:
    options = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}
    if name == "diloco":
        return DiLoCo(PLAN["artifact"], **options)
    return FedProx(proximal_mu=PLAN["mu"], **options) if name == "fedprox" else FedAvg(**options)


def clients(**options: Any) -> dict[int, ClientApp]:
    return {node: client(PLAN["artifact"], data_of, device="local-sync", **options) for node in (1, 2, 3)}


def run() -> dict[str, Any]:
    """Run the rounds of the plan; its checkpoint has the parameters at the end."""
    grid = Loopback(clients(epochs=PLAN.get("epochs"), steps=PLAN.get("steps")), PLAN["rounds"])
    served = [len(PLAN["rounds"])] if "first" not in PLAN else [PLAN["first"], len(PLAN["rounds"]) - PLAN["first"]]
    start = None
    for rounds in served:  # a second server begins with the checkpoint of the first
        strategy = strategy_of(PLAN["strategy"])
        options = {"hypers": PLAN.get("hypers", {}), "start": start, "checkpoint": PLAN["checkpoint"]}
        app = server(PLAN["artifact"], strategy, rounds=rounds, **options)
        app(grid, context(0))
        start = PLAN["checkpoint"]
    return {"errors": grid.errors, "torch": "torch" in sys.modules}


def train_message(arrays: dict[str, np.ndarray], **config: Any) -> Message:
    content = {
        "arrays": ArrayRecord({n: Array(a) for n, a in arrays.items()}),
        "config": ConfigRecord(config),
    }
    return Message(RecordDict(content), dst_node_id=1, message_type="train")


def initial() -> dict[str, np.ndarray]:
    with np.load(PLAN["initial"]) as file:
        return dict(file)


def names() -> dict[str, Any]:
    """What a client sends, and what it keeps."""
    state = context(1)
    reply = clients()[1](train_message(initial()), state)
    (sent,), (kept,) = reply.content.array_records.values(), state.state.array_records.values()
    (metrics,) = reply.content.metric_records.values()
    return {"sent": list(sent), "kept": list(kept), "metrics": dict(metrics)}


def evaluated() -> dict[str, Any]:
    """The metrics of an evaluation of the server's parameters."""
    message = train_message(initial())
    message = Message(message.content, dst_node_id=1, message_type="evaluate")

    def held_out(config: Any) -> InOrder:
        with np.load(PLAN["data"]) as file:
            return InOrder({"x": file["x1"], "y": file["y1"]}, BATCH, partial=False)

    reply = clients(held_out=held_out)[1](message, context(1))
    (metrics,) = reply.content.metric_records.values()
    return dict(metrics)


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except IronGradError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals() -> dict[str, str]:
    """The message for each bad input."""
    state = initial()
    first = next(iter(state))
    other_names = {f"net.{name}": array for name, array in state.items()}
    other_shapes = {**state, first: np.zeros((3, 3), np.float32)}
    spoilt = {**state, first: np.full_like(state[first], np.nan)}

    def to_client(arrays: dict[str, np.ndarray], app: ClientApp | None = None, **config: Any) -> Callable[[], Any]:
        return lambda: (app or clients()[1])(train_message(arrays, **config), context(1))

    def to_server(artifact: str, apps: dict[int, ClientApp], **options: Any) -> Callable[[], Any]:
        app = server(artifact, strategy_of("fedavg"), rounds=1, **options)
        return lambda: app(Loopback(apps, [[1, 2]]), context(0))

    def endless(config: Any) -> Iterator[dict[str, np.ndarray]]:
        yield from ()

    evaluation = Message(train_message(state).content, dst_node_id=1, message_type="evaluate")
    two = Message(RecordDict({"a": ArrayRecord({}), "b": ArrayRecord({})}), dst_node_id=1, message_type="train")
    predicts, trains = PLAN["predicts"], PLAN["trains"]
    return {
        "names": refused(to_client(other_names)),
        "shapes": refused(to_client(other_shapes)),
        "NaN sent": refused(to_client(spoilt)),
        "NaN update": refused(to_client(state, lr=1e30)),
        "records": refused(lambda: clients()[1](two, context(1))),
        "mu": refused(to_client(state, **{"proximal-mu": -1.0})),
        "no gradients": refused(to_client(state, client(trains, data_of), **{"proximal-mu": 0.1})),
        "no train_step": refused(to_client(state, client(predicts, data_of))),
        "no length": refused(to_client(state, client(PLAN["artifact"], endless, steps=2))),
        "not held out": refused(lambda: clients()[1](evaluation, context(1))),
        "empty": refused(lambda: clients(held_out=[])[1](evaluation, context(1))),
        "no epochs": refused(lambda: client(PLAN["artifact"], data_of, epochs=0)),
        "both": refused(lambda: client(PLAN["artifact"], data_of, epochs=1, steps=1)),
        "server's artifact": refused(to_server(predicts, clients())),
        "server's hyper": refused(to_server(PLAN["artifact"], clients(), hypers={"lrr": 0.1})),
        "server's number": refused(to_server(PLAN["artifact"], clients(), hypers={"lr": "fast"})),
        "all fail": refused(to_server(PLAN["artifact"], clients(), hypers={"lr": 1e30})),
    }


def left_out() -> dict[str, Any]:
    """A round with one client of ours and two that send what must not be averaged."""

    def foreign(change: Callable[[np.ndarray], np.ndarray]) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, _: Context) -> Message:
            reply = clients()[1](message, context(1)).content
            arrays = {n: Array(change(a.numpy())) for n, a in reply["arrays"].items()}
            return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": reply["metrics"]}), reply_to=message)

        return app

    apps = {1: clients()[1], 2: foreign(lambda a: a * np.nan), 3: foreign(lambda a: a[..., :1])}
    grid = Loopback(apps, [[1, 2, 3]])
    server(PLAN["artifact"], strategy_of("fedavg"), rounds=1, checkpoint=PLAN["checkpoint"])(grid, context(0))
    return {"errors": grid.errors}


TASKS = {f.__name__: f for f in (run, names, evaluated, refusals, left_out)}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]]()))
