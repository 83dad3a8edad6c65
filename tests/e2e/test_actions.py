"""Runs of policies that act: equal however they are played, after a resume, and by what they export."""

import json
import os
import signal
from pathlib import Path

import av
import pytest
import stopping
import torch
import transformers
from safetensors.torch import load_file

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.distributed.weight_sync.action_canary import ActionCanary
from unirl.distributed.weight_sync.canary import canary_primitives
from unirl.models.action.bundle import ActionBundle
from unirl.models.action.pipeline import BinsActionPipeline, FlowActionPipeline
from unirl.models.tiny import openvla, pi0
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.trainer.commands import export_recipe
from unirl.types.sampling import ActionSamplingParams
from unirl.worlds import tabletop

SMALL = [
    "num_rollouts=2",
    "stack.micro_batch_size=4",
    "eval.interval=0",
    "eval.num_samples=16",
    "eval.batch_size=16",
    "samples.per_evaluation=4",
    "guardrails.action=off",
]
SIZES = {
    "vla/tabletop_push_tokens_grpo": ["batch_size=2", "sampling.samples_per_prompt=4"],
    "vla/tabletop_push": ["batch_size=8"],
    "vla/tabletop_push_tokens": ["batch_size=8"],
    "vla/tabletop_push_noise": ["batch_size=8"],
    "vla/tabletop_push_grpo": ["batch_size=2", "sampling.samples_per_prompt=4"],
}
LARGE = {
    "vla/pi0_tabletop": ["batch_size=4"],
    "vla/pi0_tabletop_grpo": ["batch_size=2", "sampling.samples_per_prompt=2"],
    "vla/openvla_oft_grpo": ["batch_size=2", "sampling.samples_per_prompt=4"],
}
"""Recipes of models that tests make tiny."""
PROCESSES = [
    "engine.environment._target_=unirl.rollout.environments.gymnasium_processes.GymnasiumProcesses",
    "+engine.environment.num_processes=2",
]


def composed(name, *words):
    register_resolvers()
    return resolve(compose(name, [*SMALL, *(SIZES | LARGE)[name], *words]))


def run(name, run_dir, *words, after=10**9):
    """Step -> metrics that do not measure the machine."""
    _, records = stopping.run(composed(name, *words), run_dir, after)
    found = {step: stopping.comparable(own) for step, own in records.items()}
    return {
        step: {key: value for key, value in own.items() if not key.endswith("environment_s")}
        for step, own in found.items()
    }


@pytest.mark.parametrize("name", SIZES)
def test_how_many_episodes_are_played_at_once_changes_no_start_and_no_count(name, tmp_path):
    """Log-probs of other batch sizes differ by rounding, and so may what is drawn: the first rollout is compared."""
    whole = run(name, tmp_path / "whole", "num_rollouts=1")
    parts = run(name, tmp_path / "parts", "num_rollouts=1", "engine.forward_batch_size=3")
    for key in ("action/rollout/decisions", "action/rollout/moves", "reward/mean"):
        assert parts[1][key] == whole[1][key]
    assert whole[1]["policy/first_ratio_max_abs_dev"] == 0


@pytest.mark.parametrize("name", SIZES)
def test_a_run_and_its_repetition_have_the_same_bits_and_so_has_a_resumed_one(name, tmp_path):
    whole = run(name, tmp_path / "whole", "save.interval=1")
    assert run(name, tmp_path / "again") == whole
    run(name, tmp_path / "stopped", "save.interval=1", after=1)
    resumed = run(name, tmp_path / "stopped", "save.interval=1", "resume=auto")
    assert resumed[2] == whole[2]


REPLICA = [
    "engine._target_=unirl.rollout.engine.replica.episodes.ReplicaEpisodesEngine",
    "+engine.dtype=fp32",
    "+sync={_target_: unirl.distributed.weight_sync.full.FullWeightSync, dtype: fp32}",
    "+sync.canary_tolerance=1.0e-4",
]


