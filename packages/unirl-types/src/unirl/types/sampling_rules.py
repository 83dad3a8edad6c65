"""What sampling parameters need of each other. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl.types.errors import UniRLError
from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling import ARSamplingParams, BaseSamplingParams, DiffusionSamplingParams

_CLASSES: Mapping[str, type[BaseSamplingParams]] = {
    f"{each.__module__}.{each.__qualname__}": each for each in (DiffusionSamplingParams, ARSamplingParams)
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
    """What is said of the steps behind the last stochastic one finds some."""
    plain = {"post_solver": "euler", "post_step_ratio": 1}
    changed = [name for name, usual in plain.items() if own.get(name, usual) != usual]
    if not changed or not own.get("eta", 0.0):
        return
    if last_step_is_stochastic(own):
        yield (
            f"sampling.{changed[0]} = {own.get(changed[0])} is for the steps behind the last stochastic one, but the "
            "last step is stochastic. Give sampling.scheduler a window that ends earlier, or remove it."
        )


def guidance_has_negative_prompt(own: Part, run: Run) -> Messages:
    """Guidance needs its unconditional side said."""
    evaluated = None if run.evaluation is None else run.evaluation.node.get("guidance_scale")
    for name, value in (("sampling.guidance_scale", own.get("guidance_scale")), ("eval.guidance_scale", evaluated)):
        if value is not None and value > 1 and own.get("negative_prompt") is None:
            yield (
                f"{name} = {value} uses guidance, which needs sampling.negative_prompt. "
                'Set it (the empty string "" is a valid one), or set the scale to 1.'
            )


def negative_prompt_is_read(own: Part, run: Run) -> Messages:
    """A negative prompt has guidance that reads it."""
    negative, scales = own.get("negative_prompt"), [own.get("guidance_scale", 1.0)]
    if run.evaluation is not None:
        scales.append(run.evaluation.node.get("guidance_scale"))
    if negative and not any(scale is not None and scale > 1 for scale in scales):
        yield (
            f"sampling.negative_prompt = {negative!r} is read by guidance alone, and guidance_scale = {scales[0]} has "
            "none. Set sampling.guidance_scale above 1, or sampling.negative_prompt: null."
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
    """Whether the last step is stochastic in every rollout, as far as a check can tell."""
    if not sampling.get("eta", 0.0):
        return False
    explicit, scheduler = sampling.get("sde_indices"), sampling.inner.get("scheduler")
    if explicit is not None:
        return sampling.get("num_inference_steps", 1) - 1 in explicit
    if scheduler is None:
        return sampling.get("scheduler") is None
    return bool(scheduler.ability("takes_every_step")) and not scheduler.get("exclude_last", False)


def num_stochastic_steps(sampling: Part) -> int | None:
    """How many steps of a rollout are stochastic; None where a scheduler of its own decides."""
    steps, explicit = sampling.get("num_inference_steps", 1), sampling.get("sde_indices")
    scheduler = sampling.inner.get("scheduler")
    if isinstance(explicit, Sequence):
        return len(explicit)
    if scheduler is None:
        return steps if sampling.get("scheduler") is None else None
    if scheduler.ability("takes_every_step"):
        return steps - bool(scheduler.get("exclude_last"))
    found = [
        scheduler.node[name] for name in ("num_sde_steps", "window_size") if isinstance(scheduler.node.get(name), int)
    ]
    return found[0] if found else None


RULES = (
    values_are_accepted,
    scheduler_fits,
    post_steps_exist,
    guidance_has_negative_prompt,
    negative_prompt_is_read,
    samples_differ,
)
