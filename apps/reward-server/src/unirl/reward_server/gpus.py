"""Which GPUs each replica sees."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.reward_server.settings import RewardSettings
from unirl.types.errors import ConfigError


def placed(rewards: Sequence[RewardSettings], gpus: Sequence[str]) -> dict[str, list[list[str]]]:
    """For every reward the GPUs of each of its replicas.

    gpus: names as environment variables such as CUDA_VISIBLE_DEVICES take them. Whole GPUs are given first, so that
    fractions do not block them.
    Raises ConfigError naming the reward that does not fit.
    """
    room = dict.fromkeys(gpus, 1.0)
    found: dict[str, list[list[str]]] = {reward.name: [] for reward in rewards}
    for reward in sorted(rewards, key=lambda reward: -reward.num_gpus):
        for _ in range(reward.num_replicas):
            found[reward.name].append(_taken(reward, room))
    return found


def _taken(reward: RewardSettings, room: dict[str, float]) -> list[str]:
    if reward.num_gpus == 0:
        return []
    share = min(reward.num_gpus, 1.0)
    fitting = [gpu for gpu, left in room.items() if left >= share - 1e-9]
    if reward.scheduling == "spread":
        fitting.sort(key=lambda gpu: -room[gpu])
    chosen = fitting[: max(1, int(reward.num_gpus))]
    if len(chosen) < reward.num_gpus:
        raise ConfigError(
            f"reward {reward.name}: {reward.num_replicas} replicas with num_gpus = {reward.num_gpus:g} do not fit on "
            f"the {len(room)} GPUs of this machine besides the other rewards. Set num_gpus: 0 for the CPU."
        )
    for gpu in chosen:
        room[gpu] -= share
    return chosen