@pytest.mark.parametrize("name", ["vla/tabletop_push_grpo", "vla/tabletop_push_tokens", "vla/tabletop_push_noise"])
def test_a_copy_that_is_pushed_to_plays_with_the_bits_of_the_policy(name, tmp_path):
    direct = run(name, tmp_path / "direct", "algorithm.old_logp_source=replay")
    copy = run(name, tmp_path / "copy", "algorithm.old_logp_source=replay", *REPLICA)
    gaps = [own["sync/logprob_gap_max"] for own in copy.values() if "sync/logprob_gap_max" in own]
    assert gaps and max(gaps) < 1e-4
    without = {step: {key: own[key] for key in own if "sync/" not in key} for step, own in copy.items()}
    assert without == {step: {key: own[key] for key in own if "sync/" not in key} for step, own in direct.items()}


@pytest.mark.parametrize(("checkpoint", "kind"), [("flow", FlowActionPipeline), ("bins", BinsActionPipeline)])
def test_a_rank_without_an_engine_replays_as_often_as_the_one_that_has_it(checkpoint, kind, monkeypatch):
    """Shards are gathered equally often on all ranks."""
    bundle = ActionBundle(str(Path(str(tabletop.__file__)).parent / "checkpoint" / checkpoint), dtype="fp32")
    pipeline, replayed = kind(bundle), []
    monkeypatch.setattr(pipeline, "replay", lambda *given, own=pipeline.replay: replayed.append(1) or own(*given))
    given = ActionSamplingParams(samples_per_prompt=2), torch.device("cpu"), canary_primitives(("a",), None), None
    ActionCanary(pipeline, *given).replay_only()
    assert replayed == [1]


@pytest.mark.ray
def test_actor_and_rollout_apart_have_the_numbers_of_one_process(tmp_path):
    name, words = "vla/tabletop_push_flow", ["batch_size=2", "sampling.samples_per_prompt=4"]
    register_resolvers()
    found = {}
    for place in ("0", "1"):
        placed = [f"component_placement.{each}={place}" for each in ("rollout", "env")]
        _, records = stopping.run(resolve(compose(name, [*SMALL, *words, *placed])), tmp_path / place)
        found[place] = {
            step: {key: own[key] for key in own if not key.startswith("sync/") and not key.endswith("environment_s")}
            for step, own in ((step, stopping.comparable(each)) for step, each in records.items())
        }
    assert found["1"] == found["0"]


def test_deaths_of_environments_change_no_bit(tmp_path, monkeypatch):
    name = "vla/tabletop_push_grpo"
    undisturbed = run(name, tmp_path / "undisturbed")
    step, deaths = EnvironmentWorkers.step, []

    def step_of_the_dying(self, actions):
        if len(deaths) < 4:
            os.kill(self.pids[len(deaths) % 2], signal.SIGKILL)
            deaths.append(self)
        return step(self, actions)

    monkeypatch.setattr(EnvironmentWorkers, "step", step_of_the_dying)
    assert run(name, tmp_path / "dying", *PROCESSES) == undisturbed
    assert len(deaths) == 4


def test_videos_show_each_recorded_episode(tmp_path):
    run("vla/tabletop_push_grpo", tmp_path, "media_interval=1", "num_rollouts=1")
    folder = tmp_path / "samples"
    records = [json.loads(line) for line in (folder / "rollout-000001.jsonl").read_text().splitlines()]
    shown = [record for record in records if record["media"] and record["media"]["kind"] == "video"]
    assert len(shown) >= 4, "samples.videos, and what is no longer than an excerpt"
    for record in shown[:4]:
        with av.open(str(folder / record["media"]["file"])) as video:
            frames = sum(1 for _ in video.decode(video=0))
        assert frames == record["counts"]["decisions"] + 1 == record["media"]["num_frames"]
        assert record["end"] in ("completed", "truncated")


