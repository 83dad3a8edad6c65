"""The loop over roles, in one process on a field of a few numbers: order, refills, guardrails, stops, checkpoints."""

import functools
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusion_fakes import BrightnessReward, FieldBundle, FieldEngine, FieldPipeline, no_failure, sampling
from PIL import Image
from sync_fakes import OneWeightPipeline, RememberingEngine
from torch import Tensor

from unirl.algorithms.advantages import AdvantageConfig, Advantages
from unirl.algorithms.base import RowMetrics
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.kl import AdaptiveKL
from unirl.algorithms.prompt_statistics import PromptStatistics
from unirl.algorithms.selection import SampleSelection
from unirl.algorithms.transitions import TransitionRows
from unirl.config.schema import Samples
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.worker import WorkerContext
from unirl.tracking.base import TableRow, Tracker
from unirl.tracking.jsonl import ALERTS, JsonlTracker, read_metrics
from unirl.tracking.media import before_after
from unirl.tracking.sample_files import read_samples
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.backend.manifest import MANIFEST, read_manifest, write_manifest
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack, TrainStepResult
from unirl.trainer.build.assembly import assemble
from unirl.trainer.clock import PhaseClock
from unirl.trainer.diffusion import DiffusionModality
from unirl.trainer.evaluation import EvaluationConfig, Evaluator
from unirl.trainer.guardrails import ALARMS, GuardrailConfig, Guardrails
from unirl.trainer.roles import SyncRole
from unirl.trainer.settings import TrainerSettings
from unirl.types.errors import CheckpointError, ConfigError, RewardError, TrainingError
from unirl.types.media import Videos
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.samples import Video
from unirl.types.sampling import ARSamplingParams, Precision
from unirl.types.segments import LatentSegment

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
NO_ALARMS = GuardrailConfig(action="off")


class SpikyStack(TrainStack):
    """Reports a gradient norm a million times too large at some rollouts; remembers what it was given."""

    spikes: tuple[int, ...] = ()

    def train(self, resp: RolloutResp, *, progress: float) -> TrainStepResult:
        """Train, then exaggerate."""
        seen = vars(self).setdefault("seen", [])
        track = resp.tracks["image"]
        assert track.advantages is not None
        seen.append((list(track.sample_ids), track.advantages.clone(), progress))
        result = super().train(resp, progress=progress)
        if len(seen) in self.spikes:
            result.metrics["train/grad_norm"] *= 1e6
        return result


class WatchingEngine(FieldEngine):
    """Remembers the weights at the start of every rollout."""

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Copy, call what the test wants, sample."""
        vars(self).setdefault("weights", {})[req.rollout_id] = {
            name: value.detach().clone() for name, value in self.pipeline.model.named_parameters()
        }
        vars(self).get("then", lambda rollout_id: None)(req.rollout_id)
        resp = super().generate(req, policy)
        segment = resp.tracks["image"].segment
        if isinstance(segment, LatentSegment) and segment.sde_logp is not None:
            segment.sde_logp += vars(self).get("logp_shift", lambda rollout_id: 0.0)(req.rollout_id)
        return resp


class Notes:
    """A tracker that writes down what it is told."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.logged: dict[int, dict[str, float]] = {}
        self.pictures: list[tuple[str, int]] = []
        self.captions: list[list[str]] = []
        self.videos: list[tuple[str, int, list[str], list[str]]] = []
        self.started_at: int | None = None
        self.alerts: list[tuple[str, int]] = []
        self.summary: Mapping[str, Any] | None = None

    def start(self, config: Mapping[str, Any], run_dir: Path, step: int) -> None:
        """The step of the start."""
        self.started_at = step

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics by step, each step once."""
        assert step not in self.logged
        self.logged[step] = dict(metrics)
        self.events.append(f"log:{step}")

    def image(self, name: str, picture: Image.Image, step: int, captions: Sequence[str]) -> None:
        """Names of the images and what is said of them."""
        self.pictures.append((name, step))
        self.captions.append(list(captions))

    def video(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        """Names of the files."""
        self.videos.append((name, step, [file.name for file in files], list(captions)))

    def sound(self, name: str, files: Sequence[Path], step: int, captions: Sequence[str]) -> None:
        raise AssertionError("nothing here makes sounds")

    def table(self, name: str, rows: Sequence[TableRow], step: int) -> None:
        raise AssertionError("a trainer of images shows no table")

    def alert(self, name: str, text: str, step: int) -> None:
        """Names of the alarms, and when they began."""
        self.alerts.append((name, step))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The summary."""
        self.summary = summary

    def close(self) -> None:
        """Nothing to close."""


