"""Engines over a copy of the model: what was pushed is what they sample from, bit for bit."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_fakes import PARAMS, SHAPE, LinearPipeline, request
from test_trainside_text import FiveWords
from test_trainside_text import request as text_request
from torch import nn

from unirl.rollout.checks import step_noise_keys
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.rollout.engine.replica.text import ReplicaTextEngine
from unirl.rollout.engine.replica.weights import ReplicaWeights
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.sde.noise import initial_noise, step_noise
from unirl.types.deltas import element_delta
from unirl.types.errors import ConfigError, ContractError, WeightSyncError
from unirl.types.storage import load_rollout, save_rollout
from unirl.types.weights import AdapterConfig, WeightBucket, weight_buckets, weight_spec


class LayerPipeline(LinearPipeline):
    """Stands for a diffusion model whose velocity is one linear layer over the last axis."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(SHAPE[-1], SHAPE[-1], bias=False)
        self.bundle: Any = SimpleNamespace(trainable_modules=lambda: {"transformer": nn.Sequential(self.layer)})

    def diffuse(self, conditions, initial_latents, sigmas, params, **options):
        self.a = _Matrix(self.layer)
        return super().diffuse(conditions, initial_latents, sigmas, params, **options)


class _Matrix:
    """`a * x` of a linear pipeline as a layer's output."""

    def __init__(self, layer):
        self.layer = layer

    def __mul__(self, x):
        return self.layer(x)


def replica(seed=0, **options) -> Any:
    pipeline: Any = LayerPipeline(seed)
    given: dict[str, Any] = {"dtype": "fp32", "forward_batch_size": 2, **options}
    return ReplicaRolloutEngine(pipeline, bundle=pipeline.bundle, **given), pipeline


def trainside(pipeline) -> TrainsideRolloutEngine:
    return TrainsideRolloutEngine(pipeline, forward_batch_size=2)


def push(engine, weight, version=1, policy=None):
    tensors = {"0.weight": weight}
    engine.begin_weights(version, [weight_spec(name, tensor) for name, tensor in tensors.items()])
    for bucket in weight_buckets(tensors.items(), policy_version=version, max_bytes=1 << 20):
        engine.receive_weights(bucket)
    return engine.finish_weights(version, policy)


def latents(resp):
    return resp.root_track().segment.latents


def test_a_pushed_policy_samples_the_bits_of_the_model_that_it_came_from():
    trained: Any = LayerPipeline(seed=1)
    expected = latents(trainside(trained).generate(request()))
    engine, _ = replica(seed=2)
    assert not torch.equal(latents(engine.generate(request())), expected)
    receipt = push(engine, trained.layer.weight.detach(), version=3)
    resp = engine.generate(request())
    assert torch.equal(latents(resp), expected)
    assert resp.root_track().policy_versions.tolist() == [3] * 4
    assert (receipt.policy_version, receipt.num_tensors, receipt.num_bound) == (3, 1, 1)


def test_weights_change_when_a_push_is_finished_and_not_before():
    engine, pipeline = replica()
    before, weight = pipeline.layer.weight.clone(), torch.ones(3, 3)
    engine.begin_weights(1, [weight_spec("0.weight", weight)])
    engine.receive_weights(WeightBucket(1, {"0.weight": weight}, (weight_spec("0.weight", weight),)))
    assert torch.equal(pipeline.layer.weight, before)
    engine.finish_weights(1)
    weight.zero_()  # the sender's buffer is its own again
    assert torch.equal(pipeline.layer.weight, torch.ones(3, 3))


def test_a_push_is_copied_into_the_memory_of_the_weights():
    engine, pipeline = replica()
    place = pipeline.layer.weight.data_ptr()
    for version in range(1, 5):
        pushed = torch.full((3, 3), float(version))
        push(engine, pushed, version)
        assert torch.equal(pipeline.layer.weight, pushed) and pipeline.layer.weight.data_ptr() == place


