"""What a training stack needs of the rest of a recipe. See `unirl.types.recipe`."""

from __future__ import annotations

from collections.abc import Mapping

from unirl.train.track_loss import track_losses
from unirl.types.errors import ConfigError
from unirl.types.recipe import TARGET, Messages, Part, Run


def losses_are_of_tracks(own: Part, run: Run) -> Messages:
    """Weights and turns name tracks that train, and every update trains one."""
    given = own.get("losses") or {}
    plain = {
        track: {key: value for key, value in loss.items() if key != TARGET} if isinstance(loss, Mapping) else loss
        for track, loss in given.items()
    }
    try:
        track_losses(run.policy_of(own).algorithms, plain)
    except ConfigError as error:
        yield str(error)


def tracks_have_their_copies(own: Part, run: Run) -> Messages:
    """Tracks that are sampled from different copies of the policy have an engine that samples them apart."""
    wanted = {track: part.ability("rollout_policy") for track, part in run.policy_of(own).algorithms.items()}
    if len(set(wanted.values())) > 1 and not run.engine.ability("takes_copies_by_track"):
        shown = ", ".join(f"{track}: {copy or 'the policy that trains'}" for track, copy in wanted.items())
        yield (
            f"the algorithms of {own.at} sample from different copies ({shown}), but {run.engine.name} samples all "
            "tracks from one. Choose algorithms that sample from one, or an engine with takes_copies_by_track "
            "(unirl.rollout.engine.unified.engine.UnifiedEngine)."
        )


def balance_compares_several(own: Part, run: Run) -> Messages:
    """Gradients of tracks are compared where there are several."""
    tracks = list(run.policy_of(own).algorithms)
    if own.get("measures_balance") and len(tracks) == 1:
        yield (
            f"{own.at}.measures_balance compares the gradients of several tracks; there is one, {tracks[0]}. Set it to "
            "false."
        )


RULES = (losses_are_of_tracks, balance_compares_several, tracks_have_their_copies)