class Run:
    """A trainer on fakes in `folder`, and everything that a test looks at."""

    def __init__(
        self,
        folder: Path,
        *,
        kind: Any = DiffusionGRPO,
        algorithm: dict[str, Any] | None = None,
        guardrails: GuardrailConfig = NO_ALARMS,
        fails: Callable[[str], bool] = no_failure,
        spikes: tuple[int, ...] = (),
        evaluation: dict[str, Any] | None = None,
        num_prompts: int = 12,
        selection: SampleSelection | None = None,
        advantages: Advantages | None = None,
        sections: dict[str, Any] | None = None,
        trackers: Sequence[Tracker] = (),
        has_pictures: bool = False,
        learning_rate: float = 1e-2,
        pushes_in: Precision | None = None,
        samples: Samples | None = None,
        **settings: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prompts = folder / "prompts.jsonl"
        rows: list[dict[str, Any]] = [
            {"prompt": f"prompt {i}", "prompt_id": f"p{i}", "category": f"c{i % 2}"} for i in range(num_prompts)
        ]
        if has_pictures:
            Image.new("RGB", (8, 8), "blue").save(folder / "a.png")
            rows = [{**row, "images": ["a.png"] * (1 + i % 2)} for i, row in enumerate(rows)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.folder = folder
        self.events: list[Any] = []
        self.stop = threading.Event()
        self.notes = Notes(self.events)

        def build(context: WorkerContext) -> dict[str, Any]:
            torch.manual_seed(0)
            bundle = FieldBundle()
            backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=learning_rate), keep_reference=True)
            pipeline = FieldPipeline(bundle.model)
            stack = SpikyStack(backend, kind(pipeline, backend, **(algorithm or {})), micro_batch_size=4)
            stack.spikes = spikes
            pipe: Any = OneWeightPipeline(lambda: 0.0)
            target: Any = RememberingEngine()
            sync = pushes_in and FullWeightSync(
                backend,
                target,
                pipe,
                sampling=ARSamplingParams(temperature=1.0),
                dtype=pushes_in,
                canary_tolerance=1e-6,
            )
            return {
                **({"sync": sync} if sync else {}),
                "backend": backend,
                "engine": WatchingEngine(pipeline, backend, self.events),
                "stack": stack,
                "reward": BrightnessReward(fails, self.events),
                "checkpointer": Checkpointer(backend, str(folder / "checkpoints"), keep_last=3),
            }

        self.runtime = LocalRuntime(build)
        self.clock = PhaseClock(self._phase)
        self.phases: list[str] = []
        defaults: dict[str, Any] = {"recipe": "fake", "seed": 3, "batch_size": 4, "num_rollouts": 2}
        options: dict[str, Any] = {"prompts": str(prompts), "num_samples": 6, "batch_size": 4}
        data = MultimodalRLDataSource(str(prompts), shuffle=False)
        config = EvaluationConfig(**{**options, **(evaluation or {})})
        self.trainer = assemble(
            self.runtime,
            TrainerSettings(**{**defaults, **settings}),
            modality=DiffusionModality(),
            data=data,
            sampling=sampling(eta=0.0 if kind is DiffusionNFT else 0.7),
            advantages=advantages if advantages is not None else AdvantageConfig(),
            evaluator=None if evaluation is None else Evaluator(config, data.rows, sampling()),
            guardrails=functools.partial(Guardrails, guardrails, scorers=["bright"]),
            trackers=[self.notes, *trackers],
            run_dir=folder,
            config={"recipe": "fake", **(sections or {})},
            stop=self.stop,
            selection=selection,
            clock=self.clock,
            sync=self.runtime.role("sync", SyncRole) if pushes_in else None,
            samples=samples,
        )

    def _phase(self, name: str) -> Any:
        self.phases.append(name)
        return nullcontext()

    @property
    def engine(self) -> Any:
        """The engine itself."""
        return self.runtime.component("engine")

    @property
    def seen(self) -> list[tuple[list[str], Tensor, float]]:
        """What the stack was given, rollout by rollout."""
        return vars(self.runtime.component("stack"))["seen"]

    @property
    def checkpoints(self) -> list[str]:
        """Folders of checkpoints, sorted."""
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))

    def weights_at(self, rollout_id: int) -> dict[str, Tensor]:
        """Weights when a rollout began."""
        return self.engine.weights[rollout_id]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in right)


# Order --------------------------------------------------------------------------------------------------------------


def test_phases_come_in_order_and_every_second_has_a_place(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, evaluation={})
    summary = run.trainer.run()
    step = ["other", "rollout", "reward", "other", "train", "other"]
    assert run.phases == ["eval", *step, "eval", "checkpoint", "checkpoint"]
    assert run.events == [
        "evaluate",
        "evaluate",
        "log:0",
        "generate:None",
        "score",
        "evaluate",
        "evaluate",
        "log:1",
    ]
    assert set(summary["phases"]) == set(summary["phases_cpu_s"]) == {*step, "eval", "checkpoint"}
    assert sum(summary["phases"].values()) <= summary["wall_s"]
    metrics = run.notes.logged[1]
    assert {f"timing_s/{name}" for name in (*step, "eval", "anchor")} <= set(metrics)
    assert metrics["perf/samples_per_s"] > 0
    assert run.runtime.num_held() == 0


def test_rollouts_are_sampled_from_the_policy_that_the_algorithm_names(tmp_path: Path):
    run = Run(tmp_path, kind=DiffusionNFT)
    run.trainer.run()
    assert [event for event in run.events if str(event).startswith("generate")] == ["generate:old"] * 2


def test_advantages_are_those_of_the_rewards_and_progress_runs_from_zero_to_one(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=3)
    run.trainer.run()
    assert [progress for _, _, progress in run.seen] == [0.0, 0.5, 1.0]
    for _, advantages, _ in run.seen:
        assert advantages.shape == (12,)
        torch.testing.assert_close(advantages.view(4, 3).mean(1), torch.zeros(4), rtol=0, atol=1e-5)
    assert run.seen[0][0][:4] == [*(f"prompt:p0:sample:{j}" for j in range(3)), "prompt:p1:sample:0"]
    assert run.seen[1][0][0] == "prompt:p4:sample:0"


