"""The sections of the described flow of embodied training (`cluster`, `component_placement`, `actor`, `rollout`, `env`,
`runner`) as the recipe's own: a placement of components becomes pools, their options the keys that mean the same.

Imports no torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.config.placement import ClusterShape, cluster_shape, devices_of
from unirl.config.schema import Cluster
from unirl.config.suggestions import did_you_mean
from unirl.types.errors import ConfigError

logger = logging.getLogger(__name__)

Node = dict[str, Any]  # Any: a recipe's values

PLACEMENT = "component_placement"
POOLS: Mapping[str, str] = {"actor": "train", "rollout": "rollout", "reward": "reward"}
"""Component -> its pool."""
ENV = "env"
POOL_OPTIONS = ("served", "members", "samples_per_call")
"""Keys of `rollout` that are those of its pool."""
SECTIONS = ("actor", "rollout", ENV, "runner")
VALUES: Mapping[str, str] = {
    "actor.micro_batch_size": "stack.micro_batch_size",
    "actor.model.model_path": "bundle.pretrained_model",
    "actor.optim.lr": "backend.optimizer.learning_rate",
    "actor.seed": "seed",
    "rollout.pipeline_stage_num": "turns.pipeline_stages",
    "runner.max_steps": "num_rollouts",
    "runner.save_interval": "save.interval",
    "runner.val_check_interval": "eval.interval",
    "runner.logger.log_path": "run_dir",
}
"""Key of the flow -> the recipe's own."""
TURNS: Mapping[str, str] = {
    "env.num_workers": "turns.num_workers",
    "env.step_timeout_s": "turns.step_timeout_s",
    "env.memory_gb": "turns.memory_gb",
}
"""The same of an environment that takes turns with a language model."""
EPISODES: Mapping[str, str] = {
    "env.num_workers": "engine.environment.num_processes",
    "env.step_timeout_s": "engine.environment.step_timeout_s",
    "env.memory_gb": "engine.environment.memory_gb",
    "env.num_envs": "engine.forward_batch_size",
}
"""The same of an environment that a policy acts in."""
BATCH, ROLLOUT_MODEL = "actor.global_batch_size", "rollout.model.model_path"

_NUMBER = re.compile(r"\d+")


def in_own_words(recipe: Mapping[str, Any]) -> Node:  # Any: as in Node
    """A copy of a recipe without the sections of the flow; what they say stands where the recipe has it.

    Raises ConfigError if components are placed and pools are named too, if devices are not of the cluster, and for what
    has no counterpart.
    """
    nested = (recipe.get("cluster") or {}).get(PLACEMENT)
    if nested is None and not any(recipe.get(name) is not None for name in (PLACEMENT, *SECTIONS)):
        return dict(recipe)
    made = {name: value for name, value in recipe.items() if name not in (PLACEMENT, *SECTIONS)}
    if nested is not None:
        if recipe.get(PLACEMENT) is not None:
            raise ConfigError(f"{PLACEMENT} and cluster.{PLACEMENT} are both set. Remove one.")
        made["cluster"] = {name: value for name, value in recipe["cluster"].items() if name != PLACEMENT}
    options = _leaves({name: recipe.get(name) or {} for name in SECTIONS})
    said = _place(made, recipe.get(PLACEMENT) if nested is None else nested, options)
    said += _set_values(made, options)
    # Debug: `trainer show` writes all of it, and recipes are resolved several times in a run.
    logger.debug("in the recipe's own words: %s", ", ".join(said))
    return made


