"""Metrics, samples and the recipe in MLflow."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from unirl.tracking.base import Config, Summary, TableRow
from unirl.tracking.keys import flat
from unirl.tracking.libraries import library_of
from unirl.tracking.tables import cells, columns, numbered
from unirl.tracking.wandb import run_id

RUN_TAG = "unirl.run"
"""Tag by which a resumed run finds itself."""
MAX_BATCH = 1000
"""Metrics that MLflow takes in one request."""
MAX_PARAMETERS = 100
"""Parameters that MLflow takes in one request."""
MAX_PARAMETER = 6000
"""Characters of a parameter that MLflow keeps."""


class MlflowTracker:
    """Logs to an experiment; a resumed run continues its own curve.

    experiment, name: the experiment and the run's name; name None takes the recipe and the run directory's name.
    tracking_uri: a server, or a place such as sqlite:///mlflow.db; None leaves it to MLflow's own settings. Numbers
    that are not finite are left out, since MLflow's stores refuse them. Needs the extra `mlflow`.
    """

    def __init__(self, experiment: str = "unirl", name: str | None = None, tracking_uri: str | None = None) -> None:
        self._mlflow: Any = library_of("unirl.tracking.mlflow.MlflowTracker")  # Any: an optional module
        self._experiment, self._name, self._uri = experiment, name, tracking_uri
        self._client: Any = None  # Any: MLflow's client
        self._run = ""

    def start(self, config: Config, run_dir: Path, step: int) -> None:
        """Open the run, the same one again when resuming, and write the recipe as parameters and as a file."""
        self._client = self._mlflow.MlflowClient(self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        tag = run_id(run_dir)
        known = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{tag}'", max_results=1)
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            name = self._name or f"{config['recipe']} {run_dir.name}"
            self._run = self._client.create_run(experiment, run_name=name, tags={RUN_TAG: tag}).info.run_id
            parameters = [
                self._mlflow.entities.Param(key, str(value)[:MAX_PARAMETER])
                for key, value in flat(config)
                if not isinstance(value, Mapping)
            ]
            for start in range(0, len(parameters), MAX_PARAMETERS):
                self._client.log_batch(self._run, params=parameters[start : start + MAX_PARAMETERS])
        self._client.log_dict(self._run, dict(config), "config.yaml")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per metric."""
        now = int(time.time() * 1000)
        points = [
            self._mlflow.entities.Metric(name, float(value), now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(points), MAX_BATCH):
            self._client.log_batch(self._run, metrics=points[start : start + MAX_BATCH])

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """One image on the axis of its step, and its captions as a text."""
        self._client.log_image(self._run, picture.convert("RGB"), key=f"samples/{name}", step=step)
        if captions:
            self._client.log_text(self._run, numbered(captions), f"samples/{name}-{step:06d}.md")

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file as an artifact, and the captions as a text."""
        self._media(name, files, step, captions)

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Each file as an artifact, and the captions as a text."""
        self._media(name, files, step, captions)

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        """One table as an artifact."""
        names = columns(rows)
        data = {"columns": names, "data": cells(rows, names)}
        self._client.log_dict(self._run, data, f"samples/{name}-{step:06d}.json")

    def alert(self, name: str, text: str, step: int) -> None:
        """A text, and a tag that the list of runs shows."""
        self._client.log_text(self._run, text, f"alerts/{name}-{step:06d}.txt")
        self._client.set_tag(self._run, f"alert.{name}", f"after rollout {step}: {text}")

    def finish(self, summary: Summary) -> None:
        """Write the run's summary and close it."""
        if self._client is not None:
            self._client.log_dict(self._run, dict(summary), "summary.json")
            self._client.set_terminated(self._run, "FINISHED")
            self._client = None

    def close(self) -> None:
        """Close a run that did not finish, marked as failed."""
        if self._client is not None:
            self._client.set_terminated(self._run, "FAILED")
            self._client = None

    def _media(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        for file in files:
            self._client.log_artifact(self._run, str(file), f"samples/{name}-{step:06d}")
        self._client.log_text(self._run, numbered(captions), f"samples/{name}-{step:06d}/captions.md")
