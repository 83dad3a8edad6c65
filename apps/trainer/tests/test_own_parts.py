"""A user's own parts, outside the repository, exactly as the READMEs of the packages write them."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

import unirl.worlds.shapes
from unirl.app.environment import register_resolvers
from unirl.app.main import USER_ERROR, main
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.config.signatures import read_module, read_target
from unirl.distributed.worker import WorkerContext
from unirl.models.diffusers_pipeline.adapter import TextConditionedAdapter
from unirl.reward.service import RewardService
from unirl.trainer.build.worker import build_components

PACKAGES = Path(__file__).parents[3] / "packages"
SMALL = (
    "num_rollouts=1",
    "batch_size=2",
    "sampling.samples_per_prompt=4",
    "sampling.num_inference_steps=2",
    "stack.num_updates_per_batch=1",
    "eval.num_samples=2",
    "eval.num_inference_steps=1",
)


def programs(package, language):
    """The fenced blocks of a package's README, in order."""
    text = (PACKAGES / package / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def block(package, language, part):
    """The one block that holds `part`."""
    (found,) = [text for text in programs(package, language) if part in text]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with `my_package`, whose modules are the programs of the READMEs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = {
        "rewards": block("unirl-reward", "python", "def brightness").split("service = ")[0],
        "scorers": "".join(block("unirl-reward", "python", f"class {name}") for name in ("Contrast", "Smoothness")),
        "training": "".join(
            block("unirl-train", "python", f"class {name}") for name in ("Unclipped", "ShortPrompts", "RewardFile")
        ),
        "engines": block("unirl-rollout", "python", "class PatientEngine"),
    }
    (tmp_path / "my_package").mkdir()
    for name, text in modules.items():
        (tmp_path / "my_package" / f"{name}.py").write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    read_target.cache_clear()
    read_module.cache_clear()


OWN_FUNCTION = ("unirl-reward", "function: my_package.rewards.brightness")
OWN_TRAINING = ("unirl-train", "my_package.training.Unclipped")


def written(folder, *blocks, **changes):
    """A recipe file from the recipes of READMEs, one over the other."""
    recipe = {}
    for package, part in blocks:
        recipe |= yaml.safe_load(block(package, "yaml", part))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**recipe, **changes}, sort_keys=False))
    return str(path)


def test_a_run_with_an_algorithm_data_tracker_and_engine_of_ones_own(folder, capsys):
    recipe = written(folder, OWN_TRAINING, ("unirl-rollout", "PatientEngine"))
    assert main([recipe, *SMALL, "run_dir=run"]) == 0, capsys.readouterr().err
    first, last = Path("run/rewards.txt").read_text().splitlines()
    assert re.fullmatch(r"1 \d\.\d{4}", first) and last == "finished short_and_unclipped"
    assert not list(Path("run").glob("events*")), "the recipe takes TensorBoard out"


def test_a_run_on_a_reward_function_of_ones_own_trains_on_nothing_else(folder, capsys):
    recipe = written(folder, OWN_FUNCTION)
    assert main([recipe, *SMALL, "algorithm.num_timesteps=1", "run_dir=run"]) == 0, capsys.readouterr().err
    assert '"reward/brightness' in Path("run/metrics.jsonl").read_text()
    assert "shapes" not in Path("run/metrics.jsonl").read_text()


def test_a_scorer_class_of_ones_own_scores_beside_the_packaged_one(folder, capsys):
    recipe = written(folder, ("unirl-reward", "Contrast"), defaults=["/worlds/shapes/nft", "_self_"])
    assert main([recipe, *SMALL, "algorithm.num_timesteps=1", "run_dir=run"]) == 0, capsys.readouterr().err
    assert "reward: shapes + contrast" in capsys.readouterr().err
    assert all(f'"reward/{name}' in Path("run/metrics.jsonl").read_text() for name in ("shapes", "contrast"))


WITH_A_KEY = """
import json
from my_package.scorers import Contrast

class WithKey(Contrast):
    def __init__(self, *, key, **options):
        super().__init__(**options)
        assert "hunter2" in key
"""
KEEPS_ITS_CONFIG = """
import json
from my_package.training import RewardFile

class ConfigFile(RewardFile):
    def start(self, config, run_dir, step):
        super().start(config, run_dir, step)
        (run_dir / "config.json").write_text(json.dumps(config))
"""