def test_best_and_worst_of_every_group_are_trained_on(tmp_path: Path):
    whole = Run(tmp_path / "whole", num_rollouts=1)
    whole.trainer.run()
    run = Run(tmp_path / "pairs", num_rollouts=1, selection=SampleSelection(best_of=2))
    run.trainer.run()
    (ids, advantages, _), (pair_ids, pairs, _) = whole.seen[0], run.seen[0]
    by_group = advantages.view(4, 3)
    torch.testing.assert_close(pairs.view(4, 2), torch.stack([by_group.amax(1), by_group.amin(1)], dim=1))
    assert [advantages[ids.index(name)] for name in pair_ids] == pairs.tolist()
    assert run.notes.logged[1]["group/trained_samples"] == 8 and run.runtime.num_held() == 0


def test_dynamic_sampling_replaces_groups_that_teach_nothing(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, selection=SampleSelection(dynamic_sampling=True))
    vars(run.runtime.component("reward"))["same"] = {"prompt:p1", "prompt:p2", "refill2:prompt:p4"}
    run.trainer.run()
    groups = [name.rsplit(":sample", 1)[0] for name in run.seen[0][0]]
    assert list(dict.fromkeys(groups)) == ["prompt:p0", "prompt:p3", "refill2:prompt:p5", "refill3:prompt:p6"]
    assert run.notes.logged[1]["reward/dropped_groups"] == 3


def test_dynamic_sampling_trains_on_what_there_is_when_refills_are_used_up(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, max_refills=1, selection=SampleSelection(dynamic_sampling=True))
    vars(run.runtime.component("reward"))["same"] = {"prompt:p1", "refill1:prompt:p4"}
    run.trainer.run()
    assert run.seen[0][0][-1] == "refill1:prompt:p4:sample:2"
    assert run.seen[0][1][-3:].tolist() == [0, 0, 0]


def test_a_clock_adds_up_also_where_a_phase_fails_and_goes_on_after_a_resume():
    clock = PhaseClock()
    with pytest.raises(ValueError), clock.phase("train"):
        raise ValueError
    first = clock.step_metrics()
    assert set(first) == {"timing_s/train"} and clock.step_metrics() == {}
    again = PhaseClock()
    again.load_state_dict(clock.state_dict())
    with again.phase("train"):
        pass
    assert again.wall_s["train"] > clock.wall_s["train"] == first["timing_s/train"]


def test_a_resumed_run_remembers_the_rewards_of_its_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def options() -> dict[str, Any]:
        return {"num_rollouts": 6, "num_prompts": 4, "advantages": PromptStatistics(min_count=4)}

    whole = Run(tmp_path / "whole", **options())
    whole.trainer.run()
    first = Run(tmp_path / "parts", **options())
    first.engine.then = lambda rollout_id: first.stop.set() if rollout_id == 2 else None
    assert not first.trainer.run()["is_complete"]
    second = Run(tmp_path / "parts", **options())
    with caplog.at_level(logging.INFO, "unirl.trainer"):
        assert second.trainer.run("auto")["is_complete"]
    assert "resumed after rollout 3" in caplog.messages
    assert whole.notes.logged[6]["advantage/known_prompt_fraction"] == 1.0
    assert same(whole.weights_at(5), second.weights_at(5))


# Evaluation and checkpoints -----------------------------------------------------------------------------------------


def test_evaluation_comes_before_at_the_interval_and_at_the_end(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=5, eval_interval=2, evaluation={})
    summary = run.trainer.run()
    assert list(summary["evaluations"]) == ["0", "2", "4", "5"]
    for key, step, samples in (("eval_before", "0", 0), ("eval_after", "5", 60)):
        record = summary["evaluations"][step]
        assert record == {**summary[key], "num_samples_trained": samples, "train_cpu_s": record["train_cpu_s"]}
    assert [step for step, metrics in run.notes.logged.items() if "eval/reward" in metrics] == [0, 2, 4, 5]
    assert {"eval/c0/bright", "eval/c1/reward"} <= set(run.notes.logged[5])
    assert run.notes.logged[5]["eval/reward"] > run.notes.logged[0]["eval/reward"]
    names = sorted(path.name for path in (tmp_path / "samples").glob("*.png"))
    assert names == ["before_after.png", *(f"eval-{step:06d}.png" for step in (0, 2, 4, 5))]
    assert [picture for picture in run.notes.pictures if picture[0] == "eval"] == [("eval", n) for n in (0, 2, 4, 5)]


def test_evaluation_can_leave_out_the_start_or_everything(tmp_path: Path):
    run = Run(tmp_path / "late", num_rollouts=1, evaluation={"before": False})
    summary = run.trainer.run()
    assert summary["eval_before"] is None and list(summary["evaluations"]) == ["1"]
    summary = Run(tmp_path / "never", num_rollouts=1).trainer.run()
    assert summary["eval_before"] is None and summary["eval_after"] is None and summary["evaluations"] == {}


