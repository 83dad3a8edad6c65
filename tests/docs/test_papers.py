"""The page of papers has every paper that code, recipes and pages name, and recipes that exist."""

import re
from pathlib import Path

import pytest

from unirl.config.catalog import available

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script(reference_script):
    return reference_script("papers")


@pytest.fixture(scope="module")
def papers(script):
    return script.papers()


def test_the_page_is_what_its_sources_say(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run docs/reference/papers.py"


def test_papers_are_those_that_are_named(script, papers):
    named = script.named()
    assert len(named) > 70
    missing = {number: str(files[0]) for number, files in named.items() if number not in papers}
    assert missing == {}, "add them to docs/reference/papers.yaml, and run papers.py"
    assert sorted(papers.keys() - named.keys()) == [], "nothing names these any more"


def test_recipes_of_papers_exist(papers):
    folders = {recipe.split("/")[0] for recipe in available()}
    given = [recipe for paper in papers.values() for recipe in paper.recipes]
    plain = [recipe for recipe in given if " " not in recipe]
    quoted = [name for recipe in given for name in re.findall(r"`([\w/]+)`", recipe) if name.split("/")[0] in folders]
    assert len(plain) > 3 and quoted
    assert [recipe for recipe in plain + quoted if recipe not in available()] == []


def test_a_recipe_belongs_to_the_longest_name_that_its_comment_has(script, papers):
    found = script.recipes_of(papers)
    assert "worlds/arithmetic/dr_grpo" in found["2503.20783"] and "worlds/arithmetic/dr_grpo" not in found["2402.03300"]
    assert "worlds/shapes/tempflow" in found["2508.04324"] and "cogvideox/t2v" not in found["2402.03300"]


def test_every_algorithm_class_of_a_paper_exists(papers):
    classes = {paper.algorithm for paper in papers.values()} - {None}
    source = "".join(path.read_text() for path in ROOT.glob("packages/unirl-train/src/unirl/algorithms/*.py"))
    assert [name for name in classes if f"class {name}(" not in source] == []
