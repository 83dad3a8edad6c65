"""A recipe as rules see it: its parts, what their classes declare, and the policies that they belong to.

A class names the module with its rules (`recipe_rules = "package.module"`), which may import no heavy library:
`trainer check` reads classes from their source and imports rules alone. Such a module has RULES, functions of a part
and its run that hold anywhere, and may have MACHINE_RULES, which also ask what this machine has. A rule yields one
message per mistake: what is wrong, with the values, and what to change; what another machine may have is a plain
message, what is here and broken a Fault. Signatures have been checked before, so values
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


class Fault(str):
    """A message of MACHINE_RULES on what is here and wrong, so that no other machine would accept it."""


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
    """True if nothing is known of its class but its path, or it takes keywords that cannot be known."""
    rules: tuple[str, ...] = ()
    """Modules with its rules."""
    inner: Mapping[str, Part] = field(default_factory=dict)
    """Components inside, by place: `strategy`, `scorers.shapes`, `scorers[0]`."""

    @property
    def name(self) -> str:
        """Name of its class."""
        return self.path.rsplit(".", 1)[-1]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of its class and bases, nearest first."""
        return tuple(path.rsplit(".", 1)[-1] for path in (self.path, *self.lineage))

    def get(self, key: str, default: Any = None) -> Any:  # Any: a recipe's value
        """The value of a keyword: the recipe's, else the constructor's default, else `default`."""
        if key in self.node:
            return self.node[key]
        own = self.keywords.get(key)
        return default if own is None else own

    def number(self, key: str) -> int | float | None:
        """The number that the recipe gives a keyword; None where it gives none, or a user's own class takes another
        type."""
        value = self.node.get(key)
        return value if isinstance(value, (int, float)) else None

    def ability(self, name: str) -> Any:  # Any: a literal
        """What the class or its kind declares. Raises ContractError if neither does: a base without a default."""
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

    def with_inner(self) -> Iterator[Part]:
        """The component and all inside it, at any depth."""
        yield self
        for part in self.inner.values():
            yield from part.with_inner()