@pytest.fixture
def quarter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every phase takes a quarter of a CPU second, so the six of a step take 1.5."""
    readings = itertools.count()
    monkeypatch.setattr("unirl.trainer.clock.time.process_time", lambda: next(readings) / 4)


def test_a_cpu_budget_ends_the_run_with_the_rollout_that_exceeds_it(tmp_path: Path, quarter_seconds: None):
    run = Run(tmp_path, num_rollouts=100, max_cpu_s=6.0, eval_interval_cpu_s=2.0, evaluation={})
    summary = run.trainer.run()
    assert summary["is_complete"] and summary["num_rollouts"] == 5 and run.checkpoints == ["step-000005"]
    # 3.0, 4.5 and 6.0 seconds each pass a multiple of two; 7.5 is the end.
    taken = {step: (r["num_samples_trained"], r["train_cpu_s"]) for step, r in summary["evaluations"].items()}
    assert taken == {"0": (0, 0.0), "2": (24, 3.0), "3": (36, 4.5), "4": (48, 6.0), "5": (60, 7.5)}
    assert [progress for _, _, progress in run.seen] == pytest.approx([0, 1 / 99, 2 / 99, 3 / 99, 4 / 99])
    again = Run(tmp_path, num_rollouts=100, max_cpu_s=6.0, eval_interval_cpu_s=2.0, evaluation={})
    assert again.trainer.run("auto")["is_complete"] and again.engine.requests == []


def test_a_resumed_run_has_used_up_the_seconds_from_before(tmp_path: Path, quarter_seconds: None):
    options: dict[str, Any] = {"num_rollouts": 100, "max_cpu_s": 6.0, "eval_interval_cpu_s": 2.0, "evaluation": {}}
    whole = Run(tmp_path / "whole", **options).trainer.run()
    first = Run(tmp_path / "parts", **options)
    first.engine.then = lambda rollout_id: first.stop.set() if rollout_id == 2 else None
    assert not first.trainer.run()["is_complete"]
    parts = Run(tmp_path / "parts", **options).trainer.run("auto")
    assert parts["is_complete"] and parts["evaluations"] == whole["evaluations"]


@pytest.mark.parametrize("kind", [DiffusionGRPO, DiffusionNFT])
def test_evaluations_leave_training_as_it_is(tmp_path: Path, kind: Any):
    plain = Run(tmp_path / "plain", kind=kind, num_rollouts=4)
    plain.trainer.run()
    watched = Run(tmp_path / "watched", kind=kind, num_rollouts=4, eval_interval=1, evaluation={})
    watched.trainer.run()
    assert not same(plain.weights_at(3), plain.weights_at(0))
    assert same(plain.weights_at(3), watched.weights_at(3))


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_metrics_are_logged_before_the_checkpoint_that_a_killed_run_resumes_from(tmp_path: Path, is_evaluated: bool):
    run = Run(tmp_path, num_rollouts=3, save_interval=1, evaluation={"interval": 1} if is_evaluated else None)
    checkpointer: Any = run.runtime.component("checkpointer")
    save = checkpointer.save

    def noted(step: int, *args: Any) -> None:
        run.events.append(f"save:{step}")
        save(step, *args)

    checkpointer.save = noted
    run.trainer.run()
    order = [each for each in run.events if isinstance(each, str) and each.startswith(("log:", "save:"))]
    expected = [f"{what}:{step}" for step in (1, 2, 3) for what in ("log", "save")]
    assert [each for each in order if each != "log:0"] == expected


@pytest.mark.parametrize("metric", ["reward", "bright"])
def test_the_best_checkpoint_is_the_one_of_the_best_metric(tmp_path: Path, metric: str):
    run = Run(tmp_path, num_rollouts=6, eval_interval=1, save_interval=1, best_metric=metric, evaluation={})
    summary = run.trainer.run()
    scores = {int(step): record["overall"][metric] for step, record in summary["evaluations"].items() if step != "0"}
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best["step"] == max(scores, key=lambda step: scores[step])
    assert best["score"] == pytest.approx(scores[best["step"]])


def test_a_best_metric_that_no_scorer_reports_is_named_before_training(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, best_metric="beauty", evaluation={})
    with pytest.raises(ConfigError, match="best_metric = beauty is not among the held-out means reward"):
        run.trainer.run()
    assert run.notes.logged == {}


def test_pictures_of_training_samples_come_at_their_interval(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=4, media_interval=2)
    run.trainer.run()
    assert run.notes.pictures == [("rollout", 2), ("rollout", 4)]
    assert sorted(path.name for path in (tmp_path / "samples").glob("*.png")) == [
        f"rollout-00000{n}.png" for n in (2, 4)
    ]
    assert len(run.notes.captions[0]) == 12
    assert all(re.fullmatch(r"prompt \d: reward -?[\d.e-]+", caption) for caption in run.notes.captions[0])


def test_pictures_before_and_after_know_both_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def watched(before: Tensor, after: Tensor, labels: Any, marked: Any, given: Any) -> Image.Image:
        seen.append(marked)
        return before_after(before, after, labels, marked=marked, given=given)

    monkeypatch.setattr("unirl.tracking.gallery.before_after", watched)
    run = Run(tmp_path, num_rollouts=1, evaluation={}, samples=Samples(per_evaluation=4))
    run.trainer.run()
    ((before, after),) = seen
    for marked, captions in zip((before, after), run.notes.captions, strict=True):
        assert all(caption.endswith(f": {mark[0]}") for mark, caption in zip(marked, captions, strict=True))
    assert len(before) == len(after) == 4 and before != after


def test_pictures_that_prompts_show_stand_beside_what_was_made_from_them(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, media_interval=1, evaluation={}, has_pictures=True)
    run.trainer.run()
    # Half of the prompts show one image, half two. An evaluation has six samples, the rollout three of each of four.
    for name, num_shown in (("eval-000000", 9), ("eval-000001", 9), ("before_after", 9), ("rollout-000001", 18)):
        with Image.open(tmp_path / "samples" / f"{name}.png") as picture:
            blue = (np.array(picture.convert("RGB")) == [0, 0, 255]).all(-1)
        assert int(blue.sum()) == num_shown * 160 * 160, name


# Dropped groups -----------------------------------------------------------------------------------------------------


def test_exactly_the_groups_that_failed_are_replaced_by_fresh_prompts(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=2, fails=lambda group: group in ("prompt:p1", "prompt:p3"))
    summary = run.trainer.run()
    ids, advantages, _ = run.seen[0]
    kept = [f"prompt:p{i}:sample:{j}" for i in (0, 2) for j in range(3)]
    fresh = [f"refill2:prompt:p{i}:sample:{j}" for i in (4, 5) for j in range(3)]
    assert ids == kept + fresh
    assert bool(torch.isfinite(advantages).all())
    # The next rollout continues after the prompts that were used up.
    assert run.seen[1][0][0] == "prompt:p6:sample:0"
    assert summary["num_dropped_groups"] == 2 and summary["num_samples"] == 24
    assert run.notes.logged[1]["reward/dropped_groups"] == 2.0
    assert run.runtime.num_held() == 0
    starts = [key for req in run.engine.requests for key in req.init_noise_group_ids]
    assert len(set(starts)) == len(starts)


def test_a_refill_that_fails_in_part_is_refilled_again(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, fails=lambda group: group in ("prompt:p1", "prompt:p3", "refill2:prompt:p4"))
    summary = run.trainer.run()
    groups = list(dict.fromkeys(name.split(":sample")[0] for name in run.seen[0][0]))
    assert groups == ["prompt:p0", "prompt:p2", "refill2:prompt:p5", "refill3:prompt:p6"]
    assert summary["num_dropped_groups"] == 3


def test_a_batch_of_which_nothing_is_left_is_replaced_as_a_whole(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=1, fails=lambda group: not group.startswith("refill"))
    assert run.trainer.run()["num_dropped_groups"] == 4
    assert len(run.seen[0][0]) == 12 and all(name.startswith("refill4:") for name in run.seen[0][0])


def test_refills_end_with_an_error_and_the_last_checkpoint_stands(tmp_path: Path):
    run = Run(
        tmp_path, num_rollouts=3, save_interval=1, max_refills=2, fails=lambda group: "p5" in group or "ll" in group
    )
    with pytest.raises(RewardError, match="1 groups still could not be scored after 2 refills: .*the scorer said no"):
        run.trainer.run()
    assert [event for event in run.events if event == "score"] == ["score"] * 4
    assert run.checkpoints == ["step-000001"]


# Guardrails ---------------------------------------------------------------------------------------------------------


def watching(action: Any, patience: int) -> GuardrailConfig:
    return GuardrailConfig(action=action, warmup=2, window=4, patience=patience, grad_norm_factor=1e3, reward_drop=1e9)


def test_a_warning_changes_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    plain = Run(tmp_path / "plain", num_rollouts=4, save_interval=1)
    plain.trainer.run()
    run = Run(tmp_path / "warned", num_rollouts=4, save_interval=1, guardrails=watching("warn", 1), spikes=(3,))
    with caplog.at_level(logging.WARNING, logger="unirl"):
        summary = run.trainer.run()
    assert "rollout 3: gradient norm" in caplog.text
    assert summary["is_complete"] and run.checkpoints == [f"step-{step:06d}" for step in (2, 3, 4)]
    assert same(run.weights_at(3), plain.weights_at(3))


def test_a_stop_saves_first_and_then_raises(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=8, guardrails=watching("stop", 2), spikes=(4, 5))
    with pytest.raises(TrainingError, match="stopped after rollout 5: gradient norm .*A checkpoint was saved"):
        run.trainer.run()
    assert run.checkpoints == ["step-000005"]
    assert sorted(run.notes.logged) == [1, 2, 3, 4, 5]


def test_a_rollback_restores_the_weights_from_before_the_alarms(tmp_path: Path):
    # A checkpoint is due after every rollout, but one taken during alarms is nothing to go back to.
    run = Run(tmp_path, num_rollouts=7, save_interval=1, guardrails=watching("rollback", 2), spikes=(4, 5))
    summary = run.trainer.run()
    assert summary["is_complete"] and summary["num_rollouts"] == 7
    assert not same(run.weights_at(4), run.weights_at(3))
    assert same(run.weights_at(5), run.weights_at(3))
    assert not same(run.weights_at(6), run.weights_at(5))
    assert run.checkpoints[-1] == "step-000007"
    assert sorted(run.notes.logged) == [1, 2, 3, 4, 5, 6, 7]


def test_a_rollback_at_the_last_rollout_saves_and_evaluates_what_was_restored(tmp_path: Path):
    options: dict[str, Any] = {"num_rollouts": 4, "save_interval": 1, "guardrails": watching("rollback", 1)}
    run = Run(tmp_path / "spiky", **options, eval_interval=1, evaluation={}, spikes=(4,))
    summary = run.trainer.run()
    assert summary["eval_after"]["overall"] == summary["evaluations"]["3"]["overall"]
    # The evaluation (rollout -1) came last and saw the weights with which rollout 3 began.
    assert same(run.weights_at(-1), run.weights_at(3))
    assert run.checkpoints[-1] == "step-000004"
    again = Run(tmp_path / "spiky", **options)
    again.trainer.run("auto")
    parameters = {name: value.detach() for name, value in again.engine.pipeline.model.named_parameters()}
    assert same(parameters, run.weights_at(3))


def test_a_rollback_without_a_checkpoint_says_what_to_set(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=6, guardrails=watching("rollback", 1), spikes=(3,))
    with pytest.raises(TrainingError, match="there is no checkpoint to roll back to. Set save.interval") as caught:
        run.trainer.run()
    assert isinstance(caught.value.__cause__, CheckpointError)


# Runs that look healthy and learn nothing ---------------------------------------------------------------------------


class WithoutLoss(DiffusionGRPO):
    """Its loss has no gradient."""

    factor = 0.0

    def surrogate(self, rows: TransitionRows) -> tuple[Tensor, RowMetrics]:
        loss_R, metrics = super().surrogate(rows)
        return loss_R * self.factor, metrics


class WithNaN(WithoutLoss):
    """Its loss is not a number."""

    factor = float("nan")


class WithWrongAnchor(DiffusionGRPO):
    """Compares with log-probs of another policy."""

    def _old_logp(self, replayed_R: Tensor | None, rollout_R: Tensor | None) -> Tensor:
        return super()._old_logp(replayed_R, rollout_R) - 1e-3


class AllEqual:
    """A scorer's fault: every group has one reward."""

    def __contains__(self, group: object) -> bool:
        return True


