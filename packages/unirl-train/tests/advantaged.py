"""A response whose root track has advantages, as the trainer hands it to the stack."""

from torch import Tensor

from unirl.types.rollout import RolloutResp


def with_advantages(resp: RolloutResp, advantages: Tensor) -> RolloutResp:
    """The response with advantages [B] in its root track."""
    return resp.with_values(resp.root_name(), advantages=advantages)
