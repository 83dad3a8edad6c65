"""What algorithms on actions need of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def rewards_are_plain(own: Part, run: Run) -> Messages:
    """A critic of decisions gets the rewards of episodes as they are."""
    if not own.ability("learns_value"):
        return
    center, scale = run.advantages.node.get("center", "group"), run.advantages.node.get("scale", "group")
    if (center, scale) != ("none", "none"):
        yield (
            f"{own.name} takes the reward of an episode as it is, to find what each decision earned of it, but "
            f"{run.advantages.at} has center: {center} and scale: {scale}. Set both to none."
        )


def estimator_fits(own: Part, run: Run) -> Messages:
    """A penalty on actions has an estimator from log-probs."""
    estimator = own.get("kl_estimator")
    if estimator not in (None, "k1", "k2", "k3"):
        yield f"{own.at}.kl_estimator = {estimator}: actions have k1, k2 and k3. Set one of them."


def forwards_are_equally_many(own: Part, run: Run) -> Messages:
    """Ranks that gather a sharded model run it equally often, and episodes differ in their decisions."""
    if own.get("decisions_per_forward") is not None and run.num_devices > 1:
        yield (
            f"{own.at}.decisions_per_forward = {own.get('decisions_per_forward')} makes unequally many forwards on "
            f"{run.num_devices} devices. Set it to null, and a smaller {run.policy_of(own).stack.at}.micro_batch_size."
        )


def demonstrations_are_played(own: Part, run: Run) -> Messages:
    """Cloning and the engine that plays demonstrations go together, with a policy that imitates."""
    clones, plays = own.name == "ActionFineTuning", bool(run.engine.ability("needs_moves"))
    if clones and not plays:
        yield (
            f"{own.name} clones demonstrations, which {run.engine.name} does not play. Set {run.engine.at}._target_: "
            "unirl.rollout.engine.offline.episodes.OfflineEpisodesEngine."
        )
    if plays and not clones:
        yield (
            f"{own.name} needs log-probs, which demonstrations have not. Set {own.at}._target_: "
            "unirl.algorithms.action_fine_tuning.ActionFineTuning, or an engine that acts."
        )
    for pipeline in run.policy_of(own).pipelines.values():
        if clones and not pipeline.abilities.get("imitates", True):
            yield f"{pipeline.at}: {pipeline.name} learns no demonstrations; {own.name} takes small policies."


RULES = (demonstrations_are_played, rewards_are_plain, estimator_fits, forwards_are_equally_many)