def test_a_secret_of_the_environment_is_in_no_file_of_a_run_or_of_its_export(folder, capsys, monkeypatch):
    (folder / "my_package" / "keys.py").write_text(WITH_A_KEY)
    (folder / "my_package" / "trackers.py").write_text(KEEPS_ITS_CONFIG)
    (folder / "prompts.txt").write_text("a red circle\na blue square\na green square\n")
    recipe = written(
        folder,
        ("unirl-reward", "Contrast"),
        defaults=["/worlds/shapes/nft", "_self_"],
        reward={
            "scorers": {
                "shapes": None,
                "contrast": {"_target_": "my_package.keys.WithKey", "key": "${oc.env:SECRET_KEY}", "scale": 2.0},
            }
        },
        trackers={"own": {"_target_": "my_package.trackers.ConfigFile", "file_name": "rewards.txt"}},
        data={"path": str(folder / "prompts.txt")},
        save={"best_metric": "reward"},
    )
    monkeypatch.setenv("SECRET_KEY", "hunter2-one")
    run = [recipe, *SMALL, "algorithm.num_timesteps=1", "run_dir=run"]
    assert main(run) == 0, capsys.readouterr().err
    assert main(["export", "run", "--to", "exported", "--merged", "--trust"]) == 0, capsys.readouterr().err
    monkeypatch.setenv("SECRET_KEY", "hunter2-two")
    # An export asks neither scorers nor trackers nor prompts, which need not be on its machine.
    away = [(folder / "my_package", folder / "away"), (folder / "prompts.txt", folder / "away.txt")]
    for here, there in away:
        here.rename(there)
    assert main(["export", "run", "--to", "exported-elsewhere", "--merged"]) == 0, capsys.readouterr().err
    for here, there in away:
        there.rename(here)
    assert main([*run, "resume=auto", "num_rollouts=2"]) == USER_ERROR
    said = capsys.readouterr()
    assert '"${oc.env:SECRET_KEY}" -> "${oc.env:SECRET_KEY}, with another value"' in said.err
    files = [path for name in ("run", "exported") for path in Path(name).rglob("*") if path.is_file()]
    assert {"driver_state.json", "config.json", "config.yaml", "README.md"} <= {path.name for path in files}
    assert any(path.name.startswith("events") for path in files)
    assert not [path for path in files if b"hunter2" in path.read_bytes()] and "hunter2" not in said.out + said.err
    card = Path("exported/README.md").read_text()
    assert "${oc.env:SECRET_KEY}" in card and "${shapes:checkpoint}" in card
    assert (
        str(folder) not in card and "prompts.txt" in card and str(Path(unirl.worlds.shapes.__file__).parent) not in card
    )


DRAWS = """
import random

import numpy
import torch

from unirl.reward.base import LocalScorer

class Draws(LocalScorer):
    def __init__(self, **options):
        super().__init__(name="draws", **options)
        self.built_with = drawn()

    def score_batch(self, request):
        raise NotImplementedError

def drawn():
    return random.random(), numpy.random.rand(), float(torch.rand(1))
"""


@pytest.mark.parametrize("holds", [("reward",), ("rollout", "reward")], ids=str)
def test_a_worker_seeds_every_global_generator(folder, holds):
    (folder / "my_package" / "draws.py").write_text(DRAWS)
    sys.path.append(str(folder))
    own = ["~reward.scorers.shapes", "reward.scorers.own={_target_:my_package.draws.Draws}", "save.best_metric=reward"]
    register_resolvers()
    recipe = resolve(compose("worlds/shapes/replica", own))

    def built(seed):
        roles = build_components(
            run_of({**recipe, "seed": seed}), "run", WorkerContext(rank=0, world_size=1, device="cpu"), holds
        )
        reward = roles["reward"]
        assert isinstance(reward, RewardService)
        return [*vars(reward.scorers["own"])["built_with"], *sys.modules["my_package.draws"].drawn()]

    first, again, other = built(7), built(7), built(8)
    assert first == again
    assert not [draw for draw in zip(first, other, strict=True) if draw[0] == draw[1]]


def test_a_run_on_latents_alone_decodes_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr(TextConditionedAdapter, "decode", lambda *_: pytest.fail("the decoder ran"))
    scorers = {"shapes": None, "smooth": {"_target_": "my_package.scorers.Smoothness", "name": "smooth"}}
    recipe = written(
        folder,
        defaults=["/worlds/shapes/nft", "_self_"],
        reward={"scorers": scorers},
        save={"best_metric": "reward"},
        engine={"decode": False},
        media_interval=1,
    )
    assert main([recipe, *SMALL, "algorithm.num_timesteps=1", "run_dir=run"]) == 0, capsys.readouterr().err
    assert '"reward/smooth' in Path("run/metrics.jsonl").read_text()
    assert not list(Path("run").rglob("*.png"))


@pytest.mark.parametrize(
    ("blocks", "change", "message"),
    [
        (
            [OWN_FUNCTION],
            "reward.scorers.brightness.targte=1",
            "reward.scorers.brightness.targte: unirl.reward.function.FunctionRewardScorer has no argument 'targte'. "
            "Did you mean target",
        ),
        ([OWN_FUNCTION], "reward.scorers.brightness.images=1", "has no argument 'images'"),
        (
            [OWN_FUNCTION],
            "reward.scorers.brightness.function=my_package.rewards.brightnes",
            "reward.scorers.brightness.function = my_package.rewards.brightnes: my_package.rewards has no "
            "'brightnes'. Did you mean brightness?",
        ),
        ([OWN_TRAINING], "algorithm.max_rato=1", "my_package.training.Unclipped has no argument 'max_rato'. Did you"),
        ([OWN_TRAINING], "algorithm.step_fracton=1", "Did you mean step_fraction"),
        ([OWN_TRAINING], "data.max_wods=1", "my_package.training.ShortPrompts has no argument 'max_wods'. Did you"),
        ([OWN_TRAINING], "data.max_words=few", "data.max_words = 'few' must be an integer"),
        ([OWN_TRAINING], "~data.max_words", "ShortPrompts needs max_words. Set data.max_words."),
        ([OWN_TRAINING], "trackers.rewards.file=x", "my_package.training.RewardFile has no argument 'file'. Did you"),
        (
            [OWN_TRAINING, ("unirl-rollout", "PatientEngine")],
            "engine.max_attempt=1",
            "my_package.engines.PatientEngine has no argument 'max_attempt'. Did you mean max_attempts?",
        ),
    ],
)
def test_a_typo_in_a_part_of_ones_own_is_found_without_importing_it(folder, capsys, blocks, change, message):
    recipe = written(folder, *blocks)
    assert main(["check", recipe]) == 0, capsys.readouterr().err
    assert main(["check", recipe, change]) == USER_ERROR
    assert message in capsys.readouterr().err
    assert not [name for name in sys.modules if name.startswith("my_package")]
