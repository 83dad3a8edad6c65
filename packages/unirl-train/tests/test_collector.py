"""What a collector hands to the learner: children with their parents, and a state that forgets no prompts."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import pytest
import torch
from diffusion_fakes import BrightnessReward, FieldBundle, FieldEngine, FieldPipeline, no_failure, sampling

from unirl.algorithms.advantages import AdvantageConfig, Advantages
from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.branch_grpo import BranchGRPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.inherited import InheritedAdvantages
from unirl.algorithms.routed_advantages import RoutedAdvantages
from unirl.algorithms.selection import SampleSelection
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.worker import WorkerContext
from unirl.tracking.gallery import sheet
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import Collector
from unirl.trainer.diffusion import DiffusionModality
from unirl.trainer.evaluation import EvaluationConfig
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.held_out import spread_rows
from unirl.trainer.learner import Learner
from unirl.trainer.settings import TrainerSettings
from unirl.types.errors import ConfigError
from unirl.types.media import Texts
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import Credit, RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment


class Branching(FieldEngine):
    """A text for every prompt, and two images for every text."""

    num_images = 2

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """The tracks "plan" and "image"."""
        count, size = self.num_images, req.batch_size
        each = [
            req.replace(init_noise_group_ids=[name + "+" * k for name in req.init_noise_group_ids])
            for k in range(count)
        ]
        made = RolloutTrack.concat([super(Branching, self).generate(own, policy).tracks["image"] for own in each])
        grown = made.select([k * size + row for row in range(size) for k in range(count)])
        plan = req.make_root_track(conditions={}, segment=None, decoded=Texts(texts=list(req.sample_ids)))
        parts = {"conditions": grown.conditions, "segment": grown.segment, "decoded": grown.decoded}
        image = plan.fork("plan", "image", count, **parts)
        return RolloutResp(tracks={"plan": plan, "image": image})


class Crediting(BrightnessReward):
    """Scores images; plans are credited with theirs."""

    how: Credit = "mean"

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_track(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> dict[str, float]:
        """As the reward service does."""
        super().score_track(resp, track, is_training=is_training)
        resp.tracks["plan"] = resp.propagate_rewards(track, "plan", self.how).tracks["plan"]
        return {}


class Made:
    """A collector and a learner on fakes."""

    def __init__(
        self,
        folder: Path,
        fails: Callable[[str], bool] = no_failure,
        *,
        branches: bool = True,
        engine: type[FieldEngine] = Branching,
        how: Credit = "mean",
        make: Callable[..., StageAlgorithm] = DiffusionGRPO,
        params: DiffusionSamplingParams | None = None,
        track_advantages: Mapping[str, Advantages] | None = None,
        selection: SampleSelection | None = None,
    ) -> None:
        prompts = folder / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": f"prompt {i}", "prompt_id": f"p{i}"}) + "\n" for i in range(9))
        )

        def build(context: WorkerContext) -> dict[str, Any]:
            bundle = FieldBundle()
            backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
            pipeline = FieldPipeline(bundle.model)
            reward = (Crediting if branches else BrightnessReward)(fails)
            if isinstance(reward, Crediting):
                reward.how = how
            return {
                "engine": (engine if branches else FieldEngine)(pipeline, backend),
                "stack": TrainStack(backend, make(pipeline, backend), micro_batch_size=4),
                "reward": reward,
            }

        self.runtime = LocalRuntime(build)
        clock = PhaseClock()
        self.data = MultimodalRLDataSource(str(prompts), shuffle=False)
        self.collector = Collector(
            self.runtime,
            TrainerSettings(recipe="fake", seed=0, batch_size=2, num_rollouts=3),
            modality=DiffusionModality(),
            data=self.data,
            sampling=params or sampling(),
            advantages=AdvantageConfig(),
            clock=clock,
            scored_track="image" if branches else None,
            track_advantages=track_advantages,
            selection=selection,
        )
        self.learner = Learner(self.runtime, guardrails=Guardrails(GuardrailConfig()), clock=clock)
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


def test_children_inherit_the_advantages_of_their_parents(tmp_path: Path):
    made = Made(tmp_path, track_advantages={"image": InheritedAdvantages()})
    rollout = made.collector.collect(0)
    plan, image = rollout.resp.meta.tracks["plan"], rollout.resp.meta.tracks["image"]
    assert image.known_advantages.tolist() == plan.known_advantages.repeat_interleave(2).tolist()
    assert float(plan.known_advantages.abs().max()) > 0
    assert made.learner.train(rollout)["train/grad_norm"] > 0
    with pytest.raises(ConfigError, match="which has none: it is neither the first nor trained"):
        Made(tmp_path, branches=False, track_advantages={"image": InheritedAdvantages()}).collector.collect(0)


class Fourfold(Branching):
    """Four images for every text."""

    num_images = 4


@pytest.mark.parametrize("of_texts", [None, 2])
def test_the_best_and_the_worst_children_train_and_all_of_them_credit_their_parents(tmp_path: Path, of_texts):
    """In order of falling advantage, as pairs need them; of the texts, too, where these are chosen."""
    whole = Made(tmp_path, engine=Fourfold).collector.collect(0).resp.meta
    scores = dict(zip(whole.track("image").sample_ids, whole.track("image").scored_rewards.tolist(), strict=True))
    selection = SampleSelection(best_of=of_texts, best_of_children=2)
    made = Made(tmp_path, engine=Fourfold, selection=selection)
    rollout = made.collector.collect(0)
    held, meta = rollout.resp.fetch(), rollout.resp.meta
    plan, image = meta.track("plan"), meta.track("image")
    assert plan.batch_size == (6 if of_texts is None else 4) and image.batch_size == 2 * plan.batch_size
    for text, credited in zip(plan.sample_ids, plan.scored_rewards.tolist(), strict=True):
        own = {name: value for name, value in scores.items() if name.rpartition("/")[0] == text}
        assert credited == pytest.approx(fmean(own.values()), rel=1e-6)
        chosen = [name for name in image.sample_ids if name in own]
        assert [own[name] for name in chosen] == [max(own.values()), min(own.values())]
    assert held.tracks["image"].sample_ids == image.sample_ids
    assert rollout.metrics["image/reward/mean"] == pytest.approx(fmean(scores.values()), rel=1e-6)
    assert made.learner.train(rollout)["train/grad_norm"] > 0 and made.runtime.num_held() == 0


def test_each_medium_gets_the_advantages_of_its_route_and_what_reads_one_number_their_mean(tmp_path: Path):
    routes = {"video": {"bright": 1.0}, "audio": {"bright": 3.0}}
    made = Made(tmp_path, track_advantages={"image": RoutedAdvantages(routes=routes)})
    meta = made.collector.collect(0).resp
    for held in (meta.meta.tracks["image"], meta.fetch().tracks["image"]):
        alone = AdvantageConfig(preset="flow_grpo_global_std")(held.component_rewards["bright"], held.group_ids)
        assert list(held.media_advantages) == ["video", "audio"]
        assert torch.equal(held.media_advantages["video"], alone)
        assert torch.equal(held.media_advantages["audio"], 3.0 * alone)
        torch.testing.assert_close(held.known_advantages, 2.0 * alone)


def test_a_held_out_evaluation_scores_the_named_track_and_shows_one_sample_per_prompt(tmp_path: Path):
    made = Made(tmp_path)
    config = EvaluationConfig(prompts=str(tmp_path / "prompts.jsonl"), num_samples=5, batch_size=4)
    result = config.evaluator(made.data.rows, sampling()).run(made.runtime, "image", num_records=3)
    assert result.num_samples == 5
    prompts = [f"prompt:{row.prompt_id}:sample:0" for row in spread_rows(made.data.rows, 3)]
    assert [(record.track, record.sample_id) for record in result.records] == [
        (track, f"{prompt}{end}") for prompt in prompts for track, end in (("plan", ""), ("image", "/i0"))
    ]
    single = config.evaluator(made.data.rows, sampling()).run(Made(tmp_path, branches=False).runtime, num_records=3)
    images = [record for record in result.records if record.track == "image"]
    assert torch.equal(sheet(images), sheet(single.records))  # the first of each two


def test_a_refill_replaces_a_group_with_all_that_grew_from_it(tmp_path: Path):
    made = Made(tmp_path, lambda group: group.startswith("prompt:p1:"))
    rollout = made.collector.collect(0)
    plan, image = rollout.resp.meta.tracks["plan"], rollout.resp.meta.tracks["image"]
    assert list(dict.fromkeys(plan.group_ids)) == ["prompt:p0", "refill1:prompt:p2"]
    assert [name.rpartition("/")[0] for name in image.sample_ids[::2]] == plan.sample_ids
    assert not plan.failed_groups and rollout.metrics["reward/dropped_groups"] == 1


class Uneven(Branching):
    """One image of every second text, two of the others."""

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        resp = super().generate(req, policy)
        image = resp.tracks["image"]
        rows = [row for row, name in enumerate(image.sample_ids) if row // 2 % 2 == 0 or name.endswith("0")]
        return RolloutResp(tracks={**resp.tracks, "image": image.select(rows)})


@pytest.mark.parametrize("how", get_args(Credit))
def test_refill_after_refill_texts_are_credited_with_their_own_images(tmp_path: Path, how: Credit):
    """p1 and p2 cannot be scored, so two refills go by: against rewards by name, as the images hold them."""
    made = Made(tmp_path, lambda group: ":p1:" in group or ":p2:" in group, engine=Uneven, how=how)
    rollout = made.collector.collect(0)
    plan, image = rollout.resp.meta.tracks["plan"], rollout.resp.meta.tracks["image"]
    assert list(dict.fromkeys(plan.group_ids)) == ["prompt:p0", "refill2:prompt:p3"]
    rewards: dict[str, list[float]] = {}
    for name, value in zip(image.sample_ids, image.scored_rewards.tolist(), strict=True):
        rewards.setdefault(name.rpartition("/")[0], []).append(value)
    assert [len(own) for own in rewards.values()] == [2, 1, 2] * 2 and list(rewards) == plan.sample_ids
    reduced = {"mean": fmean, "sum": sum, "max": max, "best_of": max}[how]
    assert plan.scored_rewards.tolist() == pytest.approx([reduced(own) for own in rewards.values()], rel=1e-6)
    alone = [own[0] for own in rewards.values() if len(own) == 1]
    assert alone == [
        value for value, own in zip(plan.scored_rewards.tolist(), rewards.values(), strict=True) if len(own) == 1
    ]
    assert made.learner.train(rollout)["train/grad_norm"] > 0


def test_the_state_of_a_checkpoint_is_that_before_the_oldest_unfinished_rollout(tmp_path: Path):
    made = Made(tmp_path, branches=False)
    states = [made.collector.state_dict()]
    rollouts = []
    for rollout_id in range(2):  # the second is collected while the first is still to be trained on
        rollouts.append(made.collector.collect(rollout_id))
        assert made.collector.state_dict() == states[0]
        states.append({**states[0], "data": made.data.state_dict()})
    made.collector.finished(0, [0])
    assert made.collector.state_dict() == states[1] != states[0]
    again = Made(tmp_path, branches=False)
    again.collector.load_state_dict(states[1], changed=set())
    assert again.collector.collect(1).resp.meta.root_track().sample_ids == rollouts[1].resp.meta.root_track().sample_ids
    made.collector.finished(1, [1])
    assert made.collector.state_dict() == states[2]


def test_a_refill_of_trees_brings_whole_trees(tmp_path: Path):
    """Four leaves of each prompt part at steps 0 and 1; of the first two prompts one cannot be scored."""
    tree: dict[str, Any] = {"branch_steps": [0, 1], "branch_factors": [2, 2], "init_same_noise": True}
    made = Made(
        tmp_path,
        lambda group: group.endswith(":p1"),
        branches=False,
        make=lambda *parts: BranchGRPO(*parts, samples_per_tree=4),
        params=sampling(samples_per_prompt=4, **tree),
    )
    rollout = made.collector.collect(0)
    image = rollout.resp.fetch().tracks["image"]
    assert image.group_ids == ["prompt:p0"] * 4 + ["refill1:prompt:p2"] * 4
    assert isinstance(image.segment, LatentSegment)
    pairs = image.segment.latents_at(1).view(2, 2, 2, -1)
    assert torch.equal(pairs[:, :, 0], pairs[:, :, 1]) and not torch.equal(pairs[:, 0], pairs[:, 1])
    assert image.segment.clean_latents.unique(dim=0).shape[0] == 8
    assert made.learner.train(rollout)["train/grad_norm"] > 0


@pytest.mark.parametrize(("num_shards", "num_groups"), [(1, 1), (2, 2), (3, 3)])
def test_a_refill_asks_for_as_many_trees_as_divide_over_the_devices(
    tmp_path: Path, num_shards: int, num_groups: int, monkeypatch: pytest.MonkeyPatch
):
    """One group is missing; twelve leaves of one tree would divide over three devices, the tree does not."""
    tree: dict[str, Any] = {"branch_steps": [0, 1], "branch_factors": [4, 3], "init_same_noise": True}
    params = sampling(samples_per_prompt=12, **tree)
    made = Made(tmp_path, branches=False, params=params)
    monkeypatch.setattr(LocalRuntime, "num_shards", num_shards)
    assert made.collector._fresh_groups(0, 1).batch_size == num_groups * 12


def test_a_refill_divides_over_the_devices_in_groups_where_these_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One group of four samples is missing; four would divide over two devices, the group does not."""
    made = Made(tmp_path, branches=False, params=sampling(samples_per_prompt=4))
    monkeypatch.setattr(LocalRuntime, "num_shards", 2)
    assert made.collector._fresh_groups(0, 1).batch_size == 4
    made.collector._keeps_groups = True
    assert made.collector._fresh_groups(0, 1).batch_size == 8


class Interrupted(Branching):
    """A push cuts the second request short before its images."""

    num_calls = 0

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        """As Branching."""
        self.num_calls += 1
        resp = super().generate(req, policy)
        if self.num_calls != 2:
            return resp
        plan = resp.tracks["plan"]
        return RolloutResp(tracks={"plan": plan.replace(is_unfinished=torch.ones(plan.batch_size, dtype=torch.bool))})


def test_a_refill_that_a_push_cuts_short_goes_on_before_it_is_scored(tmp_path: Path):
    made = Made(tmp_path, lambda group: group.startswith("prompt:p1:"), engine=Interrupted)
    resp = made.collector.collect(0).resp.meta
    assert list(dict.fromkeys(resp.tracks["plan"].group_ids)) == ["prompt:p0", "refill1:prompt:p2"]
    assert resp.num_unfinished == 0 and resp.tracks["image"].batch_size == 2 * resp.tracks["plan"].batch_size
