"""What a bundle needs: a folder of its own format, or the name of one on the hub. See `unirl.types.recipe`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from unirl.models.installed import MODULAR_INDEX, wrong_model, wrong_modular_pipeline, wrong_pipeline
from unirl.types.hub import is_hub_id
from unirl.types.recipe import Machine, Messages, Part, Run

FoundT = TypeVar("FoundT")
WRONG: Mapping[str, Callable[[str, object, Collection[str]], str]] = {
    "model_index.json": wrong_pipeline,
    MODULAR_INDEX: wrong_modular_pipeline,
}
"""Index of a folder of diffusers -> the message for one of another class than a bundle loads."""


def model_exists(own: Part, run: Run, machine: Machine) -> Messages:
    """A local model folder is there and has the right format; a hub id is not verified."""
    model = own.node.get("pretrained_model")
    if model is None:
        return
    name, path, index = f"{own.at}.pretrained_model", Path(str(model)).expanduser(), own.ability("index_file")
    if path.is_dir():
        needed = _classes_of(own)
        others = [file for file in WRONG if file != index and index in WRONG and (path / file).is_file()]
        if not (path / index).is_file() and others:
            found = _read(path / others[0], lambda content: content["_class_name"])
            yield WRONG[others[0]](f"{name} = {model}", found, needed or [])
        elif not (path / index).is_file():
            kind = "diffusers pipeline" if index in WRONG else "model"
            holds = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
            yield (
                f"{name} = {model} is not a {kind} folder: it has no {index} "
                f"(it holds {holds}). Give the folder that save_pretrained wrote."
            )
        elif needed is not None and (problem := _wrong_class(path / index, f"{name} = {model}", needed)):
            yield problem
    elif path.exists():
        yield f"{name} = {model} is a file. Give a model's folder or a hub id such as owner/name."
    elif not is_hub_id(str(model)):
        yield (f"{name} = {model}: no such folder, and not a hub id (owner/name). Set PRETRAINED_MODEL or {name}.")


def _classes_of(own: Part) -> Collection[str] | None:
    """Pipelines or types of models that the bundle loads; None where it does not say."""
    key = "pipeline_classes" if own.ability("index_file") in WRONG else "model_types"
    found = own.abilities.get(key)
    return [str(each) for each in found] if isinstance(found, (list, tuple)) else None


def _wrong_class(file: Path, where: str, needed: Collection[str]) -> str | None:
    """The message for an index or configuration of another class than the bundle loads; None for one that it loads, and
    for one that cannot be read."""
    if file.name in WRONG:
        found = _read(file, lambda content: content["_class_name"])
        return WRONG[file.name](where, found, needed) if found is not None and found not in needed else None
    found = _read(file, lambda content: content["model_type"])
    return wrong_model(where, found, needed) if found is not None else None


def experts_divide(own: Part, run: Run) -> Messages:
    """Ranks divide the experts of a checkpoint on this machine."""
    policy = run.policy_of(own)
    size, file = policy.ranks_of_experts, _config_file(own)
    if size == 1 or not own.ability("spreads_experts"):
        return
    found = _read(file, _experts_of)
    if found is not None and found % size:
        yield sharing_problem(f"{policy.backend.at}.topology.ep", size, found, "experts", str(file))


def heads_of_texts_divide(own: Part, run: Run) -> Messages:
    """Ranks that share texts divide the attention heads of a checkpoint on this machine."""
    policy = run.policy_of(own)
    size, file = policy.ranks_of_heads, _config_file(own)
    if size == 1 or not own.ability("spreads_tokens") or own.ability("index_file") != file.name:
        return
    found = _read(file, _heads_of)
    problem = found and heads_problem(
        f"{policy.backend.at}.{policy.heads_option}", size, *found, str(file), has_ring=policy.has_ring
    )
    if problem:
        yield problem


def layers_divide(own: Part, run: Run) -> Messages:
    """Ranks that have layers together divide the heads and the MLP of a checkpoint on this machine."""
    policy = run.policy_of(own)
    size, file = policy.ranks_of_layers, _config_file(own)
    if size == 1 or not own.ability("cuts_layers"):
        return
    found = _read(file, lambda config: (*_heads_of(config), int(config["intermediate_size"])))
    problem = found and layers_problem(f"{policy.backend.at}.topology.tp", size, *found, str(file))
    if problem:
        yield problem


def experts_have_no_adapters(own: Part, run: Run) -> Messages:
    """LoRA adapts linear layers, and experts are stacks of weights."""
    backend, layers = run.policy_of(own).backend, own.ability("expert_layers")
    targets = (backend.get("lora") or {}).get("target_modules")
    wrong = [each for each in targets or () if str(each).rsplit(".", 1)[-1] in layers]
    if wrong:
        yield (
            f"{backend.at}.lora.target_modules {wrong} are experts of {own.name}, whose weights are stacks that LoRA "
            "does not adapt. Name projections of the attention, or set target_modules: null."
        )


def _config_file(own: Part) -> Path:
    return Path(str(own.node.get("pretrained_model"))).expanduser() / "config.json"


def _read(file: Path, take: Callable[[Any], FoundT]) -> FoundT | None:  # Any: JSON
    """What `take` finds in a configuration on this machine; None where it is not there, which the model says before its
    weights are read."""
    try:
        return take(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _heads_of(config: Any) -> tuple[int, int]:  # Any: JSON
    """Heads of attention, and of keys and values; of a model that also sees or hears those of its decoder."""
    config = config.get("thinker_config", config)
    config = config.get("text_config", config)
    heads = int(config["num_attention_heads"])
    return heads, int(config.get("num_key_value_heads") or heads)


def _experts_of(config: object) -> int | None:
    """`num_experts` of a configuration, or of the first inside it that has them."""
    if not isinstance(config, dict):
        return None
    if isinstance(own := config.get("num_experts"), int):
        return own
    return next((found for each in config.values() if (found := _experts_of(each)) is not None), None)


def tokens_kept(at: str, name: str, because: str) -> str:
    """The message for a model whose samples are not shared."""
    return f"{at}: the tokens of {name} cannot be spread over ranks: {because}. Set it to 1."


def layers_kept(at: str, name: str, because: str) -> str:
    """The message for a model whose layers are not divided. because: may be empty."""
    return f"{at}: the layers of {name} cannot be divided among ranks{because and ': '}{because}. Set it to 1."


def layers_problem(at: str, size: int, num_heads: int, num_key_heads: int, inner: int, where: str) -> str | None:
    """The message for ranks that do not divide a model's attention heads and the inner width of its MLP, or None."""
    counts = {"attention heads": num_heads, "heads of keys and values": num_key_heads, "inner width of the MLP": inner}
    for what, count in counts.items():
        if count % size:
            fitting = [each for each in range(1, num_key_heads + 1) if not any(n % each for n in counts.values())]
            return f"{at} = {size} does not divide the {count} {what} of {where}. Set it to one of {fitting}."
    return None


