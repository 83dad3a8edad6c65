"""What an engine's adapter misses in another version of its library is named, and the extras pin the one it knows."""

import dataclasses
import sys
import tomllib
import types
from pathlib import Path

import pytest

from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.engine.written_for import SGLANG_DIFFUSION, VLLM, VLLM_OMNI, WrittenFor
from unirl.types.errors import ConfigError

ROOT = Path(__file__).parents[3]
ALL = (SGLANG_DIFFUSION, VLLM, VLLM_OMNI)
PLAYED = WrittenFor(
    name="Played",
    library="played_engine",
    version="1.0",
    extra="played",
    environment="played-cpu",
    uses={"played_engine:Engine.generate": ("prompts",), "played_engine.weights:load": ()},
)


class Engine:
    def generate(self, prompts):
        return prompts


@pytest.fixture
def played(monkeypatch):
    """A library with all that is used of it."""
    library, weights = types.ModuleType("played_engine"), types.ModuleType("played_engine.weights")
    monkeypatch.setattr(library, "__version__", "1.0", raising=False)
    monkeypatch.setattr(library, "Engine", Engine, raising=False)
    monkeypatch.setattr(weights, "load", len, raising=False)
    monkeypatch.setitem(sys.modules, "played_engine", library)
    monkeypatch.setitem(sys.modules, "played_engine.weights", weights)
    return library


def test_a_library_with_all_that_is_used_is_taken(played):
    assert PLAYED.missing() == [] and PLAYED.require() is played


def test_what_another_version_lacks_is_named_with_both_versions(played, monkeypatch):
    monkeypatch.setattr(Engine, "generate", lambda self, requests: requests)
    monkeypatch.setattr(played, "__version__", "2.0")
    monkeypatch.setitem(sys.modules, "played_engine.weights", None)
    with pytest.raises(ConfigError) as caught:
        PLAYED.require()
    assert "Played 2.0 is installed, this unirl-rollout is written for 1.0 and misses:" in str(caught.value)
    assert "played_engine:Engine.generate takes no prompts; played_engine.weights:load (" in str(caught.value)
    assert "--project environments/played-cpu`" in str(caught.value)


def test_keywords_that_a_function_takes_under_any_name_are_not_missing(played, monkeypatch):
    monkeypatch.setattr(Engine, "generate", lambda self, **options: options)
    assert PLAYED.missing() == []


def test_a_library_that_is_not_there_says_what_to_install():
    absent = dataclasses.replace(PLAYED, library="no_such_engine")
    with pytest.raises(ConfigError, match=r"cannot be imported in its process .*'unirl-rollout\[played\]'"):
        absent.require()


@pytest.mark.parametrize("written", ALL, ids=lambda written: written.library)
def test_the_extra_and_the_environment_pin_the_version_that_the_adapter_is_written_for(written: WrittenFor):
    project = tomllib.loads((ROOT / "packages/unirl-rollout/pyproject.toml").read_text())["project"]
    name = written.library.replace("_", "-")
    pinned = [
        each for each in project["optional-dependencies"][written.extra] if each.startswith((f"{name}=", f"{name}["))
    ]
    assert len(pinned) == 1 and pinned[0].endswith(f"=={written.version}")
    assert f"=={written.version}" in (ROOT / "environments" / written.environment / "pyproject.toml").read_text()
    (conflicts,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["conflicts"]
    assert {"package": "unirl-rollout", "extra": written.extra} in conflicts


def test_texts_and_images_by_sglang_are_written_for_one_version():
    assert SGLangRolloutEngine.versions == (SGLANG_DIFFUSION.version,)
