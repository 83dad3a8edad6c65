"""What OmniNFT needs of the model and of the advantages. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unirl.types.recipe import Messages, Part, Run

ROUTED = "unirl.algorithms.routed_advantages.RoutedAdvantages"


def weights_problem(at: str, weights: Mapping[str, float], media: Collection[str] = ()) -> str | None:
    """What is wrong with the weights of the media that are named, for a message; None if nothing is.

    media: of the latent; empty where they are not known.
    """
    below = {medium: weight for medium, weight in weights.items() if not weight >= 0}
    if below:
        return f"{at} has weights below 0: {below}. Set weights of at least 0."
    unknown = [medium for medium in weights if media and medium not in media]
    if unknown:
        return f"{at} names {', '.join(unknown)}; media of the latent are {', '.join(media)}. Use these names."
    if media and not any(weights.get(medium, 1.0) for medium in media):
        return f"{at} = {dict(weights)} leaves no medium to train. Set one above 0."
    return None


def warmup_of_nothing(at: str, warmup: int) -> str:
    """Message for a warmup of regions that all weigh the same."""
    return f"{at}.region_warmup = {warmup} does nothing with {at}.region_weight = 1. Set it to 0."


def model_has_media(own: Part, run: Run) -> Messages:
    """The latent holds several media, whose names the weights use, and one of them counts."""
    pipeline, media = _pipeline_of(own, run), _media_of(own, run)
    weights = own.get("media_weights") or {}
    if not media:
        yield (
            f"{own.name} trains the media of a latent apart, and a latent of {pipeline.name} is one medium. Set "
            f"{own.at}._target_: unirl.algorithms.diffusion_nft.DiffusionNFT, or a model of video with sound (LTX-2)."
        )
        return
    problem = weights_problem(f"{own.at}.media_weights", weights, media)
    if problem is not None:
        yield problem


def advantages_are_routed(own: Part, run: Run) -> Messages:
    """Each medium of the latent has a route, and nothing else."""
    made = run.advantages
    if not made.ability("routes_media"):
        yield (
            f"{own.name} needs advantages for each medium, which {made.name} does not make. Set {made.at}._target_: "
            f"{ROUTED} with {made.at}.routes."
        )
        return
    media, routes = _media_of(own, run), made.get("routes")
    if media and routes and set(routes) != set(media):
        yield (
            f"{made.at}.routes is for {', '.join(routes)}, but a latent holds {', '.join(media)}. Give each of these a "
            "route, and no other."
        )


def regions_are_known(own: Part, run: Run) -> Messages:
    """The model notes the attention that weighs regions, and regions have weights where these are to warm up."""
    most, warmup = own.get("region_weight"), own.get("region_warmup")
    if most == 1:
        if warmup:
            yield warmup_of_nothing(own.at, warmup)
        return
    pipeline, said = _pipeline_of(own, run), f"{own.at}.region_weight = {most:g}"
    if "region_steps" in pipeline.keywords:
        if pipeline.get("region_steps") is None:
            yield (
                f"{said} weighs places of the video by the attention of the sound, and nothing notes it. Set "
                f"{pipeline.at}.region_steps: [0.5, 0.9]."
            )
    elif not pipeline.takes_any:
        yield (
            f"{said} weighs places of the video by the attention of the sound, which {pipeline.name} does not note. "
            f"Set {own.at}.region_weight: 1, or a model whose sound attends to its video (LTX-2)."
        )


def _pipeline_of(own: Part, run: Run) -> Part:
    policy = run.policy_of(own)
    return policy.pipeline_of(next(name for name, part in policy.algorithms.items() if part is own))


def _media_of(own: Part, run: Run) -> tuple[str, ...]:
    """Names of the media of a latent; empty where a latent is one."""
    media = _pipeline_of(own, run).abilities.get("latent_media")
    return media if isinstance(media, tuple) else ()


RULES = (model_has_media, advantages_are_routed, regions_are_known)
