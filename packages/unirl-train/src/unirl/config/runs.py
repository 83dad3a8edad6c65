"""Makes a typed run of a resolved recipe: flat sections become the policy "default", every component becomes a part.

Reads classes from source without importing them. `check`, the rules and `unirl.trainer.build` only use the run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unirl.config.schema import (
    DEFAULT_POLICY,
    DEFAULT_TRACK,
    LEARNING,
    OF_STAGE,
    SEVERAL,
    Component,
    PolicySections,
    Recipe,
    StageSections,
    built,
    components,
    keys,
)
from unirl.config.signatures import Target, read_target
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET, Part, Policy, Run, Stage

Resolved = Mapping[str, Any]  # Any: a resolved recipe's values

STAGES_MODALITY = "unirl.trainer.stages.StagesModality"
"""Modality of recipes with stages."""

_POLICY_NAME = re.compile(r"\w[\w-]*")


@dataclass(frozen=True, kw_only=True)
class ComposedRun(Run):
    """A run together with its recipe."""

    file: Recipe
    """Plain values and plain sections, with defaults."""
    resolved: Resolved
    """The composed and resolved recipe."""

    def with_values(self, **values: Any) -> ComposedRun:  # Any: as in Resolved
        """The run with other plain values, such as `run_dir`."""
        return replace(self, file=replace(self.file, **values), resolved={**self.resolved, **values})


def policy_sections(recipe: Resolved) -> dict[str, tuple[str, Resolved]]:
    """Policy -> (prefix of its places in the recipe, its sections). Policies come from flat sections, from `policies`,
    or from flat sections and those in `policies` that do not train. Raises ConfigError if there are both flat sections
    and a trained policy in `policies`, and for invalid names."""
    known = keys(PolicySections)
    flat = {DEFAULT_POLICY: ("", {key: recipe[key] for key in known if key in recipe})}
    named = recipe.get("policies")
    if not named:
        return flat
    beside = [key for key in known if recipe.get(key) is not None]
    training = [name for name, own in named.items() if not isinstance(own, Mapping) or does_train("policies", own)]
    if beside and (training or DEFAULT_POLICY in named):
        raise ConfigError(
            f"{', '.join(beside)}: a recipe with policies must not have this section at the top level. Move it to "
            f"policies.{next(iter(training), DEFAULT_POLICY)}.{beside[0]}; only policies with trains: false may "
            "be added to it."
        )
    for name, sections in recipe["policies"].items():
        if not _POLICY_NAME.fullmatch(str(name)):
            raise ConfigError(f"policies: {name!r} must be a word of letters, digits, _ and -: folders are called so.")
        if not isinstance(sections, Mapping):
            raise ConfigError(f"policies.{name} = {sections!r} must be a mapping of {', '.join(known)}.")
    others = {str(name): (f"policies.{name}.", sections) for name, sections in named.items()}
    return {**flat, **others} if beside else others


def run_of(recipe: Resolved) -> ComposedRun:
    """The run of a recipe whose keys and signatures have been checked.

    Raises ConfigError if a policy has no pipeline or algorithm or has one in two places, no policy trains, stages do
    not form a tree, or an engine does not say which of several policies it samples from.
    """
    everyone = {name: _policy(name, prefix, sections) for name, (prefix, sections) in policy_sections(recipe).items()}
    of_stages = [stage.get("policy") for stage in (recipe.get("stages") or {}).values()]
    teachers = _teachers(everyone, of_stages)
    policies = {name: policy for name, policy in everyone.items() if name not in teachers}
    if not any(policy.trains for policy in policies.values()):
        raise ConfigError(f"policies: {', '.join(policies)} all have trains: false. Let one of them train.")
    found = components(Recipe)
    advantages = _section(recipe, "advantages", found["advantages"])
    stages = _stages(recipe, policies, advantages) if recipe.get("stages") else (_only(recipe, policies, advantages),)
    optional = {key: _section(recipe, key, found[key]) if recipe.get(key) else None for key in _OPTIONAL}
    return ComposedRun(
        seed=recipe["seed"],
        runtime=recipe["runtime"],
        device=recipe["device"],
        num_devices=recipe["num_devices"],
        batch_size=recipe["batch_size"],
        policies={name: policy for name, policy in policies.items() if policy.trains},
        frozen={name: policy for name, policy in policies.items() if not policy.trains},
        teachers=teachers,
        stages=stages,
        is_staged=bool(recipe.get("stages")),
        sampled=stages[0].policy,
        sampling=stages[0].sampling,
        engine=stages[0].engine,
        advantages=advantages,
        scored_track=recipe["reward"].get("track"),
        evaluation=optional["eval"],
        guardrails=optional["guardrails"],
        selection=optional["selection"],
        file=built(Recipe, {key: value for key, value in recipe.items() if key in keys(Recipe)}),
        resolved=recipe,
        modality=_modality(recipe, found["modality"]),
        **{key: _section(recipe, key, found[key]) for key in _ALWAYS},
    )


_ALWAYS = ("data", "reward", "trainer")
_OPTIONAL = ("eval", "guardrails", "selection")


def one_or_several(sections: Resolved, prefix: str, key: str) -> dict[str, tuple[str, Resolved]]:
    """Name -> (place, node) from `pipeline` or `pipelines`, or from `algorithm` or `algorithms`; null entries are left
    out.

    Raises ConfigError if neither or both are given.
    """
    several = SEVERAL[key]
    one, many = sections.get(key), sections.get(several)
    if (one is None) == (not many):
        what = "are both set" if one is not None else "are both missing"
        raise ConfigError(
            f"{prefix}{key} and {prefix}{several} {what}. Give {prefix}{key}, or {prefix}{several} by track."
        )
    if one is None:
        given = {str(name): node for name, node in (many or {}).items()}
        return {name: (f"{prefix}{several}.{name}", node) for name, node in given.items() if node is not None}
    track = (sections.get("stack") or {}).get("track") or DEFAULT_TRACK
    return {track if key == "algorithm" else DEFAULT_POLICY: (f"{prefix}{key}", one)}


def injected_into(target: Target, component: Component) -> frozenset[str]:
    """Keywords that the trainer adds when it builds a class as this component."""
    return component.injected | (component.if_taken & set(target.parameters))


def _policy(name: str, prefix: str, sections: Resolved) -> Policy:
    found = components(PolicySections)

    trains = does_train(prefix, sections)

    def part(key: str) -> Part:
        if not trains and key in LEARNING:
            return Part(at=f"{prefix}{key}", path="", node={})
        return part_of(sections[key], f"{prefix}{key}", found[key])

    def parts(key: str) -> dict[str, Part]:
        nodes = one_or_several(sections, prefix, key)
        return {own: part_of(node, place, found[key]) for own, (place, node) in nodes.items()}

    policy = Policy(
        name=name,
        prefix=prefix,
        bundle=part("bundle"),
        pipelines=parts("pipeline"),
        backend=part("backend"),
        algorithms=parts("algorithm") if trains else {},
        # The track of a single algorithm is read above.
        stack=part_of(_without(sections["stack"], "track"), f"{prefix}stack", found["stack"])
        if trains
        else part("stack"),
        resting=tuple(str(name) for name, node in (sections.get("algorithms") or {}).items() if node is None),
        sync=part("sync") if trains and sections.get("sync") else None,
        trains=trains,
    )
    for track in policy.algorithms:
        policy.pipeline_of(track)
    return policy


def does_train(prefix: str, sections: Resolved) -> bool:
    """True if a policy is trained: always for flat sections, by `trains` for named policies."""
    return not prefix or sections.get("trains") is not False


def teacher_of(algorithm: Part) -> str | None:
    """Name of the teacher policy of an algorithm, or None."""
    option = algorithm.abilities.get("teacher_option")
    return None if option is None else algorithm.get(str(option))


def _teachers(policies: Mapping[str, Policy], sampled: Collection[str]) -> dict[str, Policy]:
    """The teachers of algorithms that are neither trained nor sampled."""
    asked = {teacher_of(part) for policy in policies.values() for part in policy.algorithms.values()}
    return {name: p for name, p in policies.items() if name in asked and not p.trains and name not in sampled}


def _only(recipe: Resolved, policies: Mapping[str, Policy], advantages: Part) -> Stage:
    """The stage of a recipe with one engine. Raises ConfigError if it is ambiguous which policy or pipeline is
    sampled."""
    found = components(Recipe)
    engine = _section(recipe, "engine", found["engine"])
    for policy in policies.values():
        if not policy.trains:
            raise ConfigError(
                f"{policy.prefix}trains: false needs a stage that samples from it, or an algorithm that asks it "
                "(algorithm.teacher). Add a stage to stages, or remove it."
            )
    named = recipe["engine"].get("policy")
    if named is not None and named not in policies:
        raise ConfigError(f"engine.policy = {named!r} is no policy of this recipe; there are {', '.join(policies)}.")
    if named is None and len(policies) > 1:
        raise ConfigError(
            f"the engine samples from one policy, the recipe has {', '.join(policies)}. Set engine.policy to one of "
            "them, or give stages an engine for each."
        )
    sampled = policies[next(iter(policies)) if named is None else named]
    if len(sampled.pipelines) > 1:
        raise ConfigError(
            f"the engine takes one pipeline, {sampled.prefix}pipelines has {', '.join(sampled.pipelines)}. Give stages "
            "an engine for each."
        )
    return Stage(
        track=engine.get("track"),
        policy=sampled.name,
        pool=recipe["engine"].get("pool"),
        engine=engine,
        sampling=_section(recipe, "sampling", found["sampling"]),
        advantages=advantages,
        turns=_turns(recipe.get("turns"), "turns", found),
    )


def _turns(node: Resolved | None, at: str, found: Mapping[str, Component]) -> Part | None:
    """What an engine takes turns with. The rules of engines are asked of that engine, and not of this one too."""
    if not node:
        return None
    part, of_engines = part_of(node, at, found["turns"]), _kind(found["engine"].kind).rules
    return replace(part, rules=tuple(name for name in part.rules if name not in of_engines))


def _stages(recipe: Resolved, policies: Mapping[str, Policy], advantages: Part) -> tuple[Stage, ...]:
    """The stages of a recipe, parents first. Raises ConfigError for a missing policy or parent, a cycle, or a policy
    without a stage."""
    found, nodes = components(StageSections), recipe["stages"]
    sections = policy_sections(recipe)
    made: dict[str, Stage] = {}
    for track, node in nodes.items():
        at = f"stages.{track}"
        policy = _policy_of_stage(at, node.get("policy"), policies)
        parent = node.get("grows_from")
        if parent is not None and parent not in nodes:
            raise ConfigError(
                f"{at}.grows_from = {parent}: no stage makes that track; there are {', '.join(nodes)}. Name one of "
                "them, or null for the request."
            )
        prefix, of_policy = sections[policy.name]
        own = _of_stage(at, node, prefix, of_policy if prefix else recipe)
        made[str(track)] = Stage(
            track=str(track),
            policy=policy.name,
            engine=own["engine"],
            sampling=own["sampling"],
            advantages=own.get("advantages", advantages),
            reads=part_of(node.get("reads") or {}, f"{at}.reads", found["reads"]),
            grows_from=parent,
            pool=node.get("pool"),
            turns=_turns(node.get("turns"), f"{at}.turns", found),
        )
        policy.pipeline_of(str(track))
    unused = [name for name in policies if name not in {stage.policy for stage in made.values()}]
    if unused:
        raise ConfigError(
            f"policies.{unused[0]}: no stage samples from it; the stages sample from "
            f"{', '.join(dict.fromkeys(stage.policy for stage in made.values()))}. Give it a stage, or remove it."
        )
    return _parents_first(made)


def _of_stage(at: str, node: Resolved, prefix: str, of_policy: Resolved) -> dict[str, Part]:
    """Engine, sampling and, if given, advantages of a stage: its own, or else its policy's."""
    found = components(StageSections)
    places = {key: (f"{prefix}{key}", of_policy[key]) for key in OF_STAGE if of_policy.get(key)}
    if not prefix:  # those of the run, which apply to all policies
        places.pop("advantages", None)
    places.update({key: (f"{at}.{key}", node[key]) for key in OF_STAGE if node.get(key)})
    for key in ("engine", "sampling"):
        if key not in places:
            raise ConfigError(f"{at}.{key} is missing, and so is {prefix}{key}, which it would take. Add one of them.")
    return {key: part_of(value, place, found[key]) for key, (place, value) in places.items()}


