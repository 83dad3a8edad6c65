"""Rules between stages. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.config.placement import group_of
from unirl.config.runs import ComposedRun
from unirl.types.recipe import Messages, Part, Stage


def texts_are_there_to_read(run: ComposedRun) -> Messages:
    """A stage that reads its parent's text grows from a text stage."""
    for stage, reads in _readers(run):
        if not reads.ability("reads_text"):
            continue
        if stage.grows_from is None:
            yield (
                f"{reads.at}: {reads.name} reads the text of a stage above, but stages.{stage.track} grows from the "
                f"request. Set stages.{stage.track}.grows_from, or remove {reads.at}."
            )
        elif not (parent := run.stage_of(stage.grows_from)).sampling.ability("samples_tokens"):
            yield (
                f"{reads.at}: {reads.name} reads text, but stages.{stage.track} grows from {parent.track}, which "
                f"{parent.engine.name} makes of latents. Name a stage of texts in stages.{stage.track}.grows_from."
            )


def latents_are_there_to_begin_from(run: ComposedRun) -> Messages:
    """A stage that starts from its parent's latents grows from a stage with the same kind of latents."""
    for stage, reads in _readers(run):
        if not reads.ability("reads_latents"):
            continue
        parent = None if stage.grows_from is None else run.stage_of(stage.grows_from)
        if parent is None or parent.sampling.ability("samples_tokens"):
            yield (
                f"{reads.at}: {reads.name} begins from the latents of the stage above, but stages.{stage.track} grows "
                f"from {stage.grows_from or 'the request'}. Set stages.{stage.track}.grows_from to a stage of images."
            )
        elif any(parent.sampling.get(key) != stage.sampling.get(key) for key in ("height", "width", "num_frames")):
            yield (
                f"{stage.sampling.at} and {parent.sampling.at} have different heights, widths or numbers of frames, "
                f"but {reads.name} begins from the latents of {parent.track}. Set them to the same values."
            )
        elif not stage.engine.ability("takes_initial_latents"):
            yield (
                f"{reads.at}: {reads.name} begins from latents, but {stage.engine.name} draws its own noise. Choose "
                "another engine."
            )


def prompts_are_known_before_the_run(run: ComposedRun) -> Messages:
    """Text encoders are dropped only if every prompt is known before the run, and not if a stage writes prompts."""
    for stage, reads in _readers(run):
        if reads.ability("reads_text") and stage.engine.get("drop_text_encoders"):
            yield (
                f"{stage.engine.at}.drop_text_encoders encodes every prompt before the run, but {reads.name} reads "
                "prompts that are written in it. Set it to false."
            )


def trained_tracks_have_rewards(run: ComposedRun) -> Messages:
    """A trained track is scored, or a track that grows from it is."""
    if not run.is_staged:
        return
    scored = run.scored_track or run.stages[0].track
    made = {stage.track: stage for stage in run.stages}
    credited, at = set(), scored
    while at in made:
        credited.add(at)
        at = made[at].grows_from
    for policy in run.policies.values():
        for track, part in policy.algorithms.items():
            if track in made and scored in made and track not in credited:
                shown = "null, the first track" if run.scored_track is None else run.scored_track
                yield (
                    f"{part.at}: the track {track} trains, but rewards are of {scored} (reward.track = {shown}) and of "
                    f"what it grew from. Set reward.track: {track}, or {policy.prefix}algorithms.{track}: null."
                )


def tracks_are_of_their_policy(run: ComposedRun) -> Messages:
    """The track of an algorithm is made by a stage of its policy."""
    for policy in run.policies.values() if run.is_staged else ():
        own = [stage.track for stage in run.stages if stage.policy == policy.name]
        for track, part in policy.algorithms.items():
            if track not in own and track in [stage.track for stage in run.stages]:
                yield (
                    f"{part.at}: the track {track} is sampled from {run.stage_of(track).policy}, not from "
                    f"{policy.name}, whose tracks are {', '.join(map(str, own))}. Move the algorithm, or set "
                    f"stages.{track}.policy."
                )


