"""The synchronous loop: collect one rollout, learn from it, record the results.

Other loops over the same collector, learner and run record, such as one that collects ahead, are further small classes.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unirl.train.checkpoint.sample_files import IN_FLIGHT
from unirl.train.checkpoint.saved import DRIVER_STATE
from unirl.train.experience_files import EXPERIENCE
from unirl.trainer.clock import TRAINING, PhaseClock
from unirl.trainer.collector import Collector, ScoredRollout, Show
from unirl.trainer.experience import Experience
from unirl.trainer.learner import Learner
from unirl.trainer.record import RunRecord
from unirl.trainer.resuming import Changes, changed_settings, check_same_algorithm, refuse_changes
from unirl.trainer.settings import TrainerSettings, is_due
from unirl.types.errors import CheckpointError, TrainingError, UniRLError

logger = logging.getLogger(__name__)


class Trainer:
    """Alternates between collecting and learning. Independent of devices and Ray;
    `unirl.trainer.build.assembly.make_trainer` joins the parts."""

    _takes_left_over: ClassVar[bool] = False
    """True if the loop continues where requests were overtaken, see `Asking.left_over`."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        collector: Collector[Any],  # Any: parameters of the modality
        learner: Learner,
        record: RunRecord,
        clock: PhaseClock,
        stop: threading.Event,
        experience: Experience | None = None,
    ) -> None:
        self._settings = settings
        self.collector = collector
        self._learner = learner
        self._record = record
        self._clock = clock
        self._stop = stop
        self._experience = experience
        self._done = 0

    def run(self, resume: str | None = None) -> dict[str, Any]:
        """Train to the end, or until stopped; returns the summary, also written to `summary.json`.

        resume: None starts afresh, "auto" continues the newest valid checkpoint of the run directory.
        If the run ends early, the last checkpoint is kept; if an engine, a scorer or a push fails, the finished
        rollouts are saved first.
        """
        self.prepare()
        if resume is not None:
            self._resume()
        resolved = {"old_logp": self._learner.old_logp()}  # known only once components are built
        self._record.start(self._done, {"resume": resume, "resolved": resolved})
        try:
            self._loop()
        except (TrainingError, CheckpointError):
            raise  # the weights are wrong or cannot be saved, so nothing is kept
        except Exception:
            self._save_what_is_finished()
            raise
        if not self._record.is_saved(self._done):
            self._save()
        return self._record.finish(
            self._done, is_complete=self._is_done(), num_dropped_groups=self.collector.asking.num_dropped_groups
        )

    def prepare(self) -> None:
        """Prepare the run. Called once, before training or resuming."""
        self._record.prepare()
        self._learner.prepare()
        self.collector.prepare(self._record.evaluator)

    def step(self, rollout_id: int) -> dict[str, float]:
        """One rollout and the updates made from it; returns its metrics."""
        record = self._record
        with self._clock.about(rollout=rollout_id):
            record.scale_pools()
            pushed = self._learner.push(rollout_id, self.collector.rollout_policy)
            rollout = self.collector.collect(rollout_id, show=self._shows(rollout_id))
            trained = self._learned(rollout)
        metrics = {**rollout.metrics, **pushed, **trained, **self._clock.step_metrics(), **record.pool_metrics()}
        busy_s = sum(metrics.get(f"timing_s/{name}", 0.0) for name in TRAINING)
        metrics["perf/samples_per_s"] = rollout.num_samples / busy_s if busy_s > 0 else 0.0
        return metrics

    def _shows(self, rollout_id: int) -> Show | None:
        """What shows samples of a rollout, if it is one of those that are shown."""
        done = rollout_id + 1
        return functools.partial(self._record.show_rollout, done=done) if self._record.shows(done) else None

    def _learned(
        self, rollout: ScoredRollout, requests: Sequence[int] | None = None, version: int | None = None
    ) -> dict[str, float]:
        """Train on a rollout, which is then finished; returns the metrics of training. requests: what it is made of;
        None: the request of its own number. version: the oldest that made any of it; None: that of its own number."""
        done, replayed = rollout.rollout_id + 1, {}
        if self._experience is not None:
            with self._clock.phase("other"):
                rollout, replayed = self._experience.mixed(rollout, rollout.rollout_id if version is None else version)
        trained = {**self._learner.train(rollout, self._record.recorded(done)), **replayed}
        if self._experience is not None:
            self._experience.finished(rollout.rollout_id)
        self._finish(rollout.rollout_id, [rollout.rollout_id] if requests is None else requests)
        self._record.note(trained, rollout.num_samples)
        return trained

    def _finish(self, rollout_id: int, requests: Sequence[int]) -> None:
        """A rollout, made of these requests, is trained on."""
        self._record.keep_traces(rollout_id + 1, self._learner.take_traces())
        self.collector.finished(rollout_id, requests)

    def _loop(self) -> None:
        """Run rollouts with evaluations and checkpoints, to the end or until stopped."""
        record = self._record
        if record.evaluator is not None and record.evaluator.config.before and record.lacks_evaluation(0):
            record.log(self._evaluate(0), 0)
        if self._is_done() and record.lacks_evaluation(self._done):
            record.log(self._evaluate(self._done), self._done)  # the run failed before this evaluation
        while not self._is_done() and not self._stop.is_set():
            metrics = self.step(self._done)
            self._done += 1
            is_last = self._is_done()
            # Before evaluation and checkpoint, which then use the weights that the run continues with.
            if self._learner.is_parity_due(self._done):
                metrics.update(self._compare(self._done))
            is_sound = self._stay_in_range(metrics)
            try:
                if is_last or record.is_evaluation_due(self._done):
                    metrics.update(self._evaluate(self._done))
            finally:
                record.log(metrics, self._done)
            # After the metrics, of which a resumed run drops what is past its checkpoint, and misses what is not.
            is_regular = is_sound and is_due(self._done, self._settings.save_interval)
            if is_last or self._stop.is_set() or is_regular:
                self._save()

    def _is_done(self) -> bool:
        budget_s = self._settings.max_cpu_s
        is_spent = budget_s is not None and self._clock.training_cpu_s > budget_s
        return is_spent or self._done >= self._settings.num_rollouts

    def _evaluate(self, done: int) -> dict[str, float]:
        evaluator = self._record.evaluator
        pushed = {} if evaluator is None else self._learner.push(done, evaluator.config.policy)
        return {**pushed, **self._record.evaluate(done)}

    def _compare(self, done: int) -> dict[str, float]:
        return self._learner.compare(done, self.collector.rollout_policy)

    def _stay_in_range(self, metrics: dict[str, float]) -> bool:
        """Stop or roll back a run that has left its usual range; returns True if a checkpoint would be sound.

        Regular checkpoints are skipped while the run is out of range, so that a rollback always returns to a sound one.
        """
        watch = self._learner.watch(metrics, self._done)
        metrics.update(watch.metrics)
        for alarm in watch.begun:
            self._record.alert(alarm.name, alarm.reason, self._done)
        if watch.verdict == "stop":
            self._record.log(metrics, self._done)
            self._save()
            raise TrainingError(
                f"stopped after rollout {self._done}: {watch.reason}. A checkpoint was saved; mend the "
                "cause and resume, or set guardrails.action: warn."
            )
        if watch.verdict == "rollback":
            try:
                state = self._record.load_newest()
            except CheckpointError as error:
                raise TrainingError(
                    f"rollout {self._done}: {watch.reason}, and there is no checkpoint to roll back to. "
                    "Set save.interval, or guardrails.action: warn."
                ) from error
            self._learner.roll_back(state)
            logger.warning("rolled the weights back to rollout %d and go on", state["next_rollout"])
        return not (watch.verdict != "sound" and self._learner.rolls_back)

    # Checkpoints ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        state, files = self._samples()
        own = {**self.collector.state_dict(), **self._learner.state_dict(), **state}
        self._record.save(self._done, own, files)

    def _samples(self) -> tuple[dict[str, Any], dict[str, Sequence[str]]]:
        """State of samples that a checkpoint holds, and their files: folder of the run -> names."""
        if self._experience is None:
            return {}, {}
        return {EXPERIENCE: self._experience.state_dict()}, {EXPERIENCE: self._experience.names}

    def _save_what_is_finished(self) -> None:
        """Save the rollouts before a failed one, as if that had not begun; does nothing if training failed."""
        is_new = self._done > 0 and not self._record.is_saved(self._done)
        if self._learner.is_training or not is_new or self._record.is_closed:
            return
        try:
            self._save()
            self._record.wait()
        except UniRLError as error:  # the error that ended the run is raised, not this one
            logger.error("the %d finished rollouts could not be saved: %s", self._done, error)
        else:
            logger.error("the run ends early; its %d finished rollouts are saved (resume=auto)", self._done)

    def _resume(self) -> None:
        state = self._record.load_newest()
        try:
            self._take_over(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{DRIVER_STATE} of the newest checkpoint is not what this version writes: {what}. Remove the newest "
                "folder of checkpoints/ to resume from the one before it, or resume with the version that wrote it."
            ) from error
        logger.info("resumed after rollout %d", self._done)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        check_same_algorithm(state["config"], self._record.config)
        changes = self._changes_since(state)
        refuse_changes(changes, self._record.config)
        changed = {key.partition(".")[0] for key in changes}
        if any("advantages" in key.split(".")[1:] for key in changes):
            changed.add("track_advantages")
        self._done = int(state["next_rollout"])
        self.collector.load_state_dict(state, changed=changed)
        if self.collector.asking.left_over is not None and not self._takes_left_over:
            raise CheckpointError(
                "the checkpoint is of a schedule whose requests overtook others (schedule.window), which are still to "
                "be trained on. Resume with schedule.kind: async."
            )
        self._learner.load_state_dict(state, changed=changed)
        self._record.load_state_dict(state, changes=changes)
        if self._experience is not None and EXPERIENCE in state:
            if changed:
                logger.warning("kept samples are not trained on again: %s changed", ", ".join(sorted(changed)))
            else:
                self._experience.load_state_dict(state[EXPERIENCE], self._done)
        in_flight = state.get(IN_FLIGHT, {"requests": []})
        if in_flight["requests"] and (changed or not self._goes_on(in_flight)):
            why = f"{', '.join(sorted(changed))} changed" if changed else "this run does not take them"
            num = len(in_flight["requests"])
            logger.warning("the %d requests in flight of the checkpoint are made again: %s", num, why)

    def _goes_on(self, in_flight: Mapping[str, Any]) -> bool:
        """True if the run goes on with what was in flight of the one that it resumes; else it asks for it again."""
        return False

    def _changes_since(self, state: Mapping[str, Any]) -> Changes:
        """Settings and data rows that differ from a checkpoint's."""
        own = self._record
        changes = changed_settings(state["config"], own.config, state.get("digests"), own.digests)
        before, now = state["data"].get("fingerprint"), self.collector.asking.fingerprint
        return changes if before == now else {**changes, "data.fingerprint": [before, now]}
