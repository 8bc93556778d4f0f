"""What training takes on many machines, before renting any: computed from one step that was measured on one machine.

The cost of a collective is that of recursive halving and doubling (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 19(1), 2005), for n bytes on N machines:

    all-reduce   2 ceil(log2 N) latencies, and 2 (N - 1)/N n bytes through each machine's link
    all-gather   ceil(log2 N) latencies, and (N - 1) n bytes

The assumptions are: all machines are as fast as the one that was measured, and wait for the slowest; each link carries
one exchange at a time, at its full bandwidth in both directions at once; latencies of exchanges under way pass side by
side; nothing is lost, and nobody leaves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from irongrad.runtime.errors import UserError

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]+?)(?:/s)?\s*")


@dataclass(frozen=True)
class Network:
    """The network between machines.

    Attributes:
        bandwidth: the bytes a second that a machine sends, and receives at the same time.
        latency: the seconds from one machine to another.
    """

    bandwidth: float
    latency: float

    def all_reduce(self, nbytes: float, machines: int) -> tuple[float, float]:
        """The seconds of latency of one all-reduce, and the seconds in which it occupies a link."""
        link = 2 * (machines - 1) / machines * nbytes / self.bandwidth
        return 2 * _rounds(machines) * self.latency, link

    def all_gather(self, nbytes: float, machines: int) -> tuple[float, float]:
        """The seconds of latency of one all-gather, and the seconds in which it occupies a link."""
        return _rounds(machines) * self.latency, (machines - 1) * nbytes / self.bandwidth


def _rounds(machines: int) -> int:
    return math.ceil(math.log2(machines))


@dataclass(frozen=True)
class MeasuredStep:
    """One training step on one machine.

    Attributes:
        seconds: the time of the step, with exchanges that take no time.
        buckets: for each exchange in order, the seconds from the step's begin until its operand is there, and its
            bytes; empty for an artifact that exchanges nothing.
        round: the seconds that a rank computes when two ranks agree on their parameters; 0 if they never do.
        trained: the bytes that ranks send when they agree on their parameters, as float32.
        memory: the peak resident memory of the process, in bytes.
    """

    seconds: float
    buckets: tuple[tuple[float, int], ...]
    round: float
    trained: int
    memory: int


@dataclass(frozen=True)
class Prediction:
    """What training takes on some machines.

    Attributes:
        machines: the number of machines.
        seconds: the mean time of a step.
        exposed: the seconds of it that communication costs: what no computation hides, and the work of a round.
        nbytes: the mean bytes that each machine hands over in a step.
        memory: the peak resident memory of a rank, in bytes.
    """

    machines: int
    seconds: float
    exposed: float
    nbytes: float
    memory: int

    @property
    def utilisation(self) -> float:
        """The share of the time in which a machine computes."""
        return 1 - self.exposed / self.seconds


def with_gradients(step: MeasuredStep, network: Network, machines: int) -> Prediction:
    """Predict steps that exchange their gradients, each bucket as soon as it is there.

    Raises:
        UserError: the artifact exchanges nothing.
    """
    if not step.buckets:
        raise UserError(
            "this artifact exchanges nothing between ranks; compile it with --communicate, or plan --sync local:STEPS"
        )
    if machines == 1:
        return Prediction(1, step.seconds, 0.0, 0.0, step.memory)
    # Before anything is exchanged, the ranks agree on the step; that is a row of a few numbers.
    free = network.all_gather(32, machines)[0]
    complete = 0.0
    for ready, nbytes in step.buckets:
        latency, link = network.all_reduce(nbytes, machines)
        free = max(free, ready) + link
        complete = max(complete, free + latency)
    computed = max(ready for ready, _ in step.buckets)
    exposed = max(complete - computed, 0.0)
    sent = float(sum(nbytes for _, nbytes in step.buckets))
    return Prediction(machines, step.seconds + exposed, exposed, sent, step.memory)


def with_local_steps(step: MeasuredStep, network: Network, machines: int, every: int, form: str = "") -> Prediction:
    """Predict ranks that train alone, and agree on their parameters every so many steps.

    Args:
        step: the measured step.
        network: the network.
        machines: the number of machines.
        every: the number of steps from one round to the next.
        form: `bf16` or `int8` if changes are sent in fewer bytes, which all ranks then receive from all others.
    """
    if machines == 1:
        return Prediction(1, step.seconds, 0.0, 0.0, step.memory)
    nbytes = step.trained * {"": 1.0, "bf16": 1 / 2, "int8": 1 / 4 + 1 / 1024}[form]
    collective = network.all_gather if form else network.all_reduce
    computed = step.round * (machines / 2 if form else 1)  # a rank adds the changes of all others, if they are rounded
    exposed = (sum(collective(nbytes, machines)) + computed) / every
    return Prediction(machines, step.seconds + exposed, exposed, nbytes / every, step.memory)


def doubled(machines: int) -> Sequence[int]:
    """1, 2, 4 and so on, and the number itself at the end."""
    return [*(2**i for i in range(_rounds(machines))), machines]


def bandwidth_in(text: str) -> float:
    """Return the bytes a second of a bandwidth such as `1Gbit` or `100Mbit/s`.

    Raises:
        UserError: the text is none.
    """
    return _quantity(text, _BITS, "bandwidth; write for instance 1Gbit or 100Mbit") / 8


def latency_in(text: str) -> float:
    """Return the seconds of a latency such as `20ms` or `50us`.

    Raises:
        UserError: the text is none.
    """
    return _quantity(text, _SECONDS, "latency; write for instance 20ms or 50us")


def _quantity(text: str, units: dict[str, float], what: str) -> float:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2].lower() not in units or (value := float(found[1]) * units[found[2].lower()]) <= 0:
        raise UserError(f"{text!r} is no {what}")
    return value