@pytest.mark.parametrize("name", ["vla/tabletop_push", "vla/tabletop_push_tokens", "vla/tabletop_push_noise"])
def test_what_is_exported_is_what_was_trained(name, tmp_path):
    run(name, tmp_path / "run", "num_rollouts=1")
    out = tmp_path / "out"
    export_recipe(run_of(composed(name)), tmp_path / "run", out, merged=True)
    exported = ActionBundle(str(out))
    bundle = composed(name)["bundle"]
    base = ActionBundle(bundle["pretrained_model"], noise_range=bundle.get("noise_range"))
    assert exported.config == base.config
    moved = [
        not torch.equal(value, base.network.state_dict()[key]) for key, value in exported.network.state_dict().items()
    ]
    assert any(moved)


@pytest.mark.parametrize("name", ["vla/pi0_tabletop", "vla/pi0_tabletop_grpo"])
def test_pi0_trains_and_is_exported_for_its_library(name, tmp_path):
    """The expert moves, the vision-language model keeps its bits."""
    base = pi0.save(tmp_path / "base")
    critic = ["algorithm.critic.hidden_size=24"] if name == "vla/pi0_tabletop" else []
    words = [
        *("device=cpu", "bundle.dtype=fp32", f"bundle.pretrained_model={base}", "bundle.tokenizer=null"),
        *("backend.fsdp=null", "backend.optimizer.learning_rate=1e-3", "stack.num_updates_per_batch=2", *critic),
        *("stack.num_epochs=1", "num_rollouts=1", "engine.environment.id=dense_room:tests/DenseRoom-v0"),
    ]
    records = run(name, tmp_path / "run", *words)
    assert records[1]["policy/first_ratio_max_abs_dev"] == 0
    assert records[1]["mismatch/logp_absdiff/max"] < 1e-3
    out = tmp_path / "out"
    export_recipe(run_of(composed(name, *words)), tmp_path / "run", out, merged=True)
    trained, before = (transformers.PI0ForConditionalGeneration.from_pretrained(each) for each in (out, base))
    kept = {key: torch.equal(value, before.state_dict()[key]) for key, value in trained.state_dict().items()}
    assert all(same for key, same in kept.items() if key.startswith("model.vlm."))
    assert not kept["action_out_proj.weight"] and not kept["model.dit.layers.0.mlp.up_proj.weight"]


def test_openvla_trains_and_its_export_continues(tmp_path):
    """The language model moves, the frozen towers and what is not read keep their bits."""
    name, base = "vla/openvla_oft_grpo", openvla.save(tmp_path / "base")
    words = [
        *("device=cpu", "runtime=local", "num_devices=1", "bundle.dtype=fp32", f"bundle.pretrained_model={base}"),
        *("bundle.max_text_tokens=100", "backend.fsdp=null", "backend.optimizer.learning_rate=1e-3"),
        *("stack.num_updates_per_batch=2", "num_rollouts=1", "engine.environment.id=dense_room:tests/DenseRoom-v0"),
    ]
    records = run(name, tmp_path / "run", *words)
    assert records[1]["policy/first_ratio_max_abs_dev"] == 0
    assert records[1]["mismatch/logp_absdiff/max"] < 1e-3
    out = tmp_path / "out"
    export_recipe(run_of(composed(name, *words)), tmp_path / "run", out, merged=True)
    before, after = (load_file(each / "model.safetensors") for each in (base, out))
    kept = {key: torch.equal(value, before[key]) for key, value in after.items()}
    assert after.keys() == before.keys() and all(kept[key] for key in kept if key.startswith("vision_backbone."))
    assert not kept["language_model.lm_head.weight"] and not kept["projector.fc1.weight"]
    again = run(name, tmp_path / "again", *words, f"bundle.pretrained_model={out}")
    assert again[1]["policy/first_ratio_max_abs_dev"] == 0


