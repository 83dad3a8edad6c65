"""What makes a category of bytes smaller in a phase: in words, and as changes of a recipe.

Changes that cost learning, such as fewer samples or other weights that train, are named and never made.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unirl.app.memory import PRODUCTS, trained_steps
from unirl.app.rehearsal.categories import (
    ACTIVATIONS,
    COPIES,
    ENGINE,
    GRADIENTS,
    OPTIMIZER,
    REWARD_MODELS,
    SAMPLES,
    TEXT_ENCODERS,
)
from unirl.config.runs import ComposedRun
from unirl.types.recipe import Part, Policy

Changes = tuple[str, ...]
"""Overrides, as `key=value`."""
Proposals = Callable[[ComposedRun, float], Iterator[Changes]]
"""Changes of a recipe that leave about a fraction of a category, or as near to it as the knob goes; best ones first. A
fraction above 1 is room to grow: what is faster and takes up to so many times as much."""

RECOMPUTED, OFFLOADED = 0.1, 0.13
"""Fractions of a model's activations that recomputation and offloading leave, about (docs/guides/large_models.md)."""


@dataclass(frozen=True)
class Knob:
    """One key of a recipe, or several that do the same."""

    says: str
    """What to set, as reports name it."""
    proposes: Proposals | None = None
    """None for what is left to the user."""
    cost: int = 0
    """Place in the order in which a search tries knobs: copies over the bus, smaller forwards, more FLOPs, other axes,
    rounding."""


# Counts ----------------------------------------------------------------------------------------------------------


