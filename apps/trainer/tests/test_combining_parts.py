"""Engine, push, layout and schedule of a recipe chosen by parts, as docs/guides/{engines_and_layouts,async}.md say."""

import re
import shlex
from pathlib import Path

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.former_recipes import former_names
from unirl.config.placement import devices_between
from unirl.config.recipes import compose, resolve
from unirl.types.errors import ConfigError

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
PAGES = [(GUIDES / name).read_text().split("## What is refused") for name in ("engines_and_layouts.md", "async.md")]
COMBINATIONS = [line for fits, _ in PAGES for line in re.findall(r"\| `trainer (.+)` \|$", fits, re.MULTILINE)]
MISTAKES = [line for _, bad in PAGES for line in re.findall(r"^\| `trainer (.+)` \| (.+) \|$", bad, re.MULTILINE)]


@pytest.fixture(autouse=True)
def resolvers() -> None:
    register_resolvers()


def checked(words: list[str]) -> None:
    check_recipe(resolve(compose(words[0], words[1:])))


@pytest.mark.parametrize("command", COMBINATIONS)
def test_a_combination_of_the_page_passes_the_check(command):
    checked(shlex.split(command))


@pytest.mark.parametrize(("command", "message"), MISTAKES)
def test_what_does_not_go_together_is_one_message(command, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        checked(shlex.split(command))


def test_the_pages_have_combinations_and_mistakes():
    assert len(COMBINATIONS) >= 27 and len(MISTAKES) >= 19


@pytest.mark.parametrize("former", [name for name, now in former_names().items() if "=" in now])
def test_a_combination_of_the_last_release_composes_to_the_same_by_its_name_and_in_defaults(former, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(f"defaults: [/{former}, _self_]\n")
    in_defaults = resolve(compose(str(own)))
    check_recipe(in_defaults)
    assert resolve(compose(former)) == in_defaults and in_defaults["recipe"] == former


@pytest.mark.parametrize("former", [name for name in former_names() if name.startswith("parts/engine/")])
def test_parts_of_the_last_release_are_taken_in_defaults(former, tmp_path):
    base = "/llm/qwen3_4b_dapo_grpo" if "_vllm" in former or former.endswith("colocated_sglang") else "/sd3/grpo"
    base = "/vlm/qwen_vl_geo3k" if "qwen_vl" in former else base
    own = tmp_path / "own.yaml"
    own.write_text(f"defaults: [{base}, /{former}, _self_]\n")
    made = resolve(compose(str(own)))
    assert (made["residency"]["sleep_engine"] and made["engine"]["sleep_level"]) if "_lora" not in former else True
    assert made["sync"]["_target_"].endswith("LoraWeightSync" if "_lora" in former else "FullWeightSync")


def test_devices_are_shared_out_by_fractions():
    assert (devices_between(8, "0", "3/4"), devices_between(8, "3/4", "1")) == ("0-5", "6-7")
    assert devices_between(4, "3/4", "1") == "3"
    for num_devices, first, last in ((6, "0", "3/4"), (1, "0", "1/2"), (8, "1/2", "1/2")):
        with pytest.raises(ConfigError, match=rf"num_devices = {num_devices} has no whole devices from {first} to"):
            devices_between(num_devices, first, last)
