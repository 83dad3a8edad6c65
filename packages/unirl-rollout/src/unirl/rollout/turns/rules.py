"""Recipe rules of turns. See `unirl.types.recipe`."""

from __future__ import annotations

import json
from pathlib import Path

from unirl.rollout.environments import rules as environments
from unirl.types.recipe import Machine, Messages, Part, Run

TOKENIZER = "tokenizer_config.json"
NEEDS_TEMPLATE = "needs a chat template, which says how messages follow each other"
LONGEST_CALL = {
    "unirl.rollout.environments.tools.python.PythonInterpreter": "time_s",
    "unirl.rollout.environments.tools.mcp.server.McpServer": "timeout_s",
}
"""Tools that end a slow call themselves, and the keyword that says when."""


def texts_take_turns(own: Part, run: Run) -> Messages:
    """Only texts have turns."""
    for stage in run.stages:
        if stage.turns is own and not stage.sampling.ability("samples_tokens"):
            yield f"{own.at}: {stage.engine.name} samples no texts, and only these take turns. Remove {own.at}."


def lengths_are_of_turns(own: Part, run: Run) -> Messages:
    """The soft punishment of overlong answers counts the tokens of a sample against the limit of one turn."""
    if run.reward.get("truncated_reward") == "soft":
        yield (
            f"reward.truncated_reward: soft measures whole samples by sampling.max_new_tokens, which with {own.at} is "
            "the limit of one turn. Set keep or zero."
        )


def calls_end_before_their_step(own: Part, run: Run) -> Messages:
    """A turn of calls that each take their time is over before its process is killed for taking too long."""
    environment = own.inner.get("environment")
    if environment is None:
        return
    for tool in environment.inside("tools").values():
        keyword = next((LONGEST_CALL[path] for path in tool.lineage if path in LONGEST_CALL), None)
        if keyword is None:
            continue
        call_s, num_calls, step_s = tool.get(keyword), environment.get("max_calls", 1), own.get("step_timeout_s")
        if call_s * num_calls >= step_s:
            yield (
                f"{tool.at}.{keyword} * {environment.at}.max_calls = {call_s:g} * {num_calls} = {call_s * num_calls:g} "
                f"s reaches {own.at}.step_timeout_s = {step_s:g}: a turn of slow calls would lose its process. Raise "
                "the last, or lower one of the others."
            )


def images_reach_the_model(own: Part, run: Run) -> Messages:
    """An environment that shows images talks to a model and an engine that take them between turns."""
    environment = own.inner.get("environment")
    if environment is None:
        return
    showing = [part for part in (environment, *environment.inside("tools").values()) if _shows_images(part)]
    for stage in run.stages:
        if not showing or stage.turns is not own:
            continue
        bundle = run.policies[stage.policy].bundle
        for part, ability in ((bundle, "reads_images_in_turns"), (stage.engine, "takes_media")):
            if not part.takes_any and not part.ability(ability):
                yield (
                    f"{showing[0].at}: {showing[0].name} shows images, but {part.at} {part.name} has none of them "
                    f"reach the model between its turns ({ability}). Choose another, or an environment of texts."
                )


def messages_have_a_template(own: Part, run: Run, machine: Machine) -> Messages:
    """The tokenizer of a local folder says how messages follow each other, and its template is used."""
    del machine
    for stage in run.stages:
        if stage.turns is not own:
            continue
        policy = run.policies.get(stage.policy)
        for pipeline in () if policy is None else policy.pipelines.values():
            if pipeline.get("chat_template") is False:
                yield f"{pipeline.at}.chat_template = false, and {own.at} {NEEDS_TEMPLATE}. Remove it."
        folder = None if policy is None else policy.bundle.get("pretrained_model")
        if isinstance(folder, str) and (Path(folder) / TOKENIZER).is_file() and not has_template(Path(folder)):
            yield (
                f"{own.at} {NEEDS_TEMPLATE}, and the tokenizer in {folder} has none. Take a model that talks (with a "
                "chat_template in its tokenizer's files), such as that of worlds/tools/grpo."
            )


def has_template(folder: Path) -> bool:
    """True if a tokenizer's files have a chat template."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return "chat_template" in json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))


def _shows_images(part: Part) -> bool:
    return bool(part.get("shows_images", part.abilities.get("shows_images")))


RULES = (
    *environments.RULES,
    images_reach_the_model,
    lengths_are_of_turns,
    texts_take_turns,
    calls_end_before_their_step,
)

MACHINE_RULES = (messages_have_a_template,)
