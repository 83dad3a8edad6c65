"""Old names of recipes: on the command line, in the defaults of other files, and as parts."""

import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from unirl.config.catalog import packaged_name
from unirl.config.former_recipes import former_recipe, names_before
from unirl.config.recipes import compose
from unirl.types import renamed
from unirl.types.errors import ConfigError

FILES = {
    "parts/engine/own.yaml": "engine: {name: own}\n",
    "parts/engine/copy.yaml": "engine: {name: copy, push: whole}\n",
    "parts/base.yaml": "defaults: [{/parts/engine: own}, _self_]\nseed: 1\n",
    "small/first.yaml": "defaults: [/parts/base, _self_]\nrecipe: small/first\n",
    "small/second.yaml": "defaults: [/parts/base, _self_]\nrecipe: small/second\nseed: 2\n",
    "large/second.yaml": "defaults: [/parts/base, _self_]\nrecipe: large/second\nseed: 3\n",
}
TABLE = """\
old/one: small/first
old/two: small/second
old/copied: small/first parts/engine=copy engine.words='["a b", "c=d"]' seed=7 engine.more.rank='${seed}'
parts/engine/replica: parts/engine/copy
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request) -> str:
    name = f"recipes_of_{abs(hash(request.node.name))}"
    for file, text in {**FILES, "__init__.py": "", "former_names.yaml": TABLE}.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(("# @package _global_\n" if file.count("/") else "") + text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(renamed, "_said", set())
    return name


def composed(recipe: str | Path, module: str, *changes: str) -> dict:
    plain = OmegaConf.to_container(compose(str(recipe), changes, module=module), resolve=True)
    assert isinstance(plain, dict)
    return plain


def test_an_old_name_composes_the_present_recipe_and_says_so_once(module, caplog):
    with caplog.at_level(logging.WARNING):
        assert composed("old/one", module, "seed=5") == {"recipe": "small/first", "seed": 5, "engine": {"name": "own"}}
        assert composed("one", module) == composed("small/first", module)
    assert [record.message for record in caplog.records] == [
        "old/one is small/first now. This release still takes the old name; write the new one."
    ]


def test_an_old_name_may_stand_for_a_recipe_with_changes_and_keeps_its_runs_apart(module, caplog):
    engine = {"name": "copy", "push": "whole", "words": ["a b", "c=d"], "more": {"rank": 7}}
    assert composed("old/copied", module) == {"recipe": "old/copied", "seed": 7, "engine": engine}
    again = composed("copied", module, "parts/engine=own", "seed=8")
    assert again["engine"]["name"] == "own" and again["engine"]["more"] == {"rank": 8}
    assert "old/copied is small/first parts/engine=copy" in caplog.text


def test_own_files_compose_from_old_names(module, tmp_path, caplog):
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [/old/one, override /parts/engine: replica, _self_]\nrecipe: mine\n")
    assert composed(own, module) == {"recipe": "mine", "seed": 1, "engine": {"name": "copy", "push": "whole"}}
    assert "old/one is small/first now" in caplog.text and "parts/engine/replica is parts/engine/copy" in caplog.text
    own.write_text("defaults: [/old/copied, _self_]\nrecipe: mine\nseed: 9\n")
    assert composed(own, module)["engine"]["more"] == {"rank": 9}


def test_an_old_part_is_chosen_on_the_command_line(module):
    assert composed("small/first", module, "parts/engine=replica")["engine"]["push"] == "whole"


def test_names_that_mean_several_recipes_are_refused_with_all_of_them(module):
    assert packaged_name("first", module) == "small/first"
    with pytest.raises(ConfigError, match=r"'second' may be any of large/second, small/second. Write more of its name"):
        composed("second", module)
    with pytest.raises(ConfigError, match=r"unknown recipe 'old/three'"):
        composed("old/three", module)


def test_a_present_name_comes_before_an_old_one(module):
    assert former_recipe("two", module) == "old/two" and former_recipe("first", module) is None
    assert names_before("small/second", module) == ["old/two"]
