"""The callback for TensorBoard, read back from its event files."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from irongrad.runtime import Session
from irongrad.runtime.errors import UserError
from irongrad.training import Evaluation, TensorBoard, train


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of all event files: records of a length, its checksum, an event, and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        data, place = path.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            place += length + 16
    return found


def test_losses_rates_and_evaluations_are_scalars(
    mlp_artifact: Path, batches: list[dict[str, np.ndarray]], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboardX", reason="the extra test installs tensorboardX")
    session = Session(mlp_artifact)
    for epochs in (1, 1):
        with TensorBoard(tmp_path) as board:
            result = train(
                session, batches[:4], epochs=epochs, evaluation=Evaluation(batches[:2], every=2), callbacks=[board]
            )
    found = scalars(tmp_path)
    assert set(found) == {"train/loss", "rate/lr", "pace/samples_per_second", "validation/loss"}
    assert [step for step, _ in found["train/loss"]] == list(range(1, 9))
    assert [step for step, _ in found["validation/loss"]] == [2, 4, 6, 8]
    assert found["validation/loss"][-1][1] == np.float32(result.evaluations[-1].loss)
    assert {value for _, value in found["rate/lr"]} == {np.float32(1e-2)}


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match=r"pip install 'irongrad\[tensorboard\]'"):
        TensorBoard(tmp_path)
