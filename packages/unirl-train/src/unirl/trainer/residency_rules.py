"""Rules of a recipe's `residency`: everything that it names can move, and may move."""

from __future__ import annotations

import dataclasses

from unirl.config.placement import REWARD, TRAIN, group_of
from unirl.config.runs import ComposedRun
from unirl.types.recipe import Messages


def residency_moves_something(run: ComposedRun) -> Messages:
    """Every option frees memory on this device, and the engine's own sleep option agrees with
    `residency.sleep_engine`."""
    residency, engines = run.file.residency, [stage.engine for stage in run.stages]
    asked = [field.name for field in dataclasses.fields(residency) if getattr(residency, field.name)]
    if run.device == "cpu":
        for name in asked:
            yield f"residency.{name}: true does nothing with device: cpu, whose memory is the host's. Remove it."
        return
    if residency.sleep_engine and not any(engine.ability("can_sleep") for engine in engines):
        names = " and ".join(engine.name for engine in engines)
        yield f"residency.sleep_engine: true, but {names} frees nothing when it sleeps. Remove it."
    for engine in engines:
        option = engine.ability("sleep_option")
        given = None if option is None else engine.get(option)
        if residency.sleep_engine and option is not None and not given:
            yield (
                f"residency.sleep_engine: true, but with {engine.at}.{option} = {given} {engine.name} frees nothing "
                f"when it sleeps. Set {engine.at}.{option}."
            )
        elif given and not residency.sleep_engine:
            yield (
                f"{engine.at}.{option} = {given} does nothing while the engine never sleeps. Set "
                "residency.sleep_engine: true."
            )
        if residency.offload_weights and not engine.ability("has_own_weights"):
            yield (
                f"residency.offload_weights: true, but {engine.name} samples with the model that trains, so its "
                "weights are on the device throughout. Remove it."
            )
    moved = [name for name in ("offload_weights", "offload_optimizer") if name in asked]
    for policy in run.policies.values():
        if moved and (policy.backend.get("fsdp") or {}).get("cpu_offload"):
            yield (
                f"residency.{moved[0]}: true does nothing with {policy.backend.at}.fsdp.cpu_offload, which keeps them "
                "in host memory. Remove one of the two."
            )


def what_leaves_makes_room(run: ComposedRun) -> Messages:
    """Worker groups on separate devices need not free memory for each other."""
    residency, places = run.file.residency, tuple(stage.at for stage in run.stages)
    for knob, own, others in (
        ("sleep_engine", places, (TRAIN,)),
        ("offload_weights", (TRAIN,), places),
        ("offload_optimizer", (TRAIN,), (*places, REWARD)),
        ("offload_reward", (REWARD,), (*places, TRAIN)),
    ):
        here, there = ([group_of(run, place) for place in both] for both in (own, others))
        needed = {device for group in there for device in group.devices}
        if getattr(residency, knob) and not any(needed.intersection(group.devices) for group in here):
            yield (
                f"residency.{knob}: true frees memory that no other group needs: {here[0].given.shown} shares no "
                f"device with {' or '.join(dict.fromkeys(group.name for group in there))}. Remove it."
            )


RULES = (residency_moves_something, what_leaves_makes_room)