def _rows(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for policy in run.policies.values():
        micro = policy.stack.get("micro_batch_size", 1)
        for stage in run.stages:
            algorithm = policy.algorithms.get(str(stage.track))
            if algorithm is None or "rows_per_forward" not in algorithm.keywords:
                continue
            whole = micro * trained_steps(algorithm, stage.sampling)
            now = min(algorithm.get("rows_per_forward") or whole, whole)
            for number in _parts(whole, now, fraction):
                yield (f"{algorithm.at}.rows_per_forward={number}",)


def _micro_batch(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    """For losses of a whole micro-batch in one forward, and to grow where all rows of one are."""
    for policy in run.policies.values():
        cuts_rows = any("rows_per_forward" in algorithm.keywords for algorithm in policy.algorithms.values())
        is_cut = any(algorithm.get("rows_per_forward") for algorithm in policy.algorithms.values())
        if is_cut or (cuts_rows and fraction < 1):
            continue
        now, shards = policy.stack.get("micro_batch_size", 1), run.num_devices // policy.ranks_per_sample
        samples = run.batch_size * run.samples_per_prompt // shards // policy.stack.get("num_updates_per_batch", 1)
        for number in _parts(samples if fraction > 1 else now, now, fraction):
            yield (f"{policy.stack.at}.micro_batch_size={number}",)


def _forward_batch(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for stage in run.stages:
        if "forward_batch_size" not in stage.engine.keywords:
            continue
        own = run.batch_size * run.samples_per_prompt * run.policy.ranks_per_sample // run.num_devices
        now = min(stage.engine.get("forward_batch_size") or own, own)
        for number in _parts(own, now, fraction):
            yield (f"{stage.engine.at}.forward_batch_size={number}",)


def _decode_batch(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for policy in run.all_policies.values():
        for pipeline in policy.pipelines.values():
            now = pipeline.get("decode_batch_size")
            if isinstance(now, int) and fraction < 1:
                for number in _parts(now, now, fraction):
                    yield (f"{pipeline.at}.decode_batch_size={number}",)


def _parts(whole: int, now: int, fraction: float) -> Iterator[int]:
    """Divisors of `whole` from `fraction * now` downwards, and the smallest; above `now` where there is room."""
    divisors = [number for number in range(whole, 0, -1) if whole % number == 0]
    if fraction > 1:
        yield from (number for number in divisors if now < number <= fraction * now)
        return
    smaller = [number for number in divisors if number < now]
    near = [number for number in smaller if number <= fraction * now]
    yield from near or smaller[-1:]


# Switches --------------------------------------------------------------------------------------------------------


def _recompute(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for fsdp, changed in _fsdp(run):
        now = {True: "full"}.get(fsdp.get("activation_checkpointing", False), fsdp.get("activation_checkpointing"))
        kept = {"full": RECOMPUTED, "selective": PRODUCTS}.get(str(now), 1.0)
        for name, own in (("false", 1.0), ("selective", PRODUCTS), ("full", RECOMPUTED)):
            is_near = own <= fraction * kept if name != "full" else fraction < 1
            if (own < kept if fraction < 1 else own > kept) and is_near:
                yield changed(f"activation_checkpointing={name}")


def _offload_activations(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for fsdp, changed in _fsdp(run):
        is_on = bool(fsdp.get("activation_offload"))
        if is_on and fraction >= 1 / OFFLOADED:
            yield changed("activation_offload=false")
        if not is_on and fraction < 1:
            yield changed("activation_offload=true")


def _reshard(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for fsdp, changed in _fsdp(run):
        is_on = fsdp.get("reshard_after_forward", True)
        if is_on != (fraction < 1) and run.num_devices > 1:
            yield changed(f"reshard_after_forward={str(not is_on).lower()}")


def _share_tokens(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    if fraction > 1 or run.num_devices == 1 or any(policy.ranks_of_layers > 1 for policy in run.policies.values()):
        return
    changes: list[str] = []
    for policy in run.policies.values():
        at = f"{policy.backend.at}.topology"
        if not policy.backend.get("topology"):
            changes.append(f"{at}._target_=unirl.train.configs.TrainTopology")
        changes.append(f"{at}.sp={2 * policy.ranks_of_tokens}")
    yield tuple(changes)


def _host_states(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for policy in run.policies.values():
        optimizer, fsdp = policy.backend.get("optimizer") or {}, policy.backend.get("fsdp") or {}
        if fraction < 1 and run.device != "cpu" and not optimizer.get("offload") and not fsdp.get("cpu_offload"):
            yield (f"{policy.backend.at}.optimizer.offload=true",)


def _small_states(run: ComposedRun, fraction: float) -> Iterator[Changes]:
    for policy in run.policies.values():
        optimizer = policy.backend.get("optimizer") or {}
        if fraction < 1 and not optimizer.get("states"):
            yield (f"{policy.backend.at}.optimizer.states=8bit",)


def _switch(parts: Callable[[Policy], Part], key: str) -> Proposals:
    """Sets a key of a part of each policy to true."""

    def proposes(run: ComposedRun, fraction: float) -> Iterator[Changes]:
        owners = [parts(policy) for policy in run.all_policies.values()]
        able = [part for part in owners if key in part.keywords and not part.get(key)]
        if able and fraction < 1:
            yield tuple(f"{part.at}.{key}=true" for part in able)

    return proposes


def _residency(key: str) -> Proposals:
    def proposes(run: ComposedRun, fraction: float) -> Iterator[Changes]:
        if fraction < 1 and not getattr(run.file.residency, key):
            yield (f"residency.{key}=true",)

    return proposes


def _fsdp(run: ComposedRun) -> Iterator[tuple[Mapping[str, Any], Callable[[str], Changes]]]:  # Any: a recipe's values
    """The section of each policy, and changes with a value in it."""
    for policy in run.policies.values():
        if "fsdp" in policy.backend.keywords:
            own, at = policy.backend.get("fsdp") or {}, f"{policy.backend.at}.fsdp"
            new = () if own else (f"{at}._target_=unirl.train.configs.FSDPConfig",)
            yield own, functools.partial(_changed, new, at)


def _changed(new: Changes, at: str, change: str) -> Changes:
    return (*new, f"{at}.{change}")


# The table -------------------------------------------------------------------------------------------------------

ROWS = Knob("algorithm.rows_per_forward lower", _rows, 1)
MICRO_BATCH = Knob("stack.micro_batch_size lower", _micro_batch, 1)
RECOMPUTE = Knob("backend.fsdp.activation_checkpointing=selective or full", _recompute, 2)
OFFLOAD = Knob("backend.fsdp.activation_offload=true", _offload_activations, 2)
RESHARD = Knob("backend.fsdp.reshard_after_forward=true", _reshard, 1)
SHARE_TOKENS = Knob("backend.topology.sp=2", _share_tokens, 3)
FORWARD_BATCH = Knob("engine.forward_batch_size lower", _forward_batch, 1)
DECODE_BATCH = Knob("pipeline.decode_batch_size lower", _decode_batch, 1)
MORE_DEVICES, LORA = Knob("more devices"), Knob("parts/train=lora")
REST_OPTIMIZER = Knob("residency.offload_optimizer=true", _residency("offload_optimizer"))
HOST_STATES = Knob("backend.optimizer.offload=true", _host_states)
REST_REWARD = Knob("residency.offload_reward=true", _residency("offload_reward"))
REST_ENCODERS = Knob("bundle.rest_text_encoders=true", _switch(lambda policy: policy.bundle, "rest_text_encoders"))
SLEEP = Knob("residency.sleep_engine=true", _residency("sleep_engine"))
RESTING = {OPTIMIZER: (REST_OPTIMIZER,), COPIES: (REST_OPTIMIZER,)}
SAMPLING = (FORWARD_BATCH, DECODE_BATCH, Knob("bundle.vae_tile_pixels"), RESHARD)

KNOBS: Mapping[str, Mapping[str, tuple[Knob, ...]]] = {
    "train": {
        ACTIVATIONS: (ROWS, MICRO_BATCH, RECOMPUTE, OFFLOAD, RESHARD, SHARE_TOKENS),
        REWARD_MODELS: (REST_REWARD,),
        ENGINE: (SLEEP, Knob("the engine's share of the memory lower"), Knob("parts/layout=separate")),
    },
    "rollout": {ACTIVATIONS: SAMPLING, **RESTING, REWARD_MODELS: (REST_REWARD,)},
    "reward": RESTING,
    "eval": {ACTIVATIONS: SAMPLING, **RESTING},
}
"""What makes a category smaller in one phase."""
ALWAYS: Mapping[str, tuple[Knob, ...]] = {
    SAMPLES: (Knob("batch_size lower"), Knob("engine.media_bits=8")),
    OPTIMIZER: (HOST_STATES, Knob("backend.optimizer.states=8bit", _small_states, 4), MORE_DEVICES, LORA),
    GRADIENTS: (MORE_DEVICES, LORA),
    COPIES: (MORE_DEVICES, LORA),
    ENGINE: (Knob("the engine's share of the memory lower"), Knob("parts/layout=separate")),
    TEXT_ENCODERS: (REST_ENCODERS,),
}
"""And in all of them."""


def knobs_of(phase: str, category: str) -> tuple[Knob, ...]:
    """What makes a category smaller in a phase, that of the phase first."""
    return tuple(dict.fromkeys(itertools.chain(KNOBS.get(phase, {}).get(category, ()), ALWAYS.get(category, ()))))