class Hackable(BrightnessReward):
    """The mean pixel is a scorer that should rise; what is rewarded is that it falls."""

    def score_track(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> dict[str, float]:
        super().score_track(resp, track, is_training=is_training)
        own = resp.tracks[track]
        resp.tracks[track] = own.replace(rewards=-own.component_rewards["bright"])
        return {}


SHORT = GuardrailConfig(window=6, warmup=2, grad_norm_factor=1e3, reward_drop=1e9)


def score_alike(run: Run) -> None:
    vars(run.runtime.component("reward"))["same"] = AllEqual()


def drift(run: Run) -> None:
    run.engine.logp_shift = lambda rollout_id: 1e-3 if rollout_id == 4 else 1e-5


def hack(run: Run) -> None:
    run.runtime.component("reward").__class__ = Hackable


def as_it_is(run: Run) -> None:
    """Break nothing after the run is built."""


@pytest.mark.parametrize(
    ("alarm", "broken", "breaks", "since"),
    [
        ("constant_reward", {}, score_alike, 1),
        ("zero_gradient", {"kind": WithoutLoss}, as_it_is, 1),
        ("non_finite_gradient", {"kind": WithNaN, "num_rollouts": 2}, as_it_is, 1),
        ("unchanged_push", {"learning_rate": 1e-9, "pushes_in": "bf16"}, as_it_is, 2),
        ("penalty_share", {"algorithm": {"kl_coef": 1e6}}, as_it_is, 2),
        ("first_ratio", {"kind": WithWrongAnchor}, as_it_is, 1),
        ("logp_gap", {}, drift, 5),
        ("reward_hacking", {"learning_rate": 0.05}, hack, 6),
    ],
)
def test_a_run_that_learns_nothing_says_so_in_metrics_log_and_trackers(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    alarm: str,
    broken: dict[str, Any],
    breaks: Callable[[Run], None],
    since: int,
):
    options: dict[str, Any] = {"num_rollouts": 6, **broken}
    run = Run(tmp_path, guardrails=SHORT, trackers=[JsonlTracker()], **options)
    breaks(run)
    with caplog.at_level(logging.WARNING, logger="unirl"):
        run.trainer.run()
    assert (alarm, since) in run.notes.alerts
    assert [step for step, metrics in run.notes.logged.items() if metrics[f"alarm/{alarm}"]][0] == since
    (line,) = (line for line in read_metrics(tmp_path / ALERTS) if (line["alarm"], line["step"]) == (alarm, since))
    assert f"rollout {since}: {line['text']}" in caplog.text


@pytest.mark.parametrize(
    "healthy",
    [{"pushes_in": "fp32"}, {"algorithm": {"kl_coef": 1.0}}, {"kind": DiffusionNFT}, {"learning_rate": 0.05}],
    ids=lambda each: str(each),
)
def test_a_healthy_run_has_no_alarm(tmp_path: Path, healthy: dict[str, Any]):
    run = Run(tmp_path, num_rollouts=6, guardrails=SHORT, trackers=[JsonlTracker()], **healthy)
    run.engine.logp_shift = lambda rollout_id: 1e-5
    run.trainer.run()
    assert run.notes.alerts == [] and not (tmp_path / ALERTS).exists()
    assert {metrics[f"alarm/{name}"] for metrics in run.notes.logged.values() for name in ALARMS} == {0.0}


def test_a_run_that_learns_nothing_is_stopped_where_the_recipe_asks_for_it(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=6, guardrails=GuardrailConfig(action="stop"))
    score_alike(run)
    with pytest.raises(TrainingError, match="stopped after rollout 2: .*every sample of the rollout has the reward"):
        run.trainer.run()
    assert run.checkpoints == ["step-000002"]


def test_a_rollback_does_not_follow_what_earlier_weights_would_not_end(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=4, save_interval=1, guardrails=GuardrailConfig(action="rollback", patience=1))
    score_alike(run)
    assert run.trainer.run()["is_complete"]
    assert run.notes.alerts == [("zero_gradient", 1), ("constant_reward", 1)]


def test_a_push_after_a_rollback_may_bring_what_the_engine_had(tmp_path: Path):
    config = GuardrailConfig(action="rollback", patience=1, warmup=2, window=4, grad_norm_factor=1e3, reward_drop=1e9)
    run = Run(tmp_path, num_rollouts=5, save_interval=1, guardrails=config, spikes=(4,), pushes_in="fp32")
    run.trainer.run()
    assert run.notes.logged[5]["sync/changed_tensors"] == 0
    assert run.notes.alerts == [("grad_norm_range", 4)]


# Stop and resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"next_rollout": 2', "driver_state.json is no JSON"),
        ("[1, 2]", "driver_state.json holds list instead of a JSON object"),
        ("{}", "driver_state.json of the newest checkpoint .* it has no 'config'"),
        ({"next_rollout": "many"}, "driver_state.json of the newest checkpoint .* invalid literal for int"),
        ({"data": [3]}, "driver_state.json of the newest checkpoint .* AttributeError"),
        ({"guardrails": None}, "driver_state.json of the newest checkpoint .* TypeError"),
        ({"clock": 3}, "driver_state.json of the newest checkpoint .* TypeError"),
    ],
)
def test_wrong_content_of_a_checkpoints_state_is_one_message_with_its_file(tmp_path: Path, content: Any, said: str):
    Run(tmp_path).trainer.run()
    (folder,) = (tmp_path / "checkpoints").glob("step-*")
    state = folder / "driver_state.json"
    text = content if isinstance(content, str) else json.dumps({**json.loads(state.read_text()), **content})
    state.write_text(text)
    facts, _ = read_manifest(folder)
    del facts["files"]
    (folder / MANIFEST).unlink()
    write_manifest(folder, facts)
    with pytest.raises(CheckpointError, match=said):
        Run(tmp_path).trainer.run("auto")