LORA = ["parts/train=lora", "backend.lora.rank=4", "backend.lora.alpha=8", "backend.fsdp=null", "bundle.dtype=fp32"]
SMALL_LORA = [*LORA, "device=cpu", "backend.optimizer.learning_rate=1e-2", "stack.num_updates_per_batch=2"]
ADAPTED = {
    "vla/pi0_tabletop_grpo": (pi0, ["bundle.tokenizer=null", "stack.num_epochs=1"], "model.dit.layers.0.mlp.up_proj"),
    "vla/openvla_oft_grpo": (
        openvla,
        ["runtime=local", "num_devices=1", "bundle.max_text_tokens=100"],
        "language_model.model.layers.0.mlp.up_proj",
    ),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_large_policies_train_with_adapters_where_gradients_reach(name, tmp_path):
    """Frozen parts and what is no linear layer keep their bits; merged, the adapters are in the released weights."""
    tiny, own, adapted = ADAPTED[name]
    base, out = tiny.save(tmp_path / "base"), tmp_path / "out"
    words = [*SMALL_LORA, *own, f"bundle.pretrained_model={base}", "num_rollouts=1"]
    words += ["engine.environment.id=dense_room:tests/DenseRoom-v0"]
    records = run(name, tmp_path / "run", *words)
    assert records[1]["policy/first_ratio_max_abs_dev"] == 0 and records[1]["train/grad_norm"] > 0
    export_recipe(run_of(composed(name, *words)), tmp_path / "run", out, merged=True)
    if name == "vla/pi0_tabletop_grpo":
        found = [transformers.PI0ForConditionalGeneration.from_pretrained(each).state_dict() for each in (base, out)]
    else:
        found = [load_file(each / "model.safetensors") for each in (base, out)]
    before, after = found
    moved = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert f"{adapted}.weight" in moved and all(key.endswith(".weight") for key in moved)
    kept = ("vlm.", "vision_backbone.", "norm", "embed_tokens", "lm_head")
    assert not [key for key in moved if any(part in key for part in kept)]


@pytest.mark.parametrize("head", ["flow", "bins"])
def test_demonstrations_are_cloned_with_the_same_bits_after_a_resume(head, tmp_path):
    """Eight rollouts of 25 demonstrations: the loss falls, and the policy that was cloned acts in the evaluation."""
    register_resolvers()
    words = [
        *("batch_size=25", "stack.micro_batch_size=5", "num_rollouts=8", "eval.interval=8", "eval.num_samples=16"),
        *("eval.batch_size=16", "samples.per_evaluation=4", "save.interval=4", f"bundle.config.head={head}"),
    ]
    if head == "bins":
        words.append("pipeline._target_=unirl.models.action.pipeline.BinsActionPipeline")
    recipe = resolve(compose("sft/tabletop", words))
    _, records = stopping.run(recipe, tmp_path / "whole")
    assert records[8]["policy/loss"] < 0.97 * records[1]["policy/loss"]
    assert "eval/reward" in records[8]
    stopping.run(recipe, tmp_path / "stopped", 4)
    _, resumed = stopping.run(resolve(compose("sft/tabletop", [*words, "resume=auto"])), tmp_path / "stopped")
    assert resumed[8]["policy/loss"] == records[8]["policy/loss"]


@pytest.mark.parametrize("name", ["vla/cartpole", "vla/inverted_pendulum"])
def test_an_environment_of_gymnasium_is_learnt_from_nothing(name, tmp_path):
    register_resolvers()
    recipe = resolve(compose(name, ["num_rollouts=12", "eval.num_samples=16", "eval.interval=0"]))
    _, records = stopping.run(recipe, Path(tmp_path))
    assert records[12]["reward/mean"] > 2 * records[1]["reward/mean"]


def test_a_robot_arm_is_learnt_from_nothing(tmp_path):
    """Rewards are distances to the goal, below 0; random moves earn -9.8, straight ones -.27."""
    register_resolvers()
    recipe = resolve(compose("vla/fetch_reach", ["num_rollouts=12", "eval.num_samples=16", "eval.interval=0"]))
    _, records = stopping.run(recipe, Path(tmp_path))
    assert records[12]["reward/mean"] > 0.75 * records[1]["reward/mean"]
