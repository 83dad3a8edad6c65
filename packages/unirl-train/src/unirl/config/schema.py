"""The schema of recipes: sections as plain dataclasses, from which `check` takes every key, type and bound.

A section is one of two kinds. A *plain section* is a dataclass of this module, whose fields are its keys. A *component*
is a mapping with `_target_`, whose keys are the constructor's; its field is annotated with a `Component`. Imports no
torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from unirl.types.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt, Seed, UnitInterval
from unirl.types.device_kinds import DeviceChoice

Node = Mapping[str, Any]  # Any: a component's keys in a recipe
SectionT = TypeVar("SectionT")


@dataclass(frozen=True, kw_only=True)
class Component:
    """How a section with `_target_` is built."""

    kind: str | None = None
    """Base class; its literal class attributes are defaults for attributes that a user's class does not declare."""
    inner_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Base classes of components inside, by keyword."""
    default: str | None = None
    """Class that is built if the section has no `_target_`; None: it must have one."""
    injected: frozenset[str] = frozenset()
    """Keywords that the trainer adds, so that a recipe may not set them."""
    if_taken: frozenset[str] = frozenset()
    """Keywords that the trainer adds if the constructor has them."""
    own_keys: frozenset[str] = frozenset()
    """Keys that the trainer reads itself and does not pass to the constructor."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """Checkpoints of a run."""

    interval: NonNegativeInt = 0
    """Rollouts between checkpoints; 0 saves only at the end."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out score."""
    is_async: bool = False
    """Write in a thread while training continues."""
    best_metric: str = "reward"
    """Held-out mean that chooses the best checkpoint."""
    in_flight: bool = True
    """Hold samples in flight of an asynchronous run, which a resumed run then does not make again."""
    mirror: str | None = None
    """URL of fsspec, such as s3://bucket/my-run, for this run alone: its checkpoints are copied there while it trains,
    and `resume=auto` takes the newest from there where this machine has none as new."""


ENABLED = "enabled"
"""Key of a tracker that switches it on or off without removing it."""
DEFAULT_POLICY = "default"
"""Name of the policy of flat sections, and of its only pipeline."""
DEFAULT_TRACK = "image"
"""Track of a single algorithm if the stack does not name one."""

_PIPELINE = Component(
    inner_kinds={"strategy": "unirl.sde.kernels.SDEStrategy"},
    injected=frozenset({"bundle"}),
)
_ALGORITHM = Component(kind="unirl.algorithms.base.StageAlgorithm", injected=frozenset({"pipeline", "policies"}))


@dataclass(frozen=True, kw_only=True)
class PolicySections:
    """A policy: the parts that are trained and saved together. In a recipe without `policies` these keys are at the top
    level and define the policy "default"."""

    bundle: Annotated[
        Node,
        Component(
            kind="unirl.models.bundle.Bundle",
            injected=frozenset({"device"}),
            if_taken=frozenset({"defers_weights"}),
        ),
    ]
    pipeline: Annotated[Node | None, _PIPELINE] = None
    pipelines: Annotated[Mapping[str, Node] | None, _PIPELINE] = None
    """Instead of `pipeline`: several pipelines over one bundle, by track."""
    backend: Annotated[Node, Component(injected=frozenset({"bundle", "device"}))]
    algorithm: Annotated[Node | None, _ALGORITHM] = None
    algorithms: Annotated[Mapping[str, Node] | None, _ALGORITHM] = None
    """Instead of `algorithm`: algorithms by the track that each trains; null leaves a track untrained."""
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
    inner_kinds={"environment": "unirl.rollout.environments.vector.VectorEnvironment"},
    injected=frozenset({"pipeline", "policies"}),
    if_taken=frozenset({"device", "rank", "bundle", "keeps_cache"}),
    own_keys=frozenset({"policy", "pool"}),
)
_STAGE_ENGINE = dataclasses.replace(_ENGINE, injected=_ENGINE.injected | {"track"}, own_keys=frozenset())
_TURNS = Component(
    kind="unirl.rollout.turns.engine.TurnsEngine",
    default="unirl.rollout.turns.engine.TurnsEngine",
    inner_kinds={"environment": "unirl.rollout.environments.base.Environment"},
    injected=frozenset({"engine", "pipeline", "policies"}),
)
_SAMPLING = Component(
    kind="unirl.types.sampling.BaseSamplingParams", inner_kinds={"scheduler": "unirl.sde.windows.StepWindow"}
)
_ADVANTAGES = Component(
    kind="unirl.algorithms.advantages.AdvantageConfig", default="unirl.algorithms.advantages.AdvantageConfig"
)


