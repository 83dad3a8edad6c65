"""What policy gradients on denoising steps need of kernel, engine and precision. See `unirl.types.recipe`."""

from __future__ import annotations

import math

from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling_rules import num_stochastic_steps

CLIP_OF_A_SUM = 1e-2
"""Below this, a clip is meant for log-probs that are means over the latent's elements."""
CLIP_OF_A_MEAN = 1e-1
"""From here on, a clip or a divergence per element is meant for sums: over 256 elements it is 25 nats."""


def _kernel(own: Part, run: Run) -> Part | None:
    policy = run.policy_of(own)
    track = next(name for name, part in policy.algorithms.items() if part is own)
    return policy.pipeline_of(track).inner.get("strategy")


def log_probs_fit(own: Part, run: Run) -> Messages:
    """The kernel's log-probs are what the algorithm, its clips and thresholds are made for."""
    kernel = _kernel(own, run)
    if kernel is None:
        return
    reduction, has_density = kernel.get("reduction", "mean"), kernel.ability("is_gaussian")
    if own.ability("requires_gaussian_mean") and not has_density:
        yield (
            f"{own.name} needs the density of a Flow or Dance kernel, the {kernel.ability('name')} kernel has none. "
            f"Set {kernel.at}._target_: unirl.sde.kernels.FlowSDEStrategy."
        )
    if own.ability("requires_gaussian_mean") and reduction == "sum":
        yield f"{own.name} needs log-probs that are means over the elements. Set {kernel.at}.reduction: mean."
    if own.get("kl_coef") and own.get("kl_estimator") == "flow_grpo" and not has_density:
        yield (
            f"{own.at}.kl_estimator = flow_grpo needs a Flow or Dance kernel, not {kernel.ability('name')}. "
            "Set kl_estimator: exact."
        )
    for key in ("clip_range", "clip_range_high"):
        clip = own.number(key)
        if clip is not None and reduction == "sum" and clip < CLIP_OF_A_SUM:
            yield (
                f"{own.at}.{key} = {clip} with {kernel.at}.reduction = sum: clips this small are meant for "
                f"means over the N elements of a latent. Set reduction: mean, or {key} to about N times as much."
            )
        if clip is not None and reduction == "mean" and clip >= CLIP_OF_A_MEAN:
            yield (
                f"{own.at}.{key} = {clip} with {kernel.at}.reduction = mean clips nothing: log-probs are means "
                f"over the N elements of a latent. Set {key} to about a number of nats divided by N (1e-4 is usual), "
                "or reduction: sum."
            )
    for key in ("threshold", "prefix_threshold"):
        value = own.number(key)
        if value is not None and CLIP_OF_A_MEAN <= value < math.inf:
            yield (
                f"{own.at}.{key} = {value} is in nats per latent element, whatever the kernel's reduction, and "
                f"masks nothing. Divide it by the number of elements (1e-5 is usual), or write .inf."
            )


def correction_binds(own: Part, run: Run) -> Messages:
    """The bounds of a correction are of the size of the kernel's log-probs."""
    kernel, correction = _kernel(own, run), own.inner.get("rollout_correction")
    if kernel is None or correction is None or kernel.get("reduction", "mean") != "mean":
        return
    for key in ("lower", "upper"):
        bound = correction.get(key)
        is_none = key == "lower" and bound == 0
        if isinstance(bound, (int, float)) and not is_none and abs(bound - 1) >= CLIP_OF_A_MEAN:
            yield (
                f"{correction.at}.{key} = {bound} with {kernel.at}.reduction = mean bounds nothing: log-probs are "
                f"means over the N elements of a latent. Set {key} to 1 {'-' if bound < 1 else '+'} about a number of "
                "nats divided by N (1e-3 is usual), null, or reduction: sum."
            )
    threshold = correction.number("m2_threshold")
    if threshold is not None and threshold >= CLIP_OF_A_MEAN**2:
        yield (
            f"{correction.at}.m2_threshold = {threshold} with {kernel.at}.reduction = mean masks nothing: log-probs "
            "are means over the N elements of a latent, and second moments are divided by N^2. Set about a number of "
            "nats squared divided by N^2 (1e-6 is usual), or reduction: sum."
        )


def trajectories_are_whole(own: Part, run: Run) -> Messages:
    """Where the steps of a sample are judged together, one forward has them all."""
    correction = own.inner.get("rollout_correction")
    joins = own.ability("joins_steps") or (correction is not None and correction.get("level", "token") != "token")
    rows, steps = own.number("rows_per_forward"), num_stochastic_steps(run.sampling)
    if not joins or rows is None or steps is None:
        return
    num_trained = max(int(own.get("step_fraction", 1.0) * steps + 1e-9), 1)
    if rows % num_trained:
        yield cut_trajectory(own.at, own.name, int(rows), num_trained)