def stages_answer_whole(run: ComposedRun) -> Messages:
    """Samples of several stages are not scored asynchronously."""
    if run.is_staged and run.reward.get("is_async"):
        yield (
            "reward.is_async: true scores samples while others are generated, but the engines of stages make whole "
            "responses only. Set reward.is_async: false."
        )


def a_policy_is_pushed_to_one_engine(run: ComposedRun) -> Messages:
    """One sync pushes to one engine, of one copy of the weights."""
    for policy in run.all_policies.values() if run.is_staged else ():
        served = [s for s in run.stages if s.policy == policy.name and s.engine.ability("has_own_weights")]
        engines = {(s.engine.at, group_of(run, s.at).name, policy.pipeline_name(str(s.track))) for s in served}
        if len(engines) > 1:
            shown = " and ".join(f"stages.{stage.track} ({stage.engine.name})" for stage in served)
            yield (
                f"policy {policy.name}: {shown} each have weights of their own, and a sync pushes to one engine. "
                "Let them take the engine of the policy in one pool, sample all but one of them with the model that "
                "trains, or give them policies of their own."
            )
        made = {stage.track for stage in served}
        copies = {track: own.ability("rollout_policy") for track, own in policy.algorithms.items() if track in made}
        if len(set(copies.values())) > 1:
            shown = " and ".join(
                f"stages.{track} from {copy or 'the present weights'}" for track, copy in copies.items()
            )
            yield (
                f"policy {policy.name}: its algorithms sample {shown}, and {served[0].engine.name} holds one copy of "
                "the weights. Choose algorithms that sample from the same copy, or the engine that trains."
            )


def sizes_suit_engine_and_devices(run: ComposedRun) -> Messages:
    """Images of chosen sizes need an engine that takes sizes, and one forward per size, of which all devices run
    equally many."""
    for stage, reads in _readers(run):
        if not reads.ability("reads_sizes") or stage.grows_from is None:
            continue
        parent = run.stage_of(stage.grows_from)
        writing = run.all_policies[parent.policy].pipeline_of(str(parent.track))
        if not writing.get("chooses_size", False):
            continue
        if not stage.engine.ability("takes_sizes"):
            yield (
                f"{writing.at}.chooses_size: true, but {stage.engine.name} draws images of one size. Set "
                f"{writing.at}.chooses_size: false, or sample with the model that trains."
            )
        policy = run.all_policies[stage.policy]
        losses = policy.stack.get("losses") or {} if policy.trains else {}
        micro = (losses.get(stage.track) or {}).get("micro_batch_size") or (
            policy.stack.get("micro_batch_size") if policy.trains else 1
        )
        sizes = {
            f"{stage.engine.at}.forward_batch_size": stage.engine.get("forward_batch_size"),
            f"{policy.prefix}stack.micro_batch_size": micro,
        }
        for name, value in sizes.items() if run.num_devices > 1 else ():
            if value != 1:
                yield (
                    f"{writing.at}.chooses_size gives images of one batch different sizes, one forward each, and "
                    f"{run.num_devices} devices must run equally many: {name} = {value} must be 1. Set {name}: 1, or "
                    f"{writing.at}.chooses_size: false."
                )


def stages_have_the_same_steps(run: ComposedRun) -> Messages:
    """Samples of a stage have the same stochastic steps."""
    for stage in run.stages:
        if run.is_staged and stage.sampling.get("one_step") is not None:
            yield (
                f"{stage.sampling.at}.one_step = {stage.sampling.get('one_step')}: where several stages sample, the "
                "samples of a stage have the same stochastic steps. Set it to null."
            )


def _readers(run: ComposedRun) -> Iterator[tuple[Stage, Part]]:
    return ((stage, stage.reads) for stage in run.stages if stage.reads is not None)


RULES = (
    texts_are_there_to_read,
    latents_are_there_to_begin_from,
    prompts_are_known_before_the_run,
    tracks_are_of_their_policy,
    trained_tracks_have_rewards,
    stages_answer_whole,
    a_policy_is_pushed_to_one_engine,
    sizes_suit_engine_and_devices,
    stages_have_the_same_steps,
)
