"""Rules of scorers that compare the samples of a group, which therefore need whole ones; rewards without prompts."""

from __future__ import annotations

from unirl.config.placement import REWARD, SCORERS, groups_of_run, num_shards
from unirl.config.runs import ComposedRun
from unirl.tracking.console import scorer_weights
from unirl.types.recipe import Messages, Part


def groupwise_scorers(run: ComposedRun) -> dict[str, Part]:
    """The scorers of a recipe whose scores depend on the other samples of a group, as far as it says so."""
    scorers = run.reward.inside("scorers")
    return {name: own for name, own in scorers.items() if own.ability("is_groupwise") or own.get("groupwise")}


def groups_have_samples_to_compare(run: ComposedRun) -> Messages:
    """A scorer that compares samples of a prompt gets several of each."""
    # A track that no stage makes is another rule's to name.
    sampling = next((each for each in run.stages if each.track == run.scored_track), run.stages[0]).sampling
    if sampling.get("samples_per_prompt", 1) > 1:
        return
    for own in groupwise_scorers(run).values():
        yield f"{own.at} compares samples of a prompt, but {sampling.at}.samples_per_prompt is 1. Raise it."


def workers_score_whole_groups(run: ComposedRun) -> Messages:
    """No group of samples is divided between workers that compare them."""
    if run.scored_track not in (None, run.stages[0].track):
        return  # samples of one parent stay with it
    size, key = run.file.schedule.groups_per_request, "schedule.groups_per_request"
    if size is None:
        size, key = run.batch_size, "batch_size"
    for name, own in groupwise_scorers(run).items():
        groups = groups_of_run(run)
        place = next(
            (i for i, group in enumerate(groups) if SCORERS + name in group.holds),
            next((i for i, group in enumerate(groups) if REWARD in group.holds), 0),
        )
        count = num_shards(run) if place == 0 else len(groups[place].devices)
        if size % count:
            yield (
                f"{own.at} compares samples of a prompt, but {key} = {size} prompts do not divide over the {count} "
                f"devices of {groups[place].given.shown}, so that some prompts would be scored in parts. Change one of "
                "them."
            )


def evaluations_have_scorers(run: ComposedRun) -> Messages:
    """An evaluation, with one sample per prompt, has a scorer that judges single samples, where the reward is
    composed."""
    compared, scorers = groupwise_scorers(run), run.reward.inside("scorers")
    pools = run.reward.get("pools") or {}
    if run.evaluation is None or not compared or any(name not in compared and name not in pools for name in scorers):
        return
    yield (
        f"eval has one sample per prompt, and {', '.join(compared)} compare samples of a prompt. Add a scorer of "
        "single samples to reward.scorers, with the weight 0 if it shall only report, or set eval to null."
    )


def ignored_prompt(run: ComposedRun) -> str | None:
    """What to say of a reward whose scorers all judge samples whatever was asked for; None for others."""
    weights = scorer_weights(run.resolved[REWARD])
    weighed = [
        (name, own)
        for (name, weight), own in zip(weights.items(), run.reward.inside("scorers").values(), strict=True)
        if weight
    ]
    if not weighed or any(_reads_prompt(own) for _, own in weighed):
        return None
    return (
        f"no scorer with a weight reads the prompt ({', '.join(name for name, _ in weighed)}), so that nothing keeps "
        "samples to it. Unless that is meant, add a scorer that does, or set algorithm.kl_coef."
    )


def _reads_prompt(own: Part) -> bool:
    inner = [part for part in own.inner.values() if "reads_prompt" in part.abilities]
    return bool(own.ability("reads_prompt")) or any(map(_reads_prompt, inner))


RULES = (groups_have_samples_to_compare, workers_score_whole_groups, evaluations_have_scorers)
