"""What a collector hands to the learner: children with their parents, and a state that forgets no prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusion_fakes import BrightnessReward, FieldBundle, FieldEngine, FieldPipeline, no_failure, sampling

from unirl.algorithms.advantages import AdvantageConfig
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.worker import WorkerContext
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import Collector
from unirl.trainer.diffusion import DiffusionModality
from unirl.trainer.evaluation import EvaluationConfig
from unirl.trainer.guardrails import GuardrailConfig
from unirl.trainer.learner import Learner
from unirl.trainer.settings import TrainerSettings
from unirl.types.media import Texts
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack


class Branching(FieldEngine):
    """A text for every prompt, and two images for every text."""

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """The tracks "plan" and "image"."""
        again = req.replace(init_noise_group_ids=[f"{name}+" for name in req.init_noise_group_ids])
        made = [super(Branching, self).generate(each, policy).tracks["image"] for each in (req, again)]
        size = req.batch_size
        both = RolloutTrack.concat(made).select([k * size + row for row in range(size) for k in range(2)])
        plan = req.make_root_track(conditions={}, segment=None, decoded=Texts(texts=list(req.sample_ids)))
        image = plan.fork("plan", "image", 2, conditions=both.conditions, segment=both.segment, decoded=both.decoded)
        return RolloutResp(tracks={"plan": plan, "image": image})


class Crediting(BrightnessReward):
    """Scores images; plans are credited with the mean of theirs."""

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_track(self, resp: RolloutResp, track: str, *, is_shaped: bool = True) -> dict[str, float]:
        """As the reward service does."""
        super().score_track(resp, track, is_shaped=is_shaped)
        resp.tracks["plan"] = resp.propagate_rewards(track, "plan", "mean").tracks["plan"]
        return {}


class Made:
    """A collector and a learner on fakes."""

    def __init__(self, folder: Path, fails: Callable[[str], bool] = no_failure, *, branches: bool = True) -> None:
        prompts = folder / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": f"prompt {i}", "prompt_id": f"p{i}"}) + "\n" for i in range(9))
        )

        def build(context: WorkerContext) -> dict[str, Any]:
            bundle = FieldBundle()
            backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
            pipeline = FieldPipeline(bundle.model)
            return {
                "engine": (Branching if branches else FieldEngine)(pipeline, backend),
                "stack": TrainStack(backend, DiffusionGRPO(pipeline, backend), micro_batch_size=4),
                "reward": (Crediting if branches else BrightnessReward)(fails),
            }

        self.runtime = LocalRuntime(build)
        clock = PhaseClock()
        self.data = MultimodalRLDataSource(str(prompts), shuffle=False)
        self.collector = Collector(
            self.runtime,
            TrainerSettings(recipe="fake", seed=0, batch_size=2, num_rollouts=3),
            modality=DiffusionModality(),
            data=self.data,
            sampling=sampling(),
            advantages=AdvantageConfig(),
            clock=clock,
            scored_track="image" if branches else None,
        )
        self.learner = Learner(self.runtime, guardrails=GuardrailConfig(), clock=clock)
        self.learner.prepare()


def test_children_are_scored_credit_their_parents_and_train_within_their_own_groups(tmp_path: Path):
    made = Made(tmp_path)
    rollout = made.collector.collect(0)
    plan, image = rollout.resp.meta.tracks["plan"], rollout.resp.meta.tracks["image"]
    assert plan.batch_size == 6 and image.batch_size == rollout.num_samples == 12
    torch.testing.assert_close(plan.scored_rewards, image.scored_rewards.view(6, 2).mean(1))
    # Two siblings differ from their mean by the same amount, to either side.
    pairs = image.known_advantages.view(6, 2)
    torch.testing.assert_close(pairs[:, 0], -pairs[:, 1], rtol=0, atol=1e-6)
    assert rollout.metrics["reward/mean"] == float(plan.scored_rewards.mean())
    assert rollout.metrics["advantage/max"] == float(pairs.abs().max())
    metrics = made.learner.train(rollout)
    assert metrics["train/grad_norm"] > 0 and made.runtime.num_held() == 0


def test_a_held_out_evaluation_scores_the_named_track_and_shows_one_sample_per_prompt(tmp_path: Path):
    made = Made(tmp_path)
    config = EvaluationConfig(prompts=str(tmp_path / "prompts.jsonl"), num_samples=5, batch_size=4, num_images=3)
    result = config.evaluator(made.data.rows, sampling()).run(made.runtime, "image")
    assert result.num_samples == 5 and result.images is not None and len(result.images) == 3
    assert len(result.labels) == len(result.scores) == 3
    single = config.evaluator(made.data.rows, sampling()).run(Made(tmp_path, branches=False).runtime)
    assert single.images is not None and torch.equal(result.images, single.images)  # the first of each two


def test_a_refill_replaces_a_group_with_all_that_grew_from_it(tmp_path: Path):
    made = Made(tmp_path, lambda group: group.startswith("prompt:p1:"))
    rollout = made.collector.collect(0)
    plan, image = rollout.resp.meta.tracks["plan"], rollout.resp.meta.tracks["image"]
    assert list(dict.fromkeys(plan.group_ids)) == ["prompt:p0", "refill1:prompt:p2"]
    assert [name.rpartition("/")[0] for name in image.sample_ids[::2]] == plan.sample_ids
    assert not plan.failed_groups and rollout.metrics["reward/dropped_groups"] == 1


def test_the_state_of_a_checkpoint_is_that_before_the_oldest_unfinished_rollout(tmp_path: Path):
    made = Made(tmp_path, branches=False)
    states = [made.collector.state_dict()]
    rollouts = []
    for rollout_id in range(2):  # the second is collected while the first is still to be trained on
        rollouts.append(made.collector.collect(rollout_id))
        assert made.collector.state_dict() == states[0]
        states.append({**states[0], "data": made.data.state_dict()})
    made.collector.finished(0)
    assert made.collector.state_dict() == states[1] != states[0]
    again = Made(tmp_path, branches=False)
    again.collector.load_state_dict(states[1], changed=set())
    assert again.collector.collect(1).resp.meta.root_track().sample_ids == rollouts[1].resp.meta.root_track().sample_ids
    made.collector.finished(1)
    assert made.collector.state_dict() == states[2]
