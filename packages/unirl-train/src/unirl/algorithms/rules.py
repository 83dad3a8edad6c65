"""What every algorithm needs of the rest of a recipe, by what its class declares. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.algorithms import correction_rules
from unirl.algorithms.advantage_presets import with_preset
from unirl.types.recipe import Messages, Part, Run
from unirl.types.sampling_rules import no_stochastic_steps


def algorithm_has_its_steps(own: Part, run: Run) -> Messages:
    """A policy gradient on transitions needs stochastic ones."""
    reason = no_stochastic_steps(run.sampling) if own.ability("requires_sde") else None
    if reason is not None:
        yield (
            f"{own.name} needs stochastic steps, but {reason}. Set sampling.eta above 0 and give "
            "sampling.scheduler some steps, or choose an algorithm without log-probs (DiffusionNFT)."
        )


def samples_are_on_policy(own: Part, run: Run) -> Messages:
    """An estimator without importance weights uses the samples of the policy that is updated."""
    stack = run.policy_of(own).stack
    updates, epochs = stack.get("num_updates_per_batch", 1), stack.get("num_epochs", 1)
    if updates > 1 and own.ability("is_on_policy"):
        yield (
            f"{own.name} serves one update per rollout, {stack.at}.num_updates_per_batch = {updates}. Set it to 1, "
            "and a smaller batch_size."
        )
    if epochs > 1 and (own.ability("is_on_policy") or own.ability("requires_trajectory")):
        yield f"{own.name} serves one update per rollout, {stack.at}.num_epochs = {epochs}. Set it to 1."


def tokens_meet_their_parts(own: Part, run: Run) -> Messages:
    """An algorithm on tokens has completions to train on, and the other way round."""
    trains, samples = own.ability("trains_tokens"), run.sampling.ability("samples_tokens")
    if trains != samples:
        yield (
            f"{own.name} trains on {'tokens' if trains else 'images'}, but sampling._target_ = {run.sampling.path}. "
            "Choose an algorithm and a model of one kind (parts/model/text has what goes with tokens)."
        )
    elif trains and not run.modality.ability("trains_tokens"):
        yield f"{own.name} trains on tokens. Set modality._target_: unirl.trainer.text.TextModality."


def actions_meet_their_parts(own: Part, run: Run) -> Messages:
    """An algorithm on actions has episodes to train on, and the other way round."""
    trains, samples = own.ability("trains_actions"), run.sampling.ability("samples_actions")
    if trains != samples:
        yield (
            f"{own.name} trains on {'actions' if trains else 'no actions'}, but sampling._target_ = "
            f"{run.sampling.path}. Choose an algorithm and a model of one kind (parts/model/action has what goes with "
            "actions)."
        )
    elif trains and not run.modality.ability("trains_actions"):
        yield f"{own.name} trains on actions. Set modality._target_: unirl.trainer.action.ActionModality."


def trajectory_is_kept(own: Part, run: Run) -> Messages:
    """An algorithm that goes back to latents inside the trajectory finds them."""
    kept = run.sampling.get("keep_latents", "transitions")
    if own.ability("requires_trajectory") and kept != "all":
        yield (
            f"{own.name} needs every latent of the trajectory, but sampling.keep_latents = {kept!r}. "
            "Set sampling.keep_latents: all."
        )


def trajectory_is_followed(own: Part, run: Run) -> Messages:
    """Gradients go back along the trajectory of the policy that is updated, a deterministic one."""
    if not own.ability("requires_trajectory"):
        return
    stack = run.policy_of(own).stack
    updates = stack.get("num_updates_per_batch", 1)
    if updates > 1:
        yield (
            f"{own.name} goes back along the trajectory of the policy that it updates; {stack.at}.num_updates_per_batch"
            f" = {updates} would train the second update on stale latents. Set it to 1, and a smaller batch_size."
        )
    if no_stochastic_steps(run.sampling) is None:
        yield f"{own.name} goes back along deterministic steps. Set sampling.eta: 0 (and scheduler: null)."
    solver = run.sampling.get("post_solver", "euler")
    if solver != "euler":
        yield f"{own.name} goes back along Euler steps, not sampling.post_solver = {solver}. Set post_solver: euler."


def reward_has_gradient(own: Part, run: Run) -> Messages:
    """An algorithm that differentiates the reward finds a gradient in every scorer that counts."""
    if not own.ability("requires_reward_gradient"):
        return
    weights = run.reward.get("weights") or {}
    for name, scorer in run.reward.inside("scorers").items():
        parts = [scorer, *(part for part in scorer.inner.values() if "is_differentiable" in part.abilities)]
        wrong = [part.name for part in parts if not part.takes_any and not part.ability("is_differentiable")]
        if weights.get(name) != 0 and wrong:
            yield (
                f"{own.name} trains through the reward, but reward.scorers.{name} ({wrong[0]}) is not "
                "differentiable. Use a scorer that is, or give it the weight 0 in reward.weights, so that it only "
                "reports."
            )


def critic_sees_rewards(own: Part, run: Run) -> Messages:
    """What a critic learns is not taken out of the rewards first, unless the recipe says so itself."""
    if own.ability("learns_value") and "center" not in run.advantages.node:
        yield (
            f"{own.name} learns what reward to expect, but advantages are centred on their group, "
            "where every prompt earns 0. Set advantages.center: batch (or none) and advantages.scale: batch; "
            "center: group, written out, is taken as meant."
        )


def weights_are_weights(own: Part, run: Run) -> Messages:
    """A method that fine-tunes on its samples gets weights, and a policy gradient gets advantages."""
    needed, made = own.ability("requires_weights"), run.advantages.ability("makes_weights")
    if needed and not made:
        yield (
            f"{own.name} fine-tunes on its samples by weights of at least 0, which {run.advantages.name} does not "
            f"make. Set {run.advantages.at}._target_: unirl.algorithms.sample_weights.SampleWeights."
        )
    if made and not needed:
        yield (
            f"{run.advantages.name} makes weights of at least 0, under which {own.name} would raise the likelihood of "
            f"every sample. Set {run.advantages.at}._target_: unirl.algorithms.advantages.AdvantageConfig, or take "
            "ARFineTuning or WeightedMatching."
        )


def advantages_are_centred(own: Part, run: Run) -> Messages:
    """A preference within each group gets advantages on both sides of 0."""
    made = run.advantages
    if not own.ability("requires_centred_advantages") or made.ability("makes_weights"):
        return
    needs = f"{own.name} compares the samples of a group by advantages that sum to 0 there"
    if not made.ability("centres_groups"):
        yield (
            f"{needs}, which {made.name} does not make. Set {made.at}._target_: "
            "unirl.algorithms.advantages.AdvantageConfig."
        )
        return
    center, trim = with_preset(made).get("center", "group"), made.get("trim")
    found, fixes = [], []
    if center != "group":
        origin = "" if made.get("center") else f" (preset {made.get('preset')})"
        found.append(f"{made.at}.center = {center}{origin}")
        fixes.append(f"{made.at}.center: group")
    if trim:
        found.append(f"{made.at}.trim = {trim}")
        fixes.append(f"{made.at}.trim: 0")
    if found:
        yield f"{needs}, but {' and '.join(found)}. Set {' and '.join(fixes)}."


def reference_exists(own: Part, run: Run) -> Messages:
    """A penalty or a preference loss has its reference, and a penalty towards an average its average."""
    backend, needed_by = run.policy_of(own).backend, needs_reference(own)
    if needed_by is not None and backend.get("lora") is None and not backend.get("keep_reference"):
        yield (
            f"{needed_by} needs a reference policy: set "
            f"{backend.at}.keep_reference: true (a second copy of the weights), or train with {backend.at}.lora."
        )
    if own.get("ema_kl_coef") and backend.get("ema") is None:
        yield (
            f"{own.at}.ema_kl_coef = {own.get('ema_kl_coef')} needs a moving average of the weights: "
            f"set {backend.at}.ema, or ema_kl_coef: 0."
        )


def needs_reference(own: Part) -> str | None:
    """What needs the reference policy, for a message; None where nothing does."""
    if own.ability("requires_reference"):
        return own.name
    return f"{own.at}.kl_coef = {own.get('kl_coef')}" if own.get("kl_coef") else None


def units_stay_together(own: Part, run: Run) -> Messages:
    """An algorithm on pairs or whole groups gets exactly one of every prompt, and no cut goes through it."""
    option, stack = own.ability("unit_option"), run.policy_of(own).stack
    unit = own.ability("samples_per_unit") if option is None else own.number(option)
    if unit is None or unit <= 1:
        return
    selection: Mapping[str, object] = {} if run.selection is None else run.selection.node
    name = "best_of" if run.stages[0].grows_from is None else "best_of_children"
    repeats, best_of = run.sampling.get("samples_per_prompt", 1), selection.get(name)
    if (repeats if best_of is None else best_of) != unit:
        yield (
            f"{own.name} trains on {unit} samples of a prompt, but {run.samples_key} = {repeats} and "
            f"selection.{name} = {'null' if best_of is None else best_of}. Set selection.{name}: {unit} (the best "
            f"and the worst of a group), or samples_per_prompt: {unit}"
            + ("." if option is None else f", or {own.at}.{option} to what the others give.")
        )
    if selection.get("drop_zero_variance"):
        yield (
            f"selection.drop_zero_variance may part the units of {own.name}, where ties teach nothing anyway. Remove "
            "it."
        )
    policy = run.policy_of(own)
    shared = policy.ranks_per_sample
    divisor = run.num_devices // shared * stack.get("num_updates_per_batch", 1)
    if divisor > 0 and run.batch_size % divisor:
        devices = "num_devices" if shared == 1 else f"num_devices / ({policy.sharing})"
        yield (
            f"batch_size = {run.batch_size} units do not divide over {devices} * {stack.at}.num_updates_per_batch = "
            f"{divisor}. Change one of them."
        )
    cuts = [(stack, "micro_batch_size")]
    if not own.ability("trains_trees"):  # whose rows are edges, which no other is compared with
        cuts.append((own, "rows_per_forward"))
    for part, key in cuts:
        value = part.number(key)
        if value is not None and value % unit:
            yield f"{part.at}.{key} = {value} must be a multiple of {unit}, the samples of a unit of {own.name}."


RULES = (
    algorithm_has_its_steps,
    samples_are_on_policy,
    tokens_meet_their_parts,
    actions_meet_their_parts,
    trajectory_is_kept,
    trajectory_is_followed,
    reward_has_gradient,
    critic_sees_rewards,
    weights_are_weights,
    advantages_are_centred,
    *correction_rules.RULES,
    reference_exists,
    units_stay_together,
)
