"""What `trainer check` says of environments and their tools."""

import importlib.util

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


SERVING = "command=[python,-m,unirl.rollout.environments.tools.mcp.serving,'add=unirl.worlds.tools.world.Adder'"


def mcp(name, *words):
    at = f"turns.environment.tools.{name}"
    return [f"+{at}._target_={TOOLS}.mcp.server.McpServer", *(f"+{at}.{word}" for word in words)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            mcp("web", "url=http://a", "command=[a]"),
            "turns.environment.tools.web: an MCP server has a command or a url",
        ),
        (
            mcp("web", "url=http://a", "tools=[a,b,a]"),
            "turns.environment.tools.web: tools of an MCP server has a twice",
        ),
        (
            [*mcp("web", "url=http://a", "tools=[add]")],
            "tools.web and turns.environment.tools.add both have a tool 'add'. Give one another name, such as "
            "turns.environment.tools.web.tools: {add: OTHER}.",
        ),
        (
            [*mcp("web", "url=http://a", "tools={find: search}"), *mcp("more", "url=http://b", "tools=[search]")],
            "turns.environment.tools.more and turns.environment.tools.web both have a tool 'search'",
        ),
        (mcp("web", "url=http://127.0.0.1:9/mcp", "tools=[a]"), "at http://127.0.0.1:9/mcp cannot be reached: Connect"),
        (mcp("sums", f"{SERVING}]"), "turns.environment.tools.add both have a tool 'add'"),
        (mcp("sums", f"{SERVING}]", "tools={sub: minus}"), "has no tool sub. It has add."),
        (
            mcp("sums", f"{SERVING}]", "tools={add: plus}", "timeout_s=9"),
            "tools.sums.timeout_s * turns.environment.max_c",
        ),
        (mcp("sums", f"{SERVING}]", "tools={add: plus}", "shows_images=true"), "McpServer shows images, but bundle"),
    ],
)
def test_servers_of_tools_are_asked_before_a_run(words, message):
    assert message in found(*words)


def test_a_server_whose_tools_have_other_names_is_right(monkeypatch):
    words = mcp("sums", f"{SERVING}]", "tools={add: plus}")
    assert found(*words) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "tools.sums: MCP servers need the library mcp: pip install 'unirl-rollout[mcp]'" in found(*words)


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
