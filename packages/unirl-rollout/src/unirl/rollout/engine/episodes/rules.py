"""What the engine of episodes needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.rollout.environments import rules as environments
from unirl.types.errors import UniRLError
from unirl.types.recipe import Machine, Messages, Part, Run

SIZES = ("action_size", "image_shape", "state_size")
"""What a policy and its environment agree on, by the names that both have."""
GYMNASIUM = "unirl.rollout.environments.gymnasium.GymnasiumEnvironment"


def actions_are_sampled(own: Part, run: Run) -> Messages:
    """Episodes are played by the sampling of actions."""
    if not run.sampling.ability("samples_actions"):
        yield (
            f"{own.name} plays episodes, but {run.sampling.at}._target_ = {run.sampling.path}. Set it to "
            "unirl.types.sampling.ActionSamplingParams."
        )


def episodes_stand_alone(own: Part, run: Run) -> Messages:
    """No stage reads episodes, nor do they read other tracks."""
    if own.at != "engine":
        yield f"{own.at}: {own.name} plays no stage of several. Give it a recipe of one engine, at engine."


def environment_is_named(own: Part, run: Run) -> Messages:
    """There is an environment, and it has a class."""
    if own.inner.get("environment") is None:
        yield f"{own.at}.environment has no _target_. Set it to {GYMNASIUM} with an id, or to one of your own."


def environment_fits_by_its_class(own: Part, run: Run) -> Messages:
    """A policy whose shape the recipe says fits an environment whose class says its sizes."""
    environment = own.inner.get("environment")
    if environment is None:
        return
    known = {name: environment.ability(name) for name in SIZES}
    if any(value is not None for value in known.values()):
        yield from _misfits(own, run, run.policy.bundle.node.get("config"), known)


def environment_is_here(own: Part, run: Run, machine: Machine) -> Messages:
    """An environment of gymnasium exists on this machine, and its policy fits it."""
    environment = own.inner.get("environment")
    if environment is None or not environment.ability("is_gymnasium"):
        return
    if importlib.util.find_spec("gymnasium") is None:
        yield (
            f"{own.at}.environment: {environment.name} needs gymnasium. Install it with: pip install "
            "'unirl-rollout[gymnasium]'"
        )
        return
    from unirl.rollout.environments.gymnasium import GymnasiumEnvironment  # gymnasium is optional

    keywords = {key: environment.node[key] for key in ("id", "options", "max_moves") if key in environment.node}
    try:
        made = GymnasiumEnvironment(**keywords)
    except UniRLError as error:
        yield str(error)
        return
    spaces = made.spaces
    made.close()
    known = {name: getattr(spaces, name) for name in SIZES}
    config = run.policy.bundle.node.get("config") or _stored(run.policy.bundle.node.get("pretrained_model"))
    yield from _misfits(own, run, config, known)


def _stored(folder: object) -> Mapping[str, Any] | None:
    """The config.json of a checkpoint; None where there is none, which other rules say."""
    try:
        values = json.loads((Path(str(folder)).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, Mapping) else None


def _misfits(own: Part, run: Run, config: object, known: Mapping[str, Any]) -> Messages:
    if not isinstance(config, Mapping) or "action_size" not in config:
        return
    for name in SIZES:
        wanted, found = _plain(config.get(name)), _plain(known[name])
        if wanted != found:
            yield (
                f"{run.policy.bundle.at}: the policy has {name} = {wanted}, {own.at}.environment {found}. Give the "
                "environment a policy that was made for it."
            )


def _plain(value: Any) -> Any:  # Any: a number, or a shape in whatever sequence
    return list(value) if isinstance(value, (list, tuple)) else value


RULES = (
    *environments.RULES,
    actions_are_sampled,
    episodes_stand_alone,
    environment_is_named,
    environment_fits_by_its_class,
)
MACHINE_RULES = (environment_is_here,)