def _policy_of_stage(at: str, named: str | None, policies: Mapping[str, Policy]) -> Policy:
    if named is None and len(policies) > 1:
        raise ConfigError(f"{at}.policy is missing; name the policy that it samples from: {', '.join(policies)}.")
    name = next(iter(policies)) if named is None else named
    if name not in policies:
        raise ConfigError(f"{at}.policy = {name}: there is no such policy; there are {', '.join(policies)}.")
    return policies[name]


def _parents_first(stages: Mapping[str, Stage]) -> tuple[Stage, ...]:
    ordered: dict[str | None, Stage] = {}
    while len(ordered) < len(stages):
        ready = [s for s in stages.values() if s.track not in ordered and s.grows_from in (None, *ordered)]
        if not ready:
            left = [f"{track} <- {stage.grows_from}" for track, stage in stages.items() if track not in ordered]
            raise ConfigError(
                f"stages grow from each other: {', '.join(left)}. Let one of them grow from the request "
                "(grows_from: null)."
            )
        ordered.update({stage.track: stage for stage in ready})
    roots = [str(stage.track) for stage in ordered.values() if stage.grows_from is None]
    if len(roots) > 1:
        raise ConfigError(
            f"stages: {', '.join(roots)} all grow from the request; one does, and the others from it. Set grows_from."
        )
    return tuple(ordered.values())


