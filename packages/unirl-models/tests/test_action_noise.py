"""Flow-Noise: log-probs of chains with learned deviations, against float64 arithmetic that shares no code with it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from unirl.models.action.bundle import ActionBundle
from unirl.models.action.config import ActionConfig
from unirl.models.action.noise_pipeline import FlowNoiseActionPipeline
from unirl.models.action.pipeline import FlowActionPipeline
from unirl.types.actions import ActionSegment, Observations
from unirl.types.errors import ConfigError, ContractError
from unirl.types.sampling import ActionSamplingParams

H, D, S, N = 3, 2, 5, 4
LOW, HIGH = 0.08, 0.16
NUM_MOVES = torch.tensor([3, 1, 2, 3])
PARAMS = ActionSamplingParams(eta=1.0)


def made(**changes) -> FlowNoiseActionPipeline:
    config = ActionConfig(head="flow", action_size=D, chunk=H, state_size=S, width=8, noise_range=(LOW, HIGH))
    return FlowNoiseActionPipeline(ActionBundle(config=config, seed=3, **changes))


def seen() -> Observations:
    return Observations(states=torch.randn(N, S, generator=torch.Generator().manual_seed(0)))


def played(pipeline: FlowNoiseActionPipeline, params: ActionSamplingParams = PARAMS) -> ActionSegment:
    with torch.no_grad():
        drawn = pipeline.draw(seen(), params, noise_keys=[f"k{row}" for row in range(N)])
    assert drawn.densities is not None and drawn.chains is not None
    return ActionSegment.pack(
        states=[seen().states],
        chains=[drawn.chains],
        log_probs=[pipeline.log_probs(drawn.densities, NUM_MOVES)],
        rewards=[torch.zeros(N)],
        num_moves=[NUM_MOVES],
        params=params,
        **pipeline.segment_fields(params),
    )


def silu(x):
    return x / (1 + np.exp(-x))


def chain_log_probs(weights: dict[str, np.ndarray], segment: ActionSegment) -> np.ndarray:
    """[N] in float64, from the weights and the stored chains."""
    assert segment.states is not None

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def log_normal(y, mean, std):
        return -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)

    hidden = np.maximum(linear("state.perceptron.0", segment.states.double().numpy()), 0)
    features = np.maximum(linear("state.perceptron.2", hidden), 0)
    assert segment.chains is not None
    chains, num_steps = segment.chains.double().numpy(), segment.chains.shape[1] - 1
    counts = np.arange(H)[None, :, None] < NUM_MOVES.numpy()[:, None, None]
    total = (log_normal(chains[:, 0], 0.0, 1.0) * counts).sum((1, 2))
    frequencies = np.exp(np.linspace(0, 4, 8))
    for step in range(num_steps):
        sigma = 1 - step / num_steps
        angles = np.broadcast_to(sigma * frequencies, (N, 8))
        x = chains[:, step]
        inner = np.concatenate([features, x.reshape(N, -1), np.sin(angles), np.cos(angles)], axis=1)
        inner = silu(linear("head.layers.2", silu(linear("head.layers.0", inner))))
        velocity = linear("head.layers.4", inner).reshape(N, H, D)
        said = np.tanh(linear("head.noise.layers.2", np.tanh(linear("head.noise.layers.0", inner))))
        log_variance = math.log(LOW**2) + (math.log(HIGH**2) - math.log(LOW**2)) * (said + 1) / 2
        std = np.exp(0.5 * log_variance).reshape(N, H, D)
        total += (log_normal(chains[:, step + 1], x - velocity / num_steps, std) * counts).sum((1, 2))
    return total


def weights_of(pipeline: FlowNoiseActionPipeline) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy() for name, value in pipeline._network.named_parameters()}


def test_the_log_prob_of_a_chain_is_that_of_its_gaussians_in_float64():
    """Float32 of some 30 terms up to 3 nats each: 1e-4 is ten roundings of the sum."""
    pipeline = made()
    segment = played(pipeline)
    expected = torch.from_numpy(chain_log_probs(weights_of(pipeline), segment)).float()
    assert segment.log_probs is not None and segment.num_terms == 1 and segment.term_mask.all()
    torch.testing.assert_close(segment.log_probs[:, 0], expected, atol=1e-4, rtol=1e-5)
    replayed = pipeline.replay(segment, torch.arange(N), PARAMS)
    torch.testing.assert_close(replayed.logp_NL, segment.log_probs, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["head.noise.layers.0.weight", "head.noise.layers.2.bias", "head.layers.4.weight", "state.perceptron.0.bias"],
)
def test_its_gradient_is_that_of_finite_differences(name):
    """Central differences of the float64 arithmetic; 1e-3 of the largest is what float32 leaves of the gradient."""
    pipeline = made()
    segment = played(pipeline)
    pipeline.replay(segment, torch.arange(N), PARAMS).logp_NL.sum().backward()
    gradient = dict(pipeline._network.named_parameters())[name].grad
    assert gradient is not None
    weights, step = weights_of(pipeline), 1e-5
    places = np.linspace(0, gradient.numel() - 1, 7).astype(int)
    found = []
    for place in places:
        values = []
        for sign in (1, -1):
            moved = weights[name].copy()
            moved.reshape(-1)[place] += sign * step
            values.append(chain_log_probs({**weights, name: moved}, segment).sum())
        found.append((values[0] - values[1]) / (2 * step))
    expected = torch.tensor(found)
    scale = float(gradient.abs().max())
    assert scale > 0.01
    torch.testing.assert_close(gradient.flatten()[places].double(), expected, atol=1e-3 * scale, rtol=1e-3)


def test_the_entropy_is_that_of_the_steps_over_executed_moves():
    pipeline = made()
    stats = pipeline.replay(played(pipeline), torch.arange(N), PARAMS)
    assert stats.entropy_NL is not None
    count = (NUM_MOVES * D * PARAMS.num_inference_steps).float()
    low, high = (torch.distributions.Normal(0.0, std).entropy() * count for std in (LOW, HIGH))
    assert bool(((low < stats.entropy_NL[:, 0]) & (stats.entropy_NL[:, 0] < high)).all())
    stats.entropy_NL.sum().backward()
    gradient = pipeline._network.get_parameter("head.noise.layers.0.weight").grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_without_noise_it_is_the_flow_and_some_steps_may_have_none():
    pipeline = made()
    plain = pipeline.draw(seen(), ActionSamplingParams(eta=0), noise_keys=["k"] * N)
    assert plain.densities is None and plain.chains is not None
    x = plain.chains[:, 0]
    for step in range(4):
        _, velocity, _ = pipeline._network(states=seen().states, x=x, sigma_R=torch.full((N,), 1 - step / 4))
        x = x - velocity / 4
    torch.testing.assert_close(plain.chains[:, -1], x)
    some = ActionSamplingParams(eta=0.5, sde_indices=[1, 3])
    segment = played(pipeline, some)
    stats = pipeline.replay(segment, torch.arange(N), some)
    torch.testing.assert_close(stats.logp_NL, segment.log_probs, atol=1e-5, rtol=1e-6)


def test_a_policy_that_learnt_no_noise_gets_a_network_for_it_and_keeps_it(tmp_path: Path):
    config = ActionConfig(head="flow", action_size=D, chunk=H, state_size=S, width=8)
    plain = ActionBundle(config=config)
    plain.export_merged(str(tmp_path / "plain"), {"policy": plain.network.state_dict()})
    first = ActionBundle(str(tmp_path / "plain"), noise_range=(LOW, HIGH))
    kept = first.network.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in plain.network.state_dict().items())
    assert {name for name in kept if name not in plain.network.state_dict()} == {
        f"head.noise.layers.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")
    }
    with torch.no_grad():
        first.network.get_parameter("head.noise.layers.2.bias").add_(1)
    first.export_merged(str(tmp_path / "noisy"), {"policy": first.network.state_dict()})
    for again in (ActionBundle(str(tmp_path / "noisy")), ActionBundle(str(tmp_path / "noisy"), noise_range=(0.1, 0.2))):
        assert all(torch.equal(value, again.network.state_dict()[name]) for name, value in kept.items())
    assert again.config.noise_range == (0.1, 0.2)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"this policy learns no noise. Set bundle.noise_range"):
        FlowNoiseActionPipeline(ActionBundle(config=ActionConfig(head="flow", action_size=2, state_size=3)))
    with pytest.raises(ConfigError, match=r"noise_range = \[0.08, 0.16\] adds a network that FlowActionPipeline"):
        FlowActionPipeline(made()._bundle)
    with pytest.raises(ConfigError, match="the head bins takes no noisy steps"):
        ActionConfig(head="bins", action_size=2, state_size=3, noise_range=(0.1, 0.2))
    with pytest.raises(ConfigError, match=r"noise_range = \[0.2, 0.1\] must be"):
        ActionConfig(head="flow", action_size=2, state_size=3, noise_range=(0.2, 0.1))
    pipeline = made()
    with pytest.raises(ContractError, match="no chains of one term each"):
        pipeline.replay(played(pipeline).replace(is_joint=False, log_probs=None), torch.arange(N), PARAMS)