def test_a_buffer_that_stays_in_another_dtype_is_what_was_pushed_and_may_be_left_out():
    module = nn.Linear(3, 2, bias=False)
    module.register_buffer("positions", torch.rand(4))
    weights = ReplicaWeights({"transformer": module}, torch.bfloat16, torch.device("cpu"), 0)
    before = {"weight": torch.ones(2, 3).bfloat16(), "positions": torch.rand(4).bfloat16()}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["weight"][1, 2], after["positions"][3] = 2, 5
    specs = {name: weight_spec(name, tensor) for name, tensor in after.items()}
    unchanged = weight_spec("positions", before["positions"])
    deltas: Any = {name: element_delta(before[name], tensor).data for name, tensor in after.items()}
    buckets = (
        WeightBucket(1, before, tuple(weight_spec(name, tensor) for name, tensor in before.items())),
        WeightBucket(2, {"weight": deltas["weight"]}, (), (specs["weight"], unchanged), 1),
        WeightBucket(3, {"positions": deltas["positions"]}, (), tuple(specs.values()), 2),
    )
    for bucket in buckets:
        weights.begin(bucket.policy_version, tuple(specs.values()))
        weights.receive(bucket)
        weights.finish(bucket.policy_version, None)
    assert torch.equal(module.weight, after["weight"])
    assert torch.equal(module.get_buffer("positions"), after["positions"].float())


def test_an_adapter_adds_its_term_until_the_next_push():
    engine, pipeline = replica()
    base = pipeline.layer.weight.detach().clone()
    a, b = torch.randn(1, 3), torch.randn(3, 1)
    tensors = {"0.lora_A.weight": a, "0.lora_B.weight": b}
    bucket = WeightBucket(2, tensors, tuple(weight_spec(name, tensor) for name, tensor in tensors.items()))
    config = AdapterConfig(rank=1, alpha=2.0, target_modules=("0",))
    receipt = engine.load_adapter(bucket, config)
    assert (receipt.num_tensors, receipt.num_bound) == (2, 1)
    engine.load_adapter(bucket, config)  # replaces the first adapter, is not added to it
    x = torch.randn(5, 3)
    assert torch.equal(pipeline.layer(x), x @ base.T + (x @ a.T @ b.T) * 2.0)
    push(engine, base, version=2)
    assert torch.equal(pipeline.layer(x), x @ base.T)


def test_a_layer_that_is_not_there_or_is_not_linear_refuses_the_adapter():
    engine, _ = replica()
    tensors = {"1.lora_A.weight": torch.zeros(1, 3), "1.lora_B.weight": torch.zeros(3, 1)}
    bucket = WeightBucket(2, tensors, tuple(weight_spec(name, tensor) for name, tensor in tensors.items()))
    with pytest.raises(WeightSyncError, match="unknown: 1.lora_A.weight"):
        engine.load_adapter(bucket, AdapterConfig(1, 1.0, ("1",)))


def test_an_engine_that_sleeps_takes_pushes_and_generates_after_it_woke():
    engine, pipeline = replica()
    engine.sleep()
    with pytest.raises(ContractError, match=r"generate while the engine sleeps: call wake_up\(\) first"):
        engine.generate(request())
    push(engine, torch.eye(3))
    engine.wake_up()
    assert torch.equal(pipeline.layer.weight, torch.eye(3))
    engine.generate(request())


def test_policies_that_were_not_pushed_and_chunks_are_refused():
    engine, _ = replica()
    with pytest.raises(WeightSyncError, match="the policy that trains was pushed last, .* the policy 'old' are asked"):
        engine.generate(request(), "old")
    with pytest.raises(ConfigError, match="makes whole responses only"):
        engine.announce_to(print)


def test_a_named_policy_is_had_once_it_was_pushed_and_until_another_is():
    engine, _ = replica()
    push(engine, torch.eye(3), policy="old")
    engine.generate(request(), "old")
    with pytest.raises(WeightSyncError, match=r"the policy 'old' was pushed last, .* the policy that trains are asked"):
        engine.generate(request())
    push(engine, torch.eye(3))
    engine.generate(request())


