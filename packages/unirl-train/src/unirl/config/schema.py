"""What a recipe may hold: its sections as plain dataclasses, from which `check` takes every key, type and bound.

A section is one of two kinds. A *plain section* is a dataclass of this module, whose fields are its keys. A *component*
is a mapping with `_target_`, whose keys are the constructor's; its field is annotated with a `Component`. Imports no
torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from unirl.types.bounds import NonNegativeInt, Positive, PositiveInt, Seed

Node = Mapping[str, Any]  # Any: what a recipe says of a component
SectionT = TypeVar("SectionT")


@dataclass(frozen=True, kw_only=True)
class Component:
    """How a section with `_target_` is built."""

    kind: str | None = None
    """Base class, whose literal class attributes are the defaults of what a class of one's own does not declare."""
    inner_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Base classes of components inside, by keyword."""
    default: str | None = None
    """What is built where the section names no `_target_`; None: it must name one."""
    injected: frozenset[str] = frozenset()
    """Keywords that the trainer adds, so that a recipe may not set them."""
    if_taken: frozenset[str] = frozenset()
    """Keywords that the trainer adds where the constructor has them."""
    own_keys: frozenset[str] = frozenset()
    """Keys that the trainer reads itself; they are no keywords of the constructor."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """Checkpoints of a run."""

    interval: NonNegativeInt = 0
    """Rollouts between checkpoints; 0 saves only at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that stay."""
    keep_best: bool = True
    """Whether the checkpoint of the best held-out score stays too."""
    is_async: bool = False
    """Whether a thread writes while training goes on."""
    best_metric: str = "reward"
    """Held-out mean that the best checkpoint is chosen by."""


DEFAULT_POLICY = "default"
"""Name of the policy that flat sections mean, and of its only pipeline."""
DEFAULT_TRACK = "image"
"""What a single algorithm trains where the stack does not say."""

_PIPELINE = Component(
    inner_kinds={"strategy": "unirl.sde.kernels.SDEStrategy"},
    injected=frozenset({"bundle"}),
)
_ALGORITHM = Component(kind="unirl.algorithms.base.StageAlgorithm", injected=frozenset({"pipeline", "policies"}))


@dataclass(frozen=True, kw_only=True)
class PolicySections:
    """What trains together and is saved together. In a recipe without `policies` these keys stand at the top level and
    mean the policy "default"."""

    bundle: Annotated[Node, Component(kind="unirl.models.bundle.Bundle", injected=frozenset({"device"}))]
    pipeline: Annotated[Node | None, _PIPELINE] = None
    pipelines: Annotated[Mapping[str, Node] | None, _PIPELINE] = None
    """In place of `pipeline`, several over one bundle, by the track that each is for."""
    backend: Annotated[Node, Component(injected=frozenset({"bundle", "device"}))]
    algorithm: Annotated[Node | None, _ALGORITHM] = None
    algorithms: Annotated[Mapping[str, Node] | None, _ALGORITHM] = None
    """In place of `algorithm`, by the track that each trains; null leaves a track untrained."""
    stack: Annotated[Node, Component(injected=frozenset({"backend", "algorithms"}))]
    sync: Annotated[
        Node | None,
        Component(
            kind="unirl.distributed.weight_sync.base.WeightSync",
            injected=frozenset({"backend", "engine", "pipeline", "rank"}),
            if_taken=frozenset({"sampling"}),
        ),
    ] = None


_ENGINE = Component(
    kind="unirl.rollout.engine.base.BaseRolloutEngine",
    injected=frozenset({"pipeline", "policies"}),
    if_taken=frozenset({"device", "rank", "bundle"}),
    own_keys=frozenset({"policy", "pool"}),
)
_STAGE_ENGINE = dataclasses.replace(_ENGINE, injected=_ENGINE.injected | {"track"}, own_keys=frozenset())
_SAMPLING = Component(
    kind="unirl.types.sampling.BaseSamplingParams", inner_kinds={"scheduler": "unirl.sde.windows.StepWindow"}
)
_ADVANTAGES = Component(
    kind="unirl.algorithms.advantages.AdvantageConfig", default="unirl.algorithms.advantages.AdvantageConfig"
)


@dataclass(frozen=True, kw_only=True)
class NamedPolicySections:
    """What a policy of `policies` may have besides `PolicySections`."""

    trains: bool = True
    """False: it samples with the weights of its bundle, and its backend, algorithm, stack and sync, where they are
    given, are not built."""
    engine: Annotated[Node | None, _STAGE_ENGINE] = None
    """Of its stages; `sampling` and `advantages` too."""
    sampling: Annotated[Node | None, _SAMPLING] = None
    advantages: Annotated[Node | None, _ADVANTAGES] = None


@dataclass(frozen=True, kw_only=True)
class StageSections:
    """One stage of `stages`, which makes the track that it is called as."""

    policy: str | None = None
    """The policy that it samples from; None: the only one."""
    grows_from: str | None = None
    """The track that it grows from; None: the request."""
    pool: str | None = None
    """The pool whose workers hold its engine; None: the pool `rollout` where there is one, else `train`."""
    reads: Annotated[
        Node | None,
        Component(kind="unirl.rollout.stages.reading.Asked", default="unirl.rollout.stages.reading.Asked"),
    ] = None
    """What it reads of the tracks above it; None: what the user asked for."""
    engine: Annotated[Node | None, _STAGE_ENGINE] = None
    """None: its policy's; so with `sampling` and `advantages`, the last of which may also be the run's."""
    sampling: Annotated[Node | None, _SAMPLING] = None
    """`samples_per_prompt` of a stage that grows from a track counts samples per sample of that track."""
    advantages: Annotated[Node | None, _ADVANTAGES] = None


OF_STAGE = ("engine", "sampling", "advantages")
"""Keys that a stage takes from its policy where it has none itself."""
LEARNING = ("backend", "algorithm", "algorithms", "stack", "sync")
"""Keys of a policy that only one that trains needs."""
SEVERAL = {"pipeline": "pipelines", "algorithm": "algorithms"}
"""Key of one component -> the key that holds several by name in its place."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The Ray cluster of a run with `runtime: ray`."""

    address: str = "auto"
    """auto: the cluster of RAY_ADDRESS, or without one a Ray of this machine alone. local: this machine alone. Else
    host:port of a running cluster."""
    num_nodes: PositiveInt | None = None
    """Nodes that the devices fill; None: as many as devices_per_node asks for."""
    devices_per_node: PositiveInt | None = None
    """None: num_devices / num_nodes, or without num_nodes 8."""
    cpus_per_device: Positive = 1.0
    """CPU cores that are reserved with each device, and threads of the worker there."""
    timeout_s: Positive = 3600.0
    """Longest time of one call, of building the models, and of one collective inside."""
    start_timeout_s: Positive = 300.0
    """Longest wait for nodes, devices and processes."""
    node_groups: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: numbers or text
    """Name -> nodes, such as 0-1, for `placement`."""
    transport: Literal["ray", "rdt", "transfer_queue"] = "ray"
    """How samples move between workers: Ray objects, Ray Direct Transport over gloo, or TransferQueue."""
    transfer_queue: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: TransferQueue's own
    """Configuration of TransferQueue that differs from its defaults, as in its config.yaml."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices with a name. What stands on them says so: `stages.<track>.pool`, `engine.pool`, `reward.pool`.

    Pools with the same devices share their workers; where only some are the same, they take turns there.
    """

    devices: str | int
    """0-3, or 4,5, or all, or of a node group big:0-7."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Short form of the pools `train`, `rollout` and `reward`: devices of each. None at all: all hold everything."""

    train: str | int | None = None
    """What trains, and its checkpoints."""
    rollout: str | int | None = None
    """The engine; None: with what trains."""
    reward: str | int | None = None
    """Reward models; None: with the engine."""