def heads_option(has_ring: bool) -> str:
    """The option by which ranks exchange heads."""
    return "topology.sp / ring" if has_ring else "topology.sp"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What trains together and is saved together; or a model that only samples, whose backend and stack are empty."""

    name: str
    prefix: str
    """Prefix of its places in the recipe: empty for the only policy of flat sections, else `policies.<name>.`."""
    bundle: Part
    pipelines: Mapping[str, Part]
    """By name, "default" for the only one."""
    backend: Part
    algorithms: Mapping[str, Part]
    """By the track that each trains."""
    stack: Part
    resting: tuple[str, ...] = ()
    """Tracks that the recipe leaves untrained: `algorithms.<track>: null`."""
    sync: Part | None = None
    trains: bool = True

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that work on the same samples: `backend.topology.sp` times `tp`."""
        return self._axis("sp") * self._axis("tp")

    @property
    def ranks_of_tokens(self) -> int:
        """Ranks that each have a part of the tokens of a sample: `backend.topology.sp`."""
        return self._axis("sp")

    @property
    def ranks_of_heads(self) -> int:
        """Ranks that each have a part of the attention heads of the same tokens: `sp` by `ring`."""
        return max(1, self._axis("sp") // max(1, self._axis("ring")))

    @property
    def has_ring(self) -> bool:
        """True if keys and values go around groups of the ranks that share tokens."""
        return self.ranks_of_heads < self.ranks_of_tokens

    @property
    def heads_option(self) -> str:
        """The option by which ranks exchange heads."""
        return heads_option(self.has_ring)

    @property
    def ranks_of_layers(self) -> int:
        """Ranks that each have a part of the layers of the model: `backend.topology.tp`."""
        return self._axis("tp")

    @property
    def sharing_option(self) -> str:
        """The option by which ranks work on the same samples."""
        return "topology.tp" if self.ranks_of_layers > 1 else "topology.sp"

    @property
    def sharing(self) -> str:
        """`sharing_option` with its value, as "topology.sp = 2"."""
        size = self.ranks_of_layers if self.ranks_of_layers > 1 else self.ranks_of_tokens
        return f"{self.sharing_option} = {size}"

    @property
    def ranks_of_experts(self) -> int:
        """Ranks that have the experts of the model together: `backend.topology.ep`."""
        return self._axis("ep")

    def _axis(self, name: str) -> int:
        topology = self.backend.inner.get("topology")
        return 1 if topology is None else topology.get(name)

    def pipeline_of(self, track: str) -> Part:
        """The pipeline of a track. Raises ConfigError as `pipeline_name`."""
        return self.pipelines[self.pipeline_name(track)]

    def pipeline_name(self, track: str) -> str:
        """The pipeline that is called as a track, or the only one. Raises ConfigError if there is neither."""
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
        if self.sync is not None:
            yield self.sync


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What makes one track: an engine that samples from a policy."""

    track: str | None
    """None where the class of the only engine does not say what its track is called."""
    policy: str
    engine: Part
    sampling: Part
    advantages: Part
    """Advantages of its track: its own, else the run's."""
    reads: Part | None = None
    """How it reads the tracks above it; None for the only stage."""
    grows_from: str | None = None
    """The parent track; None: the request."""
    pool: str | None = None
    """The pool of its engine; None: "rollout" where there is one, else "train"."""
    turns: Part | None = None
    """The environment that it takes turns with; None: a sample is one turn."""

    @property
    def at(self) -> str:
        """Where it stands in the recipe."""
        return "engine" if self.reads is None else f"stages.{self.track}"

    def parts(self) -> Iterator[Part]:
        """Every component."""
        yield from (self.sampling, self.engine, self.advantages)
        yield from (part for part in (self.reads, self.turns) if part is not None)


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
    stages: tuple[Stage, ...]
    """What makes the tracks, each after the stage that it grows from; of flat sections one."""
    is_staged: bool = False
    """True if the recipe has `stages`, even if only one."""
    sampled: str
    """Name of the policy that `engine` samples from."""
    scored_track: str | None
    """The track whose media are scored; None: the root."""
    data: Part
    sampling: Part
    """Sampling of the first stage, which reads the prompts; so is `engine`."""
    engine: Part
    advantages: Part
    """For tracks whose stage has none."""
    reward: Part
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
    def samples_per_prompt(self) -> int:
        """Samples of the first track per prompt."""
        return self.sampling.get("samples_per_prompt", 1)

    @property
    def samples_key(self) -> str:
        """Place of `samples_per_prompt` in the recipe."""
        return f"{self.sampling.at}.samples_per_prompt"

    def stage_of(self, track: str | None) -> Stage:
        """The stage that makes a track. Raises ContractError if there is none."""
        for stage in self.stages:
            if stage.track == track:
                return stage
        raise ContractError(f"no stage makes the track {track!r}; there are {[stage.track for stage in self.stages]}")

    def views(self) -> list[Self]:
        """The run as each stage sees it; the run itself where there is only one engine.

        The engine, sampling and advantages of a view are those of the stage, its only policy is the one that the stage
        samples from, with the pipeline and the algorithms of its track.
        """
        return [self._view(stage, of_track=True) for stage in self.stages] if self.is_staged else [self]

    def _view(self, stage: Stage, *, of_track: bool) -> Self:
        policy = self.all_policies[stage.policy]
        if of_track:
            name = policy.pipeline_name(str(stage.track))
            policy = dataclasses.replace(
                policy,
                pipelines={name: policy.pipelines[name]},
                algorithms={track: part for track, part in policy.algorithms.items() if track == stage.track},
                sync=policy.sync if stage is self.pushed_stage(policy) else None,
            )
        alone = {policy.name: policy}
        return dataclasses.replace(
            self,
            policies=alone if policy.trains else {},
            frozen={} if policy.trains else alone,
            stages=(stage,),
            is_staged=False,
            sampled=policy.name,
            engine=stage.engine,
            sampling=stage.sampling,
            advantages=stage.advantages,
        )

    def seen_by(self, part: Part) -> Self:
        """The run as the rules of a part judge it.

        A part of one track is judged by its stage; what the tracks of a policy share, by the stage that the policy is
        pushed to, else by its last one; everything else by the run as a whole.
        """
        if not self.is_staged:
            return self
        own = [stage for stage in self.stages if any(part is each for each in self._of_track(stage))]
        if len(own) == 1:
            return self._view(own[0], of_track=True)
        owners = [policy for policy in self.all_policies.values() if any(part is each for each in policy.parts())]
        shared = self.pushed_stage(owners[0]) if owners else None
        return self if shared is None else self._view(shared, of_track=False)

    def _of_track(self, stage: Stage) -> Iterator[Part]:
        policy, track = self.all_policies[stage.policy], str(stage.track)
        yield from stage.parts()
        yield policy.pipeline_of(track)
        if track in policy.algorithms:
            yield policy.algorithms[track]

    def pushed_stage(self, policy: Policy) -> Stage | None:
        """The stage of a policy whose engine has its own weights, else its last stage; None where it has none."""
        stages = [stage for stage in self.stages if stage.policy == policy.name]
        served = [stage for stage in stages if stage.engine.ability("has_own_weights")]
        return next(iter([*served, *reversed(stages)]), None)

    def policy_of(self, part: Part) -> Policy:
        """The policy that a part belongs to. Raises ContractError for a part of the run as a whole."""
        for policy in (*self.all_policies.values(), *self.teachers.values()):
            if any(part is own for own in policy.parts()):
                return policy
        raise ContractError(f"{part.at} belongs to no policy")

    def parts(self) -> Iterator[Part]:
        """Every component outside the trackers, each once."""
        yield self.data
        yield from (stage.sampling for stage in self.stages)
        for policy in (*self.all_policies.values(), *self.teachers.values()):
            yield from policy.parts()
        yield from (part for stage in self.stages for part in (stage.engine, stage.reads) if part is not None)
        # With the environment and its tools, which are of users.
        yield from (part for stage in self.stages if stage.turns is not None for part in stage.turns.with_inner())
        yield from self.reward.with_inner()  # with its scorers
        yield self.advantages
        yield from (stage.advantages for stage in self.stages if stage.advantages is not self.advantages)
        yield from (self.trainer, self.modality)
        yield from (part for part in (self.evaluation, self.guardrails, self.selection) if part is not None)
