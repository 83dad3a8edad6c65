"""Rules about policies that act: one message for each mistake, before anything is built."""

from __future__ import annotations

import importlib.util

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe, machine_findings, run_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

PPO, GRPO, TOKENS = "vla/tabletop_push", "vla/tabletop_push_grpo", "vla/tabletop_push_tokens"
NOISE, CLONING = "vla/tabletop_push_noise", "sft/tabletop"
DEMONSTRATIONS = "unirl.rollout.engine.offline.episodes.OfflineEpisodesEngine"
FEW = Machine(num_cpus=1, num_gpus=0)
CARTPOLE = ["engine.environment.id=CartPole-v1"]


def composed(name: str, *overrides: str):
    register_resolvers()
    return resolve(compose(name, list(overrides)))


def findings(name: str, *overrides: str) -> list[str]:
    return list(run_findings(run_of(composed(name, *overrides))))


def on_machine(name: str, *overrides: str) -> list[str]:
    return list(machine_findings(run_of(composed(name, *overrides)), FEW))


@pytest.mark.parametrize("name", [PPO, GRPO, TOKENS, NOISE, CLONING, "vla/tabletop_push_tokens_grpo"])
def test_the_recipes_have_no_mistakes(name):
    check_recipe(composed(name))
    assert findings(name) == on_machine(name) == []


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (GRPO, ["sampling.samples_per_prompt=1"], "a group of one has no advantage"),
        (PPO, ["advantages.scale=batch"], "has center: none and scale: batch. Set both to none."),
        (
            PPO,
            ["+sampling.temperature=0.7"],
            "temperature does nothing with FlowActionPipeline, whose head is flow",
        ),
        (TOKENS, ["+sampling.eta=0.3"], "sampling.eta does nothing with BinsActionPipeline, whose head is bins"),
        (PPO, ["+bundle.noise_range=[0.1,0.2]"], "noise_range = [0.1, 0.2] does nothing with FlowActionPipeline"),
        (
            CLONING,
            ["engine._target_=unirl.rollout.engine.episodes.engine.EpisodesEngine"],
            "which EpisodesEngine does not",
        ),
        (GRPO, [f"engine._target_={DEMONSTRATIONS}"], "needs log-probs, which demonstrations have not"),
        (TOKENS, ["+sampling.temperature=0"], "takes the most probable bins, which nothing trains on"),
        (PPO, ["+sampling.eta=0"], "leave no stochastic step, which alone can be trained on"),
        (PPO, ["+sampling.sde_indices=[4]"], "sde_indices [4] lie outside 0..3"),
        (GRPO, ["+algorithm.kl_estimator=exact"], "algorithm.kl_estimator = exact: actions have k1, k2 and k3"),
        (
            "worlds/arithmetic/rloo",
            ["stack.num_updates_per_batch=1", "+stack.num_epochs=2"],
            "stack.num_epochs = 2. Set",
        ),
        (PPO, ["+algorithm.decisions_per_forward=9", "num_devices=2"], "makes unequally many forwards on 2 devices"),
        (PPO, ["engine.environment=null"], "engine.environment has no _target_"),
        (PPO, ["+reward.on_failure=retry"], "would score an episode again whose environment"),
        (
            PPO,
            ["modality._target_=unirl.trainer.text.TextModality"],
            "Set modality._target_: unirl.trainer.action",
        ),
        (GRPO, ["algorithm._target_=unirl.algorithms.ar_grpo.ARGRPO"], "trains on no actions, but sampling._target_"),
        (PPO, ["+eval.max_new_tokens=4"], "eval.max_new_tokens: of texts, but this run samples episodes"),
        (PPO, ["+backend.lora={_target_:unirl.train.configs.LoraConfig,rank:2,alpha:2}"], "has no layers for adapters"),
        (
            "vla/pi0_tabletop_grpo",
            ["parts/train=lora", "+backend.lora.target_modules=[q_proj]"],
            "backend.lora.target_modules names ['q_proj'], with which layers of parts that are frozen end too",
        ),
        (PPO, ["bundle.pretrained_model=null"], "bundle.pretrained_model and bundle.config: both are missing"),
    ],
)
def test_a_mistake_has_its_message(name, overrides, message):
    found = findings(name, *overrides)
    assert any(message in each for each in found), found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (CARTPOLE, "bundle: the policy has action_size = 2, engine.environment 1. Give the environment a policy"),
        (CARTPOLE, "bundle: the policy has image_shape = [3, 64, 64], engine.environment None."),
        (["engine.environment.id=Nowhere-v3"], "engine.environment.id = Nowhere-v3: "),
        (["engine.environment.id=Taxi-v4"], "Taxi-v4: observations are Discrete(500)"),
    ],
)
def test_what_only_the_machine_knows_has_its_message(overrides, message):
    found = on_machine(PPO, *overrides)
    assert any(message in each for each in found), found


def test_a_missing_library_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "gymnasium" else find(name))
    assert on_machine(PPO) == [
        "engine.environment: GymnasiumEnvironment needs gymnasium. Install it with: pip install "
        "'unirl-rollout[gymnasium]'"
    ]


def test_a_policy_of_another_environment_is_refused_by_its_class(tmp_path, monkeypatch):
    (tmp_path / "own_tables.py").write_text(
        "from unirl.rollout.environments.vector import VectorEnvironment\n\n\n"
        "class Tables(VectorEnvironment):\n    action_size = 7\n    state_size = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shape = "{_target_:unirl.models.action.config.ActionConfig,head:flow,action_size:2,state_size:3}"
    environment = "engine.environment={_target_:own_tables.Tables}"
    found = findings(PPO, environment, "bundle.pretrained_model=null", f"+bundle.config={shape}")
    assert found == [
        "bundle: the policy has action_size = 2, engine.environment 7. Give the environment a policy that was made for "
        "it."
    ]


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="num_step"):
        check_recipe(composed(PPO, "+sampling.num_step=3"))
