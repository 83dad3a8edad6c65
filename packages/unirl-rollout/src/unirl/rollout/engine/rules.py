"""Recipe rules that follow from the abilities that an engine's class declares. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.rollout.engine.guidance_rules import dropped_prompts_have_a_negative_one
from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling_rules import num_leaves


def images_are_given(own: Part, run: Run) -> Messages:
    """An engine that takes images from the data has data with images, and no stochastic steps."""
    if not own.ability("needs_images"):
        return
    if not run.data.ability("brings_images"):
        yield (
            f"the engine takes the images of the data, but {run.data.name} brings none. Set data._target_: "
            "unirl.data.pairs.PreferenceDataSource or unirl.data.targets.TargetDataSource, or brings_images = True in "
            "a class that does bring them."
        )
    per_prompt = run.sampling.get("samples_per_prompt", 1)
    if run.data.ability("brings_targets") and per_prompt != 1:
        yield (
            f"sampling.samples_per_prompt = {per_prompt}, but a row of {run.data.name} has one target. Set "
            "sampling.samples_per_prompt: 1."
        )
    eta = run.sampling.get("eta", 0.0)
    if eta > 0:
        yield f"sampling.eta = {eta}: given images have no stochastic steps. Set sampling.eta: 0."


def tokens_make_images(own: Part, run: Run) -> Messages:
    """An engine that makes images of tokens samples from a model that draws them."""
    if own.ability("draws_by_tokens") and not run.policy.bundle.ability("draws_by_tokens"):
        yield (
            f"{own.name} makes images of tokens, which {run.policy.bundle.name} does not draw. Set {own.at}._target_: "
            "unirl.rollout.engine.trainside.text.TrainsideTextEngine, or take unirl.models.janus.bundle.JanusBundle."
        )


def engine_gets_its_weights(own: Part, run: Run) -> Messages:
    """The recipe pushes the policy to an engine with separate weights, and only to such an engine."""
    has_own, policy = own.ability("has_own_weights"), run.policy
    if has_own and policy.sync is None and policy.trains:
        yield (
            f"{own.name} has weights of its own and would sample from the untrained policy to the end. Set "
            f"{policy.prefix}sync._target_: unirl.distributed.weight_sync.full.FullWeightSync (or .lora.LoraWeightSync "
            "with max_lora_rank)."
        )
    for each in run.policies.values():
        if each.sync is not None and not has_own:
            yield (
                f"{each.sync.at} does nothing with {own.name}, which samples with the model that trains. Remove it, or "
                "set has_own_weights = True in an engine that does have weights of its own."
            )
        elif each.sync is not None and each is not policy:
            yield (
                f"{each.sync.at}: the engine samples from {policy.name}, and takes no push of {each.name}. Remove it, "
                "or set engine.policy."
            )
    if has_own and policy.sync is not None:
        wanted, kept = policy.sync.get("dtype", "bf16"), own.get("dtype", "bf16")
        if wanted != kept:
            yield f"{policy.sync.at}.dtype = {wanted}, but {own.at}.dtype = {kept}. Set both to one value."


def async_reward_has_chunks(own: Part, run: Run) -> Messages:
    """Scoring overlaps with generation only if the engine announces samples before all are ready."""
    if run.reward.get("is_async") and not own.ability("announces_chunks"):
        yield (
            f"reward.is_async: true scores samples while others are generated, but engine {own.name} "
            "makes whole responses only. Set reward.is_async: false."
        )


def engine_takes_the_push(own: Part, run: Run) -> Messages:
    """Adapters are pushed only to an engine started for them, whole weights only to one that is not."""
    sync, option = run.policy.sync, own.ability("adapter_option")
    if sync is None or not own.ability("has_own_weights"):
        return
    sends_adapters = sync.ability("sends_adapters")
    if sends_adapters and run.policy.backend.get("lora") is None:
        yield (
            f"{sync.name} pushes LoRA adapters, but {run.policy.backend.at}.lora is null. Train with LoRA "
            "(parts/train=lora), or push unirl.distributed.weight_sync.full.FullWeightSync."
        )
    if option is None or sends_adapters == (own.get(option) is not None):
        return
    fix = f"Set {own.at}.{option} to the adapter's rank" if sends_adapters else f"Set {own.at}.{option}: null"
    other = "full.FullWeightSync" if sends_adapters else "lora.LoraWeightSync"
    what = "adapters" if sends_adapters else "whole weights"
    yield (
        f"{sync.name} pushes {what}, but {own.at}.{option} = {'null' if own.get(option) is None else own.get(option)}. "
        f"{fix}, or push by unirl.distributed.weight_sync.{other}."
    )


def push_can_be_proved(own: Part, run: Run) -> Messages:
    """The canary that proves a push has the inputs that the model needs."""
    bundle, sync = run.policy.bundle, run.policy.sync
    if not own.ability("has_own_weights") or sync is None:
        return
    size = sync.get("canary_image_size")
    if size is not None and not (bundle.takes_any or bundle.ability("reads_media")):
        yield f"{sync.at}.canary_image_size = {size}, but {bundle.name} reads text alone. Remove it."
    has_masks = bool(sync.get("canary_mask"))
    if not bundle.takes_any and has_masks != bundle.ability("needs_mask"):
        needed, wanted = ("fills a hole, which a mask says", "true") if not has_masks else ("reads no mask", "false")
        yield (
            f"every push to {own.name} is proved by samples of {sync.at}.canary_prompts, and {bundle.name} {needed}. "
            f"Set {sync.at}.canary_mask: {wanted}."
        )
    if size is None and bundle.ability("needs_media"):
        yield (
            f"every push to {own.name} is proved by samples of {sync.at}.canary_prompts, which show no image, but "
            f"{bundle.name} needs one. Set {sync.at}.canary_image_size to a side in pixels; or sample with the model "
            f"that trains: remove {sync.at}, and set {own.at}._target_: "
            "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine."
        )


def engine_gives_what_is_trained_on(own: Part, run: Run) -> Messages:
    """The engine returns what the algorithm replays and supports the denoising steps that the sampling asks for."""
    for algorithm in run.policy.algorithms.values():
        if algorithm.ability("requires_sde") and not own.ability("gives_latents"):
            yield f"{algorithm.name} replays denoising steps, but {own.name} returns no latents. Choose another engine."
        source = algorithm.get("old_logp_source")
        if source in ("rollout", "log-linear") and not own.ability("gives_logp"):
            yield (
                f"{algorithm.at}.old_logp_source = {source}, but {own.name} returns no log-probs. Set "
                f"{algorithm.at}.old_logp_source: replay."
            )
    sampling = run.sampling
    if sampling.get("init_same_noise") and not own.ability("takes_initial_latents"):
        yield f"{sampling.at}.init_same_noise: true, but {own.name} draws its own noise. Set it to false."
    some = [key for key in ("scheduler", "sde_indices") if sampling.node.get(key) is not None]
    if some and not own.ability("takes_step_subsets"):
        yield f"{own.name} makes every step stochastic or none, but {sampling.at}.{some[0]} is set. Set it to null."


def trees_are_whole(own: Part, run: Run) -> Messages:
    """Samples that share steps are sampled together, by an engine that supports it."""
    leaves = num_leaves(run.sampling)
    if leaves is None:
        return
    if not own.ability("shares_steps"):
        yield (
            f"{run.sampling.at}.branch_steps is set, but {own.name} samples every trajectory alone. Remove "
            f"branch_steps and branch_factors, or set {own.at}._target_: "
            "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine."
        )
        return
    size = own.number("forward_batch_size")
    if size is not None and size % leaves:
        yield (
            f"{own.at}.forward_batch_size = {size} would cut trees of {leaves} samples "
            f"({run.sampling.at}.branch_factors). Set it to a multiple of {leaves}."
        )


def own_steps_are_taken(own: Part, run: Run) -> Messages:
    """Samples that have one stochastic step each are sampled by an engine that supports it."""
    if run.sampling.get("one_step") is not None and not own.ability("takes_own_steps"):
        yield (
            f"{run.sampling.at}.one_step = {run.sampling.get('one_step')}, but {own.name} makes the same steps "
            f"stochastic for all samples of a call. Set it to null, or {own.at}._target_: "
            "unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine."
        )


RULES = (
    images_are_given,
    tokens_make_images,
    dropped_prompts_have_a_negative_one,
    engine_gets_its_weights,
    engine_takes_the_push,
    push_can_be_proved,
    engine_gives_what_is_trained_on,
    async_reward_has_chunks,
    trees_are_whole,
    own_steps_are_taken,
)
