"""The configuration file of the server: what it may say, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from unirl.reward.catalog import CATALOG
from unirl.types.errors import ConfigError

Scheduling = Literal["pack", "spread"]
Load = Literal["start", "demand"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerSettings:
    """`server:` of the file. Sizes are of one request where nothing else is said."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but this machine needs a token."""
    port: int = 8080
    token_file: str | None = None
    """File with the bearer token that clients must send; its first line counts."""
    score_timeout_s: float = 120.0
    """Waiting and scoring of one request; what is not scored then is cancelled and has an error. A replica that takes
    longer over one batch is killed."""
    header_timeout_s: float = 10.0
    """Time a client has to send the headers of a request."""
    body_timeout_s: float = 60.0
    """Time a client has to send its body."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, time for the requests that are in work."""
    start_timeout_s: float = 1800.0
    """Time for a replica to load its scorer and warm up."""
    max_connections: int = 1024
    """Open connections. Beyond it the one that has rested longest makes room; where all have requests in work, new
    ones may ask anything but POST /score. Fewer where the process may not open as many files (ulimit -n)."""
    max_connections_per_address: int = 512
    """The same of one IPv4 address or of one IPv6 network of 64 bits."""
    max_body_bytes: int = 256 * 1024**2
    max_pending_bytes: int = 4 * 1024**3
    """Bodies, as far as they have arrived, and decoded media of all requests in work; more get 429."""
    max_samples: int = 1024
    max_image_pixels: int = 4096 * 4096
    """Limit per image or frame."""
    max_video_frames: int = 1024
    max_media_bytes: int = 1024**3
    """Media when decoded."""
    max_video_bytes: int = 256 * 1024**2
    """One video when decoded: some hundred bytes of a file can become that much."""
    max_sound_s: float = 600.0
    """Seconds of one sound, of a video, a prompt or alone."""
    max_text_chars: int = 1_000_000
    video_roots: list[str] = field(default_factory=list)
    """Folders below which `video_path` may point, links resolved. None: the field is refused."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.type in ("int", "float") and not (_is_number(value) and value > 0):
                raise ConfigError(f"server.{entry.name} = {value!r} must be a positive number")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"server.host = {self.host!r} must be an address such as 127.0.0.1")
        if not isinstance(self.video_roots, list) or not all(isinstance(root, str) for root in self.video_roots):
            raise ConfigError(f"server.video_roots = {self.video_roots!r} must be a list of folders")


@dataclass(frozen=True)
class ClusterSettings:
    """`cluster:` of the file: replicas are actors of a Ray cluster, on any of its nodes. Needs the extra `ray`."""

    ray_address: str = "auto"
    """As ray.init takes it; "auto" is the cluster that this node belongs to, "local" a new one on this machine."""
    namespace: str | None = None
    """Ray's namespace of the server."""

    def __post_init__(self) -> None:
        for name, value in (("ray_address", self.ray_address), ("namespace", self.namespace)):
            if not (isinstance(value, str) and value) and not (name == "namespace" and value is None):
                raise ConfigError(f"cluster.{name} = {value!r} must be a text")


