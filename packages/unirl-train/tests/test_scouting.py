"""Scouts choose samples by hand-worked cases, and what is made exactly has the bits of an ordinary run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_fakes import BrightnessReward, FieldBundle, FieldEngine, FieldPipeline, no_failure, sampling

from unirl.algorithms.advantages import AdvantageConfig
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.selection import SampleSelection, extremes, rank_agreement
from unirl.config.schema import Scouts
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.worker import WorkerContext
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.clock import PhaseClock
from unirl.trainer.collector import Collector
from unirl.trainer.diffusion import DiffusionModality
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.learner import Learner
from unirl.trainer.scouting import Scouting
from unirl.trainer.settings import TrainerSettings
from unirl.types.errors import RewardError
from unirl.types.segments import LatentSegment

NAN = float("nan")


def test_the_best_and_the_worst_of_each_prompt_are_named_in_the_order_of_the_batch():
    rewards = torch.tensor([0.5, -1.0, 2.0, 0.1, 0.3, 9.0, 3.0, -2.0, 1.0, 0.0])
    groups = ["a"] * 5 + ["b"] * 5
    assert extremes(rewards, groups, 2) == [1, 2, 5, 7]
    assert extremes(rewards, groups, 4) == [0, 1, 2, 3, 5, 6, 7, 9]
    assert extremes(torch.ones(4), ["a"] * 4, 2) == [0, 3]  # ties keep the order of the batch


def test_a_scout_without_a_reward_is_chosen_only_where_others_do_not_suffice():
    rewards = torch.tensor([NAN, 5.0, 1.0, 3.0, NAN, NAN, NAN, 1.0])
    groups = ["a"] * 4 + ["b"] * 4
    assert extremes(rewards, groups, 2) == [1, 2, 4, 7]


def test_rank_agreement_by_hand():
    left = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0])
    right = torch.tensor([10.0, 20.0, 40.0, 30.0, 3.0, 2.0, 1.0])
    groups = ["a"] * 4 + ["b"] * 3
    # a: one swap of neighbours, 1 - 6 * 2 / (4 * 15) = .8; b: reversed, -1.
    assert rank_agreement(left, right, groups) == pytest.approx((0.8 - 1) / 2)
    # Ties share their mean rank: 0, 1.5, 1.5, 3 against 0, 1, 2, 3 is 4.5 / sqrt(4.5 * 5).
    tied = torch.tensor([0.0, 1.0, 1.0, 2.0])
    assert rank_agreement(tied, torch.arange(4.0), ["a"] * 4) == pytest.approx(4.5 / 22.5**0.5)
    assert rank_agreement(torch.ones(4), torch.arange(4.0), ["a"] * 4) is None
    assert rank_agreement(torch.tensor([NAN, 1.0]), torch.arange(2.0), ["a"] * 2) is None


class Made:
    """A collector and a learner on fakes; two prompts, and `per_prompt` samples of each unless scouts say more."""

    def __init__(
        self,
        folder: Path,
        per_prompt: int,
        scouts: Scouts | None = None,
        *,
        fails: Callable[[str], bool] = no_failure,
        selection: SampleSelection | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        prompts = folder / "prompts.jsonl"
        rows = [{"prompt": f"prompt {i}", "prompt_id": f"p{i}"} for i in range(8)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

        def build(context: WorkerContext) -> dict[str, Any]:
            torch.manual_seed(0)
            bundle = FieldBundle()
            backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
            pipeline = FieldPipeline(bundle.model)
            return {
                "engine": FieldEngine(pipeline, backend),
                "stack": TrainStack(backend, DiffusionNFT(pipeline, backend), micro_batch_size=4),
                "reward": BrightnessReward(fails),
            }

        self.runtime = LocalRuntime(build)
        clock = PhaseClock()
        self.collector = Collector(
            self.runtime,
            TrainerSettings(recipe="fake", seed=0, batch_size=2, num_rollouts=3),
            modality=DiffusionModality(),
            data=MultimodalRLDataSource(str(prompts), shuffle=False),
            sampling=sampling(samples_per_prompt=per_prompt, eta=0.0, sde_indices=None),
            advantages=AdvantageConfig(),
            clock=clock,
            selection=selection,
            scouting=None if scouts is None else Scouting(self.runtime, scouts, clock),
        )
        self.learner = Learner(self.runtime, guardrails=Guardrails(GuardrailConfig()), clock=clock)
        self.learner.prepare()

        self.engine: Any = self.runtime.component("engine")
        self.reward: Any = self.runtime.component("reward")

    @property
    def requests(self) -> list[Any]:
        """What the engine was asked for, in order."""
        return self.engine.requests

    def samples(self, rollout_id: int) -> tuple[Any, dict[str, float]]:
        """The track of one rollout with its tensors, and the metrics; nothing trains."""
        rollout = self.collector.collect(rollout_id)
        return rollout.resp.map(lambda resp: resp.tracks["image"])[0], rollout.metrics


def test_chosen_samples_have_the_bits_of_an_ordinary_run_at_the_full_setting(tmp_path: Path):
    scouts = Scouts(per_prompt=10, num_inference_steps=2, autocast_precision="bf16")
    made, whole = Made(tmp_path, 4, scouts), Made(tmp_path, 10)
    for rollout_id in range(2):
        own, metrics = made.samples(rollout_id)
        every, _ = whole.samples(rollout_id)
        cheap, exact = made.requests[-2:]
        assert cheap.sampling_params.num_inference_steps == 2 and len(cheap.sigmas) == 3
        assert cheap.sampling_params.autocast_precision == "bf16" and cheap.sample_ids == every.sample_ids
        assert exact.sampling_params.num_inference_steps == 4 and exact.sampling_params.samples_per_prompt == 4
        assert exact.sampling_params.autocast_precision == "fp32"
        rows = [every.sample_ids.index(name) for name in own.sample_ids]
        assert len(set(rows)) == 8 and own.group_ids == [every.group_ids[row] for row in rows]
        assert isinstance(own.segment, LatentSegment) and isinstance(every.segment, LatentSegment)
        assert torch.equal(own.segment.latents, every.segment.latents[rows])
        assert torch.equal(own.decoded.pixels, every.decoded.pixels[rows])
        assert torch.equal(own.rewards, every.rewards[rows])
        assert metrics["scouts/count"] == 20 and metrics["group/trained_samples"] == 8


def test_the_samples_made_are_those_that_scouts_found_best_and_worst(tmp_path: Path):
    made = Made(tmp_path, 4, Scouts(per_prompt=10, num_inference_steps=1))
    own, metrics = made.samples(0)
    cheap = made.requests[0]
    resp = made.engine.generate(cheap)
    made.reward.score_track(resp, "image")
    track = resp.tracks["image"]
    expected = []
    for group in ("prompt:p0", "prompt:p1"):
        members = [row for row, name in enumerate(track.group_ids) if name == group]
        ordered = sorted(members, key=lambda row: float(track.rewards[row]))
        expected += [track.sample_ids[row] for row in sorted([*ordered[:2], *ordered[-2:]])]
    assert own.sample_ids == expected
    assert metrics["scouts/reward_mean"] == pytest.approx(float(track.rewards.mean()))
    found = [track.rewards[track.sample_ids.index(name)] for name in own.sample_ids]
    assert metrics["scouts/rank_agreement"] == rank_agreement(torch.stack(found), own.rewards, own.group_ids)


def test_scouted_rollouts_train_and_leave_nothing_held(tmp_path: Path):
    made = Made(tmp_path, 4, Scouts(per_prompt=6, num_inference_steps=2))
    rollout = made.collector.collect(0)
    assert rollout.num_samples == 8
    assert rollout.metrics["scouts/cpu_s"] >= 0 and rollout.metrics["scouts/exact_cpu_s"] >= 0
    assert made.learner.train(rollout)["train/grad_norm"] > 0 and made.runtime.num_held() == 0


def test_groups_that_replace_others_are_scouted_with_their_own_noise(tmp_path: Path):
    made = Made(tmp_path, 2, Scouts(per_prompt=6, num_inference_steps=2), fails=lambda group: group == "prompt:p1")
    own, metrics = made.samples(0)
    assert list(dict.fromkeys(own.group_ids)) == ["prompt:p0", "refill1:prompt:p2"]
    counts = [(req.batch_size, req.sampling_params.num_inference_steps) for req in made.requests]
    assert counts == [(12, 2), (4, 4), (6, 2), (2, 4)] and metrics["scouts/count"] == 18
    cheap, exact = made.requests[2:]
    noise = dict(zip(cheap.sample_ids, cheap.init_noise_group_ids, strict=True))
    assert exact.init_noise_group_ids == [noise[name] for name in exact.sample_ids]
    with pytest.raises(RewardError, match="still could not be scored"):
        Made(tmp_path, 2, Scouts(per_prompt=6, num_inference_steps=2), fails=lambda group: True).samples(0)


def test_groups_that_teach_nothing_are_replaced_after_they_were_made_exactly(tmp_path: Path):
    made = Made(
        tmp_path, 2, Scouts(per_prompt=6, num_inference_steps=2), selection=SampleSelection(dynamic_sampling=True)
    )
    made.reward.same = {"prompt:p0"}
    own, _ = made.samples(0)
    assert list(dict.fromkeys(own.group_ids)) == ["prompt:p1", "refill1:prompt:p2"]
