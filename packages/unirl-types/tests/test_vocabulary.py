"""Sampling parameters, role markers, weight buckets, errors, and what importing the package pulls in."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unirl.types import errors
from unirl.types.errors import ConfigError, UniRLError, WeightSyncError, WorkerError, as_sentence
from unirl.types.protocols.engines import RolloutEngine
from unirl.types.protocols.rewards import Scorer
from unirl.types.roles import Collect, Dispatch, RemoteMethod, distributed, remote_method
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, StagedSamplingParams
from unirl.types.weights import WeightBucket, peft_names, plain_names, tensor_checksum, weight_buckets, weight_spec


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("gone", "gone."), ("gone.", "gone."), ("why?", "why?"), ("a...", "a...")],
)
def test_an_error_inside_a_message_ends_with_one_full_stop(text, sentence):
    assert as_sentence(ValueError(text)) == sentence


class Fixed:
    """A scheduler that always answers the same."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def indices(self, rollout_id: int) -> list[int]:
        return [step + rollout_id for step in self.steps]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples_per_prompt": 0}, "samples_per_prompt = 0 must be at least 1"),
        ({"num_inference_steps": 0}, "num_inference_steps = 0 must be at least 1"),
        ({"num_inference_steps": "50"}, "num_inference_steps = '50' must be an integer"),
        ({"height": 0}, "height = 0 must be at least 1"),
        ({"width": 1.5}, "width = 1.5 must be an integer"),
        ({"num_frames": -1}, "num_frames = -1 must be at least 1"),
        ({"seed": None}, "seed = None must be an integer"),
        ({"eta": -0.1}, "eta = -0.1 must be finite and at least 0"),
        ({"eta": float("nan")}, "eta = nan must be finite"),
        ({"eta": "1"}, "eta = '1' must be a number"),
        ({"guidance_scale": float("inf")}, "guidance_scale = inf must be finite"),
        ({"guidance_scale_2": -1.0}, "guidance_scale_2 = -1.0 must be finite and at least 0"),
        ({"distilled_guidance_scale": -1.0}, "distilled_guidance_scale = -1.0 must be"),
        ({"max_sequence_length": 0}, "max_sequence_length = 0 must be at least 1"),
        ({"post_solver": "heun"}, "post_solver = 'heun' must be one of euler, dpmpp_2m, unipc"),
        ({"sde_indices": [3, 50]}, r"sde_indices \[50\] lie outside 0\.\.49 \(num_inference_steps = 50\)"),
        ({"sde_indices": [1, 1]}, r"sde_indices repeat a step: \[1, 1\]"),
        ({"sde_indices": [1.5]}, "a step of sde_indices = 1.5 must be an integer"),
        ({"autocast_precision": "float32"}, "autocast_precision = 'float32' must be one of fp32, bf16, fp16"),
        ({"trajectory_precision": "fp8"}, "trajectory_precision = 'fp8'"),
        ({"logprob_precision": ""}, "logprob_precision = ''"),
        ({"sampler_kwargs": {"eta": 1, "own": 2}}, r"sampler_kwargs repeats declared fields \['eta'\]"),
    ],
)
def test_bad_diffusion_values_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        DiffusionSamplingParams(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1}, "temperature = -1 must be finite and at least 0"),
        ({"temperature": float("inf")}, "temperature = inf must be finite"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
        ({"top_p": 0}, r"top_p = 0 must lie in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p = 1.1 must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k = -1 must be at least 0"),
        ({"seed": "x"}, "seed = 'x' must be an integer"),
        ({"stop_token_ids": [3, -1]}, "a token of stop_token_ids = -1 must be at least 0"),
    ],
)
def test_bad_autoregressive_values_are_named(changes, message):
    arguments: dict[str, Any] = {"temperature": 1.0, **changes}
    with pytest.raises(ConfigError, match=message):
        ARSamplingParams(**arguments)


def test_autoregressive_parameters_say_whether_the_whole_softmax_is_drawn_from():
    params = ARSamplingParams(temperature=1.0)
    assert not params.is_greedy
    assert not params.is_truncated
    assert ARSamplingParams(temperature=0).is_greedy
    assert dataclasses.replace(params, top_p=0.9).is_truncated
    assert dataclasses.replace(params, top_k=5).is_truncated


def test_stop_tokens_of_a_recipe_may_be_a_list():
    # YAML has no tuples
    listed = ARSamplingParams(temperature=1.0, stop_token_ids=[7, 8])  # ty: ignore[invalid-argument-type]
    assert listed == ARSamplingParams(temperature=1.0, stop_token_ids=(7, 8))


