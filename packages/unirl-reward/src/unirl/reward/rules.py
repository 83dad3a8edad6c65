"""What a reward service needs: scorers, and one weight each. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.types.recipe import Messages, Part, Run


def weights_name_scorers(own: Part, run: Run) -> Messages:
    """Reward weights and scorers have the same names."""
    scorers, weights = own.node.get("scorers"), own.node.get("weights")
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


def scorers_have_what_they_read(own: Part, run: Run) -> Messages:
    """An engine that decodes nothing has scorers that need no media."""
    if all(stage.engine.get("decode", True) for stage in run.stages):
        return
    for name, scorer in own.inside("scorers").items():
        if scorer.ability("reads_media") and not scorer.get("latents"):
            yield (
                f"engine.decode: false leaves no pixels to score, which {own.at}.scorers.{name} ({scorer.name}) needs. "
                "Set engine.decode: true, or take a scorer of latents (reads_media = False in its class; "
                "FunctionRewardScorer with latents: true)."
            )


def latents_are_there(own: Part, run: Run) -> Messages:
    """A function of latents scores samples that were denoised."""
    # A track that no stage makes is another rule's to name.
    stage = next((each for each in run.stages if each.track == run.scored_track), run.stages[0])
    if not stage.sampling.ability("samples_tokens"):
        return
    for name, scorer in own.inside("scorers").items():
        if scorer.get("latents"):
            yield (
                f"{own.at}.scorers.{name}.latents: true reads latents, and {stage.engine.name} makes tokens. Set it to "
                "false, or take another scorer."
            )


def sounds_are_sent(own: Part, run: Run) -> Messages:
    """Videos with sound go to reward servers in the body that carries it."""
    makers = [each.bundle.name for each in run.all_policies.values() if each.bundle.abilities.get("makes_sound")]
    if not makers:
        return
    for name, scorer in own.inside("scorers").items():
        if scorer.name == "RemoteRewardBackend" and scorer.get("transport") == "json":
            yield (
                f"{own.at}.scorers.{name}.transport = json carries no sound of a video, which {makers[0]} makes. Set "
                "transport: binary."
            )


RULES = (weights_name_scorers, scorers_have_what_they_read, latents_are_there, sounds_are_sent)
