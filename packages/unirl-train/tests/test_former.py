"""Names of the last release are accepted for one more release, with a message, and never together with the current
ones."""

import logging
from typing import ClassVar

import pytest

from unirl.config import former
from unirl.types import renamed
from unirl.types.errors import ConfigError


class Engine:
    """A class with a keyword that was renamed."""

    renamed_keywords: ClassVar = {"num_gpus": "num_devices"}

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices


PRESENT = f"{__name__}.Engine"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(former, "CLASSES", {**former.CLASSES, "old.Engine": PRESENT})
    monkeypatch.setattr(renamed, "_said", set())


def test_classes_and_keywords_get_their_present_names_and_are_said_once(caplog):
    recipe = {"engine": {"_target_": "old.Engine", "num_gpus": 2}, "list": [{"_target_": PRESENT, "num_gpus": 3}]}
    with caplog.at_level(logging.WARNING):
        made = former.modernised(recipe)
        assert former.modernised(recipe) == made
    assert made == {
        "engine": {"_target_": PRESENT, "num_devices": 2},
        "list": [{"_target_": PRESENT, "num_devices": 3}],
    }
    assert recipe["engine"] == {"_target_": "old.Engine", "num_gpus": 2}
    assert [record.getMessage().partition(" now.")[0] for record in caplog.records] == [
        f"engine._target_: old.Engine is {PRESENT}",
        "engine.num_gpus is called engine.num_devices",
        "list[0].num_gpus is called list[0].num_devices",
    ]


def test_present_names_stay_and_nothing_is_said(caplog):
    recipe = {"engine": {"_target_": PRESENT, "num_devices": 2}, "other": {"num_gpus": 2}}
    assert former.modernised(recipe) == recipe
    assert not caplog.records


def test_both_names_are_refused():
    recipe = {"engine": {"_target_": PRESENT, "num_gpus": 2, "num_devices": 2}}
    with pytest.raises(ConfigError, match=r"engine.num_gpus is the old name of engine.num_devices, and both are set."):
        former.modernised(recipe)


def test_sections_that_moved_are_moved(monkeypatch, caplog):
    def moved(recipe):
        recipe["new"] = recipe.pop("old")
        return ["old is new now."]

    monkeypatch.setattr(former, "MOVES", (moved,))
    assert former.modernised({"old": 1}) == {"new": 1}
    assert caplog.records[0].getMessage().startswith("old is new now.")


@pytest.mark.parametrize("key", former.FORMER_COUNTS)
def test_how_many_samples_of_an_evaluation_are_shown_is_a_key_of_samples_now(key: str):
    recipe = {"eval": {"prompts": "p", key: 3}, "samples": {"max_mb": 1}}
    assert former.modernised(recipe) == {"eval": {"prompts": "p"}, "samples": {"max_mb": 1, "per_evaluation": 3}}
    assert former.modernised({"eval": {key: 3}, "samples": None})["samples"] == {"per_evaluation": 3}
    with pytest.raises(ConfigError, match=f"eval.{key} is called samples.per_evaluation now, and both are set"):
        former.modernised({"eval": {key: 3}, "samples": {"per_evaluation": 3}})


def test_the_sampling_of_pass_at_k_has_keys_of_its_kind_now():
    texts = {"_target_": "unirl.types.sampling.ARSamplingParams"}
    recipe = {"sampling": texts, "eval": {"temperature": 0.5, "top_p": 0.9}}
    assert former.modernised(recipe)["eval"] == {"pass_temperature": 0.5, "pass_top_p": 0.9}
    assert recipe["eval"] == {"temperature": 0.5, "top_p": 0.9}  # the recipe itself stays
    drawn = {**recipe, "engine": {"_target_": former.IMAGE_TOKENS}, "eval": {"temperature": 0.5}}
    assert former.modernised(drawn)["eval"] == {"temperature": 0.5}
    images_of_texts = {"eval": {"temperature": 0.5}}
    assert former.modernised(images_of_texts) == images_of_texts
    own = {"sampling": texts, "eval": {"_target_": "mine.Evaluation", "temperature": 0.5, "num_images": 3}}
    assert former.modernised(own) == own
