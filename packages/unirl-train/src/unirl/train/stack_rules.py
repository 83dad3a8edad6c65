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


def balance_compares_several(own: Part, run: Run) -> Messages:
    """Gradients of tracks are compared where there are several."""
    tracks = list(run.policy_of(own).algorithms)
    if own.get("measures_balance") and len(tracks) == 1:
        yield (
            f"{own.at}.measures_balance compares the gradients of several tracks; there is one, {tracks[0]}. Set it to "
            "false."
        )


RULES = (losses_are_of_tracks, balance_compares_several)