def test_stochastic_steps_are_explicit_then_scheduled_then_all():
    scheduler = Fixed([2, 0])
    explicit = DiffusionSamplingParams(num_inference_steps=4, sde_indices=[3, 1], scheduler=scheduler)
    assert explicit.resolve_sde_indices(0) == [1, 3]
    scheduled = dataclasses.replace(explicit, sde_indices=None)
    assert scheduled.resolve_sde_indices(1) == [1, 3]
    assert dataclasses.replace(scheduled, scheduler=None).resolve_sde_indices(1) == [0, 1, 2, 3]
    assert dataclasses.replace(explicit, sde_indices=[]).resolve_sde_indices(0) == []


def test_without_noise_no_step_is_stochastic():
    params = DiffusionSamplingParams(num_inference_steps=4, eta=0.0, sde_indices=[1], scheduler=Fixed([0]))
    assert params.resolve_sde_indices(0) == []
    assert params.resolved(0).sde_indices == []


def test_a_scheduler_outside_the_schedule_is_named():
    params = DiffusionSamplingParams(num_inference_steps=2, scheduler=Fixed([0, 2]))
    with pytest.raises(ConfigError, match=r"Fixed chose steps \[2\] outside 0\.\.1"):
        params.resolve_sde_indices(0)
    with pytest.raises(ConfigError, match=r"Fixed chose a step twice: \[0, 0\]"):
        dataclasses.replace(params, scheduler=Fixed([0, 0])).resolve_sde_indices(0)


def test_resolved_parameters_hold_the_steps_and_no_scheduler():
    params = DiffusionSamplingParams(num_inference_steps=4, scheduler=Fixed([1])).resolved(2)
    assert params.sde_indices == [3]
    assert params.scheduler is None
    assert params.resolved(9) == params


def test_guidance_is_used_above_one():
    assert DiffusionSamplingParams(guidance_scale=1.5).uses_guidance
    assert not DiffusionSamplingParams(guidance_scale=1).uses_guidance


def test_samples_of_stages_are_those_of_the_first_and_cannot_be_set():
    ar = ARSamplingParams(temperature=1.0, samples_per_prompt=3)
    staged = StagedSamplingParams(stages={"text": ar, "image": DiffusionSamplingParams(samples_per_prompt=2)})
    assert staged.samples_per_prompt == 3
    alone = dataclasses.replace(staged, stages={"image": staged.stages["image"]})
    assert (alone.samples_per_prompt, alone.is_float32) == (2, False)
    arguments: dict[str, Any] = {"stages": staged.stages, "samples_per_prompt": 5}
    with pytest.raises(TypeError, match="samples_per_prompt"):
        StagedSamplingParams(**arguments)
    with pytest.raises(ConfigError, match="stages is empty"):
        StagedSamplingParams(stages={})


# Roles


class Engine:
    limit = 3

    @distributed(Dispatch.DP_SCATTER, Collect.CONCAT)
    def generate(self) -> str:
        return "made"

    @distributed(Dispatch.BROADCAST)
    def sleep(self) -> None: ...

    def private(self) -> None: ...


class Quiet(Engine):
    def generate(self) -> str:
        return "quiet " + super().generate()

    @distributed(Dispatch.RANK_ZERO, Collect.ALL)
    def sleep(self) -> None: ...


def test_markers_are_read_from_the_class_and_its_bases():
    generate = RemoteMethod(Dispatch.DP_SCATTER, Collect.CONCAT)
    assert remote_method(Engine, "generate") == generate
    assert remote_method(Engine, "sleep") == RemoteMethod(Dispatch.BROADCAST, Collect.FIRST)
    assert remote_method(Quiet, "generate") == generate, "an unmarked override keeps the marker"
    assert remote_method(Quiet, "sleep") == RemoteMethod(Dispatch.RANK_ZERO, Collect.ALL), "a marked one sets its own"


def test_a_marked_method_is_called_as_usual():
    assert Quiet().generate() == "quiet made"


@pytest.mark.parametrize("name", ["private", "missing", "limit", "__init__"])
def test_an_unmarked_method_is_not_remote(name):
    with pytest.raises(AttributeError, match=f"Engine.{name} is not marked with @distributed"):
        remote_method(Engine, name)


def test_protocols_can_be_asked_for():
    class Made:
        name = "made"
        score = generate = check_prompts = announce_to = abort = sleep = wake_up = shutdown = staticmethod(
            lambda *_: None
        )

    assert isinstance(Made(), RolloutEngine)
    assert isinstance(Made(), Scorer)
    assert not isinstance(Engine(), RolloutEngine)


# Weights


def weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.arange(4).float()),
        ("b", torch.ones(3, dtype=torch.bfloat16)),
        ("c", torch.tensor(2.0)),
        ("d", torch.zeros(0)),
    ]


