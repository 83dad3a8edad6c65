"""An engine with a copy of the model: a push makes it the engine that samples with the model that trains."""

import threading

import pytest
import torch

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.build.assembly import make_trainer
from unirl.trainer.build.worker import build_components
from unirl.trainer.commands import run_recipe
from unirl.types.errors import WeightSyncError

SMALL_TEXT = [
    "batch_size=2",
    "sampling.samples_per_prompt=4",
    "stack.micro_batch_size=8",
    "engine.forward_batch_size=8",
]
LORA = "sync._target_=unirl.distributed.weight_sync.lora.LoraWeightSync"
REPLICA = [
    "engine._target_=unirl.rollout.engine.replica.engine.ReplicaRolloutEngine",
    "+engine.dtype=fp32",
    "+sync._target_=unirl.distributed.weight_sync.full.FullWeightSync",
    "+sync.dtype=fp32",
    "+sync.canary_prompts=[a red circle]",
]
OURS = ("timing_s/", "perf/", "sync/", "reward/shapes/utilisation")
"""Metrics of the machine and of the push."""


def steps(recipe, run_dir, num=2):
    """Metrics of some rollouts with the updates between them, and the runtime's components."""
    components = {}

    def build(context):
        components.update(build_components(run_of(recipe), str(run_dir), context))
        return components

    with LocalRuntime(build, device="cpu") as runtime:
        trainer = make_trainer(run_of({**recipe, "eval": None}), runtime, run_dir, [], threading.Event())
        runtime.role("stack").prepare()
        return [trainer.step(number) for number in range(num)], components


def of_training(metrics):
    return [{name: value for name, value in step.items() if not name.startswith(OURS)} for step in metrics]


@pytest.mark.parametrize("overrides", [[], ["parts/train=lora", LORA]], ids=["whole", "adapter"])
def test_images_of_a_replica_train_the_policy_to_the_same_bits(recipe, tmp_path, overrides):
    words = ["stack.num_updates_per_batch=2", "algorithm.old_logp_source=replay"]
    own = [word for word in overrides if not word.startswith("sync")]
    expected, trained = steps(recipe("worlds/shapes/flowgrpo", *words, *own), tmp_path)
    found, pushed = steps(recipe("worlds/shapes/replica", *words, *overrides), tmp_path)
    assert of_training(found) == of_training(expected)
    assert [step["sync/logprob_gap_max"] for step in found] == [0.0, 0.0]
    states = [built["backend"].state_dict() for built in (trained, pushed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_old_policy_of_nft_is_pushed_to_an_engine_of_its_own(recipe, tmp_path):
    """Rollouts are drawn from the average of earlier policies, evaluations from the policy that trains."""
    evaluated = ["eval.interval=1", "stack.num_updates_per_batch=2"]
    summaries = []
    for name, words in (("trainside", []), ("replica", REPLICA)):
        small = recipe("worlds/shapes/nft", *evaluated, *words)
        summaries.append(run_recipe(run_of(small), tmp_path / name, []))
    expected, found = ([summary["evaluations"][step]["overall"] for step in ("0", "1", "2")] for summary in summaries)
    assert found == expected
    assert found[2] != found[1]


def test_texts_of_a_replica_train_the_policy_to_the_same_bits(tmp_path):
    register_resolvers()
    words = [*SMALL_TEXT, "stack.num_updates_per_batch=2", "algorithm.old_logp_source=replay", "guardrails.action=off"]
    replica = [
        "parts/engine=text_replica_cpu",
        'sync.canary_prompts=["37+58=", "90-4="]',
        "sync.canary_tolerance=1.0e-4",
    ]
    expected, _ = steps(resolve(compose("worlds/arithmetic/grpo", words)), tmp_path)
    found, _ = steps(resolve(compose("worlds/arithmetic/grpo", [*words, *replica])), tmp_path)
    assert of_training(found) == of_training(expected)
    assert all(step["sync/logprob_gap_max"] < 1e-5 for step in found)


def test_pushes_of_changed_elements_train_the_policy_to_the_bits_of_whole_ones(recipe, tmp_path):
    words = ["engine.dtype=bf16", "sync.dtype=bf16", "+sync.canary_tolerance=0.01", "stack.num_updates_per_batch=1"]
    words.append("backend.optimizer.learning_rate=1e-6")
    (_, whole), _ = expected, _ = steps(recipe("sd3_shapes_replica", *words), tmp_path)
    (first, second), _ = found, _ = steps(recipe("sd3_shapes_replica", *words, "+sync.changed=elements"), tmp_path)
    assert of_training(found) == of_training(expected)
    assert first["sync/megabytes"] == whole["sync/megabytes"]
    assert second["sync/changed_elements"] < 0.2 and second["sync/megabytes"] < 0.4 * whole["sync/megabytes"]
    assert second["sync/tensors"] == whole["sync/tensors"]


def test_the_canary_of_transitions_finds_a_weight_that_is_not_the_trainers(recipe, tmp_path):
    _, components = steps(recipe("worlds/shapes/replica"), tmp_path, num=1)
    engine, sync = components["engine"], components["sync"]
    finish = engine.finish_weights

    def finish_wrongly(version, policy):
        receipt = finish(version, policy)
        weights = engine._weights._tensors()
        with torch.no_grad():
            weights["proj_out.weight"].mul_(1.05)
        return receipt

    engine.finish_weights = finish_wrongly
    with pytest.raises(WeightSyncError, match=r"the same samples differ by up to .*sync.canary_tolerance is 0.0001"):
        sync.push()
