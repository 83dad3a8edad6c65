"""Pushes to an engine that only remembers: what is sent, what is compared, and what stops the run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sync_fakes import OneWeightPipeline, RememberingEngine, first_weight, nothing
from train_fakes import TinyBundle, make_backend

from unirl.distributed.weight_sync.canary import TokenCanary, canary_primitives
from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.distributed.weight_sync.lora import LoraWeightSync
from unirl.train.configs import LoraConfig
from unirl.types.errors import ConfigError, ContractError, WeightSyncError, WorkerError
from unirl.types.sampling import ARSamplingParams

TEXT = ARSamplingParams(temperature=1.0)


def make_sync(kind, backend, engine, pipeline=None, **options) -> Any:
    pipeline = pipeline or OneWeightPipeline(lambda: 0.0)
    return kind(backend, engine, pipeline, sampling=TEXT, dtype="fp32", canary_tolerance=1e-6, **options)


def test_all_weights_arrive_whole_under_the_models_names_in_buckets():
    backend, engine = make_backend(), RememberingEngine()
    metrics = make_sync(FullWeightSync, backend, engine, bucket_bytes=500).push()
    assert {
        name: tuple(tensor.shape) for name, tensor in engine.pushed.items()
    } == backend.weight_source.weight_shapes()
    for name, parameter in backend.parameters.items():
        assert torch.equal(engine.pushed[name.removeprefix("transformer.")], parameter)
    assert len(engine.sizes) > 1
    assert metrics["sync/tensors"] == len(engine.pushed)
    assert metrics["sync/megabytes"] == pytest.approx(sum(engine.sizes) / 1e6)
    assert engine.policy_version == 0


def test_adapters_are_merged_into_full_weights():
    backend = make_backend(lora=LoraConfig(rank=2, alpha=4))
    with torch.no_grad():
        for name, parameter in backend.parameters.items():
            if "lora_B" in name:
                parameter.fill_(0.5)
    engine = RememberingEngine()
    make_sync(FullWeightSync, backend, engine).push()
    assert not any("lora" in name or "base_layer" in name for name in engine.pushed)
    state = backend._model.modules["transformer"].state_dict()
    base = next(name for name in state if name.endswith("to_q.base_layer.weight"))
    layer = base.removesuffix(".base_layer.weight")
    a, b = (state[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
    assert torch.allclose(engine.pushed[f"{layer}.weight"], state[base] + 2 * b @ a)


def test_an_adapter_travels_alone_with_its_scale():
    backend, engine = make_backend(lora=LoraConfig(rank=2, alpha=4)), RememberingEngine()
    make_sync(LoraWeightSync, backend, engine).push()
    assert len(engine.pushed) == len(backend.parameters)
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in engine.pushed)
    assert (engine.config.rank, engine.config.alpha) == (2, 4)
    assert set(engine.config.target_modules) == {"to_q", "to_out"}
    with pytest.raises(ConfigError, match="set backend.lora, or push full weights"):
        make_sync(LoraWeightSync, make_backend(), engine).push()


def test_tensors_are_rounded_to_the_engines_dtype_before_they_leave():
    backend, engine = make_backend(), RememberingEngine()
    sync = FullWeightSync(backend, engine, OneWeightPipeline(lambda: 0.0), sampling=TEXT, dtype="bf16")  # ty: ignore[invalid-argument-type]
    sync.push()
    assert {tensor.dtype for tensor in engine.pushed.values()} == {torch.bfloat16}
    assert {spec.dtype for spec in engine.announced} == {"torch.bfloat16"}


def test_a_push_that_was_not_proved_does_not_count_as_what_the_engine_has():
    backend, pipeline = make_backend(), OneWeightPipeline(lambda: 0.0)

    def dies_once(tensors):
        engine.read = nothing
        raise WorkerError("engine", "it died")

    engine = RememberingEngine(read=dies_once)
    sync = make_sync(FullWeightSync, backend, engine, pipeline)
    with pytest.raises(WorkerError, match="it died"):
        sync.push()
    assert pipeline.num_replays == 1  # other ranks replay, and wait for this one
    metrics = sync.push()
    assert metrics["sync/changed_tensors"] == metrics["sync/tensors"] > 0
    assert sync.push()["sync/changed_tensors"] == 0


def test_a_push_that_does_not_fit_stops_before_a_tensor_moves():
    backend, engine = make_backend(), RememberingEngine()
    make_sync(FullWeightSync, backend, engine).push()
    engine.expected = engine.announced[1:]
    engine.pushed = {}
    with pytest.raises(WeightSyncError, match=f"unknown: {engine.announced[0].name}"):
        make_sync(FullWeightSync, backend, engine).push()
    assert engine.pushed == {}


def test_an_engine_that_counts_otherwise_stops_the_run():
    engine = RememberingEngine()
    engine.num_tensors_off = -1
    with pytest.raises(WeightSyncError, match=r"tensors were sent, the engine counts"):
        make_sync(FullWeightSync, make_backend(), engine).push()


def test_the_canary_compares_the_engine_with_the_trainer():
    backend = make_backend()
    pipeline = OneWeightPipeline(lambda: first_weight(dict(backend.weight_source.weights())))
    engine = RememberingEngine(read=first_weight)
    sync = make_sync(FullWeightSync, backend, engine, pipeline)
    assert sync.push()["sync/logprob_gap_max"] == 0
    engine.read = lambda tensors: first_weight(tensors) + 0.25
    with pytest.raises(WeightSyncError, match=r"differ by up to 0\.25 nats .*canary_tolerance is 1e-06"):
        sync.push()
    engine.read = lambda tensors: float("nan")
    with pytest.raises(WeightSyncError, match="differ by up to nan"):
        sync.push()


def test_the_trainer_scores_the_canary_on_the_device_of_its_weights():
    """An engine in another process answers in host memory."""
    seen: list[str] = []

    class Pipeline(OneWeightPipeline):
        def replay(self, conditions: Any, segment: Any, params: Any) -> Any:
            seen.append(segment.tokens.device.type)
            return super().replay(conditions, segment, params)

    canary = TokenCanary(Pipeline(lambda: 0.0), torch.device("meta"), canary_primitives(["a"], None), None)  # ty: ignore[invalid-argument-type]
    engine = RememberingEngine()
    canary.check(engine, engine.policy_version)
    canary.replay_only()
    assert seen == ["meta", "meta"]


def test_a_canary_shows_the_same_pictures_in_every_push_where_the_model_needs_one():
    primitives = canary_primitives(["a", "b"], 8)
    again = canary_primitives(["a", "b"], 8)
    shown: Any = primitives["image"]
    assert shown.pixels.shape == (2, 3, 8, 8) and not torch.equal(shown.pixels[0], shown.pixels[1])
    other: Any = again["image"]
    assert torch.equal(shown.pixels, other.pixels)
    assert set(canary_primitives(["a"], None)) == {"text"}
    mask: Any = canary_primitives(["a", "b"], 8, has_masks=True)["mask"]
    assert mask.pixels.shape == shown.pixels.shape
    assert mask.pixels.mean() == 0.5
    with pytest.raises(ConfigError, match="set sync.canary_image_size too"):
        canary_primitives(["a"], None, has_masks=True)
    backend, engine = make_backend(), RememberingEngine()
    sync = make_sync(FullWeightSync, backend, engine, canary_image_size=8)
    assert set(sync._canary._request(0).primitives) == {"text", "image"}
    sync.push()


def test_samples_of_another_version_fail_the_canary():
    backend, engine = make_backend(), RememberingEngine()
    sync = make_sync(FullWeightSync, backend, engine)
    sync.push()
    with pytest.raises(WeightSyncError, match=r"version 7 was pushed, but the engine samples with \[0\]"):
        sync._canary.check(engine, 7)


def test_a_push_is_due_after_an_optimizer_step_only():
    backend, engine = make_backend(), RememberingEngine()
    sync = make_sync(FullWeightSync, backend, engine)
    assert sync.is_due
    sync.push()
    assert not sync.is_due
    step(backend)
    assert sync.is_due
    sync.push()
    assert engine.policy_version == 1


def step(backend):
    for parameter in backend.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    backend.optimizer_step(1.0)


def test_a_rollback_is_a_new_version_that_the_engine_takes():
    backend, engine = make_backend(), RememberingEngine()
    sync = make_sync(FullWeightSync, backend, engine)
    step(backend)
    saved = {name: tensor.clone() for name, tensor in backend.state_dict().items()}
    earlier = {name: tensor.clone() for name, tensor in backend.weight_source.weights()}
    step(backend)
    step(backend)
    sync.push()
    backend.load_state_dict(saved)
    assert sync.is_due
    sync.push()
    assert (backend.progress.num_optimizer_steps, backend.policy_version, engine.policy_version) == (1, 4, 4)
    assert all(torch.equal(engine.pushed[name], tensor) for name, tensor in earlier.items())
    resumed = make_backend()
    resumed.load_state_dict(backend.state_dict())
    assert resumed.policy_version == 4


def test_a_rank_without_an_engine_gathers_and_replays_with_the_others():
    backend, pipeline = make_backend(), OneWeightPipeline(lambda: 0.0)
    sync = make_sync(FullWeightSync, backend, RememberingEngine(), pipeline, rank=1)
    sync.connect(RememberingEngine())
    assert sync.push() == {}
    assert pipeline.num_replays == 1
    assert not sync.is_due


def test_a_tied_head_travels_once():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(2, 3, bias=False)
            self.head = torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    bundle: Any = SimpleNamespace(block_class_names=("Linear",), trainable_modules=lambda: {"model": model})
    backend, engine = make_backend(bundle), RememberingEngine()
    make_sync(FullWeightSync, backend, engine).push()
    assert list(engine.pushed) == ["embed.weight"]


def test_two_experts_are_pushed_under_their_names_or_one_is_read_alone():
    backend, engine = make_backend(TinyBundle(num_components=2)), RememberingEngine()
    make_sync(FullWeightSync, backend, engine).push()
    source = backend.weight_source
    assert source.components == ("transformer", "transformer_2")
    for component in source.components:
        alone = dict(source.weights(component=component))
        assert source.weight_shapes(component) == {name: tuple(tensor.shape) for name, tensor in alone.items()}
        assert all(torch.equal(engine.pushed[f"{component}/{name}"], tensor) for name, tensor in alone.items())
    assert len(engine.pushed) == 2 * len(source.weight_shapes("transformer"))
    with pytest.raises(ContractError, match="no component 'vae' that trains"):
        source.weight_shapes("vae")


@pytest.mark.parametrize(("kind", "lora"), [(FullWeightSync, None), (LoraWeightSync, LoraConfig(rank=2, alpha=4))])
def test_a_kept_copy_of_the_policy_is_pushed_by_its_name(kind, lora):
    backend, engine = make_backend(lora=lora), RememberingEngine()
    read = backend.weight_source.adapter_weights if lora else backend.weight_source.weights
    expected = {name: tensor.clone() for name, tensor in dict(read()).items()}
    backend.keep_policy("old")
    step(backend)
    sync = make_sync(kind, backend, engine)
    sync.push("old")
    assert engine.policy == "old" and engine.policy_version == 1
    assert all(torch.equal(engine.pushed[name], tensor) for name, tensor in expected.items())
    sync.push()
    assert engine.policy is None
    assert not all(torch.equal(engine.pushed[name], tensor) for name, tensor in expected.items())


def test_the_canary_of_a_named_policy_replays_under_it():
    name = "proj_in.bias"
    backend, engine = make_backend(), RememberingEngine(read=lambda tensors: float(tensors[name][0]))
    pipeline = OneWeightPipeline(lambda: float(backend.parameters[f"transformer.{name}"].detach()[0]))
    backend.keep_policy("old")
    step(backend)
    sync = make_sync(FullWeightSync, backend, engine, pipeline)
    assert sync.push("old")["sync/logprob_gap_max"] == 0
    with pytest.raises(ContractError, match="there is no policy 'older'"):
        sync.push("older")
