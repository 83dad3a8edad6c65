"""Distributes samples of unequal cost over devices, so that no device waits for the others.

Legend: R devices, U updates per rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.types.errors import ConfigError


def balanced_order(costs: Sequence[int], num_shards: int, num_updates: int, samples_per_unit: int = 1) -> list[int]:
    """An order of the samples, as indices, in which contiguous shards of equal size have nearly equal costs.

    costs: of each sample, in any unit. `samples_per_unit` consecutive samples stay together.
    Update u still trains on the samples i with (i // samples_per_unit) mod U == u, as in `unirl.train.slicing`, so the
    samples of an update and their divisor do not change, only the devices. Within an update the costs of two devices
    differ by at most the largest difference of R neighbours in the sorted costs. The k-th samples of all devices are
    such neighbours, so micro-batches are balanced too; they stay in the order of the batch, long and short mixed. With
    one device the order does not change. Raises ConfigError if the units do not divide evenly.
    """
    units, rest = divmod(len(costs), samples_per_unit)
    if rest or units % (num_shards * num_updates):
        raise ConfigError(
            f"{len(costs)} samples, {samples_per_unit} to a unit, do not divide over {num_shards} devices x "
            f"{num_updates} updates. Change batch_size, sampling.samples_per_prompt or stack.num_updates_per_batch."
        )
    unit_costs = [sum(costs[start : start + samples_per_unit]) for start in range(0, len(costs), samples_per_unit)]
    shard = units // num_shards
    order = [0] * units
    for update in range(num_updates):
        teams = _teams(list(range(update, units, num_updates)), unit_costs, num_shards)
        for slot, team in enumerate(sorted(teams, key=min)):
            for rank, unit in enumerate(team):
                order[rank * shard + slot * num_updates + update] = unit
    return [unit * samples_per_unit + offset for unit in order for offset in range(samples_per_unit)]


def _teams(units: list[int], costs: Sequence[int], num_shards: int) -> list[list[int]]:
    """Groups of R units of similar cost, ordered by device: the most expensive unit goes to the device with the least
    so far."""
    falling = sorted(units, key=lambda unit: (-costs[unit], unit))
    loads = [0] * num_shards
    teams = []
    for start in range(0, len(falling), num_shards):
        team = [0] * num_shards
        by_load = sorted(range(num_shards), key=lambda rank: (loads[rank], rank))
        for rank, unit in zip(by_load, falling[start : start + num_shards], strict=True):
            team[rank] = unit
            loads[rank] += costs[unit]
        teams.append(team)
    return teams