_TRAINER = frozenset({"settings", "collector", "learner", "record", "clock", "stop"})


@dataclass(frozen=True, kw_only=True)
class Residency:
    """What leaves the device in the phases that do not need it; see `unirl.trainer.residency` for when that is."""

    sleep_engine: bool = False
    """Whether the engine sleeps while the policy trains."""
    offload_weights: bool = False
    """Whether the weights that train go to host memory while an engine with weights of its own samples."""
    offload_optimizer: bool = False
    """Whether optimizer state and copies of the policy go to host memory while samples are made and scored."""
    offload_reward: bool = False
    """Whether reward models go to host memory while nothing is scored."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples that a run keeps in its folder `samples`, see docs/run_directory.md."""

    per_rollout: NonNegativeInt = 32
    """Samples of each track, every `media_interval` rollouts: whole groups, where the first one fits."""
    per_evaluation: NonNegativeInt = 16
    """Samples of each track; grids and tables show as many."""
    videos: NonNegativeInt = 4
    """Of a rollout or an evaluation, where samples are videos. Grids show frames of the others too."""
    image_format: Literal["png", "webp"] = "png"
    """png is exact, webp lossy and a fraction of the size."""
    max_mb: Positive | None = 1000
    """Megabytes, above which those of the oldest rollouts go, then of the oldest evaluations; null: no limit."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The keys of a recipe besides those of `PolicySections`. A field without a default is required; null means its
    default."""

    recipe: str
    """Name: runs are written into runs/<recipe>."""
    seed: Seed
    runtime: Literal["local", "ray"]
    device: Literal["auto", "cpu", "cuda"]
    num_devices: PositiveInt
    batch_size: PositiveInt
    """Prompts per rollout."""
    num_rollouts: PositiveInt
    data: Annotated[Node, Component(kind="unirl.data.data_source.MultimodalRLDataSource", injected=frozenset({"seed"}))]
    reward: Annotated[
        Node,
        Component(
            kind="unirl.reward.service.RewardService",
            inner_kinds={"scorers": "unirl.reward.base.LocalScorer"},
            injected=frozenset({"device"}),
            own_keys=frozenset({"track", "pool"}),
        ),
    ]
    """`reward.track` names the track whose media are scored where it is not the root; those above it are credited.
    `reward.pool` names the pool whose workers score; absent: the pool `reward` where there is one, else that of the
    last stage."""

    sampling: Annotated[Node | None, _SAMPLING] = None
    engine: Annotated[Node | None, _ENGINE] = None
    """`engine.policy` names the policy that it samples from, where there are several, `engine.pool` the pool of its
    workers."""
    stages: Mapping[str, StageSections] = dataclasses.field(default_factory=dict)
    """What a request goes through, by track; absent: one engine makes one track."""
    policies: Mapping[str, PolicySections] = dataclasses.field(default_factory=dict)
    """Several policies, by name, each with keys of `NamedPolicySections` too; absent: the flat sections are the only
    one."""
    cluster: Cluster = Cluster()
    placement: Placement = Placement()
    pools: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: each has the keys of `Pool`
    """By name, any number; `train` is the pool of what trains."""
    media_interval: NonNegativeInt = 0
    """Rollouts between those whose samples are kept and shown; 0 shows none."""
    samples: Samples = Samples()
    max_cpu_s: Positive | None = None
    """CPU seconds of training after which the run ends; None: num_rollouts alone."""
    run_dir: str | None = None
    """None: runs/<recipe>/<time>."""
    resume: str | None = None
    """"auto", or the path of a run."""
    resume_changes: Literal["refuse", "allow"] = "refuse"
    save: Save = Save()
    residency: Residency = Residency()
    eval: Annotated[
        Node | None,
        Component(
            kind="unirl.trainer.evaluation.EvaluationConfig", default="unirl.trainer.evaluation.EvaluationConfig"
        ),
    ] = None
    guardrails: Annotated[
        Node | None,
        Component(default="unirl.trainer.guardrails.GuardrailConfig"),
    ] = None
    selection: Annotated[
        Node | None,
        Component(default="unirl.algorithms.selection.SampleSelection"),
    ] = None
    advantages: Annotated[Node | None, _ADVANTAGES] = None
    trainer: Annotated[
        Node | None,
        Component(kind="unirl.trainer.base.Trainer", default="unirl.trainer.base.Trainer", injected=_TRAINER),
    ] = None
    """The loop."""
    modality: Annotated[
        Node | None,
        Component(kind="unirl.trainer.modality.Modality", default="unirl.trainer.diffusion.DiffusionModality"),
    ] = None
    """What is sampled: requests, and what people get to see."""
    trackers: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: components by name, or None
    """Components by name, each with `enabled` beside its own keywords."""


