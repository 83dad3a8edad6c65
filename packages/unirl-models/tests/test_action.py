"""Policies that act: what they draw, that a replay gives the rollout's log-probs, and what only executed moves change.

Bits are compared in float32 on a CPU at equal rows; other geometries by 1e-5 nats, a few roundings of a sum.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unirl.models.action.bundle import ActionBundle
from unirl.models.action.config import ActionConfig, Head
from unirl.models.action.pipeline import BinsActionPipeline, FlowActionPipeline
from unirl.sde.kernels import CPSSDEStrategy
from unirl.sde.noise import keyed_normal, keyed_uniform
from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.sampling import ActionSamplingParams

H, D = 4, 2
NUM_MOVES = torch.tensor([4, 1, 3, 2, 4])
Pipeline = FlowActionPipeline | BinsActionPipeline


def made(head: Head, **changes) -> Pipeline:
    config = ActionConfig(
        head=head, action_size=D, chunk=H, image_shape=(3, 24, 24), width=16, num_keypoints=8, num_bins=7, **changes
    )
    bundle = ActionBundle(config=config)
    return FlowActionPipeline(bundle) if head == "flow" else BinsActionPipeline(bundle)


def seen(num: int = 5, pipeline: Pipeline | None = None) -> Observations:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (num, 3, 24, 24), generator=generator, dtype=torch.uint8)
    has_states = pipeline is not None and pipeline.state_size is not None
    return Observations(images, torch.randn(num, 6, generator=generator) if has_states else None)


def keys(num: int = 5) -> list[str]:
    return [f"k{row}" for row in range(num)]


def segment_of(pipeline: Pipeline, drawn: DrawnChunks, params: ActionSamplingParams, num_moves=NUM_MOVES):
    assert drawn.densities is not None
    chunks = {"chains": drawn.chains} if drawn.tokens is None else {"tokens": drawn.tokens}
    observed = seen(len(num_moves), pipeline)
    return ActionSegment.pack(
        images=[observed.images],
        states=None if observed.states is None else [observed.states],
        **{name: [value] for name, value in chunks.items()},
        log_probs=[pipeline.log_probs(drawn.densities, num_moves)],
        rewards=[torch.zeros(len(num_moves))],
        num_moves=[num_moves],
        params=params,
        **pipeline.segment_fields(params),
    )


@pytest.fixture(params=["flow", "bins"])
def head(request) -> Head:
    return request.param


@pytest.mark.parametrize("changes", [{}, {"state_size": 6}], ids=["images", "images and states"])
def test_a_replay_at_unchanged_weights_gives_the_log_probs_of_the_rollout(head, changes):
    pipeline, params = made(head, **changes), ActionSamplingParams()
    observed = seen(5, pipeline)
    with pipeline.evaluating():
        drawn = pipeline.draw(observed, params, noise_keys=keys())
        segment = segment_of(pipeline, drawn, params)
        stats = pipeline.replay(segment, torch.arange(5), params)
    assert torch.equal(stats.logp_NL, segment.log_probs)
    few = pipeline.replay(segment, torch.tensor([3, 1]), params)
    torch.testing.assert_close(few.logp_NL, segment.log_probs[[3, 1]], atol=1e-5, rtol=1e-5)
    assert few.logp_NL.requires_grad and few.features_NW.shape == (2, 16)


def test_some_steps_of_a_flow_may_be_deterministic():
    pipeline, params = made("flow"), ActionSamplingParams(sde_indices=[1, 2], num_inference_steps=5)
    drawn = pipeline.draw(seen(), params, noise_keys=keys())
    segment = segment_of(pipeline, drawn, params)
    assert segment.num_terms == 2
    stats = pipeline.replay(segment, torch.arange(5), params)
    torch.testing.assert_close(stats.logp_NL, segment.log_probs, atol=1e-5, rtol=1e-5)


def test_the_log_prob_of_a_flow_step_is_the_gaussian_one_over_executed_moves():
    """Against torch.distributions, from the stored chain and the velocities alone."""
    pipeline, params = made("flow"), ActionSamplingParams(eta=0.4)
    segment = segment_of(pipeline, pipeline.draw(seen(), params, noise_keys=keys()), params)
    sigma, following = segment.sigmas[1], segment.sigmas[2]  # the second step, where nothing divides by 1 - 1
    x, y = segment.chains[:, 1], segment.chains[:, 2]
    velocity = pipeline._network(seen().images, x=x, sigma_R=sigma.expand(5))[1]
    dt, q = following - sigma, 0.4 * (sigma / (1 - sigma)).sqrt()
    mean = x + velocity * dt + q**2 / (2 * sigma) * (x + (1 - sigma) * velocity) * dt
    density = torch.distributions.Normal(mean, q * (-dt).sqrt()).log_prob(y)
    expected = torch.stack([density[row, : NUM_MOVES[row]].sum() for row in range(5)])
    torch.testing.assert_close(segment.log_probs[:, 1], expected, atol=1e-4, rtol=1e-5)


def test_moves_that_were_not_executed_change_no_log_prob_and_get_no_gradient(head):
    pipeline, params = made(head), ActionSamplingParams()
    segment = segment_of(pipeline, pipeline.draw(seen(), params, noise_keys=keys()), params, torch.full((5,), 2))
    if segment.chains is not None:
        changed = segment.chains.clone()
        changed[:, -1, 2:] += 1  # the last position: what a step was drawn to, and no step goes on from
        other = segment.replace(chains=changed)
    else:
        tokens = segment.tokens.clone()
        tokens[:, 2:] = 0
        other = segment.replace(tokens=tokens)
    before, after = (pipeline.replay(each, torch.arange(5), params).logp_NL for each in (segment, other))
    assert torch.equal(before, after)


def test_draws_depend_on_their_keys_alone(head):
    pipeline, params = made(head), ActionSamplingParams()
    whole = pipeline.draw(seen(), params, noise_keys=keys()).moves
    one = pipeline.draw(seen().select(torch.tensor([3])), params, noise_keys=["k3"]).moves
    torch.testing.assert_close(one[0], whole[3], atol=1e-5, rtol=1e-5)
    assert not torch.equal(pipeline.draw(seen(), params, noise_keys=[f"x{key}" for key in keys()]).moves, whole)
    assert bool((whole.abs() <= 1).all())


def test_bins_are_drawn_by_their_probabilities():
    pipeline, params = made("bins"), ActionSamplingParams(temperature=0.7)
    one = seen(1)
    assert one.images is not None
    probabilities = (pipeline._network(one.images)[1][0, 0, 0] / 0.7).softmax(-1)
    many = Observations(one.images.repeat(4000, 1, 1, 1))
    drawn = pipeline.draw(many, params, noise_keys=keys(4000)).tokens
    assert drawn is not None
    tokens = drawn[:, 0, 0]
    shares = torch.bincount(tokens, minlength=7) / 4000
    torch.testing.assert_close(shares, probabilities.detach(), atol=0.03, rtol=0)  # 3.8 standard errors of .008
    first = int((probabilities.cumsum(0) <= keyed_uniform(["k0"], params.seed, (H, D))[0, 0, 0]).sum())
    assert int(tokens[0]) == first


def test_without_noise_the_most_probable_chunk_is_taken(head):
    pipeline, params = made(head), ActionSamplingParams(eta=0, temperature=0)
    drawn = pipeline.draw(seen(), params, noise_keys=keys())
    assert drawn.densities is None
    if drawn.tokens is not None:
        logits = pipeline._network(seen().images)[1]
        assert torch.equal(drawn.tokens, logits.argmax(-1))
        assert torch.equal(drawn.moves, (drawn.tokens + 0.5) / 7 * 2 - 1)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_flow_follows_its_velocity(num_rows):
    """Two Euler steps by hand."""
    pipeline, params = made("flow"), ActionSamplingParams(eta=0, num_inference_steps=2)
    observed = seen(num_rows)
    drawn = pipeline.draw(observed, params, noise_keys=keys(num_rows))
    assert drawn.chains is not None
    x = drawn.chains[:, 0]
    for sigma in (1.0, 0.5):
        x = x - 0.5 * pipeline._network(observed.images, x=x, sigma_R=torch.full((num_rows,), sigma))[1]
    torch.testing.assert_close(drawn.chains[:, -1], x)


def test_imitation_is_flow_matching_or_cross_entropy_over_executed_moves(head):
    """By hand from the network; whatever stands after the executed moves has no part in it."""
    pipeline, params = made(head), ActionSamplingParams()
    moves = torch.rand(5, H, D, generator=torch.Generator().manual_seed(2)) * 2 - 1
    drawn, images = pipeline.given(moves, params), seen().images
    chunks = {"chains": [drawn.chains]} if drawn.tokens is None else {"tokens": [drawn.tokens]}
    fields = {"rewards": [torch.zeros(5)], "num_moves": [NUM_MOVES], "params": params}
    segment = ActionSegment.pack(images=[images], **chunks, **fields, **pipeline.segment_fields(params))
    found = pipeline.imitation_loss(segment, torch.arange(5), noise_keys=keys(), seed=3)
    if drawn.tokens is None:
        noise = keyed_normal(keys(), 3, (H, D))
        sigma = keyed_uniform([f"{key}::level" for key in keys()], 3, ())
        x = moves + sigma[:, None, None] * (noise - moves)
        each = (pipeline._network(images, x=x, sigma_R=sigma)[1] - (noise - moves)).square()
    else:
        assert torch.equal(drawn.tokens, ((moves + 1) * 3.5).floor().long())
        logits = pipeline._network(images)[1]
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 2), drawn.tokens.flatten(), reduction="none")
        each = each.view(5, H, D)
    expected = torch.stack([each[row, : NUM_MOVES[row]].mean() for row in range(5)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.requires_grad


def test_a_policy_survives_its_folder(head, tmp_path: Path):
    pipeline = made(head, state_size=6)
    pipeline._bundle.export_merged(str(tmp_path / "x"), {"policy": pipeline._network.state_dict()})
    again = ActionBundle(pretrained_model=str(tmp_path / "x"))
    assert again.config == pipeline._bundle.config
    loaded = again.network.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in pipeline._network.state_dict().items())
    with pytest.raises(ConfigError, match="is the checkpoint that was loaded"):
        again.export_merged(str(tmp_path / "x"), {"policy": again.network.state_dict()})


def test_states_are_read_less_their_offset_and_divided_by_their_scale(head, tmp_path: Path):
    plain, scaled = made(head, state_size=2), made(head, state_size=2, state_offset=[100, -3], state_scale=[0.25, 2])
    states = torch.tensor([[100.25, 1.0], [99.5, -3.0]])
    trunk, unscaled = scaled._network.state, plain._network.state
    assert trunk is not None and unscaled is not None
    assert torch.equal(trunk(states), unscaled(torch.tensor([[1.0, 2.0], [-2.0, 0.0]])))
    trunk.to(torch.bfloat16)
    assert not torch.equal(*trunk(states)), "100.25 and 99.5 are one number in bfloat16"
    scaled._bundle.export_merged(str(tmp_path / "x"), {"policy": scaled._network.float().state_dict()})
    again = ActionBundle(pretrained_model=str(tmp_path / "x"))
    assert (again.config.state_offset, again.config.state_scale) == ((100.0, -3.0), (0.25, 2.0))


def test_weights_made_anew_depend_on_their_seed_alone():
    config = ActionConfig(head="flow", action_size=2, state_size=3)
    torch.manual_seed(5)
    first = ActionBundle(config=config).network.state_dict()
    torch.manual_seed(6)
    again, other = (ActionBundle(config=config, seed=seed).network.state_dict() for seed in (0, 1))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_what_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="the policy has the head flow, BinsActionPipeline samples from bins"):
        BinsActionPipeline(made("flow")._bundle)
    with pytest.raises(ConfigError, match="the cps kernel has no density"):
        FlowActionPipeline(made("flow")._bundle, CPSSDEStrategy())
    with pytest.raises(ConfigError, match="set image_shape, state_size or both"):
        ActionConfig(head="flow", action_size=2)
    with pytest.raises(ConfigError, match=r"image_shape = \[3, 8, 8\]"):
        ActionConfig(head="flow", action_size=2, image_shape=(3, 8, 8))
    with pytest.raises(ConfigError, match=r"state_offset has 1 numbers, state_size is 2"):
        ActionConfig(head="flow", action_size=2, state_size=2, state_offset=(1.0,))
    with pytest.raises(ConfigError, match=r"state_scale has 2 numbers, state_size is None"):
        ActionConfig(head="flow", action_size=2, image_shape=(3, 16, 16), state_scale=(1.0, 1.0))
    with pytest.raises(ConfigError, match=r"state_scale = \[1.0, 0.0\] must not be 0"):
        ActionConfig(head="flow", action_size=2, state_size=2, state_scale=(1.0, 0.0))
    with pytest.raises(ConfigError, match="give pretrained_model, or config"):
        ActionBundle()
    with pytest.raises(CheckpointError, match="cannot be read"):
        ActionBundle(str(tmp_path))
    pipeline, params = made("bins"), ActionSamplingParams()
    segment = segment_of(pipeline, pipeline.draw(seen(), params, noise_keys=keys()), params)
    with pytest.raises(ConfigError, match=r"Set sampling.temperature above 0"):
        pipeline.replay(segment, torch.arange(5), ActionSamplingParams(temperature=0))
