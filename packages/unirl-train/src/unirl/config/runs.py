"""From a resolved recipe to a typed run: flat sections become the policy "default", every component a part.

Reads the classes from their source; imports none. `check`, the rules and `unirl.trainer.build` use the run alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unirl.config.schema import (
    DEFAULT_POLICY,
    DEFAULT_TRACK,
    LEARNING,
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
from unirl.types.recipe import TARGET, Part, Policy, Run

Resolved = Mapping[str, Any]  # Any: a resolved recipe's values

_POLICY_NAME = re.compile(r"\w[\w-]*")


@dataclass(frozen=True, kw_only=True)
class ComposedRun(Run):
    """A run with the file that it comes from."""

    file: Recipe
    """Plain values and plain sections, defaults filled in."""
    resolved: Resolved
    """The recipe as it was composed."""

    def with_values(self, **values: Any) -> ComposedRun:  # Any: as in Resolved
        """The run with other plain values, such as `run_dir`."""
        return replace(self, file=replace(self.file, **values), resolved={**self.resolved, **values})


def policy_sections(recipe: Resolved) -> dict[str, tuple[str, Resolved]]:
    """Policy -> (prefix of its places in the recipe, its sections): of flat sections, of `policies`, or the flat ones
    and then policies that do not train. Raises ConfigError for flat sections beside one that trains, and for a name
    that is none."""
    known = keys(PolicySections)
    flat = {DEFAULT_POLICY: ("", {key: recipe[key] for key in known if key in recipe})}
    named = recipe.get("policies")
    if not named:
        return flat
    beside = [key for key in known if recipe.get(key) is not None]
    training = [name for name, own in named.items() if not isinstance(own, Mapping) or does_train("policies", own)]
    if beside and (training or DEFAULT_POLICY in named):
        raise ConfigError(
            f"{', '.join(beside)}: a recipe with policies has no such section of its own. Move it to "
            f"policies.{next(iter(training), DEFAULT_POLICY)}.{beside[0]}; only policies with trains: false may stand "
            "beside it."
        )
    for name, sections in recipe["policies"].items():
        if not _POLICY_NAME.fullmatch(str(name)):
            raise ConfigError(f"policies: {name!r} must be a word of letters, digits, _ and -: folders are called so.")
        if not isinstance(sections, Mapping):
            raise ConfigError(f"policies.{name} = {sections!r} must be a mapping of {', '.join(known)}.")
    others = {str(name): (f"policies.{name}.", sections) for name, sections in named.items()}
    return {**flat, **others} if beside else others


def run_of(recipe: Resolved) -> ComposedRun:
    """The run of a recipe whose keys and signatures are right.

    Raises ConfigError for a policy without a pipeline or an algorithm, or with one in two places, for policies of which
    none trains, and for an engine that does not say which of several policies it samples from.
    """
    everyone = {name: _policy(name, prefix, sections) for name, (prefix, sections) in policy_sections(recipe).items()}
    teachers = _teachers(everyone)
    policies = {name: policy for name, policy in everyone.items() if name not in teachers}
    _engines_match(recipe, policies)
    if not any(policy.trains for policy in policies.values()):
        raise ConfigError(f"policies: {', '.join(policies)} all have trains: false. Let one of them train.")
    found = components(Recipe)
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
        sampled=_sampled(recipe, policies),
        samples_all=_samples_all(recipe),
        scored_track=recipe["reward"].get("track"),
        evaluation=optional["eval"],
        guardrails=optional["guardrails"],
        selection=optional["selection"],
        file=built(Recipe, {key: value for key, value in recipe.items() if key in keys(Recipe)}),
        resolved=recipe,
        **{key: _section(recipe, key, found[key]) for key in _ALWAYS},
    )


_ALWAYS = ("data", "sampling", "engine", "reward", "advantages", "trainer", "modality")
_OPTIONAL = ("eval", "guardrails", "selection")


def one_or_several(sections: Resolved, prefix: str, key: str) -> dict[str, tuple[str, Resolved]]:
    """Name -> (place, node) of `pipeline` or `pipelines`, of `algorithm` or `algorithms`; null ones are left out.

    Raises ConfigError for neither and for both.
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
    has = set(target.parameters)
    always = {next((name for name in component.of_all.get(key, ()) if name in has), key) for key in component.injected}
    return frozenset(always | (component.if_taken & has))