def test_a_model_of_two_components_is_pushed_under_the_components_names():
    modules = {"transformer": nn.Linear(1, 1, bias=False), "transformer_2": nn.Linear(1, 1, bias=False)}
    bundle: Any = SimpleNamespace(trainable_modules=lambda: modules)
    pipeline: Any = LinearPipeline()
    engine = ReplicaRolloutEngine(pipeline, bundle=bundle, dtype="fp32", forward_batch_size=2)
    tensors = {"transformer/weight": torch.full((1, 1), 2.0), "transformer_2/weight": torch.full((1, 1), 3.0)}
    specs = tuple(weight_spec(name, tensor) for name, tensor in tensors.items())
    engine.begin_weights(1, specs)
    engine.receive_weights(WeightBucket(1, tensors, specs))
    engine.finish_weights(1)
    assert [float(module.weight) for module in modules.values()] == [2.0, 3.0]


def test_weights_are_kept_in_the_dtype_that_pushes_bring():
    pipeline: Any = LayerPipeline(0)
    engine = ReplicaRolloutEngine(pipeline, bundle=pipeline.bundle, dtype="bf16", forward_batch_size=2)
    assert pipeline.layer.weight.dtype == torch.bfloat16
    with pytest.raises(WeightSyncError, match=r"dtype: 0.weight is torch.float32, expected torch.bfloat16"):
        push(engine, torch.zeros(3, 3))


def test_a_text_replica_has_the_version_that_was_pushed():
    head = nn.Linear(1, 5, bias=False)
    bundle: Any = SimpleNamespace(trainable_modules=lambda: {"model": head})
    pipeline: Any = FiveWords()
    engine = ReplicaTextEngine(pipeline, bundle=bundle, dtype="fp32", forward_batch_size=2)
    weight = torch.arange(5.0).view(5, 1)
    spec = weight_spec("weight", weight)
    engine.begin_weights(4, [spec])
    engine.receive_weights(WeightBucket(4, {"weight": weight}, (spec,)))
    engine.finish_weights(4)
    assert torch.equal(head.weight, weight)
    versions = engine.generate(text_request(num=2)).root_track().policy_versions
    assert versions is not None and versions.tolist() == [4, 4]


def test_texts_are_ended_early_and_go_on_with_the_policy_that_was_pushed_meanwhile():
    head = nn.Linear(1, 5, bias=False)
    bundle: Any = SimpleNamespace(trainable_modules=lambda: {"model": head})
    pipeline: Any = FiveWords()
    engine = ReplicaTextEngine(pipeline, bundle=bundle, dtype="fp32", forward_batch_size=2)
    whole: Any = engine.generate(text_request()).root_track()
    begun = ended_early(engine, pipeline)
    track: Any = begun.root_track()
    assert track.is_unfinished is not None and begun.num_unfinished == int(track.is_unfinished.sum()) > 0
    weight = torch.arange(5.0).view(5, 1)
    spec = weight_spec("weight", weight)
    engine.begin_weights(4, [spec])
    engine.receive_weights(WeightBucket(4, {"weight": weight}, (spec,)))
    engine.finish_weights(4)
    resumed: Any = engine.generate(text_request(), None, begun).root_track()
    assert resumed.is_unfinished is None and resumed.segment.tokens.equal(whole.segment.tokens)
    assert resumed.conditions["prompt"].tokens.equal(whole.conditions["prompt"].tokens)
    assert resumed.decoded.texts == whole.decoded.texts
    kept = track.segment.lengths.tolist()
    versions = [own.tolist() for own in resumed.segment.unpack("versions")]
    assert versions == [[0] * old + [4] * (len(own) - old) for old, own in zip(kept, versions, strict=True)]
    assert resumed.policy_versions.tolist() == [0] * 5
    assert resumed.last_versions.tolist() == [4 if left else 0 for left in track.is_unfinished.tolist()]


