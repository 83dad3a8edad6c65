"""A recipe as rules see it: its parts, what their classes declare, and the policies that they belong to.

A class names the module with its rules (`recipe_rules = "package.module"`), which may import no heavy library:
`trainer check` reads classes from their source and imports rules alone. Such a module has RULES, functions of a part
and its run that hold anywhere, and may have MACHINE_RULES, which also ask what this machine has. A rule yields one
message per mistake: what is wrong, with the values, and what to change. Signatures have been checked before, so values
have the right types. Rules of a base class hold for its subclasses too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from unirl.types.errors import ConfigError, ContractError

Messages = Iterator[str]
RULES_OF = "recipe_rules"
"""Class attribute that names the module with the rules of a class."""
TARGET = "_target_"


@dataclass(frozen=True)
class Machine:
    """What this machine offers."""

    num_cpus: int
    num_gpus: int
    command_for: Callable[[str], str | None] = field(default=lambda path: None, compare=False)
    """The command that makes a file of prompts that is not there; None for a file that none makes."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One component of a recipe."""

    at: str
    """Where it stands in the recipe, such as `pipeline.strategy` or `policies.writer.backend`."""
    path: str
    """Import path of its class."""
    node: Mapping[str, Any]  # Any: a recipe's values
    """What the recipe says of it, `_target_` included."""
    keywords: Mapping[str, object] = field(default_factory=dict)
    """Keywords of its constructor, each with its default; None where that is no literal."""
    abilities: Mapping[str, object] = field(default_factory=dict)
    """Literal class attributes, those of its kind first."""
    lineage: tuple[str, ...] = ()
    """Import paths of its class and bases, nearest first."""
    takes_any: bool = False
    """Whether nothing is known of its class but its path, or it takes keywords that cannot be known."""
    rules: tuple[str, ...] = ()
    """Modules with its rules."""
    inner: Mapping[str, Part] = field(default_factory=dict)
    """Components inside, by place: `strategy`, `scorers.shapes`, `scorers[0]`."""

    @property
    def name(self) -> str:
        """Of its class."""
        return self.path.rsplit(".", 1)[-1]

    def get(self, key: str, default: Any = None) -> Any:  # Any: a recipe's value
        """The value of a keyword: the recipe's, else the constructor's default, else `default`."""
        if key in self.node:
            return self.node[key]
        own = self.keywords.get(key)
        return default if own is None else own

    def number(self, key: str) -> int | float | None:
        """The number that the recipe gives a keyword; None where it gives none, or a class of one's own takes another
        type."""
        value = self.node.get(key)
        return value if isinstance(value, (int, float)) else None

    def ability(self, name: str) -> Any:  # Any: a literal
        """What the class or its kind declares. Raises ContractError where neither does: a base without a default."""
        if name not in self.abilities:
            raise ContractError(f"{self.at}: neither {self.path} nor the base class of its kind declares {name}")
        return self.abilities[name]

    def inside(self, key: str) -> dict[str, Part]:
        """The components of a mapping or list inside, by name or number."""
        names = {
            place: place.removeprefix(key).strip(".[]")
            for place in self.inner
            if place.startswith((f"{key}.", f"{key}["))
        }
        return {name: self.inner[place] for place, name in names.items() if "." not in name}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What trains together and is saved together; or a model that only samples, whose backend and stack are empty."""

    name: str
    prefix: str
    """Of its places in the recipe: empty for the only policy of flat sections, else `policies.<name>.`."""
    bundle: Part
    pipelines: Mapping[str, Part]
    """By name, "default" for the only one."""
    backend: Part
    algorithms: Mapping[str, Part]
    """By the track that each trains."""
    stack: Part
    resting: tuple[str, ...] = ()
    """Tracks of its own that the recipe leaves untrained: `algorithms.<track>: null`."""
    sync: Part | None = None
    trains: bool = True
    engine: Part | None = None
    """Its own engine and `sampling`, where the run's engine is composed of one per policy."""
    sampling: Part | None = None
    advantages: Part | None = None
    """Of its tracks; None: the run's."""

    def pipeline_of(self, track: str) -> Part:
        """The pipeline of a track. Raises ConfigError as `pipeline_name`."""
        return self.pipelines[self.pipeline_name(track)]

    def pipeline_name(self, track: str) -> str:
        """The pipeline that is called as a track, or the only one. Raises ConfigError where there is neither."""
        if track in self.pipelines:
            return track
        if len(self.pipelines) > 1:
            raise ConfigError(
                f"{self.prefix}pipelines has {', '.join(self.pipelines)}, and none of the track {track!r}. Name one of "
                f"them {track}."
            )
        return next(iter(self.pipelines))

    @property
    def pipeline(self) -> Part:
        """The first pipeline."""
        return next(iter(self.pipelines.values()))

    def parts(self) -> Iterator[Part]:
        """Every component."""
        yield self.bundle
        yield from self.pipelines.values()
        if self.trains:
            yield from (self.backend, *self.algorithms.values(), self.stack)
        yield from (part for part in (self.sync, self.engine, self.sampling, self.advantages) if part is not None)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole recipe."""

    seed: int
    runtime: str
    device: str
    num_devices: int
    batch_size: int
    """Prompts per rollout."""
    policies: Mapping[str, Policy]
    """Those that train, by name, "default" for the policy of flat sections."""
    frozen: Mapping[str, Policy]
    """Those that only sample, by name."""
    teachers: Mapping[str, Policy] = field(default_factory=dict)
    """Those that neither train nor sample, by name: algorithms ask them."""
    sampled: str
    """Name of the policy that the engine samples from; of several, of the first."""
    samples_all: bool
    """Whether the engine gets the pipelines of all policies."""
    scored_track: str | None
    """The track whose media are scored; None: the root."""
    data: Part
    sampling: Part
    engine: Part
    reward: Part
    advantages: Part
    trainer: Part
    modality: Part
    evaluation: Part | None
    guardrails: Part | None
    selection: Part | None

    @property
    def policy(self) -> Policy:
        """The policy that the engine samples from."""
        return self.all_policies[self.sampled]

    @property
    def all_policies(self) -> Mapping[str, Policy]:
        """Those that train, then those that only sample; not the teachers, which have no engine and are not saved."""
        return {**self.policies, **self.frozen}

    @property
    def is_composed(self) -> bool:
        """Whether the engine is composed of one per policy."""
        return any(policy.engine is not None for policy in self.all_policies.values())

    @property
    def samples_per_prompt(self) -> int:
        """Samples of the root track per prompt."""
        root = self.sampling.ability("root_stage")
        return (self.sampling if root is None else self.sampling.inner[root]).get("samples_per_prompt", 1)

    @property
    def samples_key(self) -> str:
        """Place of `samples_per_prompt` in the recipe."""
        root = self.sampling.ability("root_stage")
        return ".".join([self.sampling.at, *([] if root is None else [root]), "samples_per_prompt"])

    @property
    def samplings(self) -> list[Part]:
        """How each kind of sample is made: the stages of `sampling`, or where it has none itself."""
        inner = [part for part in self.sampling.inner.values() if "samples_tokens" in part.abilities]
        return inner or [self.sampling]

    def stages(self) -> list[Self]:
        """The run as each policy with an engine of its own sees it; the run itself where there is one engine.

        A stage's engine, sampling and advantages are the policy's, which is the one that it samples from.
        """
        if not self.is_composed:
            return [self]
        return [self._stage(policy) for policy in self.all_policies.values()]

    def _stage(self, policy: Policy) -> Self:
        alone = {policy.name: dataclasses.replace(policy, engine=None, sampling=None, advantages=None)}
        return dataclasses.replace(
            self,
            policies=alone if policy.trains else {},
            frozen={} if policy.trains else alone,
            sampled=policy.name,
            samples_all=False,
            engine=policy.engine or self.engine,
            sampling=policy.sampling or self.sampling,
            advantages=policy.advantages or self.advantages,
        )

    def seen_by(self, part: Part) -> Self:
        """The run as the rules of a part judge it: of a policy with an engine of its own, its stage.

        Of a policy whose samples have two stages, an algorithm on tokens is judged by how texts are sampled, all else
        by how images are.
        """
        owner = next(
            (policy for policy in self.all_policies.values() if any(part is own for own in policy.parts())), None
        )
        if owner is None:
            return self
        if self.is_composed:
            return self._stage(owner)
        is_of_texts = part.abilities.get("trains_tokens", False)
        fitting = [each for each in self.samplings if each.ability("samples_tokens") is is_of_texts]
        return dataclasses.replace(self, sampling=fitting[0]) if len(self.samplings) > 1 and fitting else self

    def policy_of(self, part: Part) -> Policy:
        """The policy that a part belongs to. Raises ContractError for a part of the run as a whole."""
        for policy in (*self.all_policies.values(), *self.teachers.values()):
            if any(part is own for own in policy.parts()):
                return policy
        raise ContractError(f"{part.at} belongs to no policy")

    def parts(self) -> Iterator[Part]:
        """Every component outside the trackers."""
        yield from (self.data, self.sampling)
        if not self.is_composed:  # else they are those of the policies
            yield from (part for part in self.samplings if part is not self.sampling)
        for policy in (*self.all_policies.values(), *self.teachers.values()):
            yield from policy.parts()
        yield from (self.engine, self.reward, self.advantages, self.trainer, self.modality)
        yield from (part for part in (self.evaluation, self.guardrails, self.selection) if part is not None)