def _policy(name: str, prefix: str, sections: Resolved) -> Policy:
    found = components(PolicySections)

    trains = does_train(prefix, sections)
    known = {**found, **components(StageSections)}

    def part(key: str) -> Part:
        if not trains and key in LEARNING:
            return Part(at=f"{prefix}{key}", path="", node={})
        return part_of(sections[key], f"{prefix}{key}", known[key])

    def own(key: str) -> Part | None:
        return part(key) if prefix and sections.get(key) else None

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
        # What the only algorithm's track is called is read above.
        stack=part_of(_without(sections["stack"], "track"), f"{prefix}stack", found["stack"])
        if trains
        else part("stack"),
        resting=tuple(str(name) for name, node in (sections.get("algorithms") or {}).items() if node is None),
        sync=part("sync") if trains and sections.get("sync") else None,
        trains=trains,
        engine=own("engine"),
        sampling=own("sampling"),
        advantages=own("advantages"),
    )
    for track in policy.algorithms:
        policy.pipeline_of(track)
    return policy


def does_train(prefix: str, sections: Resolved) -> bool:
    """Whether a policy trains: always, but where several have a word about it."""
    return not prefix or sections.get("trains") is not False


def teacher_of(algorithm: Part) -> str | None:
    """Name of the policy that an algorithm asks; None where it asks none."""
    option = algorithm.abilities.get("teacher_option")
    return None if option is None else algorithm.get(str(option))


def _teachers(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """The policies that an algorithm asks and that neither train nor sample."""
    asked = {teacher_of(part) for policy in policies.values() for part in policy.algorithms.values()}
    return {name: p for name, p in policies.items() if name in asked and not p.trains and p.engine is None}


def _engines_match(recipe: Resolved, policies: Mapping[str, Policy]) -> None:
    """Every policy has an engine and sampling of its own where the run's engine is composed, and nowhere else."""
    is_composed = "engines" in read_target(str(recipe["engine"].get(TARGET))).parameters
    for policy in policies.values():
        for key, part in (("engine", policy.engine), ("sampling", policy.sampling)):
            if is_composed and part is None:
                raise ConfigError(
                    f"{policy.prefix or 'policies.<name>.'}{key} is missing: engine._target_ is composed of the "
                    "engines of all policies. Add it there."
                )
            if not is_composed and part is not None:
                raise ConfigError(
                    f"{part.at}: the run's engine samples for all policies, so this does nothing. Set engine._target_: "
                    "unirl.rollout.engine.composed.engine.ComposedEngine, or remove it."
                )
        if not is_composed and not policy.trains:
            raise ConfigError(
                f"{policy.prefix}trains: false needs an engine of the policy's own, or an algorithm that asks it "
                "(algorithm.teacher). Set engine._target_: unirl.rollout.engine.composed.engine.ComposedEngine, or "
                "remove it."
            )


def _without(node: Resolved, key: str) -> Resolved:
    return {name: value for name, value in node.items() if name != key}


def _sampled(recipe: Resolved, policies: Mapping[str, Policy]) -> str:
    named = recipe["engine"].get("policy")
    if named is not None and named not in policies:
        raise ConfigError(f"engine.policy = {named!r} is no policy of this recipe; there are {', '.join(policies)}.")
    samples_all = _samples_all(recipe)
    if named is None and len(policies) > 1 and not samples_all:
        raise ConfigError(
            f"the engine samples from one policy, the recipe has {', '.join(policies)}. Set engine.policy to one of "
            "them, or take an engine with the arguments pipelines and stores, which get all policies'."
        )
    sampled = policies[next(iter(policies)) if named is None else named]
    if len(sampled.pipelines) > 1 and not samples_all:
        raise ConfigError(
            f"the engine takes one pipeline, {sampled.prefix}pipelines has {', '.join(sampled.pipelines)}. Take an "
            "engine with the arguments pipelines and stores."
        )
    return sampled.name


def _samples_all(recipe: Resolved) -> bool:
    parameters = read_target(str(recipe["engine"].get(TARGET))).parameters
    return "pipelines" in parameters or "engines" in parameters


def named_copy(run: Run, given: str) -> tuple[str, str]:
    """(policy, copy of its weights) that a word means: a copy of the only policy, such as "ema"; of several policies
    `<policy>`, or `<policy>/<copy>`. Raises ConfigError for another policy."""
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
    """A component of a recipe with what source tells of its class and of its kind."""
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
    """The components directly inside one, with their places; those in mappings and lists of it too."""
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
    """What the base class of a kind declares; nothing where its package is not installed."""
    if path is None:
        return Target("")
    try:
        return read_target(path)
    except ConfigError:
        return Target(path)