def cut_trajectory(place: str, name: str, rows_per_forward: int, num_steps: int) -> str:
    """What is wrong with a number of rows that cuts the trained steps of a sample."""
    return (
        f"{place}.rows_per_forward = {rows_per_forward} is not a multiple of the {num_steps} trained steps of a "
        f"sample, which {name} judges together. Change it, or set null."
    )


def rollout_log_probs_are_replayed_ones(own: Part, run: Run) -> Messages:
    """A clip on the rollout's log-probs of denoising steps gets those that replay would give, to float32's rounding."""
    is_clipped = "clip_range" in own.keywords and own.node.get("estimator") != "score_function"
    source, fix = own.get("old_logp_source"), f"Set {own.at}.old_logp_source: auto."
    if source == "log-linear" and own.ability("keeps_anchor_means"):
        yield f"{own.name} compares transition means, which a rollout does not keep. {fix}"
    if source != "rollout" or not is_clipped:
        return
    if own.ability("keeps_anchor_means"):
        yield f"{own.name} compares transition means, which a rollout does not keep. {fix}"
        return
    if not run.engine.ability("has_trainer_logp") and not _is_below_the_clip(own, run):
        yield (
            f"{own.at}.old_logp_source = rollout takes the log-probs of {run.engine.name}, whose weights or "
            f"precision are not the trainer's: the first ratio would not be 1, and {own.name} clips it. {fix}"
        )
    half = [f"{place} = {value}" for place, value in _precisions(own, run).items() if value != "fp32"]
    rollout, replay = run.engine.number("forward_batch_size"), _replayed_rows(own, run)
    if half and isinstance(rollout, int) and replay != {rollout}:
        rows = "an unknown number of" if replay is None else " or ".join(map(str, sorted(replay)))
        yield (
            f"{own.at}.old_logp_source = rollout with {half[0]}: a forward of the rollout has "
            f"engine.forward_batch_size = {rollout} rows, one of the replay {rows}, and half precision rounds other "
            f"numbers of rows otherwise, by as much as {own.name} clips. {fix[:-1]}, or sample and train in fp32."
        )


def _is_below_the_clip(own: Part, run: Run) -> bool:
    """True if the engine's log-probs are known to be a replay's up to less than a tenth of the clip: in float32."""
    gap, clip = run.engine.ability("logp_gap_float32"), own.number("clip_range")
    in_float32 = {run.engine.get("dtype"), *_precisions(own, run).values()} == {"fp32"}
    return in_float32 and gap is not None and clip is not None and gap < clip / 10


def _precisions(own: Part, run: Run) -> dict[str, str]:
    """What rollout and replay compute in, by place."""
    backend = run.policy_of(own).backend
    weights = (backend.get("fsdp") or {}).get("param_dtype", "fp32")
    return {
        "sampling.autocast_precision": run.sampling.get("autocast_precision", "fp32"),
        f"{backend.at}.fsdp.param_dtype": weights,
    }


def _replayed_rows(own: Part, run: Run) -> set[int] | None:
    """Rows of the forwards that replay a micro-batch; None where only the run can tell."""
    micro, most = run.policy_of(own).stack.node.get("micro_batch_size"), own.node.get("rows_per_forward")
    steps = None if own.node.get("step_fraction", 1) != 1 else num_stochastic_steps(run.sampling)
    if not isinstance(micro, int):
        return None
    if isinstance(most, int) and most > 0 and micro % most == 0:
        return {most}  # whatever the number of steps
    if steps is None:
        return None
    total = micro * steps
    if not isinstance(most, int) or most <= 0 or most >= total:
        return {total}
    return {most, total % most} - {0}


def score_function_is_on_policy(own: Part, run: Run) -> Messages:
    """The score-function estimator uses the samples of the policy that is updated, and clips no ratio."""
    if own.node.get("estimator") != "score_function":
        return
    stack = run.policy_of(own).stack
    updates = stack.get("num_updates_per_batch", 1)
    if updates > 1:
        yield (
            f"{own.at}.estimator = score_function serves one update per rollout, {stack.at}.num_updates_per_batch = "
            f"{updates}. Set it to 1 (and a smaller batch_size), or estimator: importance_sampling."
        )
    if own.node.get("clip_range") is not None:
        yield (
            f"{own.at}.clip_range = {own.node['clip_range']} does nothing with estimator = score_function. "
            "Set clip_range: null, or estimator: importance_sampling."
        )


RULES = (
    log_probs_fit,
    correction_binds,
    trajectories_are_whole,
    rollout_log_probs_are_replayed_ones,
    score_function_is_on_policy,
)