@dataclass(frozen=True)
class RewardSettings:
    """One entry of `rewards:`."""

    name: str
    scorer: str
    """A name of unirl.reward.catalog, or the dotted path of a class."""
    params: Mapping[str, Any] = field(default_factory=dict)  # Any: constructor keywords of any scorer
    num_replicas: int = 1
    num_gpus: float = 1.0
    """GPUs per replica; a fraction shares a GPU. 0 runs on the CPU."""
    num_cpus: float = 1.0
    """Threads of each replica's torch, at least one."""
    max_concurrency: int = 1
    """Batches that one replica works on at a time; more than 1 is for scorers that wait for another service."""
    scheduling: Scheduling = "pack"
    """Fractions of GPUs: fill one before the next, or take the emptiest."""
    runtime_env: str | None = None
    """A pip requirements file, seen from the configuration file; the replica runs under `uv run` with it."""
    packages: list[str] = field(default_factory=list)
    """Requirements that `uv run --with` adds to the replica's environment."""
    python: str | None = None
    """Interpreter of the replica; its environment must have unirl-reward-server."""
    max_batch: int | None = None
    """Samples of one batch, which may come from several requests; None takes the scorer's batch_size."""
    max_wait_ms: float = 5.0
    """Time a sample waits for others to fill its batch."""
    max_queue: int = 4096
    """Samples that wait; a request that would make more gets 429."""
    load: Load = "start"
    """Load the scorer when the server starts, or at the first request for it."""
    idle_stop_s: float | None = None
    """Stop the replicas after this time without requests, which frees their memory. They come back on demand."""
    warm_up: bool = True
    """Score one grey image before the replica counts as ready."""

    def __post_init__(self) -> None:
        where = f"reward {self.name}"
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ConfigError(f"a reward cannot be called {self.name!r}; use a name without '/'")
        if not isinstance(self.params, Mapping):
            raise ConfigError(f"{where}: params = {self.params!r} must be a mapping of constructor keywords")
        for name in ("num_replicas", "max_concurrency", "max_queue", "max_batch"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1) and not (name == "max_batch" and value is None):
                raise ConfigError(f"{where}: {name} = {value!r} must be a whole number of at least 1")
        for name in ("num_gpus", "num_cpus", "max_wait_ms", "idle_stop_s"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0) and not (name == "idle_stop_s" and value is None):
                raise ConfigError(f"{where}: {name} = {value!r} must be a number of at least 0")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ConfigError(f"{where}: num_gpus = {self.num_gpus} must be a fraction of one GPU or a whole number")
        for name, choices in (("scheduling", get_args(Scheduling)), ("load", get_args(Load))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{where}: {name} = {getattr(self, name)!r} must be one of {choices}")
        if self.python is not None and (self.runtime_env or self.packages):
            raise ConfigError(f"{where}: give python, or runtime_env and packages; an interpreter has its own packages")
        if not isinstance(self.scorer, str):
            raise ConfigError(f"{where}: scorer = {self.scorer!r} must be a name or a dotted path")
        if self.scorer not in CATALOG and "." not in self.scorer:
            raise ConfigError(f"{where}: no scorer is called {self.scorer!r}. {_near(self.scorer, sorted(CATALOG))}")
        wanted = self.params.get("tensor_parallel_size", 1)
        if _is_number(wanted) and wanted > max(self.num_gpus, 1):
            raise ConfigError(
                f"{where}: tensor_parallel_size = {wanted} needs as many GPUs; num_gpus = {self.num_gpus}"
            )

    @property
    def target(self) -> str:
        """Dotted path of the scorer's class."""
        return CATALOG[self.scorer].target if self.scorer in CATALOG else self.scorer


@dataclass(frozen=True)
class Settings:
    """The whole file."""

    rewards: tuple[RewardSettings, ...]
    server: ServerSettings = field(default_factory=ServerSettings)
    cluster: ClusterSettings | None = None
    """None runs every replica on this machine."""

    def __post_init__(self) -> None:
        names = [reward.name for reward in self.rewards]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not names or twice:
            raise ConfigError(f"rewards must list at least one reward, each name once; twice: {twice}")


def read_settings(path: str | None) -> Settings:
    """The settings in a YAML or JSON file; None reads the file that comes with the server.

    Raises ConfigError naming the file and the key.
    """
    file = files("unirl.reward_server") / "default.yaml" if path is None else Path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    try:
        return parsed_settings(content, Path(path).parent if path is not None else Path())
    except ConfigError as error:
        raise ConfigError(f"{path or 'the default configuration'}: {error}") from error


def parsed_settings(content: Any, folder: Path) -> Settings:  # Any: values of a configuration file
    """The settings that a file's content says. folder: where the file lies; relative files are seen from there."""
    if not isinstance(content, dict):
        raise ConfigError(f"it must hold a mapping with `rewards`, got {type(content).__name__}")
    _check_keys(content, ["server", "cluster", "rewards"], "")
    server, cluster = _section(content, "server", ServerSettings), _section(content, "cluster", ClusterSettings)
    listed = content.get("rewards")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError("rewards must be a list of mappings, each with name and scorer")
    return Settings(
        rewards=tuple(_reward(entry, i, folder) for i, entry in enumerate(listed)),
        server=ServerSettings(**server),
        cluster=ClusterSettings(**cluster) if "cluster" in content else None,
    )


def _section(content: dict[str, Any], name: str, owner: type[ServerSettings] | type[ClusterSettings]) -> dict[str, Any]:
    found = content.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name} must be a mapping, got {type(found).__name__}")
    _check_keys(found, _names(owner), f"{name}.")
    return found


def _reward(entry: dict[str, Any], index: int, folder: Path) -> RewardSettings:  # Any: values of a file
    where = f"rewards[{index}]."
    _check_keys(entry, _names(RewardSettings), where)
    for key in ("name", "scorer"):
        if key not in entry:
            raise ConfigError(f"{where}{key} is missing")
    found = dict(entry)
    found["params"] = found.get("params") or {}
    if found.get("runtime_env"):
        requirements = (folder / str(found["runtime_env"])).resolve()
        if not requirements.is_file():
            raise ConfigError(f"{where}runtime_env = {found['runtime_env']!r}: there is no such requirements file")
        found["runtime_env"] = str(requirements)
    return RewardSettings(**found)


def _names(owner: type[ServerSettings] | type[ClusterSettings] | type[RewardSettings]) -> list[str]:
    return [entry.name for entry in dataclasses.fields(owner)]


def _check_keys(found: Mapping[Any, Any], known: list[str], where: str) -> None:  # Any: values of a file
    for key in found:
        if key not in known:
            raise ConfigError(f"unknown key {where}{key}. {_near(str(key), known)}")


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=3)
    return f"Did you mean {' or '.join(near)}?" if near else f"Known are {', '.join(known)}."


def _is_number(value: Any) -> bool:  # Any: values of a file
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
