"""What an engine of two stages needs of a recipe: a writer of texts, a painter of texts, rewards on the images."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def stages_are_there(own: Part, run: Run) -> Messages:
    """The two policies exist, each samples what its role makes, and the run's sampling is theirs."""
    policies = run.all_policies
    for role, keyword, samples_tokens in (("writer", "ar", True), ("painter", "diffusion", False)):
        name = own.get(role, role)
        if name not in policies:
            yield f"{own.at}.{role} = {name} is no policy of this recipe; there are {', '.join(policies)}. Name one."
            continue
        sampling = policies[name].sampling
        if sampling is None:
            continue
        if sampling.ability("samples_tokens") is not samples_tokens:
            made, wanted = ("images", "texts") if samples_tokens else ("texts", "images")
            yield f"{sampling.at} samples {made}, but {own.at}.{role} = {name} makes {wanted}. Name the other policy."
        elif run.sampling.node.get(keyword) != sampling.node:
            yield (
                f"{run.sampling.at}.{keyword} is not {sampling.at}, which the policy's own parts are judged by. Write "
                f"{keyword}: ${{{sampling.at}}}."
            )
    beside = [name for name in policies if name not in (own.get("writer", "writer"), own.get("painter", "painter"))]
    if beside:
        yield f"policies.{beside[0]} has no part in {own.name}, which joins a writer and a painter. Remove it."


def images_are_scored(own: Part, run: Run) -> Messages:
    """Rewards are of the painter's track, from which the texts are credited."""
    painter = run.all_policies.get(own.get("painter", "painter"))
    made = None if painter is None or painter.engine is None else painter.engine.get("track")
    if made is not None and run.scored_track != made:
        shown = "null, the texts" if run.scored_track is None else run.scored_track
        yield f"reward.track = {shown}, but the painter's track is {made}. Set reward.track: {made}."


def prompts_are_written_later(own: Part, run: Run) -> Messages:
    """Nobody knows the painter's prompts before the run."""
    for policy in run.all_policies.values():
        if policy.engine is not None and policy.engine.get("drop_text_encoders"):
            yield (
                f"{policy.engine.at}.drop_text_encoders encodes every prompt before the run, but they are written in "
                "it. Set it to false."
            )


RULES = (stages_are_there, images_are_scored, prompts_are_written_later)