def test_a_run_that_begins_removes_what_a_killed_one_left_half_written(tmp_path: Path):
    left = tmp_path / "checkpoints" / "step-000001.tmp-0a1b2c3d"
    left.mkdir(parents=True)
    run = Run(tmp_path)
    run.trainer.prepare()
    assert not left.exists()


def test_files_of_a_checkpoint_have_the_mode_that_the_umask_says(tmp_path: Path):
    before = os.umask(0o022)
    try:
        run = Run(tmp_path)
        run.trainer.run()
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o644"}


def test_a_stop_event_saves_and_returns_an_incomplete_summary(tmp_path: Path):
    run = Run(tmp_path, num_rollouts=5, evaluation={})
    run.engine.then = lambda rollout_id: run.stop.set() if rollout_id == 1 else None
    summary = run.trainer.run()
    assert summary["is_complete"] is False and summary["num_rollouts"] == 2 and summary["eval_after"] is None
    assert run.checkpoints == ["step-000002"]
    assert run.notes.summary == summary
    saved = json.loads((tmp_path / "checkpoints/step-000002/driver_state.json").read_text())

    again = Run(tmp_path, num_rollouts=5, evaluation={})
    resumed = again.trainer.run("auto")
    assert again.notes.started_at == 2 and sorted(again.notes.logged) == [3, 4, 5]
    assert resumed["is_complete"] and resumed["num_rollouts"] == 5 and resumed["num_samples"] == 60
    assert resumed["eval_before"] == summary["eval_before"]
    assert resumed["wall_s"] > saved["wall_s"] > 0 and resumed["phases"]["train"] > summary["phases"]["train"]
    straight = Run(tmp_path / "straight", num_rollouts=5, evaluation={})
    assert straight.trainer.run()["eval_after"] == resumed["eval_after"]
    assert same(again.weights_at(4), straight.weights_at(4))


