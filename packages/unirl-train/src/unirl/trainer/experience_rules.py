"""Rules of `schedule.experience`: groups of earlier rollouts fit the batch, the objective and the rest of the loop."""

from __future__ import annotations

import math

from unirl.config.placement import num_shards
from unirl.config.runs import ComposedRun
from unirl.trainer.loops.rules import LOOP, steps_of_rollouts_that_differ
from unirl.types.recipe import Messages

KEY = "schedule.experience"


def experience_says_what_it_does(run: ComposedRun) -> Messages:
    """What is kept suffices for what is drawn, and the loop is one that adds it."""
    given = run.file.schedule.experience
    if given is None:
        return
    if given.groups_per_rollout > given.capacity:
        yield (
            f"{KEY}.groups_per_rollout = {given.groups_per_rollout} exceeds {KEY}.capacity = {given.capacity}. Raise "
            "the capacity."
        )
    if given.order == "recent" and given.capacity > max(run.batch_size, given.groups_per_rollout):
        yield (
            f"{KEY}.order = recent draws the last groups alone, so that all but {run.batch_size} of {KEY}.capacity = "
            f"{given.capacity} are never drawn. Lower it, or take order: uniform."
        )
    if run.trainer.path != LOOP:
        yield f"{KEY} is added by {LOOP}, and trainer._target_ = {run.trainer.path} names another. Remove one of them."


def experience_divides(run: ComposedRun) -> Messages:
    """The samples of the added groups divide over devices and updates, as fresh ones do."""
    given = run.file.schedule.experience
    selection = {} if run.selection is None else run.selection.node
    if given is None or selection.get("drop_zero_variance"):
        return  # groups have as many samples as differ
    per_group = selection.get("best_of") or run.samples_per_prompt
    if given.best_of is not None:
        per_group, whole = given.best_of, per_group
        if given.best_of >= whole:
            yield f"{KEY}.best_of = {given.best_of} is no part of the {whole} samples of a group. Lower it, or null."
            return
    shards = num_shards(run)
    updates = math.lcm(*(policy.stack.get("num_updates_per_batch", 1) for policy in run.policies.values()))
    if (given.groups_per_rollout * per_group) % (shards * updates):
        yield (
            f"{KEY}.groups_per_rollout * samples per group = {given.groups_per_rollout} * {per_group} = "
            f"{given.groups_per_rollout * per_group} is not divisible by {shards} devices * {updates} updates. Change "
            "groups_per_rollout."
        )


def experience_fits_objectives(run: ComposedRun) -> Messages:
    """Kept samples fit together with fresh ones, and with what the objective compares."""
    given = run.file.schedule.experience
    if given is None:
        return
    for own in (algorithm for policy in run.policies.values() for algorithm in policy.algorithms.values()):
        option = own.ability("unit_option")
        unit = own.ability("samples_per_unit") if option is None else own.number(option)
        if given.best_of is not None and (unit or 1) > 1:
            yield f"{KEY}.best_of tears apart the {unit} samples that {own.name} compares. Set best_of: null."
    yield from steps_of_rollouts_that_differ(run, KEY)
    for stage in run.stages:
        if stage.engine.ability("needs_texts"):
            yield f"{KEY} does nothing for given samples, which come again with the data. Remove it."


RULES = (experience_says_what_it_does, experience_divides, experience_fits_objectives)
