"""Held-out evaluation: the same images every time, whatever the batches and the ranks."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusion_fakes import BrightnessReward, FieldBundle, FieldEngine, FieldPipeline, displace, prompt_rows, sampling

from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.worker import WorkerContext
from unirl.sde.windows import AllSteps
from unirl.tracking.gallery import sheet
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.trainer.evaluation import EvaluationConfig, Evaluator
from unirl.trainer.held_out import EVAL_ROLLOUT_ID, EvaluationResult, spread_rows
from unirl.types.errors import ConfigError, RewardError
from unirl.types.sampling import DiffusionSamplingParams


def build(context: WorkerContext) -> dict[str, Any]:
    bundle = FieldBundle()
    backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
    engine = FieldEngine(FieldPipeline(bundle.model), backend)
    return {"backend": backend, "engine": engine, "reward": BrightnessReward()}


@pytest.fixture
def runtime() -> LocalRuntime:
    return LocalRuntime(build)


def engine_of(runtime: LocalRuntime) -> FieldEngine:
    engine = runtime.component("engine")
    assert isinstance(engine, FieldEngine)
    return engine


def evaluated(
    runtime: LocalRuntime, *, num_shards: int = 1, num_prompts: int = 4, num_records: int = 10, **options: Any
) -> EvaluationResult:
    defaults: dict[str, Any] = {"prompts": "", "num_samples": 10, "batch_size": 4}
    config = EvaluationConfig(**{**defaults, **options})
    evaluator = Evaluator(config, prompt_rows(num_prompts), sampling())
    pretending: Any = SimpleNamespace(role=runtime.role, num_shards=num_shards)
    result = evaluator.run(pretending, num_records=num_records)
    assert runtime.num_held() == 0
    return result


def images_of(result: EvaluationResult) -> torch.Tensor:
    return sheet(result.records)


def prompts_of(result: EvaluationResult) -> list[str]:
    return [record.prompt for record in result.records]


def test_an_evaluation_repeats_itself_and_shares_no_noise_with_training(runtime: LocalRuntime):
    first, again = evaluated(runtime), evaluated(runtime)
    assert torch.equal(images_of(first), images_of(again))
    assert (
        first.overall == again.overall
        and first.categories == again.categories
        and prompts_of(first) == prompts_of(again)
    )
    requests = engine_of(runtime).requests
    assert all(req.rollout_id == EVAL_ROLLOUT_ID for req in requests)
    assert all(key.startswith(f"r{EVAL_ROLLOUT_ID}:") for req in requests for key in req.init_noise_group_ids)
    other = evaluated(runtime, seed=5)
    assert not torch.equal(images_of(first), images_of(other))


@pytest.mark.parametrize("batch_size", [1, 3, 10, 100])
def test_the_batch_size_does_not_change_the_images(runtime: LocalRuntime, batch_size: int):
    whole, parts = evaluated(runtime), evaluated(runtime, batch_size=batch_size)
    # A batch of another size is another matrix product: float32 rounding.
    torch.testing.assert_close(images_of(parts), images_of(whole), rtol=0, atol=1 / 255)
    assert prompts_of(parts) == prompts_of(whole)
    for category, values in whole.categories.items():
        assert parts.categories[category] == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(("num_shards", "expected"), [(2, 10), (3, 15), (8, 24)])
def test_padding_to_the_shards_changes_neither_means_nor_images(runtime: LocalRuntime, num_shards: int, expected: int):
    plain, padded = evaluated(runtime), evaluated(runtime, num_shards=num_shards)
    sizes = [req.batch_size for req in engine_of(runtime).requests[3:]]
    assert sum(sizes) == expected and all(size % num_shards == 0 for size in sizes)
    assert padded.overall == pytest.approx(plain.overall, abs=1e-6)
    assert padded.categories.keys() == plain.categories.keys()
    torch.testing.assert_close(images_of(padded), images_of(plain), rtol=0, atol=1 / 255)
    assert padded.num_samples == 10


def test_means_are_over_samples_overall_and_by_category(runtime: LocalRuntime):
    result = evaluated(runtime)
    scores = {name: torch.tensor([each.scores[name] for each in result.records]) for name in ("reward", "bright")}
    seen = images_of(result).mean(dim=(1, 2, 3))
    torch.testing.assert_close(scores["bright"], seen, rtol=0, atol=0.5 / 255)  # images are shown in bytes
    torch.testing.assert_close(scores["reward"], -(scores["bright"] - 0.8).square())
    is_even = torch.tensor([int(prompt.split()[1]) % 2 == 0 for prompt in prompts_of(result)])
    assert result.overall == pytest.approx({name: float(values.mean()) for name, values in scores.items()}, rel=1e-5)
    assert result.categories["even"]["reward"] == pytest.approx(float(scores["reward"][is_even].mean()), rel=1e-5)
    assert result.categories["odd"]["bright"] == pytest.approx(float(scores["bright"][~is_even].mean()), rel=1e-5)
    metrics = result.metrics()
    assert set(metrics) == {
        *(f"eval/{name}" for name in ("reward", "bright")),
        *(f"eval/{category}/{name}" for category in ("even", "odd") for name in ("reward", "bright")),
    }
    assert result.record() == {"overall": result.overall, "categories": result.categories, "num_samples": 10}


def test_images_are_the_first_of_the_list_and_no_more_than_asked(runtime: LocalRuntime):
    every, few, none = (evaluated(runtime, num_records=count) for count in (10, 5, 0))
    assert torch.equal(images_of(few), images_of(every)[:5]) and prompts_of(few) == prompts_of(every)[:5]
    assert none.records == []


def test_only_the_weights_change_the_result(runtime: LocalRuntime):
    backend = runtime.component("backend")
    assert isinstance(backend, FSDPBackend)
    backend.keep_policy("old")
    before = evaluated(runtime)
    displace(backend, 0.3)
    assert not torch.equal(images_of(evaluated(runtime)), images_of(before))
    assert torch.equal(images_of(evaluated(runtime, policy="old")), images_of(before))


def test_rows_take_turns_and_every_repetition_has_noise_of_its_own():
    rows = spread_rows(prompt_rows(5), 12)
    assert [int(row.prompt.split()[1]) % 2 for row in rows] == [0, 1] * 6
    assert len({row.prompt_id for row in rows}) == 12
    assert set(Counter(row.prompt for row in rows).values()) == {2, 3}
    assert spread_rows(prompt_rows(5), 5) == rows[:5]


def test_samples_without_a_score_are_counted_and_left_out_of_the_means(runtime: LocalRuntime):
    whole = evaluated(runtime)
    reward = runtime.component("reward")
    assert isinstance(reward, BrightnessReward)
    reward.fails = lambda group: "p1@0" in group
    result = evaluated(runtime)
    assert (result.num_samples, result.num_failed) == (9, 1)
    assert result.metrics()["eval/failed_samples"] == 1.0
    bright = [each.scores["bright"] for i, each in enumerate(whole.records) if i != 1]
    assert result.overall["bright"] == pytest.approx(sum(bright) / 9, rel=1e-5)
    assert result.records[1].scores == {} and result.records[1].error is not None
    assert result.categories["even"] == whole.categories["even"]
    reward.fails = lambda group: True
    with pytest.raises(
        RewardError, match="none of 10 evaluation samples could be scored; first error: the scorer said"
    ):
        evaluated(runtime)


def test_parameters_are_deterministic_and_otherwise_those_of_training():
    training = sampling(scheduler=AllSteps(4), sde_indices=None, guidance_scale=3.0, negative_prompt="", seed=9)
    params = EvaluationConfig(prompts="").params(training)
    assert (params.eta, params.sde_indices, params.scheduler, params.samples_per_prompt) == (0.0, [], None, 1)
    assert (params.seed, params.guidance_scale, params.num_inference_steps) == (1234, 3.0, 4)
    assert isinstance(params, DiffusionSamplingParams) and params.resolve_sde_indices(0) == []
    changed = EvaluationConfig(prompts="", num_inference_steps=8, guidance_scale=0.0).params(training)
    assert (changed.num_inference_steps, changed.guidance_scale) == (8, 0.0)
    scales = EvaluationConfig(prompts="", guidance_scale_2=3.0, distilled_guidance_scale=6.0).params(training)
    assert (scales.guidance_scale, scales.guidance_scale_2, scales.distilled_guidance_scale) == (3.0, 3.0, 6.0)
    assert params.post_solver == "euler"
    second_order = EvaluationConfig(prompts="", post_solver="unipc")
    assert second_order.params(training).post_solver == "unipc"
    assert second_order.settings(training)["sampling"]["post_solver"] == "unipc"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "eval.num_samples = 0 must be at least 1"),
        ({"batch_size": 0}, "eval.batch_size = 0 must be at least 1"),
        ({"interval": -1}, "eval.interval = -1 must be at least 0"),
        ({"interval_cpu_s": 0.0}, "eval.interval_cpu_s = 0.0 must be above 0, or null"),
        (
            {"interval": 8, "interval_cpu_s": 20.0},
            "eval.interval = 8 rollouts and eval.interval_cpu_s = 20.0 both say when to evaluate",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        EvaluationConfig(prompts="", **options)
