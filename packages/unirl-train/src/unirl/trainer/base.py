"""The loop that trainers share: rollout, reward, advantage, train, evaluate, save.

A trainer of one modality says what a request is, what is prepared before the first one, and what people get to see.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from unirl.algorithms.advantages import Advantages, group_metrics
from unirl.algorithms.selection import SampleSelection, zero_variance_groups
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import Held, Role, Runtime
from unirl.tracking.base import Tracker
from unirl.train.stack import TrainStepResult
from unirl.trainer.balance import balanced_order
from unirl.trainer.clock import TRAINING, PhaseClock
from unirl.trainer.evaluation import BaseEvaluator, EvaluationResult
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.resuming import Changes, changed_settings, check_same_algorithm, refuse_changes
from unirl.trainer.versions import versions
from unirl.types.errors import CheckpointError, ConfigError, RewardError, TrainingError, UniRLError
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import BaseSamplingParams

logger = logging.getLogger(__name__)

ParamsT = TypeVar("ParamsT", bound=BaseSamplingParams)


@dataclass(frozen=True)
class TrainerSettings:
    """The numbers of a run that belong to no component."""

    recipe: str
    seed: int
    batch_size: int
    """Prompts a rollout."""
    num_rollouts: int
    eval_interval: int = 0
    """Rollouts between evaluations; 0 evaluates only before and after."""
    eval_interval_cpu_s: float | None = None
    """Training CPU seconds between evaluations, in place of `eval_interval`."""
    max_cpu_s: float | None = None
    """Training ends with the rollout in which its CPU seconds (rollout, reward, train, other) exceed this. `progress`
    stays the fraction of `num_rollouts`, so that what a rollout learns never depends on the speed of the machine."""
    save_interval: int = 0
    """Rollouts between checkpoints; 0 saves only at the end."""
    media_interval: int = 0
    """Rollouts between pictures of training samples; 0 draws none."""
    num_updates: int = 1
    """Optimizer steps a rollout; what is trained on divides by it."""
    max_refills: int = 4
    """Attempts to replace dropped groups before the run stops."""
    best_metric: str = "reward"
    """Held-out mean that the best checkpoint is chosen by."""


class Trainer(ABC, Generic[ParamsT]):
    """One synchronous loop over roles; knows neither devices nor Ray."""

    trains_tokens: ClassVar[bool] = False
    """Whether requests are for tokens."""

    def __init__(
        self,
        runtime: Runtime,
        settings: TrainerSettings,
        *,
        data: MultimodalRLDataSource,
        sampling: ParamsT,
        advantages: Advantages,
        evaluator: BaseEvaluator | None,
        guardrails: GuardrailConfig,
        trackers: Sequence[Tracker],
        run_dir: Path,
        config: Mapping[str, Any],
        rollout_policy: str | None,
        stop: threading.Event,
        selection: SampleSelection | None = None,
        sync: Role | None = None,
        clock: PhaseClock | None = None,
    ) -> None:
        self._runtime = runtime
        self._sync = sync
        self._synced: tuple[int, str | None] | None = None
        self._settings = settings
        self._data = data
        self._sampling = sampling
        self._advantages = advantages
        self._selection = selection if selection is not None else SampleSelection()
        self._evaluator = evaluator
        self._guardrails = Guardrails(guardrails)
        self._trackers = trackers
        self._run_dir = run_dir
        self._config = dict(config)
        self._rollout_policy = rollout_policy
        self._stop = stop
        self._engine = runtime.role("engine")
        self._reward = runtime.role("reward")
        self._stack = runtime.role("stack")
        self._checkpointer = runtime.role("checkpointer")
        self._clock = clock if clock is not None else PhaseClock()
        self._next_rollout = 0
        self._num_samples = 0
        self._num_dropped_groups = 0
        self._wall_before_s = 0.0
        self._cpu_before_s = 0.0
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._gap_mean: list[float] = []
        self._gap_max = 0.0
        self._first_ratio_deviation: float | None = None
        self._saved_at = -1
        self._resume_changes: list[dict[str, Any]] = []
        self._before_rollout: dict[str, Any] | None = None

    # The run ----------------------------------------------------------------------------------------------------

    def run(self, resume: str | None = None) -> dict[str, Any]:
        """Train to the end, or until stopped; returns the summary, also written to `summary.json`.

        resume: None starts afresh, "auto" continues the newest valid checkpoint of the run directory.
        Whatever ends the run early, the last checkpoint stands; where an engine, a scorer or a push fails, one is saved
        first, of the rollouts that are finished.
        """
        started = time.perf_counter()
        self._stack.prepare()
        if self._sync is not None:
            self._sync.prepare()
        self.prepare()
        if resume is not None:
            self._resume()
        self._before_rollout = self._drawn()
        resolved = {"old_logp": self._stack.old_logp()}  # what only the built components know
        for tracker in self._trackers:
            tracker.start({**self._config, "resume": resume, "resolved": resolved}, self._run_dir, self._next_rollout)
        try:
            self._loop(started)
        except (TrainingError, CheckpointError):
            raise  # weights that went wrong, or nowhere to save: nothing to keep
        except Exception:
            self._save_what_is_finished(started)
            raise
        if self._saved_at != self._next_rollout:
            self._save(started)
        with self._clock.phase("checkpoint"):
            self._checkpointer.wait()
        summary = self._summary(self._wall_before_s + time.perf_counter() - started)
        (self._run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        for tracker in self._trackers:
            tracker.finish(summary)
        return summary

    def _loop(self, started: float) -> None:
        """Rollouts with what follows them, to the end or until stopped."""
        if self._evaluator is not None and self._evaluator.config.before and 0 not in self._evaluations:
            self._evaluate(0)
        if self._evaluator is not None and self._is_done() and self._next_rollout not in self._evaluations:
            self._log(self._evaluate(self._next_rollout), self._next_rollout)  # it failed after the last rollout
        while not self._is_done() and not self._stop.is_set():
            metrics = self.step(self._next_rollout)
            self._next_rollout += 1
            self._before_rollout = self._drawn()
            done = self._next_rollout
            is_last = self._is_done()
            reason = self._guardrails.observe(metrics["train/grad_norm"], metrics["reward/mean"])
            # Before evaluation and checkpoint, which are then of the weights that the run goes on with.
            self._act(reason, metrics, started)
            try:
                if self._evaluator is not None and (is_last or self._is_evaluation_due()):
                    metrics.update(self._evaluate(done))
                # What a rollback returns to must be sound: no regular checkpoint while the run is off its range.
                is_regular = _due(done, self._settings.save_interval) and not (reason and self._guardrails.rolls_back)
                if is_last or self._stop.is_set() or is_regular:
                    self._save(started)
            finally:
                self._log(metrics, done)

    def _is_done(self) -> bool:
        budget_s = self._settings.max_cpu_s
        is_spent = budget_s is not None and self._clock.training_cpu_s > budget_s
        return is_spent or self._next_rollout >= self._settings.num_rollouts

    def _is_evaluation_due(self) -> bool:
        """After every so many rollouts, or where training has passed another multiple of so many CPU seconds."""
        every_s = self._settings.eval_interval_cpu_s
        if every_s is None:
            return _due(self._next_rollout, self._settings.eval_interval)
        last_s = max((record["train_cpu_s"] for record in self._evaluations.values()), default=0.0)
        return self._clock.training_cpu_s // every_s > last_s // every_s

    def step(self, rollout_id: int) -> dict[str, float]:
        """One rollout and the updates made from it; returns its metrics."""
        self._before_rollout = self._drawn()
        with self._clock.phase("other"):
            req = self.request(rollout_id, self._settings.batch_size)
        pushed = self._push_weights(rollout_id, self._rollout_policy)
        with self._clock.phase("rollout"):
            resp = self._engine.generate(req, policy=self._rollout_policy)
        with self._clock.phase("reward"):
            gauges = self._score(resp)
            resp, gauges = self._refill(resp, gauges, rollout_id)
        with self._clock.phase("other"):
            progress = rollout_id / max(1, self._settings.num_rollouts - 1)
            meta = resp.meta
            root, num_samples = meta.root_name(), meta.batch_size
            advantages = {
                name: self._advantages(
                    meta.track(name).scored_rewards,
                    meta.track(name).group_ids,
                    meta.track(name).component_rewards,
                    progress=progress,
                )
                for name in dict.fromkeys((root, *self._stack.trained_tracks()))
            }
            for name, values in advantages.items():
                resp.attach(name, advantages=values)
            metrics = self._rollout_metrics(meta.track(root), gauges)
            metrics.update(advantage_metrics({name: advantages[name] for name in self._stack.trained_tracks()}))
            metrics.update(self._advantages.metrics(progress))
            metrics.update(pushed)
            if _due(rollout_id + 1, self._settings.media_interval):
                self.show_rollout(resp, root, rollout_id + 1)
            resp = self._selected(resp, root)
            metrics["group/trained_samples"] = float(resp.meta.batch_size)
        self._before_rollout = None  # from here on the weights change
        with self._clock.phase("train"):
            result = self._stack.train(resp, progress=progress)
        with self._clock.phase("other"):
            resp.release()
            self._num_samples += num_samples
            metrics.update(self._training_metrics(result))
        metrics.update(self._clock.step_metrics())
        busy_s = sum(metrics.get(f"timing_s/{name}", 0.0) for name in TRAINING)
        metrics["perf/samples_per_s"] = num_samples / busy_s if busy_s > 0 else 0.0
        return metrics

    def _push_weights(self, done: int, policy: str | None) -> dict[str, float]:
        """Let an engine with weights of its own sample from a policy after `done` rollouts; returns what was pushed.

        Once for each policy: evaluation and rollout of one policy share the push. Raises WeightSyncError where the
        engine has not taken exactly what was sent.
        """
        if self._sync is None or self._synced == (done, policy):
            return {}
        with self._clock.phase("sync"):
            pushed = self._sync.push(policy)
        self._synced = (done, policy)
        return pushed

    # What a modality says ---------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Called once, before training or resuming: what the engine must know of the whole run."""

    @abstractmethod
    def request(self, rollout_id: int, num_prompts: int) -> RolloutReq:
        """The next prompts of the data as a request, with everything pinned."""

    @abstractmethod
    def show_rollout(self, resp: Held, track: str, step: int) -> None:
        """Let people see some samples of a track with their rewards. Called every `media_interval` rollouts."""

    @abstractmethod
    def show_evaluation(self, result: EvaluationResult, step: int) -> None:
        """Let people see some samples of a held-out evaluation, and keep them in the run directory."""

    def training_costs(self, resp: Held) -> list[int] | None:
        """What each sample costs to train, by which they are dealt to devices; None leaves them where they are."""
        return None

    # Rollout and reward ----------------------------------------------------------------------------------------

    def _score(self, resp: Held) -> dict[str, float]:
        """Rewards into the root track, where it lies; returns how scoring kept up, of the slowest worker."""
        gauges = self._reward.score_track(resp, resp.meta.root_name())
        resp.refresh()
        return largest(gauges)

    def _refill(self, resp: Held, gauges: dict[str, float], rollout_id: int) -> tuple[Held, dict[str, float]]:
        """Replace groups that a scorer dropped, and under dynamic sampling groups that teach nothing, by fresh prompts,
        until the batch is whole again; samples go from worker to worker.

        After `max_refills` attempts groups that teach nothing stay; groups without a score raise RewardError.
        """
        for _ in range(self._settings.max_refills):
            track = resp.meta.root_track()
            failed = track.failed_groups
            dropped = failed | self._uninformative_groups(track)
            if not dropped:
                return resp, gauges
            self._num_dropped_groups += len(dropped)
            if failed:
                logger.warning("rollout %d: %d groups could not be scored and are replaced", rollout_id, len(failed))
            keep = [row for row, group in enumerate(track.group_ids) if group not in dropped]
            fresh = self._engine.generate(self._fresh_groups(rollout_id, len(dropped)), policy=self._rollout_policy)
            gauges = largest([gauges, self._score(fresh)])
            wanted = list(range(track.batch_size - len(keep)))
            whole = self._runtime.gather([(held, rows) for held, rows in ((resp, keep), (fresh, wanted)) if rows])
            resp.release()
            fresh.release()
            resp = whole
        track = resp.meta.root_track()
        dropped = track.failed_groups
        if dropped:
            raise RewardError(
                f"{len(dropped)} groups still could not be scored after {self._settings.max_refills} refills: "
                f"{sorted(dropped)[:4]}; first error: {next((e for e in track.reward_errors if e), None)}"
            )
        return resp, gauges

    def _uninformative_groups(self, track: RolloutTrack) -> set[str]:
        if not self._selection.dynamic_sampling:
            return set()
        return zero_variance_groups(track.scored_rewards, track.group_ids)

    def _selected(self, resp: Held, name: str) -> Held:
        """The samples to train on, by the advantages of a track; those that change devices go from worker to worker."""
        track = resp.meta.track(name)
        divisor = self._runtime.num_shards * self._settings.num_updates
        rows = self._selection.rows(track.known_advantages, track.group_ids, divisor)
        if rows is not None and len(rows) % divisor:
            raise ConfigError(
                f"selection keeps {len(rows)} samples, which do not divide over {self._runtime.num_shards} devices x "
                f"{self._settings.num_updates} updates. Change batch_size, selection.best_of or "
                "stack.num_updates_per_batch."
            )
        rows = self._balanced(resp, rows)
        if rows is None:
            return resp
        chosen = self._runtime.gather([(resp, rows)])
        resp.release()
        return chosen

    def _balanced(self, resp: Held, rows: list[int] | None) -> list[int] | None:
        """The rows to train on (None: all, as they lie), dealt so that every device has as much to do."""
        costs = self.training_costs(resp) if self._runtime.num_shards > 1 else None
        if costs is None:
            return rows
        in_order = list(range(len(costs)))
        own = in_order if rows is None else rows
        order = balanced_order(
            [costs[row] for row in own],
            self._runtime.num_shards,
            self._settings.num_updates,
            self._stack.samples_per_unit(),
        )
        arranged = [own[place] for place in order]
        return None if arranged == in_order else arranged

    def _fresh_groups(self, rollout_id: int, num_groups: int) -> RolloutReq:
        """A request for at least `num_groups` new prompts that divides over the devices, with ids of its own."""
        while (num_groups * self._sampling.samples_per_prompt) % self._runtime.num_shards:
            num_groups += 1
        fresh = self.request(rollout_id, num_groups)
        return fresh.replace(
            sample_ids=[f"refill{self._num_dropped_groups}:{name}" for name in fresh.sample_ids],
            group_ids=[f"refill{self._num_dropped_groups}:{name}" for name in fresh.group_ids],
            init_noise_group_ids=[f"refill{self._num_dropped_groups}:{name}" for name in fresh.init_noise_group_ids],
        )

    # Metrics, evaluation ---------------------------------------------------------------------------------------

    def _rollout_metrics(self, track: RolloutTrack, gauges: Mapping[str, float]) -> dict[str, float]:
        rewards = track.scored_rewards
        metrics = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(unbiased=False)),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "reward/dropped_groups": float(self._num_dropped_groups),
        }
        for name, values in track.component_rewards.items():
            metrics[f"reward/{name}/mean"] = float(values.mean())
            metrics[f"reward/{name}/std"] = float(values.std(unbiased=False))
        metrics.update({f"reward/{name}": value for name, value in gauges.items()})
        metrics.update(group_metrics(rewards, track.group_ids))
        return metrics

    def _training_metrics(self, result: TrainStepResult) -> dict[str, float]:
        metrics = dict(result.metrics)
        if "mismatch/logp_absdiff/mean" in metrics:
            self._gap_mean.append(metrics["mismatch/logp_absdiff/mean"])
            self._gap_max = max(self._gap_max, metrics["mismatch/logp_absdiff/max"])
        if "policy/first_ratio_max_abs_dev" in metrics:
            largest = self._first_ratio_deviation or 0.0
            self._first_ratio_deviation = max(largest, metrics["policy/first_ratio_max_abs_dev"])
        return metrics

    def _evaluate(self, done: int) -> dict[str, float]:
        if self._evaluator is None:
            return {}
        pushed = self._push_weights(done, self._evaluator.config.policy)
        with self._clock.phase("eval"):
            result = self._evaluator.run(self._engine, self._reward, self._runtime.num_shards)
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
        self.show_evaluation(result, done)
        metrics = {**pushed, **result.metrics()}
        if done == 0:
            self._log(metrics, 0)
        return metrics

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step)

    # Guardrails, checkpoints, summary --------------------------------------------------------------------------

    def _act(self, reason: str | None, metrics: dict[str, float], started: float) -> None:
        """Warn about a run that leaves its own range; stop it or roll it back where the patience is used up."""
        if reason is not None:
            logger.warning("rollout %d: %s", self._next_rollout, reason)
        if not self._guardrails.acts:
            return
        if self._guardrails.config.action == "stop":
            self._log(metrics, self._next_rollout)
            self._save(started)
            raise TrainingError(
                f"stopped after rollout {self._next_rollout}: {reason}. A checkpoint was saved; resume with a lower "
                "learning rate, or set guardrails.action: warn."
            )
        try:
            state = self._checkpointer.load(None)
        except CheckpointError as error:
            raise TrainingError(
                f"rollout {self._next_rollout}: {reason}, and there is no checkpoint to roll back to. "
                "Set save.interval, or guardrails.action: warn."
            ) from error
        self._stack.load_state_dict(state["stack"])
        self._synced = None
        logger.warning("rolled the weights back to rollout %d and go on", state["next_rollout"])
        self._guardrails.reset()

    def _save(self, started: float) -> None:
        latest = self._evaluations.get(self._next_rollout)
        score = None if latest is None else latest["overall"].get(self._settings.best_metric)
        with self._clock.phase("checkpoint"):
            self._checkpointer.save(self._next_rollout, self._driver_state(started), score)
        self._saved_at = self._next_rollout

    def _drawn(self) -> dict[str, Any]:
        """What a rollout changes before anything is trained."""
        return {
            "data": self._data.state_dict(),
            "advantages": self._advantages.state_dict(),
            "num_dropped_groups": self._num_dropped_groups,
        }

    def _restore_drawn(self, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state["data"])
        self._advantages.load_state_dict(state["advantages"])
        self._num_dropped_groups = state["num_dropped_groups"]

    def _save_what_is_finished(self, started: float) -> None:
        """Save the rollouts before one that failed, as if it had not begun; nothing where it failed in training."""
        is_new = self._next_rollout > 0 and self._saved_at != self._next_rollout
        if self._before_rollout is None or not is_new or self._runtime.is_closed:
            return
        self._restore_drawn(self._before_rollout)
        try:
            self._save(started)
            self._checkpointer.wait()
        except UniRLError as error:  # what ended the run is raised, not this
            logger.error("the %d finished rollouts could not be saved: %s", self._next_rollout, error)
        else:
            logger.error("the run ends early; its %d finished rollouts are saved (resume=auto)", self._next_rollout)

    def _driver_state(self, started: float) -> dict[str, Any]:
        return {
            "next_rollout": self._next_rollout,
            "num_samples": self._num_samples,
            **self._drawn(),
            "stack": self._stack.state_dict(),
            "guardrails": self._guardrails.state_dict(),
            "clock": self._clock.state_dict(),
            "wall_s": self._wall_before_s + time.perf_counter() - started,
            "cpu_s": self._cpu_before_s + self._runtime.usage().cpu_s,
            "evaluations": {str(step): record for step, record in self._evaluations.items()},
            "gap_mean": self._gap_mean,
            "gap_max": self._gap_max,
            "first_ratio_deviation": self._first_ratio_deviation,
            "resume_changes": self._resume_changes,
            "config": self._config,
        }

    def _resume(self) -> None:
        state = self._checkpointer.load(None)
        check_same_algorithm(state["config"], self._config)
        changes = self._changes_since(state)
        refuse_changes(changes, self._config)
        self._next_rollout = state["next_rollout"]
        self._num_samples = state["num_samples"]
        sections = {key.partition(".")[0] for key in changes}
        # What was remembered of other rows or other rewards begins anew.
        self._restore_drawn(
            {
                **state,
                **({"data": self._data.state_dict()} if sections & {"seed", "data"} else {}),
                **({"advantages": self._advantages.state_dict()} if sections & {"reward", "advantages"} else {}),
            }
        )
        self._stack.load_state_dict(state["stack"])
        if "reward" not in sections:
            self._guardrails.load_state_dict(state["guardrails"])
        self._resume_changes = list(state.get("resume_changes", []))
        if changes:
            self._resume_changes.append({"rollout": self._next_rollout, "settings": changes})
        self._clock.load_state_dict(state["clock"])
        self._wall_before_s = state["wall_s"]
        self._cpu_before_s = state["cpu_s"]
        self._evaluations = {int(step): record for step, record in state["evaluations"].items()}
        self._gap_mean = list(state["gap_mean"])
        self._gap_max = state["gap_max"]
        self._first_ratio_deviation = state["first_ratio_deviation"]
        self._saved_at = self._next_rollout

    def _changes_since(self, state: Mapping[str, Any]) -> Changes:
        """Settings and rows of the data that differ from those of a checkpoint."""
        changes = changed_settings(state["config"], self._config)
        before, now = state["data"].get("fingerprint"), self._data.state_dict().get("fingerprint")
        return changes if before == now else {**changes, "data.fingerprint": [before, now]}

    def _summary(self, wall_s: float) -> dict[str, Any]:
        usage = self._runtime.usage()
        steps = sorted(self._evaluations)
        return {
            "recipe": self._settings.recipe,
            "seed": self._settings.seed,
            "versions": versions(),
            "settings": asdict(self._settings),
            "num_rollouts": self._next_rollout,
            "num_samples": self._num_samples,
            "num_dropped_groups": self._num_dropped_groups,
            "is_complete": self._is_done(),
            "wall_s": wall_s,
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


def _due(count: int, interval: int) -> bool:
    return interval > 0 and count % interval == 0


def _held_out(record: dict[str, Any]) -> dict[str, Any]:
    """An evaluation without when it was taken, so that two runs of one recipe compare equal."""
    return {name: value for name, value in record.items() if name not in ("num_samples_trained", "train_cpu_s")}


def largest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest of each number over several records; one that only some have counts where it is."""
    return {name: max(part[name] for part in parts if name in part) for name in sorted({n for p in parts for n in p})}


def advantage_metrics(advantages: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Mean and size of the advantages [B] of each trained track, under its name where there are several."""
    return {
        f"{name}/{key}" if len(advantages) > 1 else key: value
        for name, values in advantages.items()
        for key, value in (
            ("advantage/mean", float(values.mean())),
            ("advantage/abs_mean", float(values.abs().mean())),
            ("advantage/max", float(values.abs().max())),
        )
    }