def _place(made: Node, placement: Any, options: Node) -> list[str]:  # Any: a value of a recipe
    own = {name: options.pop(f"rollout.{name}") for name in POOL_OPTIONS if f"rollout.{name}" in options}
    if placement is None:
        if own:
            raise ConfigError(
                f"rollout.{next(iter(own))} is of the pool of the engine, and {PLACEMENT} places none. Add "
                f"{PLACEMENT}.rollout, or name the pool in pools."
            )
        return []
    placed = _components(placement)
    own_pools = {name: pool for name, pool in (made.get("pools") or {}).items() if pool is not None}
    played_in = {name: pool for name, pool in own_pools.items() if _is_of_environments(pool)}
    if played_in and ENV in placed:
        name = next(iter(played_in))
        raise ConfigError(
            f"{PLACEMENT}.{ENV} and pools.{name} both say where environments are played. Remove one: {PLACEMENT}.{ENV} "
            "on other nodes than the engine's is a pool of kind env."
        )
    for old, given in (
        ("pools", {**own_pools, **dict.fromkeys(played_in)}),
        ("placement", made.get("placement") or {}),
    ):
        if any(value is not None for value in given.values()):
            raise ConfigError(
                f"{PLACEMENT} and {old} are both set, and say the same in other words: actor is the pool "
                "train, rollout the pool rollout. Remove one."
            )
    _size(made, placed)
    pools: Node = {POOLS[name]: {"devices": text} for name, text in placed.items() if name != ENV}
    if own and "rollout" not in pools:
        raise ConfigError(f"rollout.{next(iter(own))} needs a pool of the engine. Add {PLACEMENT}.rollout.")
    if own:
        pools["rollout"] |= own
    said = [f"pools.{pool}.devices = {each['devices']}" for pool, each in pools.items()]
    if not any("${" in str(text) for text in placed.values()):
        nodes = _nodes_of_environments(made, placed)
        if nodes:
            pools[ENV] = _pool_of_environments(made, nodes, options)
            said.append(f"pools.{ENV}.nodes = {pools[ENV]['nodes']}")
    made["pools"] = {**played_in, **pools}
    return said


def _is_of_environments(pool: Any) -> bool:  # Any: a value of a recipe
    return isinstance(pool, Mapping) and pool.get("kind") == ENV


def _components(placement: Any) -> dict[str, Any]:  # Any: a value of a recipe
    """Component -> devices. Several components may stand in one key, with commas between them."""
    if not isinstance(placement, Mapping) or not placement:
        raise ConfigError(f"{PLACEMENT} = {placement} must name devices by component, such as {{actor: 0-3}}.")
    found: dict[str, Any] = {}
    for key, text in placement.items():
        for name in (part.strip() for part in str(key).split(",")):
            if name in found:
                raise ConfigError(f"{PLACEMENT} places {name} twice. Remove one.")
            if name not in (*POOLS, ENV):
                raise ConfigError(
                    f"{PLACEMENT}.{name}: there is no such component; there are {', '.join((*POOLS, ENV))}. "
                    f"{did_you_mean(name, [*POOLS, ENV])}".rstrip()
                )
            found[name] = text
    if "actor" not in found:
        raise ConfigError(f"{PLACEMENT} names {', '.join(found)}, and no actor. Name the devices of what trains.")
    # `all` follows from the others, and what trains comes first.
    return {name: found[name] for name in (*POOLS, ENV) if found.get(name) is not None}


