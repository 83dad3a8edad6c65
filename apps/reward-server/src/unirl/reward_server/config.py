"""Reads the server's configuration file and builds its scorers."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unirl.reward.compose import Aggregation
from unirl.reward.function import imported
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """What a configuration file may say."""

    scorers: Mapping[str, Any] = field(default_factory=dict)  # Any: constructor keywords of any scorer
    """Name -> `_target_` (dotted path of the class) and its keywords."""
    weights: Mapping[str, float] | None = None
    """Scorer -> weight; absent means 1 each."""
    aggregation: Aggregation = "weighted_sum"
    max_body_bytes: int = 64 * 1024**2
    """Larger requests get 413."""
    max_image_pixels: int = 4096 * 4096
    """Larger pictures get 400 before they are decoded."""
    max_queued: int = 64
    """Requests scored or waiting at one time; more get 503."""
    score_timeout_s: float = 300.0
    """Waiting and scoring of one request; longer gets 504."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_image_pixels", "max_queued", "score_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be positive")


def read_config(path: str) -> ServerConfig:
    """The configuration in a .json, .yaml or .yml file. Raises ConfigError naming the file and the key."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error}") from error
    content = _parsed_yaml(text, path) if file.suffix in (".yaml", ".yml") else _parsed_json(text, path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping, got {type(content).__name__}")
    known = [entry.name for entry in dataclasses.fields(ServerConfig)]
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3) or known
            raise ConfigError(f"{path}: unknown key {key!r}. Did you mean one of {near}?")
    try:
        return ServerConfig(**content)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def build_service(config: ServerConfig) -> RewardService:
    """The scorers of a configuration. A sample that cannot be scored fails alone: clients choose what follows."""
    if not isinstance(config.scorers, Mapping) or not config.scorers:
        raise ConfigError("scorers must map at least one name to a _target_ and its keywords")
    for name, node in config.scorers.items():
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise ConfigError(f"scorers.{name} has no _target_, the dotted path of a scorer class; it is {node!r}")
    scorers = {str(name): _built(node, f"scorers.{name}") for name, node in config.scorers.items()}
    return RewardService(scorers, weights=config.weights, on_failure="drop_group", aggregation=config.aggregation)


def _built(node: Any, where: str) -> Any:  # Any: values of a configuration file
    """`node` with every mapping that has a `_target_` replaced by the object it describes."""
    if isinstance(node, list):
        return [_built(item, f"{where}[{i}]") for i, item in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    ready = {str(key): _built(value, f"{where}.{key}") for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return ready
    try:
        target = imported(str(node["_target_"]))
        inspect.signature(target).bind(**ready)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}, _target_ {node['_target_']}: {error}") from error
    return target(**ready)


def _parsed_json(text: str, path: str) -> Any:  # Any: values of a configuration file
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def _parsed_yaml(text: str, path: str) -> Any:  # Any: values of a configuration file
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{path} needs PyYAML. Install it with: pip install pyyaml, or write the file as JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