@dataclass(frozen=True, kw_only=True)
class NamedPolicySections:
    """Further keys of a policy in `policies`, besides `PolicySections`."""

    trains: bool = True
    """False: it only samples, with the weights of its bundle; its backend, algorithm, stack and sync, if given, are not
    built."""
    engine: Annotated[Node | None, _STAGE_ENGINE] = None
    """Engine of its stages; likewise `sampling` and `advantages`."""
    sampling: Annotated[Node | None, _SAMPLING] = None
    advantages: Annotated[Node | None, _ADVANTAGES] = None


@dataclass(frozen=True, kw_only=True)
class StageSections:
    """One stage of `stages`. Its key is the name of the track that it makes."""

    policy: str | None = None
    """The policy that it samples from; None: the only one."""
    grows_from: str | None = None
    """The track that it grows from; None: the request."""
    pool: str | None = None
    """The pool whose workers hold its engine; None: the pool `rollout` if there is one, else `train`."""
    reads: Annotated[
        Node | None,
        Component(kind="unirl.rollout.stages.reading.Asked", default="unirl.rollout.stages.reading.Asked"),
    ] = None
    """What it reads from its parent tracks; None: the user's request."""
    engine: Annotated[Node | None, _STAGE_ENGINE] = None
    """None: its policy's. The same holds for `sampling` and `advantages`; the latter may also be the run's."""
    sampling: Annotated[Node | None, _SAMPLING] = None
    """For a stage that grows from a track, `samples_per_prompt` is the number of samples per sample of that track."""
    advantages: Annotated[Node | None, _ADVANTAGES] = None
    turns: Annotated[Node | None, _TURNS] = None
    """The environment that it talks to; None: it writes once."""


OF_STAGE = ("engine", "sampling", "advantages")
"""Keys that a stage takes from its policy if it does not have them."""
LEARNING = ("backend", "algorithm", "algorithms", "stack", "sync")
"""Keys of a policy that are only needed for training."""
SEVERAL = {"pipeline": "pipelines", "algorithm": "algorithms"}
"""Key of a single component -> the key for several by name."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The Ray cluster of a run with `runtime: ray`."""

    address: str = "auto"
    """auto: the cluster of RAY_ADDRESS, or this machine if it is not set. local: this machine. Otherwise host:port of a
    running cluster."""
    num_nodes: PositiveInt | None = None
    """Number of nodes; None: as many as devices_per_node requires."""
    devices_per_node: PositiveInt | None = None
    """None: num_devices / num_nodes, or 8 if num_nodes is not set."""
    cpus_per_device: Positive = 1.0
    """CPU cores reserved per device, which is also the worker's number of threads."""
    timeout_s: Positive = 3600.0
    """Time limit of one call, of building the models, and of one collective in a call."""
    start_timeout_s: Positive = 300.0
    """Time limit for nodes, devices and processes to become available."""
    node_groups: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: numbers or text
    """Name -> nodes, such as 0-1, for `pools` and `placement`."""
    transport: Literal["ray", "rdt", "transfer_queue"] = "ray"
    """How samples move between workers: Ray objects, Ray Direct Transport over gloo, or TransferQueue."""
    transfer_queue: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: TransferQueue's own
    """Changes to TransferQueue's default configuration, as in its config.yaml."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Named devices. Components name their pool: `stages.<track>.pool`, `engine.pool`, `reward.pool`.

    Pools with the same devices share their workers; pools with some devices in common take turns on them. A pool of
    kind env has no devices: its members hold processes of an environment, which names it (`turns.pool`,
    `engine.environment.pool`).
    """

    devices: str | int | None = None
    """0-3, or 4,5, or all, or with a node group big:0-7."""
    kind: Literal["devices", "env"] = "devices"
    """devices: workers, one on each. env: processes of environments, without a device."""
    nodes: str | int | None = None
    """For kind env: nodes of the run that hold its members in turn, such as 0-1 or all, or a node group. None: all
    nodes of the cluster, those without devices too."""
    processes: PositiveInt = 1
    """For kind env: processes of each member."""
    cpus: NonNegative = 0.0
    """For kind env: cores that are reserved for each member; 0: none, they share those of what else is there."""
    served: bool = False
    """False: each device gets an equal share of every call, and one that dies ends the run. True, for engines: each
    device has a member, calls go to the one that is free, and one that dies is replaced with the present weights."""
    members: PositiveInt | None = None
    """Members of a served pool, or of one of kind env, to begin with; None: one on each device or node. `trainer scale`
    lets others join or leave."""
    samples_per_call: PositiveInt | None = None
    """Smallest number of samples of a call of a served pool, always whole groups. None: two calls for each device."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Short form of the pools `train`, `rollout` and `reward`, with the devices of each. If all are None, every worker
    holds everything."""

    train: str | int | None = None
    """Devices of the trainer."""
    rollout: str | int | None = None
    """Devices of the engine; None: with the trainer."""
    reward: str | int | None = None
    """Devices of the reward models; None: with the engine."""