def test_a_stop_before_the_first_rollout_still_leaves_a_checkpoint(tmp_path: Path):
    run = Run(tmp_path)
    run.stop.set()
    summary = run.trainer.run()
    assert summary["num_rollouts"] == 0 and not summary["is_complete"] and run.checkpoints == ["step-000000"]


def test_a_run_stopped_before_the_first_rollout_keeps_its_first_line_of_metrics(tmp_path: Path):
    run = Run(tmp_path, evaluation={}, trackers=[JsonlTracker()])
    run.stop.set()
    run.trainer.run()
    (before,) = read_metrics(tmp_path / "metrics.jsonl")
    Run(tmp_path, evaluation={}, trackers=[JsonlTracker()]).trainer.run("auto")
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2] and lines[0] == before


def test_a_resume_with_another_reward_is_refused_before_anything_is_changed(tmp_path: Path):
    first = Run(tmp_path, sections={"reward": {"weights": {"a": 1.0}}}, num_rollouts=1)
    first.trainer.run()
    other = Run(tmp_path, sections={"reward": {"weights": {"a": 0.5}}})
    with pytest.raises(CheckpointError, match=r"reward.weights.a: 1.0 -> 0.5.*resume_changes=allow"):
        other.trainer.run("auto")
    assert other.notes.started_at is None and other.engine.requests == []


def test_a_resume_with_changed_rows_is_refused_or_begins_them_anew(tmp_path: Path):
    Run(tmp_path, num_rollouts=1).trainer.run()
    with pytest.raises(CheckpointError, match="data.fingerprint: "):
        Run(tmp_path, num_prompts=10).trainer.run("auto")
    allowed = Run(tmp_path, num_prompts=10, sections={"resume_changes": "allow"})
    summary = allowed.trainer.run("auto")
    assert allowed.seen[0][0][0] == "prompt:p0:sample:0"
    assert [list(change["settings"]) for change in summary["resume_changes"]] == [["data.fingerprint"]]


def test_allowed_changes_are_in_the_summary_of_every_later_run(tmp_path: Path):
    def config(weight: float, *, changes: str = "allow") -> dict[str, Any]:
        return {"reward": {"weights": {"a": weight}}, "resume_changes": changes}

    def options() -> dict[str, Any]:
        return {"num_prompts": 8, "advantages": PromptStatistics(min_count=4)}

    assert (
        Run(tmp_path, sections=config(1.0, changes="refuse"), num_rollouts=2, **options()).trainer.run()[
            "resume_changes"
        ]
        == []
    )
    known = Run(tmp_path, sections=config(1.0), num_rollouts=3, **options())
    known.trainer.run("auto")
    assert known.notes.logged[3]["advantage/known_prompt_fraction"] > 0
    fresh = Run(tmp_path, sections=config(0.5), num_rollouts=4, **options())
    summary = fresh.trainer.run("auto")
    # What was remembered are rewards of the other kind.
    assert fresh.notes.logged[4]["advantage/known_prompt_fraction"] == 0
    changed = {"rollout": 3, "settings": {"reward.weights.a": [1.0, 0.5]}}
    assert summary["resume_changes"] == [changed]
    last = Run(tmp_path, sections=config(0.5, changes="refuse"), num_rollouts=5, **options()).trainer.run("auto")
    assert last["resume_changes"] == [changed]