def _size(made: Node, placed: Mapping[str, Any]) -> None:  # Any: a value of a recipe
    """Let the run have the devices that are placed, unless it says how many it has; several workers need Ray."""
    numbers = [int(number) for text in placed.values() for number in _NUMBER.findall(str(text).rpartition(":")[2])]
    if made.get("num_devices") in (None, 1) and numbers and ":" not in "".join(map(str, placed.values())):
        num_nodes = (made.get("cluster") or {}).get("num_nodes") or 1
        made["num_devices"] = -(-(max(numbers) + 1) // num_nodes) * num_nodes
    if made.get("runtime") in (None, "local") and made.get("num_devices") not in (None, 1):
        made["runtime"] = "ray"


def _nodes_of_environments(made: Node, placed: Mapping[str, Any]) -> list[int]:  # Any: a value of a recipe
    """Nodes on which environments are played in a pool; none if they are children of the engine, since all their nodes
    are nodes of the engine. Raises ConfigError if devices are not of the cluster, or there is no environment."""
    given = {name: value for name, value in (made.get("cluster") or {}).items() if name in _SHAPE}
    shape = cluster_shape(int(made.get("num_devices") or 1), Cluster(**given))
    devices = {name: devices_of(text, f"{PLACEMENT}.{name}", shape) for name, text in placed.items()}
    if ENV not in devices:
        return []
    if not made.get("turns") and not (made.get("engine") or {}).get("environment"):
        raise ConfigError(f"{PLACEMENT}.{ENV} = {placed[ENV]}: the recipe has no environment. Remove it.")
    engine = "rollout" if "rollout" in devices else "actor"
    own = _nodes(devices[ENV], shape)
    return sorted(own) if own - _nodes(devices[engine], shape) else []


def _pool_of_environments(made: Node, nodes: Sequence[int], options: Node) -> Node:
    """The pool of environments on other nodes than the engine's, which what plays then names; it takes the number of
    processes. Raises ConfigError if it cannot be told what plays."""
    section, count = ("turns", "num_workers") if made.get("turns") else ("engine.environment", "num_processes")
    processes = options.pop("env.num_workers", None)
    given = made["turns"] if section == "turns" else made["engine"]["environment"]
    if processes is None and given.get(count) is not None:
        processes = given[count]
    _put(made, f"{section}.pool", ENV, f"{PLACEMENT}.{ENV}")
    if given.get(count) is not None:
        _put(made, f"{section}.{count}", None, f"{PLACEMENT}.{ENV}")
    pool: Node = {"kind": ENV, "nodes": ",".join(map(str, nodes))}
    return pool if processes is None else {**pool, "processes": processes}


_SHAPE = ("num_nodes", "devices_per_node", "node_groups")


def _nodes(devices: tuple[int, ...], shape: ClusterShape) -> set[int]:
    return {device // shape.devices_per_node for device in devices}


def _set_values(made: Node, options: Node) -> list[str]:
    known = {**VALUES, **(TURNS if made.get("turns") else EPISODES)}
    said = []
    for name, value in options.items():
        if name == BATCH:
            name_, value_ = "stack.num_updates_per_batch", _updates(made, value)
        elif name == ROLLOUT_MODEL:
            trained = options.get("actor.model.model_path", (made.get("bundle") or {}).get("pretrained_model"))
            if value != trained:
                raise ConfigError(
                    f"{name} = {value}, and the actor has {trained}: the engine samples with the policy that trains, "
                    "which is pushed to it. Remove the key."
                )
            continue
        elif name in known:
            name_, value_ = known[name], value
        else:
            names = [*known, BATCH, ROLLOUT_MODEL, *(f"rollout.{option}" for option in POOL_OPTIONS)]
            raise ConfigError(
                f"{name} has no counterpart here. {did_you_mean(name, names)} The others are in the recipe's own "
                "sections, see docs/reference/names.md."
            )
        _put(made, name_, value_, name)
        said.append(f"{name_} = {value_}")
    return said


def _updates(made: Node, batch: Any) -> int:  # Any: a value of a recipe
    """Updates per rollout that make `batch` samples each."""
    num, per_prompt = made.get("batch_size"), (made.get("sampling") or {}).get("samples_per_prompt")
    if not (isinstance(num, int) and isinstance(per_prompt, int) and isinstance(batch, int) and batch > 0):
        raise ConfigError(
            f"{BATCH} = {batch} needs whole numbers batch_size (is {num}) and sampling.samples_per_prompt (is "
            f"{per_prompt}). Set stack.num_updates_per_batch instead."
        )
    if num * per_prompt % batch:
        raise ConfigError(
            f"{BATCH} = {batch} does not divide the samples of a rollout, batch_size * sampling.samples_per_prompt = "
            f"{num} * {per_prompt}. Change one of them."
        )
    return num * per_prompt // batch


def _put(made: Node, key: str, value: Any, name: str) -> None:  # Any: a value of a recipe
    """Set a key of sections that the recipe has, which are copied."""
    *sections, last = key.split(".")
    node = made
    for section in sections:
        if not isinstance(node.get(section), Mapping):
            raise ConfigError(
                f"{name} is {key} here, and the recipe has no {'.'.join(sections)}. Add it, or remove it."
            )
        node[section] = dict(node[section])
        node = node[section]
    node[last] = value


def _leaves(node: Mapping[str, Any], at: str = "") -> Node:  # Any: as in Node
    """Dotted key -> value."""
    found: Node = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{at}{name}.")
        else:
            found[f"{at}{name}"] = value
    return found
