"""The order in which a stage of a pipeline runs micro-batches: 1F1B (Narayanan et al., SC 2021, arXiv:2104.04473).

A stage first runs as many forwards as there are stages behind it. Then each further forward is followed by the backward
of the oldest micro-batch. So a stage keeps the values of few micro-batches, however many there are. All gradients of a
step are there before its update (PipeDream-Flush): the numbers are those of one process.
"""

from __future__ import annotations

FORWARD, BACKWARD = 0, 1


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[tuple[int, int]]:
    """The calls of a stage, in order: each is `FORWARD` or `BACKWARD`, and the number of a micro-batch.

    The last stage goes back at once, so its forwards include the backward.

    Args:
        stage: the number of the stage, from 0.
        stages: the number of stages.
        count: the number of micro-batches.
    """
    if stage == stages - 1:
        return [(FORWARD, number) for number in range(count)]
    ahead = min(stages - 1 - stage, count)
    order = [(FORWARD, number) for number in range(ahead)]
    for number in range(count - ahead):
        order += [(FORWARD, number + ahead), (BACKWARD, number)]
    return order + [(BACKWARD, number) for number in range(count - ahead, count)]
