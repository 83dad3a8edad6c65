"""Records a run: held-out evaluations, checkpoints, metrics, shown samples, and the summary."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unirl.algorithms.traces import Trace
from unirl.config.schema import Samples
from unirl.distributed.held import Held
from unirl.distributed.runtime import Runtime
from unirl.tracking.base import TakesTimeline, Tracker
from unirl.tracking.gallery import EVALUATION, Gallery
from unirl.tracking.sample_files import SampleFiles
from unirl.trainer.clock import PhaseClock
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.resuming import Changes, Digests
from unirl.trainer.roles import CheckpointerRole
from unirl.trainer.samples import first_roots, take, whole_groups
from unirl.trainer.scaling import take_sizes
from unirl.trainer.settings import TrainerSettings, is_due
from unirl.trainer.timeline import TIMELINE, Timeline
from unirl.trainer.versions import versions
from unirl.types.errors import ConfigError, UniRLError
from unirl.types.samples import SampleRecord, Video

logger = logging.getLogger(__name__)

NUM_SHOWN = 16
"""Samples per track that a grid or table of a rollout shows."""


class RunRecord:
    """Evaluates, saves, logs. `done` is always the number of finished rollouts.

    config: the published recipe, for trackers and checkpoints. digests: of its hidden values
    (`unirl.trainer.resuming`). scored_track: as in the collector. samples: how many to keep.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: TrainerSettings,
        *,
        evaluator: Evaluator | None,
        trackers: Sequence[Tracker],
        run_dir: Path,
        config: Mapping[str, Any],
        digests: Digests,
        clock: PhaseClock,
        scored_track: str | None = None,
        samples: Samples | None = None,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self.evaluator = evaluator
        self._trackers = trackers
        self._samples = samples if samples is not None else Samples()
        folder = run_dir / "samples"
        self._gallery = Gallery(folder, trackers, settings.best_metric)
        self._files = SampleFiles(folder, image_format=self._samples.image_format, max_mb=self._samples.max_mb)
        self._timeline = Timeline(run_dir / TIMELINE)
        self._recorded: tuple[int, list[str]] = (-1, [])
        self._run_dir = run_dir
        self.config = dict(config)
        self.digests = dict(digests)
        self._clock = clock
        self._scored_track = scored_track
        self._checkpointer = runtime.role("checkpointer", CheckpointerRole)
        self._started = time.perf_counter()
        self._wall_before_s = 0.0
        self._cpu_before_s = 0.0
        self._num_samples = 0
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._gap_mean: list[float] = []
        self._gap_max = 0.0
        self._first_ratio_deviation: float | None = None
        self._saved_at: int | None = None
        self._resume_changes: list[dict[str, Any]] = []

    def prepare(self) -> None:
        """Prepare the run directory. Called once, before training or resuming."""
        self._checkpointer.remove_unfinished()

    # Begin and end ----------------------------------------------------------------------------------------------

    def start(self, done: int, head: Mapping[str, Any]) -> None:
        """Start the trackers of a run that begins or continues after `done` rollouts, with the recipe and `head`."""
        known = done if head.get("resume") is not None else None
        self._files.start(known)
        self._timeline.start(known)
        for tracker in self._trackers:
            tracker.start({**self.config, **head}, self._run_dir, done)

    def finish(self, done: int, *, is_complete: bool, num_dropped_groups: int) -> dict[str, Any]:
        """Wait for the last checkpoint; returns the summary, also written to `summary.json`."""
        with self._clock.phase("checkpoint"):
            self._checkpointer.wait()
        self._write_timeline(done)
        summary = self._summary(done, is_complete=is_complete, num_dropped_groups=num_dropped_groups)
        (self._run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        for tracker in self._trackers:
            tracker.finish(summary)
        return summary

    # Metrics and samples ----------------------------------------------------------------------------------------

    def log(self, metrics: Mapping[str, float], done: int) -> None:
        """Log one point of every curve, and when what worked since the last one."""
        for tracker in self._trackers:
            tracker.log(metrics, done)
        self._write_timeline(done)

    def _write_timeline(self, done: int) -> None:
        """What worked when, since the last time."""
        lines = self._timeline.write([*self._clock.spans.take(), *self._runtime.take_spans()], done)
        for tracker in self._trackers:
            if isinstance(tracker, TakesTimeline):
                tracker.timeline(lines, done)

    def alert(self, name: str, text: str, done: int) -> None:
        """Send an alert to the trackers."""
        for tracker in self._trackers:
            tracker.alert(name, text, done)

    def note(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """Keep what the summary reports about a rollout's training, over all tracks together."""
        self._num_samples += num_samples
        for name, value in metrics.items():
            if name.endswith("mismatch/logp_absdiff/mean"):
                self._gap_mean.append(value)
            elif name.endswith("mismatch/logp_absdiff/max"):
                self._gap_max = max(self._gap_max, value)
            elif name.endswith("policy/first_ratio_max_abs_dev"):
                self._first_ratio_deviation = max(self._first_ratio_deviation or 0.0, value)

    def shows(self, done: int) -> bool:
        """True if samples of the rollout that ends with `done` rollouts are shown."""
        return is_due(done, self._settings.media_interval)

    def show_rollout(self, resp: Held, done: int) -> None:
        """Write samples of a scored response with advantages, as whole groups if they fit, and show the first few."""
        options, meta = self._samples, resp.meta
        kept, shown = whole_groups(meta, options.per_rollout), first_roots(meta, NUM_SHOWN)
        wanted = [sample for sample in meta.root_track().sample_ids if sample in {*kept, *shown}]
        taken = take(resp, wanted, whole=whole_groups(meta, min(options.per_rollout, options.videos)))
        recorded = [record for sample in kept for record in taken[sample]]
        files = self._keep("rollout", done, recorded)
        self._recorded = (done, [record.sample_id for record in recorded])
        records = [record for sample in shown for record in taken[sample]]
        self._gallery.show("rollout", done, records, files, most=NUM_SHOWN)

    def recorded(self, done: int) -> Sequence[str]:
        """Samples of the rollout that ends with `done` rollouts that were written."""
        return self._recorded[1] if self._recorded[0] == done else ()

    def keep_traces(self, done: int, traces: Sequence[Trace]) -> None:
        """Write what is known of recorded samples per token or step, next to them."""
        if traces:
            self._files.write_traces("rollout", done, traces)

    def _keep(self, name: str, done: int, records: Sequence[SampleRecord]) -> dict[str, Path]:
        """Write records that have whole media; returns the media's files."""
        whole = [each for each in records if not (isinstance(each.media, Video) and each.media.is_excerpt)]
        return self._files.write(name, done, whole) if whole else {}

    # Held-out evaluation ----------------------------------------------------------------------------------------

    def lacks_evaluation(self, done: int) -> bool:
        """True if this run has evaluations but none after `done` rollouts."""
        return self.evaluator is not None and done not in self._evaluations

    def is_evaluation_due(self, done: int) -> bool:
        """True every `eval.interval` rollouts, or when training passes another multiple of `eval.interval_cpu_s`."""
        if self.evaluator is None:
            return False
        every_s = self._settings.eval_interval_cpu_s
        if every_s is None:
            return is_due(done, self._settings.eval_interval)
        last_s = max((record["train_cpu_s"] for record in self._evaluations.values()), default=0.0)
        return self._clock.training_cpu_s // every_s > last_s // every_s

    def evaluate(self, done: int) -> dict[str, float]:
        """Held-out means of the policy that the engine samples from; {} without an evaluator."""
        if self.evaluator is None:
            return {}
        with self._clock.phase("eval"):
            result = self.evaluator.run(
                self._runtime,
                self._scored_track,
                num_records=self._samples.per_evaluation,
                num_videos=self._samples.videos,
            )
        if self._settings.best_metric not in result.overall:
            raise ConfigError(
                f"save.best_metric = {self._settings.best_metric} is not among the held-out means "
                f"{', '.join(result.overall)}. Name one of those, so that a best checkpoint can be kept."
            )
        self._evaluations[done] = {
            **result.record(),
            "num_samples_trained": self._num_samples,
            "train_cpu_s": self._clock.training_cpu_s,
        }
        files = self._keep(EVALUATION, done, result.records)
        self._gallery.show(EVALUATION, done, result.records, files)
        return result.metrics()

    # Checkpoints ------------------------------------------------------------------------------------------------

    def save(self, done: int, state: Mapping[str, Any], kept: Mapping[str, Sequence[str]]) -> None:
        """Save a checkpoint of the weights, with `state` of the other parts and the record's own, and samples.

        kept: folder of the run -> names of its files, see `Checkpointer.save`.
        """
        latest = self._evaluations.get(done)
        score = None if latest is None else latest["overall"].get(self._settings.best_metric)
        with self._clock.phase("checkpoint"):
            self._checkpointer.save(done, {"next_rollout": done, **state, **self.state_dict()}, score, dict(kept))
        self._saved_at = done

    def is_saved(self, done: int) -> bool:
        """True if the newest checkpoint is from after `done` rollouts."""
        return self._saved_at == done

    def wait(self) -> None:
        """Wait until the newest checkpoint is on disk."""
        self._checkpointer.wait()

    def scale_pools(self) -> None:
        """Give pools the sizes that `trainer scale` asked for since the last call. A size that cannot be had is
        an error in the log, and the run continues with the members that it has."""
        try:
            sizes = take_sizes(self._run_dir)
            if sizes:
                self._runtime.scale(sizes)
        except UniRLError as error:
            logger.error("pools keep their sizes: %s", error)

    def pool_metrics(self) -> dict[str, float]:
        """What the pools of workers did since the last call, see `Runtime.pool_metrics`."""
        return self._runtime.pool_metrics()

    @property
    def is_closed(self) -> bool:
        """True if the workers are stopped, so that nothing can be saved."""
        return self._runtime.is_closed

    def load_newest(self) -> dict[str, Any]:
        """Load the newest valid checkpoint into the backend; returns the driver's state. Raises CheckpointError."""
        return self._checkpointer.load(None)

    # State ------------------------------------------------------------------------------------------------------

    @property
    def _wall_s(self) -> float:
        return self._wall_before_s + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Everything that the summary of a resumed run needs, and the recipe."""
        return {
            "num_samples": self._num_samples,
            "clock": self._clock.state_dict(),
            "wall_s": self._wall_s,
            "cpu_s": self._cpu_before_s + self._runtime.usage().cpu_s,
            "evaluations": {str(step): record for step, record in self._evaluations.items()},
            "gap_mean": self._gap_mean,
            "gap_max": self._gap_max,
            "first_ratio_deviation": self._first_ratio_deviation,
            "resume_changes": self._resume_changes,
            "config": self.config,
            "digests": self.digests,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, changes: Changes) -> None:
        """Restore `state_dict`, and record the settings that have changed since."""
        self._num_samples = state["num_samples"]
        self._resume_changes = list(state.get("resume_changes", []))
        if changes:
            self._resume_changes.append({"rollout": state["next_rollout"], "settings": changes})
        self._clock.load_state_dict(state["clock"])
        self._wall_before_s = state["wall_s"]
        self._cpu_before_s = state["cpu_s"]
        self._evaluations = {int(step): record for step, record in state["evaluations"].items()}
        self._gap_mean = list(state["gap_mean"])
        self._gap_max = state["gap_max"]
        self._first_ratio_deviation = state["first_ratio_deviation"]
        self._saved_at = state["next_rollout"]

    def _summary(self, done: int, *, is_complete: bool, num_dropped_groups: int) -> dict[str, Any]:
        usage = self._runtime.usage()
        steps = sorted(self._evaluations)
        return {
            "recipe": self._settings.recipe,
            "seed": self._settings.seed,
            "versions": versions(),
            "settings": asdict(self._settings),
            "num_rollouts": done,
            "num_samples": self._num_samples,
            "num_dropped_groups": num_dropped_groups,
            "is_complete": is_complete,
            "wall_s": self._wall_s,
            "cpu_s": self._cpu_before_s + usage.cpu_s,
            "peak_rss_bytes": usage.peak_rss_bytes,
            "phases": self._clock.wall_s,
            "phases_cpu_s": self._clock.cpu_s,
            "eval_before": _held_out(self._evaluations[0]) if 0 in self._evaluations else None,
            "eval_after": _held_out(self._evaluations[steps[-1]]) if steps and steps[-1] > 0 else None,
            "evaluations": {str(step): self._evaluations[step] for step in steps},
            "resume_changes": self._resume_changes,
            "logp_gap": {
                "mean": sum(self._gap_mean) / len(self._gap_mean) if self._gap_mean else None,
                "max": self._gap_max if self._gap_mean else None,
            },
            "first_ratio_max_abs_dev": self._first_ratio_deviation,
            "run_dir": str(self._run_dir),
        }


def _held_out(record: dict[str, Any]) -> dict[str, Any]:
    """An evaluation without its time, so that two runs of a recipe compare equal."""
    return {name: value for name, value in record.items() if name not in ("num_samples_trained", "train_cpu_s")}