def test_buckets_cover_every_weight_within_the_limit_and_verify():
    buckets = list(weight_buckets(weights(), policy_version=3, max_bytes=16))
    assert [list(bucket.tensors) for bucket in buckets] == [["a"], ["b", "c", "d"]]
    assert [bucket.num_bytes for bucket in buckets] == [16, 10]
    assert {bucket.policy_version for bucket in buckets} == {3}
    for bucket in buckets:
        bucket.verify()
        pickle.loads(pickle.dumps(bucket)).verify()
    assert [list(b.tensors) for b in weight_buckets(weights(), policy_version=0, max_bytes=1)] == [
        ["a"],
        ["b"],
        ["c"],
        ["d"],
    ]


def test_what_the_receiver_has_is_described_and_does_not_travel():
    known = {name: weight_spec(name, tensor) for name, tensor in weights()}
    known["b"] = weight_spec("b", torch.zeros(1))

    def changes(spec, tensor):
        return None if known[spec.name] == spec else tensor

    (bucket,) = weight_buckets(weights(), policy_version=1, max_bytes=10**6, base_version=0, changes=changes)
    bucket.verify()
    assert list(bucket.tensors) == ["b"]
    assert [spec.name for spec in bucket.kept] == ["a", "c", "d"]
    assert bucket.base_version == 0
    known["b"] = weight_spec("b", bucket.tensors["b"])
    (nothing,) = weight_buckets(weights(), policy_version=1, max_bytes=1, base_version=0, changes=changes)
    assert (nothing.num_bytes, len(nothing.kept)) == (0, 4)


def test_the_checksum_is_that_of_the_published_algorithm():
    # XXH3_128bits of b"abc" with seed 0, from the test vectors of the reference implementation's command line.
    assert tensor_checksum(torch.tensor([97, 98, 99], dtype=torch.uint8)) == "06b05ab6733a618578af5f94892f3950"


def test_one_flipped_bit_is_refused():
    (bucket,) = weight_buckets(weights(), policy_version=0, max_bytes=10**6)
    bucket.tensors["b"].view(torch.uint8)[3] ^= 1
    with pytest.raises(WeightSyncError, match="weights arrived changed: expected WeightSpec.*'b'"):
        bucket.verify()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.reshape(2, 2),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor.double(),
        lambda tensor: tensor.flip(0),
    ],
)
def test_another_shape_dtype_or_order_is_refused(change: Callable[[torch.Tensor], torch.Tensor]):
    tensor = torch.arange(4).float()
    bucket = WeightBucket(0, {"a": change(tensor)}, (weight_spec("a", tensor),))
    with pytest.raises(WeightSyncError, match="arrived changed"):
        bucket.verify()


def test_names_in_files_of_peft_have_a_prefix_once():
    plain = {"model.q.lora_A.weight": torch.ones(1), "base_model.q.lora_B.weight": torch.ones(1)}
    named = peft_names(plain)
    assert list(named) == ["base_model.model.model.q.lora_A.weight", "base_model.model.base_model.q.lora_B.weight"]
    assert plain_names(named) == plain == plain_names(plain)


def test_missing_repeated_and_unlimited_weights_are_refused():
    spec = weight_spec("a", torch.ones(1))
    with pytest.raises(WeightSyncError, match=r"holds \[\] but describes \['a'\]"):
        WeightBucket(0, {}, (spec,)).verify()
    with pytest.raises(WeightSyncError, match="weight a was sent twice"):
        list(weight_buckets([*weights(), ("a", torch.ones(1))], policy_version=0, max_bytes=4))
    with pytest.raises(WeightSyncError, match="max_bytes = 0"):
        list(weight_buckets(weights(), policy_version=0, max_bytes=0))


def test_a_checksum_sees_values_not_strides():
    tensor = torch.arange(6).reshape(2, 3)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())
    assert tensor_checksum(tensor) != tensor_checksum(tensor.t())


# Errors


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UniRLError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_survive_pickling_and_copying(kind):
    error = kind("actor 3", "Traceback: boom") if kind is WorkerError else kind("a = 1 must be 2")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_a_worker_error_names_the_worker_and_its_traceback():
    assert str(WorkerError("actor 3", "boom")) == "worker actor 3 failed:\nboom"


# Import

FOREIGN = ["safetensors", "transformers", "diffusers", "ray", "hydra", "omegaconf", "PIL", "peft", "scipy", "pydantic"]


def test_importing_every_module_pulls_in_torch_alone():
    code = f"""
import importlib, pkgutil, sys
import torch
before = set(sys.modules)
import unirl.types
for module in pkgutil.walk_packages(unirl.types.__path__, "unirl.types."):
    importlib.import_module(module.name)
own = set(sys.modules) - before
foreign = set({FOREIGN!r}) & {{name.partition(".")[0] for name in own}}
others = {{name for name in own if name.startswith("unirl.") and not name.startswith("unirl.types")}}
sys.exit(f"imported {{sorted(foreign | others)}}" if foreign or others else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