def heads_problem(at: str, size: int, num_heads: int, num_key_heads: int, where: str, *, has_ring: bool) -> str | None:
    """The message for ranks that do not divide a model's attention heads, or None. Ranks may share heads of keys."""
    if num_heads % size:
        return undivided_heads(at, size, num_heads, where, has_ring=has_ring)
    if num_key_heads % size and size % num_key_heads:
        fitting = [
            each
            for each in range(1, num_heads + 1)
            if num_heads % each == 0 and (num_key_heads % each == 0 or each % num_key_heads == 0)
        ]
        return (
            f"{at} = {size} neither divides the {num_key_heads} heads of keys and values of {where} nor is a multiple "
            f"of them. Set it to one of {fitting}."
        )
    return None


def undivided_heads(at: str, size: int, num_heads: int, where: str, *, has_ring: bool) -> str:
    """The message for ranks that do not divide a model's attention heads."""
    advice = "" if has_ring else " Or let keys go around the ranks instead, with topology.ring."
    return sharing_problem(at, size, num_heads, "attention heads", where) + advice


def sharing_problem(at: str, size: int, count: int, what: str, where: str) -> str:
    """The message for ranks that do not divide what a model has `count` of."""
    fitting = [each for each in range(1, count + 1) if count % each == 0]
    return f"{at} = {size} does not divide the {count} {what} of {where}. Set it to one of {fitting}."


RULES = (experts_divide, experts_have_no_adapters, heads_of_texts_divide, layers_divide)
MACHINE_RULES = (model_exists,)
