"""What sampling parameters need of each other. See `unirl.types.recipe`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from unirl.types.errors import UniRLError
from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling import (
    ActionSamplingParams,
    ARSamplingParams,
    BaseSamplingParams,
    DiffusionSamplingParams,
)

_CLASSES: Mapping[str, type[BaseSamplingParams]] = {
    f"{each.__module__}.{each.__qualname__}": each
    for each in (DiffusionSamplingParams, ARSamplingParams, ActionSamplingParams)
}


def values_are_accepted(own: Part, run: Run) -> Messages:
    """The sampling parameters accept their own values (they import no heavy library)."""
    cls = next((_CLASSES[path] for path in own.lineage if path in _CLASSES), None)
    if cls is None:
        return
    known = set(cls.__dataclass_fields__) - {"scheduler"}
    try:
        cls(**{key: value for key, value in own.node.items() if key in known})
    except UniRLError as error:
        yield f"{own.at}: {error}"


def scheduler_fits(own: Part, run: Run) -> Messages:
    """The scheduler counts the steps that are sampled, and something uses it."""
    scheduler = own.get("scheduler")
    if scheduler is None:
        return
    steps, counted = own.get("num_inference_steps", 1), scheduler.get("num_steps")
    if counted is not None and counted != steps:
        yield (
            f"sampling.scheduler.num_steps = {counted} differs from sampling.num_inference_steps = {steps}. "
            "Write num_steps: ${sampling.num_inference_steps}."
        )
    outside = [step for step in scheduler.get("indices") or [] if isinstance(step, int) and not 0 <= step < steps]
    if outside:
        yield (
            f"sampling.scheduler.indices {outside} lie outside 0..{steps - 1} "
            f"(sampling.num_inference_steps = {steps}). Change one of the two."
        )
    if not own.get("eta", 0.0):
        yield "sampling.scheduler does nothing with sampling.eta = 0. Remove it (scheduler: null), or raise eta."
    if own.get("sde_indices") is not None:
        yield "sampling.sde_indices wins over sampling.scheduler, which then does nothing. Remove one of them."


def post_steps_exist(own: Part, run: Run) -> Messages:
    """Steps after the last stochastic one must exist if they are configured."""
    plain = {"post_solver": "euler", "post_step_ratio": 1}
    changed = [name for name, usual in plain.items() if own.get(name, usual) != usual]
    if not changed or not own.get("eta", 0.0):
        return
    if last_step_is_stochastic(own):
        yield (
            f"sampling.{changed[0]} = {own.get(changed[0])} is for the steps after the last stochastic one, but the "
            "last step is stochastic, and its log-probability is that of one step alone. Give sampling.scheduler a "
            "window that ends earlier, or set sampling.post_solver: euler and sampling.post_step_ratio: 1."
        )
    elif last_step_may_be_stochastic(own):
        yield (
            f"sampling.{changed[0]} = {own.get(changed[0])} is for the steps after the last stochastic one, but "
            f"{own.inner['scheduler'].name} makes the last step stochastic in some rollouts. End its choice earlier "
            "(sampling.scheduler.max_step or .fraction)."
        )


def guidance_has_negative_prompt(own: Part, run: Run) -> Messages:
    """Guidance needs its unconditional side said."""
    if own.ability("samples_tokens") is not False:
        return
    evaluated = None if run.evaluation is None else run.evaluation.node.get("guidance_scale")
    for name, value in (("sampling.guidance_scale", own.get("guidance_scale")), ("eval.guidance_scale", evaluated)):
        if value is not None and value > 1 and own.get("negative_prompt") is None:
            yield (
                f"{name} = {value} uses guidance, which needs sampling.negative_prompt. "
                'Set it (the empty string "" is a valid one), or set the scale to 1.'
            )


def negative_prompt_is_read(own: Part, run: Run) -> Messages:
    """A negative prompt has guidance that reads it."""
    if own.ability("samples_tokens") is not False:
        return
    negative, scales = own.get("negative_prompt"), [own.get("guidance_scale", 1.0)]
    if run.evaluation is not None:
        scales.append(run.evaluation.node.get("guidance_scale"))
    is_trained = run.engine.get("prompt_dropout", 0.0) > 0
    if negative and not is_trained and not any(scale is not None and scale > 1 for scale in scales):
        yield (
            f"sampling.negative_prompt = {negative!r} is read by guidance alone, and guidance_scale = {scales[0]} has "
            "none. Set sampling.guidance_scale above 1, or sampling.negative_prompt: null."
        )


def guided_tokens_have_an_empty_prompt(own: Part, run: Run) -> Messages:
    """Guidance of tokens has a model that knows an empty prompt."""
    scale = own.get("guidance_scale", 1.0)
    if own.ability("samples_tokens") and scale > 1 and not run.policy.bundle.ability("draws_by_tokens"):
        yield (
            f"{own.at}.guidance_scale = {scale}, but {run.policy.bundle.name} draws tokens without guidance. Set it to "
            "1, or take a model that draws images by tokens (unirl.models.janus.bundle.JanusBundle)."
        )


def samples_differ(own: Part, run: Run) -> Messages:
    """Samples of a prompt have something that differs."""
    repeats, reason = own.get("samples_per_prompt", 1), no_stochastic_steps(own)
    if repeats > 1 and own.get("init_same_noise") and reason is not None:
        yield (
            f"sampling.init_same_noise: true makes the {repeats} samples of a prompt equal, because {reason}. "
            "Set init_same_noise: false, or make steps stochastic."
        )


def no_stochastic_steps(sampling: Part) -> str | None:
    """Why no step is stochastic, or None where some are."""
    if not sampling.get("eta", 0.0):
        return "sampling.eta = 0"
    explicit = sampling.get("sde_indices")
    if explicit is not None:
        return "sampling.sde_indices is empty" if len(explicit) == 0 else None
    scheduler = sampling.get("scheduler")
    if not isinstance(scheduler, Mapping):
        return None
    for name in ("indices", "num_sde_steps", "fraction", "window_size"):
        value = scheduler.get(name)
        if value == 0 or value == []:
            return f"sampling.scheduler.{name} = {value}"
    return None


def last_step_is_stochastic(sampling: Part) -> bool:
    """True if the last step is stochastic in every rollout, as far as a check can tell."""
    if not sampling.get("eta", 0.0):
        return False
    explicit, scheduler = sampling.get("sde_indices"), sampling.inner.get("scheduler")
    if explicit is not None:
        return sampling.get("num_inference_steps", 1) - 1 in explicit
    if scheduler is None:
        return sampling.get("scheduler") is None
    return bool(scheduler.ability("takes_every_step")) and not scheduler.get("exclude_last", False)


def last_step_may_be_stochastic(sampling: Part) -> bool:
    """True if a window reaches the last step in some rollout, as far as a check can tell."""
    scheduler, steps = sampling.inner.get("scheduler"), sampling.get("num_inference_steps", 1)
    if scheduler is None or sampling.get("sde_indices") is not None:
        return False
    if "indices" in scheduler.node:
        return steps - 1 in scheduler.node["indices"]
    if "max_step" in scheduler.keywords:
        end = scheduler.get("max_step") or steps
        is_fixed = scheduler.get("stride") == 0
        return end == steps and (not is_fixed or scheduler.get("init", 0) + scheduler.get("window_size", 0) == steps)
    if "fraction" in scheduler.keywords:
        share = scheduler.get("fraction")
        return (share[1] if isinstance(share, Sequence) else share) == 1
    return False


def num_stochastic_steps(sampling: Part) -> int | None:
    """How many steps of a sample are stochastic; None if its own scheduler decides."""
    return num_candidates(sampling) if sampling.get("one_step") is None else 1


def num_candidates(sampling: Part) -> int | None:
    """How many steps are stochastic in some sample of a rollout; None if its own scheduler decides."""
    steps, explicit = sampling.get("num_inference_steps", 1), sampling.get("sde_indices")
    scheduler = sampling.inner.get("scheduler")
    if isinstance(explicit, Sequence):
        return len(explicit)
    if scheduler is None:
        return steps if sampling.get("scheduler") is None else None
    if scheduler.ability("takes_every_step"):
        return steps - bool(scheduler.get("exclude_last"))
    if isinstance(scheduler.node.get("indices"), Sequence):
        return len(scheduler.node["indices"])
    found = [
        scheduler.node[name] for name in ("num_sde_steps", "window_size") if isinstance(scheduler.node.get(name), int)
    ]
    return found[0] if found else None


def branches_are_stochastic(own: Part, run: Run) -> Messages:
    """Trajectories part at steps that are stochastic in every rollout, the first of them at the first."""
    branches, scheduler = own.get("branch_steps"), own.inner.get("scheduler")
    if not branches or own.get("sde_indices") is not None:
        return  # `values_are_accepted` compares what is written down
    steps = own.get("num_inference_steps", 1)
    if scheduler is None:
        if own.get("scheduler") is not None:
            return  # one of which nothing is known
        chosen = list(range(steps))
    else:
        every = (
            list(range(steps - bool(scheduler.get("exclude_last")))) if scheduler.ability("takes_every_step") else None
        )
        chosen = scheduler.get("indices", every)
    if scheduler is not None and chosen is None:
        yield (
            f"sampling.branch_steps = {list(branches)} must be stochastic in every rollout, and {scheduler.name} "
            "chooses other steps from rollout to rollout. Set sampling.sde_indices (and scheduler: null)."
        )
        return
    wrong = [step for step in branches if step not in chosen]
    if wrong:
        yield (
            f"sampling.branch_steps {wrong} are not stochastic, and trajectories part by their noise alone; the "
            f"stochastic steps are {list(chosen)}. Branch at some of these."
        )
    elif min(chosen) < min(branches):
        yield (
            f"stochastic steps {[step for step in chosen if step < min(branches)]} lie before the first of "
            f"sampling.branch_steps = {list(branches)}: all samples of a prompt share them, so nothing tells a good "
            f"one from a bad one. Branch at step {min(chosen)} too, or make those steps deterministic by "
            "sampling.sde_indices."
        )


def branches_are_trained(own: Part, run: Run) -> Messages:
    """Samples that share steps are told apart by the algorithm that trains on them."""
    if num_leaves(own) is None:
        return
    for policy in run.policies.values():
        for algorithm in policy.algorithms.values():
            if run.seen_by(algorithm).sampling is own and not algorithm.ability("trains_trees"):
                yield (
                    f"sampling.branch_steps: samples share steps, which {algorithm.name} would train once for each. "
                    f"Set {algorithm.at}._target_: unirl.algorithms.branch_grpo.BranchGRPO, or remove branch_steps and "
                    "branch_factors."
                )


def own_steps_are_trained(own: Part, run: Run) -> Messages:
    """Samples with one stochastic step each are trained at that step alone."""
    if own.get("one_step") is None:
        return
    steps = num_candidates(own)
    if own.get("one_step") == "branch" and steps and own.get("samples_per_prompt", 1) % steps:
        yield (
            f"sampling.one_step: branch spreads sampling.samples_per_prompt = {own.get('samples_per_prompt', 1)} "
            f"evenly over {steps} stochastic steps, which do not divide them. Change one of the two."
        )
    for policy in run.policies.values():
        for algorithm in policy.algorithms.values():
            if run.seen_by(algorithm).sampling is not own:
                continue
            if not algorithm.ability("trains_own_steps"):
                yield (
                    f"sampling.one_step = {own.get('one_step')}: samples have one stochastic step each, and "
                    f"{algorithm.name} trains on several. Set {algorithm.at}._target_: "
                    "unirl.algorithms.diffusion_grpo.DiffusionGRPO, or one_step: null."
                )
            fraction = algorithm.number("step_fraction")
            if fraction is not None and fraction != 1:
                yield (
                    f"{algorithm.at}.step_fraction = {fraction} leaves steps out of training, and "
                    "sampling.one_step gives each sample one. Set it to 1."
                )


def num_leaves(sampling: Part) -> int | None:
    """Samples of a tree; None where samples share no steps, or what is written does not describe a tree."""
    factors = sampling.get("branch_factors")
    if sampling.get("branch_steps") is None or not isinstance(factors, Sequence):
        return None
    return math.prod(factor for factor in factors if isinstance(factor, int))


RULES = (
    values_are_accepted,
    scheduler_fits,
    post_steps_exist,
    guidance_has_negative_prompt,
    negative_prompt_is_read,
    guided_tokens_have_an_empty_prompt,
    samples_differ,
    branches_are_stochastic,
    branches_are_trained,
    own_steps_are_trained,
)
