"""The contract suite over every adapter, and what only the fakes can show."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unirl.models.adapter import require_condition
from unirl.models.pipeline import DiffusionPipeline
from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.sd3.pipeline import SD3Pipeline
from unirl.sde.kernels import CPSSDEStrategy, DDIMStrategy, FlowSDEStrategy
from unirl.sde.loop import transition_rows
from unirl.sde.noise import initial_noise
from unirl.sde.schedule import SigmaSchedule
from unirl.sde.timesteps import TimestepSchedule
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

from .contract import CHECKS, KEYS, Case
from .fakes import FakeBundle, PackedAdapter, TimestepAdapter, TwoExpertAdapter


def _params(**changes: Any) -> DiffusionSamplingParams:
    fields: dict[str, Any] = {
        "num_inference_steps": 5,
        "guidance_scale": 3.0,
        "negative_prompt": "bad",
        "height": 16,
        "width": 16,
        "eta": 0.7,
        "autocast_precision": "fp32",
        "max_sequence_length": 16,
    }
    return DiffusionSamplingParams(**{**fields, **changes})


@pytest.fixture(scope="module")
def sd3(sd3_bundle: SD3Bundle) -> Case:
    bundle = sd3_bundle
    frozen: list[nn.Module] = [bundle.vae, *bundle.text.encoders.values()]
    return Case(SD3Pipeline(bundle, FlowSDEStrategy()), _params(), frozen)


@pytest.fixture(scope="module")
def two_experts() -> Case:
    adapter = TwoExpertAdapter()
    pipeline = DiffusionPipeline(adapter, FlowSDEStrategy(), SigmaSchedule("linear", shift=3.0))
    return Case(pipeline, _params(num_frames=5, guidance_scale_2=1.5), [adapter.bundle.modules["text_encoder"]])


@pytest.fixture(scope="module")
def packed() -> Case:
    adapter = PackedAdapter()
    pipeline = DiffusionPipeline(adapter, CPSSDEStrategy(), SigmaSchedule("dynamic"))
    return Case(pipeline, _params(eta=0.5), [adapter.bundle.modules["understanding"]])


@pytest.fixture(scope="module")
def timesteps() -> Case:
    schedule = TimestepSchedule(steps_offset=1)
    adapter = TimestepAdapter(schedule)
    pipeline = DiffusionPipeline(adapter, DDIMStrategy(), schedule)
    return Case(pipeline, _params(eta=1.0, sde_indices=[0, 1, 2, 3]), [adapter.bundle.modules["text_encoder"]])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["sd3", "two_experts", "packed", "timesteps"])
def test_adapter_contract(name: str, check: Callable[[Case], None], request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(name))


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("name", ["sd3", "two_experts", "packed", "timesteps"])
def test_each_transition_of_two_policies_has_the_log_prob_of_the_one_that_took_it(
    name: str, cut: int, request: pytest.FixtureRequest
) -> None:
    """The latents are those of a walk whose weights are switched within it."""
    case = request.getfixturevalue(name)
    pipeline, (conditions, whole) = case.pipeline, case.rollout()
    trained = [weight for module in pipeline.bundle.trainable_modules().values() for weight in module.parameters()]
    kept = [weight.detach().clone() for weight in trained]

    def load(scale: float) -> None:
        with torch.no_grad():
            for weight, old in zip(trained, kept, strict=True):
                weight.copy_(old * scale)

    noise = initial_noise(KEYS, case.params.seed, pipeline.latent_shape(case.params))
    sample = functools.partial(
        pipeline.diffuse, conditions, noise, pipeline.sigmas(case.params), case.params, noise_keys=KEYS
    )
    num_asked = 0

    def switching() -> bool:
        """Asked before the first step, and after each."""
        nonlocal num_asked
        if num_asked == cut:
            load(0.9)
        num_asked += 1
        return False

    try:
        with pipeline.evaluating():
            switched = sample(is_ending=switching)
            load(1.0)
            asked = iter([*[False] * cut, True])
            begun = sample(is_ending=lambda: next(asked))
            load(0.9)
            found = sample(begun=begun)
            assert found.equals(switched) and not torch.equal(found.clean_latents, whole.clean_latents)
            assert found.sde_logp is not None
            for column, step in enumerate(found.sde_indices):
                load(1.0 if step < cut else 0.9)
                rows = torch.arange(3)
                logp_R = pipeline.replay(conditions, found, rows, torch.full((3,), step), case.params).logp_R
                assert torch.equal(logp_R, found.sde_logp[:, column])
                load(0.9 if step < cut else 1.0)
                other_R = pipeline.replay(conditions, found, rows, torch.full((3,), step), case.params).logp_R
                assert not torch.equal(other_R, found.sde_logp[:, column])
    finally:
        load(1.0)


def test_rows_above_the_boundary_train_the_high_noise_expert_alone(two_experts: Case) -> None:
    conditions, segment = two_experts.rollout()
    high = [step for step in segment.sde_indices if segment.sigmas[step] >= TwoExpertAdapter.boundary]
    assert 0 < len(high) < len(segment.sde_indices)
    samples, steps = transition_rows(3, high)
    two_experts.pipeline.replay(conditions, segment, samples, steps, two_experts.params).logp_R.sum().backward()
    experts = two_experts.pipeline.bundle.trainable_modules()
    assert all(p.grad is None for p in experts["transformer_2"].parameters())
    assert all(p.grad is not None for p in experts["transformer"].parameters())
    experts["transformer"].zero_grad()


def test_an_expert_that_another_rank_needs_runs_here_too_and_changes_nothing(two_experts: Case) -> None:
    """Two ranks whose rows lie on both sides of the boundary, and which gather each expert's shards together."""
    conditions, segment = two_experts.rollout()
    bundle = two_experts.pipeline.bundle
    assert isinstance(bundle, FakeBundle)
    experts = bundle.trainable_modules()
    calls: list[str] = []
    hooks = [module.register_forward_hook(lambda *_, name=name: calls.append(name)) for name, module in experts.items()]
    high = [step for step in segment.sde_indices if segment.sigmas[step] >= TwoExpertAdapter.boundary]
    low = [step for step in segment.sde_indices if step not in high]
    found = {}
    for steps in (high, low):
        samples, rows = transition_rows(3, steps)
        alone = two_experts.pipeline.replay(conditions, segment, samples, rows, two_experts.params).logp_R
        calls.clear()
        bundle.follow_ranks(lambda has_rows: True)  # some rank has rows for every expert
        with_others = two_experts.pipeline.replay(conditions, segment, samples, rows, two_experts.params).logp_R
        bundle.any_rank = None
        found[tuple(steps)] = list(calls)
        assert torch.equal(with_others, alone)
        with_others.sum().backward()
        idle = experts["transformer_2" if steps is high else "transformer"]
        assert all(p.grad is not None and not p.grad.any() for p in idle.parameters())
        for module in experts.values():
            module.zero_grad()
    assert found[tuple(high)] == found[tuple(low)] == ["transformer", "transformer_2"]
    for hook in hooks:
        hook.remove()


