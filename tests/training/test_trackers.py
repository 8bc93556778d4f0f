"""The callbacks for MLflow and trackio, with these packages: what they recorded, read back through them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irongrad.runtime import Session
from irongrad.runtime.errors import UserError
from irongrad.training import Evaluation, MLflow, Trackio, train
from irongrad.training.events import Evaluated, Stepped

Batches = list[dict[str, np.ndarray]]
NAMES = {"train/loss", "rate/lr", "pace/samples_per_second", "validation/loss"}


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store in files; mlflow-skinny without its companions knows no other without a server."""
    pytest.importorskip("mlflow", reason="the extra test installs mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    from mlflow.tracking import MlflowClient

    return MlflowClient()


def trained(session: Session, batches: Batches, tracker: Any) -> tuple[list[Stepped], list[Evaluated]]:
    """Train four steps; return what happened in them."""
    events: list[Any] = []
    with tracker:
        train(
            session, batches[:4], epochs=1, evaluation=Evaluation(batches[:2], every=2),
            callbacks=[tracker, events.append],
        )  # fmt: skip
    return [e for e in events if isinstance(e, Stepped)], [e for e in events if isinstance(e, Evaluated)]


def test_mlflow_has_every_number_of_a_run(session: Session, batches: Batches, mlflow_client: Any) -> None:
    steps, evaluations = trained(session, batches, MLflow("news"))
    experiment = mlflow_client.get_experiment_by_name("news").experiment_id
    (run,) = mlflow_client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert set(run.data.metrics) == NAMES

    def history(name: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in mlflow_client.get_metric_history(run.info.run_id, name)]

    assert history("train/loss") == [(e.step, e.loss) for e in steps]
    assert history("validation/loss") == [(e.step, e.loss) for e in evaluations]
    trained(session, batches, MLflow("news", run_id=run.info.run_id))
    assert [step for step, _ in history("train/loss")] == list(range(1, 9))
    assert len(mlflow_client.search_runs([experiment])) == 1


def test_an_unknown_run_of_mlflow_is_refused(mlflow_client: Any) -> None:
    with pytest.raises(UserError, match="MLflow: Run '?0123"):
        MLflow("news", run_id="0123456789abcdef0123456789abcdef")


# trackio decides where its database is when it is imported, and its threads outlive a run.
TRACKIO = """
import sys
import numpy as np
from irongrad.runtime import load
from irongrad.training import Trackio, train

with np.load(sys.argv[2]) as file:
    batches = [{n: file[n][i] for n in file} for i in range(4)]
with load(sys.argv[1]) as session:
    for _ in range(2):
        with Trackio("news", run="first") as tracker:
            train(session, batches, epochs=1, callbacks=[tracker])
"""


def printed(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trackio_has_every_step_of_a_run_that_goes_on(
    mlp_artifact: Path, batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio", reason="the extra test installs trackio")
    np.savez(tmp_path / "data.npz", **{n: np.stack([b[n] for b in batches[:4]]) for n in batches[0]})
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert printed(TRACKIO, mlp_artifact, tmp_path / "data.npz") == ""  # trackio's own words are on stderr
    ask = ["get", "metric", "--project", "news", "--run", "first", "--metric", "train/loss", "--json"]
    found = json.loads(printed("from trackio.cli import main; main()", *ask))
    with Session(mlp_artifact) as session:
        expected = [session.train_step(**batch) for _ in range(2) for batch in batches[:4]]
    assert [(v["step"], v["value"]) for v in found["values"]] == list(enumerate(expected, 1))


@pytest.mark.parametrize(("make", "package"), [(MLflow, "mlflow"), (Trackio, "trackio")])
def test_a_missing_package_is_named(make: Callable[[str], Any], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"pip install 'irongrad\[{package}\]'"):
        make("news")