def ended_early(engine, pipeline, **changes):
    """What `generate` gives whose first batch was ended after its first token."""
    plain = pipeline.encode

    def encode(primitives: Any, params: Any) -> Any:
        engine.abort()
        return plain(primitives, params)

    pipeline.encode = encode
    begun = engine.generate(text_request().replace(**changes))
    pipeline.encode = plain
    return begun


@pytest.mark.parametrize("lost", [None, "sleep", "another"])
def test_texts_go_on_in_place_unless_what_was_kept_is_lost_and_both_is_counted(lost):
    bundle: Any = SimpleNamespace(trainable_modules=lambda: {"model": nn.Linear(1, 5, bias=False)})
    pipeline: Any = FiveWords()
    engine = ReplicaTextEngine(pipeline, bundle=bundle, dtype="fp32", forward_batch_size=5, keeps_cache=True)
    begun = ended_early(engine, pipeline)
    left = begun.root_track().is_unfinished
    assert left is not None and 0 < int(left.sum())
    if lost == "sleep":
        engine.sleep()
        engine.wake_up()
    elif lost == "another":
        ended_early(engine, pipeline, rollout_id=101)
    engine.generate(text_request().replace(rollout_id=102))  # as the canary of a push
    resumed = engine.generate(text_request(), None, begun).root_track()
    assert resumed.is_unfinished is None
    expected = {"continued_in_place": left.float(), "continued_by_prefill": torch.zeros(5)}
    if lost is not None:
        expected = dict(zip(expected, reversed(list(expected.values())), strict=True))
    assert {name: counts.tolist() for name, counts in resumed.counts.items()} == {
        name: counts.tolist() for name, counts in expected.items()
    }


def test_a_replica_that_keeps_nothing_counts_nothing():
    bundle: Any = SimpleNamespace(trainable_modules=lambda: {"model": nn.Linear(1, 5, bias=False)})
    pipeline: Any = FiveWords()
    engine = ReplicaTextEngine(pipeline, bundle=bundle, dtype="fp32", forward_batch_size=5)
    begun = ended_early(engine, pipeline)
    assert begun.num_unfinished and not engine.generate(text_request(), None, begun).root_track().counts


class Ending:
    """Ends an engine after so many steps of all its batches, each of which is a call of the layer."""

    def __init__(self, engine, pipeline, steps: int) -> None:
        self.left = steps
        self.hook = pipeline.layer.register_forward_hook(self)
        self.engine = engine

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.engine.abort()


def cut_at(steps: int, engine, pipeline, *args) -> Any:
    """What `generate` gives that is ended after so many steps."""
    ending = Ending(engine, pipeline, steps)
    begun = engine.generate(*args)
    ending.hook.remove()
    return begun


NUM_STEPS = PARAMS.num_inference_steps


@pytest.mark.parametrize("cut", range(1, 2 * NUM_STEPS))
def test_denoising_that_goes_on_with_the_same_weights_has_the_bits_of_the_whole(cut, tmp_path):
    engine, pipeline = replica()
    whole: Any = engine.generate(request()).root_track()
    begun = cut_at(cut, engine, pipeline, request())
    track: Any = begun.root_track()
    first, second = min(cut, NUM_STEPS), max(cut - NUM_STEPS, 0)
    assert track.segment.reached.tolist() == [first] * 2 + [second] * 2 and track.decoded is None
    assert track.is_unfinished.tolist() == [first < NUM_STEPS] * 2 + [True] * 2
    save_rollout(tmp_path / "begun.safetensors", begun)
    begun, _ = load_rollout(tmp_path / "begun.safetensors")
    pipeline.encoded.clear()
    resumed: Any = engine.generate(request(), None, begun).root_track()
    assert not pipeline.encoded, "the texts were encoded when the samples began"
    assert resumed.is_unfinished is None and resumed.last_versions.tolist() == [0] * 4
    assert resumed.segment.replace(versions=None).equals(whole.segment)
    assert torch.equal(resumed.decoded.pixels, whole.decoded.pixels)


