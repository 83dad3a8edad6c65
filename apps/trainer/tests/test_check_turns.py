"""What `trainer check` says of environments and their tools."""

import pytest

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.rollout.environments.sandbox.runner import Sandbox
from unirl.types.errors import ConfigError
from unirl.types.recipe import Machine

MACHINE = Machine(num_cpus=8, num_gpus=0)
TOOLS = "unirl.rollout.environments.tools"


def found(*words):
    """The messages on a changed recipe of the tools world."""
    register_resolvers()
    try:
        check_recipe(resolve(compose("worlds/tools/grpo", list(words))), MACHINE)
    except ConfigError as error:
        return str(error)
    return ""


def tool(name, path, **options):
    at = f"turns.environment.tools.{name}"
    return [f"+{at}._target_={TOOLS}.{path}", *(f"+{at}.{key}={value}" for key, value in options.items())]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.truncated_reward=soft"], "reward.truncated_reward: soft measures whole samples"),
        (["reward.on_failure=retry"], "retry would score an episode again whose environment (turns) has failed"),
        (
            [*tool("python", "python.PythonInterpreter", time_s=5)],
            "turns.environment.tools.python.time_s * turns.environment.max_calls = 5 * 8 = 40 s reaches "
            "turns.step_timeout_s = 30",
        ),
        (["+pipeline.chat_template=false"], "pipeline.chat_template = false, and turns needs a chat template"),
        (["bundle.pretrained_model=${arithmetic:checkpoint}"], "arithmetic/checkpoint has none. Take a model that"),
        (tool("search", "search.CorpusSearch", corpus="nowhere.jsonl"), "search.corpus: nowhere.jsonl: no such file"),
    ],
)
def test_a_mistake_in_turns_is_named_with_the_fix(words, message):
    assert message in found(*words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("timeout_s: 30", "turns.environment.timeout_s = 30 reaches turns.step_timeout_s = 30"),
        ("python: /nowhere/python", "turns.environment.python = /nowhere/python: no such interpreter"),
        ("max_turns: 4", "turns.environment: this environment does not find verifiers"),
    ],
)
def test_a_task_set_of_verifiers_needs_its_library_and_its_deadline(options, message):
    path = "unirl.rollout.environments.verifiers.environment.Verifiers"
    task_set = f"+turns.environment={{_target_: {path}, taskset: adding, {options}}}"
    assert message in found("~turns.environment", task_set)


def test_a_tool_that_shows_images_needs_a_model_that_reads_them_between_turns():
    said = found(*tool("crop", "images.Crop"))
    assert (
        "turns.environment.tools.crop: Crop shows images, but bundle Qwen3Bundle has none of them reach the model "
        "between its turns (reads_images_in_turns). Choose another, or an environment of texts." in said
    )
    vision = ["bundle._target_=unirl.models.qwen_vl.bundle.QwenVLBundle", *tool("crop", "images.Crop")]
    assert "shows images" not in found(*vision)


def test_a_broken_corpus_is_found_with_its_line(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "title": "", "text": "x"}\n')
    words = tool("search", "search.CorpusSearch", corpus=corpus)
    assert found(*words) == ""
    corpus.write_text('{"id": "a", "title": "", "text": "x"}\n{}\n')
    assert f"tools.search.corpus: {corpus}:2: 'id' is missing" in found(*words)


def test_a_machine_that_isolates_no_code_is_named(monkeypatch):
    def refuse(sandbox):
        raise ConfigError("this machine cannot isolate code of a model: it lacks a layer")

    words = tool("python", "python.PythonInterpreter")
    monkeypatch.setattr(Sandbox, "verify", lambda sandbox: None)
    assert found(*words) == ""
    monkeypatch.setattr(Sandbox, "verify", refuse)
    assert "tools.python: this machine cannot isolate code of a model: it lacks a layer" in found(*words)