# What is reported ---------------------------------------------------------------------------------------------------


def test_the_summary_has_every_promised_key_and_is_what_the_file_holds(tmp_path: Path):
    run = Run(tmp_path, evaluation={})
    summary = run.trainer.run()
    promised = "recipe seed versions num_rollouts num_samples wall_s cpu_s peak_rss_bytes phases eval_before eval_after"
    assert {*promised.split(), "logp_gap", "first_ratio_max_abs_dev"} <= set(summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary == run.notes.summary
    assert summary["recipe"] == "fake" and summary["seed"] == 3
    assert summary["num_rollouts"] == 2 and summary["num_samples"] == 24 and summary["is_complete"]
    assert {"python", "torch"} <= set(summary["versions"])
    assert summary["cpu_s"] > 0 and summary["peak_rss_bytes"] > 2**20
    for record in (summary["eval_before"], summary["eval_after"]):
        assert set(record["overall"]) == {"reward", "bright"} and set(record["categories"]) == {"c0", "c1"}
    assert 0 <= summary["logp_gap"]["mean"] <= summary["logp_gap"]["max"] < 1e-5
    assert summary["first_ratio_max_abs_dev"] == 0.0


def test_the_first_ratio_is_reported_wherever_there_is_one(tmp_path: Path):
    trusted = Run(tmp_path / "rollout", algorithm={"old_logp_source": "rollout"}).trainer.run()
    assert trusted["first_ratio_max_abs_dev"] is not None and trusted["first_ratio_max_abs_dev"] < 1e-5
    assert 0 <= trusted["logp_gap"]["mean"] <= trusted["logp_gap"]["max"] < 1e-5
    forward = Run(tmp_path / "nft", kind=DiffusionNFT).trainer.run()
    assert forward["first_ratio_max_abs_dev"] is None
    assert forward["logp_gap"] == {"mean": None, "max": None}


def documented() -> list[re.Pattern[str]]:
    names = re.findall(r"`([a-z_]+/[^`]+)`", DOCS.read_text())
    patterns = [re.escape(name).replace(r"\.\.\.", "(/.+)?") for name in names]
    return [re.compile(re.sub(r"<[a-z]+>", "[^/]+", pattern)) for pattern in patterns]


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        (DiffusionGRPO, {"kl_coef": 0.1, "adaptive_kl": AdaptiveKL(target=0.1, horizon=100.0)}),
        (DiffusionNFT, {"kl_coef": 0.1}),
    ],
)
def test_every_metric_is_listed_in_the_documentation(tmp_path: Path, kind: Any, algorithm: dict[str, Any]):
    run = Run(tmp_path, kind=kind, algorithm=algorithm, eval_interval=1, save_interval=1, evaluation={})
    run.trainer.run()
    names = {name for metrics in run.notes.logged.values() for name in metrics}
    assert {"policy/reference_kl", "train/grad_norm", "eval/c1/bright", "timing_s/checkpoint"} <= names
    patterns = documented()
    assert [name for name in sorted(names) if not any(pattern.fullmatch(name) for pattern in patterns)] == []


def as_video(self: FieldPipeline, latents: Tensor, params: object) -> Videos:
    """Eight frames that fade in, 16 x 16 pixels."""
    pixels = torch.nn.functional.interpolate(latents.sigmoid(), size=(16, 16))
    return Videos.pack(frames=[torch.linspace(0, 1, 8)[:, None, None, None] * one for one in pixels], fps=4.0)


def test_videos_are_shown_as_strips_of_frames_and_as_files_that_play(tmp_path, monkeypatch):
    monkeypatch.setattr(FieldPipeline, "decode", as_video)
    run = Run(tmp_path, num_rollouts=1, media_interval=1, evaluation={})
    run.trainer.run()
    notes = run.notes
    assert [(name, step, files) for name, step, files, _ in notes.videos] == [
        (name, step, [f"image-000{place}.mp4" for place in range(num)])
        for name, step, num in (("eval", 0, 4), ("rollout", 1, 3), ("eval", 1, 4))
    ]
    for name in ("eval-000000", "rollout-000001", "eval-000001"):
        kept = read_samples(tmp_path / "samples" / f"{name}.jsonl")
        assert [each.media.num_frames for each in kept if isinstance(each.media, Video)] == [8] * len(kept)
        assert len(kept) == (4 if name.startswith("eval") else 3)  # whole videos, of training a whole group
    assert all("reward" in caption for *_, captions in notes.videos for caption in captions)
    assert [picture for picture, _ in notes.pictures] == ["eval", "rollout", "eval"]
    samples = tmp_path / "samples"
    assert (samples / "before_after.png").is_file()
    with av.open(str(samples / "eval-000001" / "image-0000.mp4")) as container:
        assert container.streams.video[0].average_rate == 4
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 8 and frames[0].shape == (16, 16, 3)
    assert frames[0].mean() < 8 < frames[-1].mean()