def test_each_expert_has_its_own_guidance_scale(two_experts: Case) -> None:
    conditions, segment = two_experts.rollout()
    one_scale = _params(num_frames=5)
    x, _, sigma, _ = segment.transitions(torch.tensor([0, 0]), torch.tensor([0, 4]))
    rows = {name: condition.select([0, 0]) for name, condition in conditions.items()}
    steps = torch.tensor([0, 4])
    with two_experts.pipeline.evaluating():
        two = two_experts.pipeline.velocity(rows, x, sigma, steps, two_experts.params)
        one = two_experts.pipeline.velocity(rows, x, sigma, steps, one_scale)
    assert torch.equal(two[0], one[0])
    assert not torch.allclose(two[1], one[1])


def test_a_bound_velocity_reads_its_conditions_once(packed: Case) -> None:
    adapter = packed.pipeline.adapter
    assert isinstance(adapter, PackedAdapter)
    conditions, _ = packed.rollout()
    before = adapter.num_text_passes
    packed.sample(conditions, ["a", "b", "c"])
    assert adapter.num_text_passes == before + 2  # the text and the negative text, for all five steps


def test_a_variance_preserving_model_samples_as_diffusers_ddim_does(timesteps: Case) -> None:
    """Without guidance, from the same unit noise, one start and no step noise; float32 on both sides."""
    diffusers = pytest.importorskip("diffusers")
    adapter, params = timesteps.pipeline.adapter, _params(eta=0.0, guidance_scale=1.0)
    assert isinstance(adapter, TimestepAdapter)
    noise = initial_noise(KEYS, params.seed, adapter.latent_shape(params))
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1, clip_sample=False
    )
    scheduler.set_timesteps(5)
    with timesteps.pipeline.evaluating():
        conditions = timesteps.pipeline.encode(timesteps.primitives, params)
        pooled, z = require_condition(conditions, "text", TextEmbedCondition).pooled, noise
        for timestep in scheduler.timesteps:
            output = adapter.bundle.modules["unet"](z, timestep.expand(3), pooled)
            z = scheduler.step(output, timestep, z, return_dict=False)[0]
        segment = timesteps.pipeline.diffuse(
            conditions, noise, timesteps.pipeline.sigmas(params), params, noise_keys=KEYS
        )
    torch.testing.assert_close(segment.clean_latents, z, rtol=1e-5, atol=1e-5)