RUN_RULES = (
    "unirl.config.placement",
    "unirl.distributed.rules",
    "unirl.trainer.rules",
    "unirl.trainer.stage_rules",
    "unirl.trainer.residency_rules",
)
"""Modules with the rules of a run as a whole, whose rules take the run alone; see `unirl.types.recipe`."""


@functools.cache
def components(section: type = Recipe) -> Mapping[str, Component]:
    """The components among the fields of a section, by key."""
    return {
        name: item
        for name, hint in get_type_hints(section, include_extras=True).items()
        for item in getattr(hint, "__metadata__", ())
        if isinstance(item, Component)
    }


@functools.cache
def plain_sections(section: type = Recipe) -> Mapping[str, type]:
    """The plain sections among the fields of a section, by key: those of a dataclass, or of one or null."""
    found: dict[str, type] = {}
    for name, hint in get_type_hints(section).items():
        choices = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for each in choices:
            if isinstance(each, type) and dataclasses.is_dataclass(each):
                found[name] = each
    return found


@functools.cache
def keys(section: type) -> tuple[str, ...]:
    """Every key of a section, in order."""
    return tuple(inspect.signature(section).parameters)


@functools.cache
def required(section: type = Recipe) -> tuple[str, ...]:
    """Keys that must be given."""
    return tuple(name for name, item in inspect.signature(section).parameters.items() if item.default is item.empty)


def built(section: type[SectionT], values: Mapping[str, Any]) -> SectionT:  # Any: a checked recipe's values
    """A plain section from what a checked recipe says: null and absent keys get the default, plain sections inside are
    built, components stay mappings."""
    inner = plain_sections(section)
    given = {key: value for key, value in values.items() if value is not None}
    return section(**{key: built(inner[key], value) if key in inner else value for key, value in given.items()})