@pytest.mark.parametrize("cut", range(1, NUM_STEPS))
def test_weights_that_change_at_a_step_are_those_of_a_loop_that_switches_there(cut):
    engine, pipeline = replica(seed=1)
    weights = [pipeline.layer.weight.detach().clone(), torch.eye(3) * 0.3]
    begun = cut_at(cut, engine, pipeline, request(num=2))
    push(engine, weights[1], version=5)
    track: Any = engine.generate(request(num=2), None, begun).root_track()
    segment, eta, stochastic = track.segment, PARAMS.eta, PARAMS.sde_indices or []
    x = initial_noise(request(num=2).init_noise_group_ids, PARAMS.seed, SHAPE)
    sigmas = segment.sigmas.tolist()
    for step in range(NUM_STEPS):
        sigma, dt = sigmas[step], sigmas[step + 1] - sigmas[step]
        velocity = x @ weights[step >= cut].T + pipeline.b
        if step not in stochastic:
            x = x + velocity * dt
            continue
        q = eta * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
        mean = x + velocity * dt + q**2 / (2 * sigma) * (x + (1 - sigma) * velocity) * dt
        normal = torch.distributions.Normal(mean, q * math.sqrt(-dt))
        torch.testing.assert_close(segment.latents_at(step), x, rtol=1e-6, atol=1e-6)
        x = mean + normal.stddev * step_noise(step_noise_keys(request(num=2)), step, PARAMS.seed, SHAPE)
        column = stochastic.index(step)
        drawn = segment.latents_at(step + 1)
        logp = normal.log_prob(drawn).flatten(1).mean(1)
        torch.testing.assert_close(segment.sde_logp[:, column], logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(segment.clean_latents, x, rtol=1e-6, atol=1e-6)
    assert segment.versions.tolist() == [[0] * cut + [5] * (NUM_STEPS - cut)] * 2
    assert track.policy_versions.tolist() == [0, 0] and track.last_versions.tolist() == [5, 5]


def test_samples_at_unequal_steps_go_on_together_and_may_be_cut_short_again():
    """Another size of batch puts samples of several steps into one, as a run that is resumed with it does."""
    engine, pipeline = replica()
    whole: Any = engine.generate(request(num=6)).root_track()
    begun = cut_at(NUM_STEPS + 2, engine, pipeline, request(num=6))
    assert begun.root_track().segment.reached.tolist() == [4, 4, 2, 2, 0, 0]
    other, copied = replica(forward_batch_size=6)
    push(other, pipeline.layer.weight.detach(), version=3)
    begun = cut_at(1, other, copied, request(num=6), None, begun)
    track: Any = begun.root_track()
    assert track.segment.reached.tolist() == [4, 4, 2, 2, 1, 1]  # those furthest behind come first
    assert track.policy_versions.tolist() == [0, 0, 0, 0, 3, 3] and track.last_versions.tolist() == [0, 0, 0, 0, 3, 3]
    push(other, pipeline.layer.weight.detach(), version=4)
    resumed: Any = other.generate(request(num=6), None, begun).root_track()
    assert torch.equal(resumed.segment.latents, whole.segment.latents)
    assert resumed.segment.versions.tolist() == [[0] * 4] * 2 + [[0, 0, 4, 4]] * 2 + [[3, 4, 4, 4]] * 2
    assert resumed.segment.status is None and resumed.segment.unfinished is None


def test_what_is_no_trajectory_is_not_continued():
    engine, _ = replica()
    begun = engine.generate(request())
    begun.root_track().segment = None
    with pytest.raises(ContractError, match="the samples to continue are no trajectories"):
        engine.generate(request(), None, begun)


def test_the_parameters_of_a_plan_are_the_pipelines():
    engine, _ = replica()
    assert engine.plan(PARAMS).latent_shape == SHAPE
