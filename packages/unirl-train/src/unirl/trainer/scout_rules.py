"""Rules of `scouts`: what samples, what trains and what divides."""

from __future__ import annotations

from unirl.config.placement import groups_of_run, num_shards
from unirl.config.runs import ComposedRun
from unirl.trainer.loops.rules import LOOP
from unirl.types.recipe import Messages

MODALITY = "unirl.trainer.diffusion.DiffusionModality"


def scouts_denoise_alone(run: ComposedRun) -> Messages:
    """One stage makes images or videos along the flow, and the loop waits for them."""
    if run.file.scouts is None:
        return
    if run.is_staged:
        yield f"scouts are of one stage, and this run has {', '.join(stage.at for stage in run.stages)}. Remove scouts."
        return
    stage = run.stages[0]
    if stage.sampling.ability("samples_tokens") or stage.sampling.ability("samples_actions"):
        yield f"scouts denoise with fewer steps, and {stage.sampling.name} samples no latents. Remove scouts."
        return
    if stage.engine.ability("needs_images"):
        yield f"scouts are sampled, and {stage.engine.name} returns what the data brings. Remove scouts."
    if run.modality.path != MODALITY:
        yield f"scouts make requests of {MODALITY}, and modality is {run.modality.path}. Remove one of them."
    eta = stage.sampling.get("eta", 1.0)
    if eta != 0:
        yield (
            f"scouts follow the flow from the noise of the exact sample, and {stage.sampling.at}.eta = {eta} adds "
            "noise at each step, of which fewer steps have another share. Set eta: 0, or remove scouts."
        )
    if run.file.schedule.kind != "sync":
        yield (
            f"scouts are scored before the samples of a rollout are asked for, and schedule.kind = "
            f"{run.file.schedule.kind} asks ahead. Set schedule.kind: sync, or remove scouts."
        )
    if run.trainer.path != LOOP:
        yield f"scouts are asked by {LOOP}, trainer._target_ = {run.trainer.path} is another. Remove one of them."


def scouts_are_cheaper(run: ComposedRun) -> Messages:
    """There are more of them than exact samples, each costs less, and halves of the latter are best and worst."""
    own = run.file.scouts
    if own is None or run.is_staged:
        return
    kept, key = run.samples_per_prompt, run.samples_key
    if own.per_prompt <= kept:
        yield (
            f"scouts.per_prompt = {own.per_prompt} leaves nothing to choose for {key} = {kept} exact samples. Raise "
            "the first, or lower the second."
        )
    if kept % 2:
        yield f"scouts choose equally many best and worst samples, and {key} = {kept} is odd. Set an even number."
    steps, precision = run.sampling.get("num_inference_steps"), run.sampling.get("autocast_precision")
    cheap_steps = own.num_inference_steps or steps
    if None not in (cheap_steps, steps) and cheap_steps > steps:
        yield (
            f"scouts.num_inference_steps = {cheap_steps} exceeds {run.sampling.at}.num_inference_steps = {steps}. "
            "Lower it."
        )
    elif cheap_steps == steps and own.autocast_precision in (None, precision):
        yield (
            f"scouts have the {steps} steps and the precision {precision} of exact samples, so that they cost as much. "
            "Set scouts.num_inference_steps or scouts.autocast_precision."
        )


def scouts_divide(run: ComposedRun) -> Messages:
    """The candidates of a rollout divide over the devices that sample or score them."""
    own = run.file.scouts
    if own is None:
        return
    total = run.batch_size * own.per_prompt
    for place, group in enumerate(groups_of_run(run)):
        count = num_shards(run) if place == 0 else len(group.devices)
        if not group.given.is_served and total % count:
            yield (
                f"batch_size * scouts.per_prompt = {run.batch_size} * {own.per_prompt} = {total} is not divisible by "
                f"the {count} devices of {group.given.shown}. Change one of them."
            )


def scouts_fit_objectives(run: ComposedRun) -> Messages:
    """What trains judges finished samples by their rewards, without ratios of how they came about."""
    if run.file.scouts is None:
        return
    for own in (algorithm for policy in run.policies.values() for algorithm in policy.algorithms.values()):
        if own.ability("requires_reward_gradient"):
            yield f"{own.name} samples while it trains, so that there is nothing to choose. Remove scouts."
        elif own.ability("requires_sde"):
            yield (
                f"{own.name} weighs steps by the probability with which they were sampled, and scouts choose among "
                "samples by what came of them. Take an objective without ratios (parts/method=nft), or remove scouts."
            )
        elif own.ability("teacher_option"):
            yield f"{own.name} learns from its teacher, not from rewards, by which scouts choose. Remove scouts."


RULES = (scouts_denoise_alone, scouts_are_cheaper, scouts_divide, scouts_fit_objectives)
