"""The page of recipes says what the recipes and the results say."""

import json
from pathlib import Path

import pytest

from unirl.config.catalog import available

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script(reference_script):
    return reference_script("recipes")


@pytest.fixture(scope="module")
def known(script):
    return json.loads(script.EVIDENCE.read_text())


def test_the_page_has_every_recipe_with_its_evidence(script, known):
    assert list(known) == list(available()), "run docs/reference/recipes.py"
    for name, parts in known.items():
        assert parts["levels"] == script.evidence(name, parts, known), f"{name}: run docs/reference/recipes.py"
    assert script.PAGE.read_text() == script.page(known), "run docs/reference/recipes.py"


@pytest.mark.parametrize("name", ["sd3/nft", "worlds/phrases/both", "sd3/controlnet_flowgrpo"])
def test_the_kept_algorithms_and_models_are_those_of_the_recipe(script, known, name):
    assert script.composed(name).items() <= known[name].items()


@pytest.mark.matrix
def test_the_kept_algorithms_and_models_are_those_of_every_recipe(script, known):
    assert {name: script.composed(name) | {"levels": parts["levels"]} for name, parts in known.items()} == known


def test_levels_follow_from_results(script, known):
    assert "curve" in known["worlds/shapes/nft"]["levels"]
    assert "GPU" in known["sd3/nft"]["levels"] and "GPU" not in known["sd3/crd"]["levels"]
    parts = {"algorithms": ["Unknown"], "models": ["sd3"]}
    assert script.evidence("sd3/unknown", parts, known | {"sd3/unknown": parts}) == ["pipeline"]