_TRAINER = frozenset({"settings", "collector", "learner", "record", "clock", "stop", "experience"})


@dataclass(frozen=True, kw_only=True)
class Residency:
    """What leaves the device in phases that do not need it; `unirl.trainer.residency` has the table of phases."""

    sleep_engine: bool = False
    """The engine sleeps while the policy trains."""
    offload_weights: bool = False
    """The trained weights move to host memory while an engine with separate weights samples."""
    offload_optimizer: bool = False
    """Optimizer state and copies of the policy move to host memory while samples are generated and scored."""
    offload_reward: bool = False
    """Reward models move to host memory while nothing is scored."""


@dataclass(frozen=True, kw_only=True)
class ExperienceReplay:
    """Groups of earlier rollouts that are trained on again, see docs/guides/async.md."""

    capacity: PositiveInt
    """Groups that are kept, the newest."""
    groups_per_rollout: PositiveInt
    """Kept groups that train with each rollout, behind its own."""
    order: Literal["uniform", "recent", "advantage"] = "uniform"
    """Which: all alike, the newest, or with probability in proportion to the mean |advantage|."""
    max_staleness: PositiveInt | None = None
    """Rollouts by which the weights that train may be newer than those that made a group; None: any number."""
    best_of: PositiveInt | None = None
    """Samples kept of each group, those of the highest advantages, and none of a group whose rewards are all equal;
    None: whole groups."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which phases of a run overlap, see docs/guides/async.md."""

    kind: Literal["sync", "pipelined", "one_step_off", "async", "hybrid"] = "sync"
    """sync: collect, then train. pipelined: requests of a rollout are trained on while its next ones are collected.
    async: rollouts are collected while others are trained on, up to `max_staleness`. one_step_off: async with one
    version and whole rollouts. hybrid: async, and devices that train generate while training waits for samples."""
    max_staleness: NonNegativeInt | None = None
    """Versions by which the weights that train may be newer than those that a sample began with; None: 1 of async."""
    groups_per_request: PositiveInt | None = None
    """Prompts that the engine is asked for at once; None: those of a rollout. New weights are taken in between."""
    window: UnitInterval = 0.0
    """Share of a rollout's requests, W of them, but at least 1: it is made of those that finish first among its own and
    the next W - 1, so that a slow one holds up none. 0: requests are trained on in order."""
    too_old: Literal["wait", "drop", "correct"] = "wait"
    """What becomes of a request that was overtaken until it is too old for the next rollout. wait: it is waited for.
    drop: it is left out, and its prompts are asked again. correct: it is trained on when it is finished, at any age."""
    requests_at_once: PositiveInt | None = None
    """Requests that engines of served pools have at most, so that members which are done with one begin the next; None:
    all that `max_staleness` allows. Other engines take one."""
    on_push: Literal["finish", "retract", "in_place"] = "finish"
    """What becomes of texts that are being written when new weights are ready. finish: the push waits for them.
    retract: they end early, keep their tokens, and go on with the new weights, which read those tokens again, and
    stages that had not begun follow.
    in_place: as retract, but the engine keeps the keys and values of the old weights, and nothing is read again."""
    replay: str | None = None
    """File requests.jsonl of a run whose order is repeated: each request begins with the same version."""
    experience: ExperienceReplay | None = None
    """Groups of earlier rollouts that are trained on again; None: none."""

    def window_of(self, batch_size: int) -> int:
        """W in requests."""
        return max(1, math.floor(self.window * (batch_size // (self.groups_per_request or batch_size))))

    @property
    def staleness(self) -> int:
        """Versions by which fresh samples may be old."""
        if self.kind in ("sync", "pipelined"):
            return 0
        return 1 if self.max_staleness is None else self.max_staleness

    @property
    def takes_older(self) -> bool:
        """True if samples may be of older weights than those that train."""
        return self.staleness > 0 or self.experience is not None


@dataclass(frozen=True, kw_only=True)
class Scouts:
    """Cheap candidates of each prompt (Sol-RL), see docs/reference/algorithms.md. The best and the worst by reward are
    made again exactly from their noise; these are the `sampling.samples_per_prompt` samples of the rollout."""

    per_prompt: PositiveInt
    """Candidates of each prompt."""
    num_inference_steps: PositiveInt | None = None
    """Their denoising steps; None: as `sampling`."""
    autocast_precision: Literal["fp32", "bf16", "fp16"] | None = None
    """The precision that they are sampled in; None: as `sampling`."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples that a run keeps in its folder `samples`, see docs/reference/run_directory.md."""

    per_rollout: NonNegativeInt = 32
    """Samples per track, every `media_interval` rollouts; whole groups if the first one fits."""
    per_evaluation: NonNegativeInt = 16
    """Samples per track; also the number that grids and tables show."""
    videos: NonNegativeInt = 4
    """Whole videos per rollout or evaluation. Grids also show frames of the others."""
    image_format: Literal["png", "webp"] = "png"
    """png is exact; webp is lossy and much smaller."""
    max_mb: Positive | None = 1000
    """Megabytes. Above this, samples of the oldest rollouts are deleted, then of the oldest evaluations; null: no
    limit."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The keys of a recipe besides those of `PolicySections`. Fields without a default are required; null means the
    default."""

    recipe: str
    """Name of the recipe; runs are written into runs/<recipe>."""
    seed: Seed
    runtime: Literal["local", "ray"]
    device: DeviceChoice
    """`auto` is the accelerator of this machine, or the CPU; see docs/reference/devices.md."""
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
            if_taken=frozenset({"elsewhere"}),
            own_keys=frozenset({"track", "pool", "pools"}),
        ),
    ]
    """`reward.track` names the track whose media are scored if it is not the root; its ancestors get the rewards too.
    `reward.pool` names the pool whose workers score; default: the pool `reward` if there is one, else that of the last
    stage. `reward.pools` names pools of single scorers, by scorer; at least one scorer stays in `reward.pool`."""

    sampling: Annotated[Node | None, _SAMPLING] = None
    engine: Annotated[Node | None, _ENGINE] = None
    """`engine.policy` names the policy that it samples from, if there are several, and `engine.pool` the pool of its
    workers."""
    turns: Annotated[Node | None, _TURNS] = None
    """The environment that the engine takes turns with, see docs/guides/environments.md; None: a sample is one turn."""
    stages: Mapping[str, StageSections] = dataclasses.field(default_factory=dict)
    """The stages of a request, by track; absent: one engine makes one track."""
    policies: Mapping[str, PolicySections] = dataclasses.field(default_factory=dict)
    """Several policies, by name, each also with the keys of `NamedPolicySections`; absent: the flat sections are the
    only policy."""
    cluster: Cluster = Cluster()
    placement: Placement = Placement()
    pools: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: each has the keys of `Pool`
    """Any number of pools, by name; `train` is the pool of the trainer."""
    media_interval: NonNegativeInt = 0
    """Rollouts between those whose samples are kept and shown; 0 shows none."""
    samples: Samples = Samples()
    max_cpu_s: Positive | None = None
    """CPU seconds of training after which the run ends; None: only num_rollouts counts."""
    run_dir: str | None = None
    """None: runs/<recipe>/<time>."""
    resume: str | None = None
    """"auto", or the path of a run."""
    resume_changes: Literal["refuse", "allow"] = "refuse"
    max_restarts: NonNegativeInt = 0
    """Times that all workers are started again, from the newest checkpoint, when some die; then the run ends."""
    save: Save = Save()
    residency: Residency = Residency()
    schedule: Schedule = Schedule()
    scouts: Scouts | None = None
    """Cheap candidates that choose which samples are made; None: all samples are made."""
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
    """The training loop."""
    modality: Annotated[
        Node | None,
        Component(kind="unirl.trainer.modality.Modality", default="unirl.trainer.diffusion.DiffusionModality"),
    ] = None
    """The kind of samples: makes requests and balances devices."""
    trackers: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # Any: components by name, or None
    """Components by name, each with `enabled` in addition to its own keywords."""


RUN_RULES = (
    "unirl.config.placement",
    "unirl.config.environment_pools",
    "unirl.distributed.rules",
    "unirl.trainer.rules",
    "unirl.trainer.stage_rules",
    "unirl.trainer.reward_rules",
    "unirl.trainer.residency_rules",
    "unirl.trainer.guardrail_rules",
    "unirl.trainer.loops.rules",
    "unirl.trainer.experience_rules",
    "unirl.trainer.scout_rules",
)
"""Modules with rules of the whole run, which take only the run; see `unirl.types.recipe`."""


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
    """The plain sections among the fields of a section, by key: dataclasses, optional ones included."""
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
    """Build a plain section from a checked recipe: null and absent keys get the default, nested plain sections are
    built, components stay mappings."""
    inner = plain_sections(section)
    given = {key: value for key, value in values.items() if value is not None}
    return section(**{key: built(inner[key], value) if key in inner else value for key, value in given.items()})