def _modality(recipe: Resolved, component: Component) -> Part:
    default = replace(component, default=STAGES_MODALITY) if recipe.get("stages") else component
    return part_of(recipe.get("modality") or {}, "modality", default)


def _without(node: Resolved, key: str) -> Resolved:
    return {name: value for name, value in node.items() if name != key}


def named_copy(run: Run, given: str) -> tuple[str, str]:
    """(policy, copy of its weights) for a name: with one policy a copy, such as "ema"; with several `<policy>` or
    `<policy>/<copy>`. Raises ConfigError for an unknown policy."""
    if len(run.all_policies) == 1:
        return run.sampled, given
    name, _, copy = given.partition("/")
    if name in run.frozen:
        raise ConfigError(f"policy {given!r} does not train in this run; its weights are those of its bundle.")
    if name not in run.policies:
        raise ConfigError(
            f"policy {given!r}: this run has the policies {', '.join(run.policies)}. Name one of them, such as "
            f"--policy {(first := next(iter(run.policies)))}, or a copy of its weights, such as --policy {first}/ema."
        )
    return name, copy or "default"


def _section(recipe: Resolved, key: str, component: Component) -> Part:
    return part_of(recipe.get(key) or {}, key, component)


def part_of(node: Resolved, at: str, component: Component | None = None) -> Part:
    """A component of a recipe, with the facts about its class and kind that the source shows."""
    default = None if component is None else component.default
    own_keys = frozenset() if component is None else component.own_keys
    path = str(node.get(TARGET, default))
    target = read_target(path)
    of_kind = _kind(None if component is None else component.kind)
    return Part(
        at=at,
        path=path,
        node={TARGET: path, **{key: value for key, value in node.items() if key not in own_keys}},
        keywords={name: item.default for name, item in target.parameters.items()},
        abilities={**of_kind.constants, **target.constants},
        lineage=target.lineage,
        takes_any=target.accepts_any,
        rules=tuple(dict.fromkeys((*of_kind.rules, *target.rules))),
        inner={
            place: part_of(inside, f"{at}.{place}", _inner_component(component, place))
            for place, inside in _inside(node)
        },
    )


def _inner_component(component: Component | None, place: str) -> Component | None:
    kind = None if component is None else component.inner_kinds.get(re.split(r"[.\[]", place)[0])
    return None if kind is None else Component(kind=kind)


def _inside(node: Resolved) -> Iterator[tuple[str, Resolved]]:
    """The components directly inside one, with their places; also those in its mappings and lists."""
    for key, value in node.items():
        if isinstance(value, Mapping) and TARGET in value:
            yield str(key), value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{place}", inside) for place, inside in _inside(value))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for index, item in enumerate(value):
                if isinstance(item, Mapping) and TARGET in item:
                    yield f"{key}[{index}]", item


def _kind(path: str | None) -> Target:
    """The declarations of a kind's base class; empty if its package is not installed."""
    if path is None:
        return Target("")
    try:
        return read_target(path)
    except ConfigError:
        return Target(path)
