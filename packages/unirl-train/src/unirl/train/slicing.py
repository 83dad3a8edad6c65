"""Which samples form which mini-batch and micro-batch: the single source for anchor and training.

Mini-batch u of U is the strided set {i : i mod U == u}. A contiguous shard of a device whose size is a multiple
of U holds its own part of every mini-batch, so the union over devices is the same set at any number of devices.
Where samples belong together (the two of a preference pair), the same holds for units of that many samples.
"""

from __future__ import annotations

from unirl.types.errors import ConfigError


def mini_batches(num_samples: int, num_updates: int, samples_per_unit: int = 1) -> list[list[int]]:
    """Sample indices of every update; `samples_per_unit` consecutive samples stay together.

    Raises ConfigError if they do not divide.
    """
    if num_updates < 1:
        raise ConfigError(f"stack.num_updates_per_batch = {num_updates} must be at least 1")
    units, rest = divmod(num_samples, samples_per_unit)
    if rest or units % num_updates:
        raise ConfigError(
            f"{num_samples} samples per device, {samples_per_unit} to a unit, do not divide into {num_updates} "
            "updates. Change stack.num_updates_per_batch, batch_size or sampling.samples_per_prompt."
        )
    return [
        [
            unit * samples_per_unit + offset
            for unit in range(update, units, num_updates)
            for offset in range(samples_per_unit)
        ]
        for update in range(num_updates)
    ]


def micro_batches(indices: list[int], micro_batch_size: int, samples_per_unit: int = 1) -> list[list[int]]:
    """Consecutive pieces of at most `micro_batch_size`; the last may be smaller."""
    if micro_batch_size < 1 or micro_batch_size % samples_per_unit:
        raise ConfigError(
            f"stack.micro_batch_size = {micro_batch_size} must be a positive multiple of {samples_per_unit}"
            if samples_per_unit > 1
            else f"stack.micro_batch_size = {micro_batch_size} must be at least 1"
        )
    return [indices[start : start + micro_batch_size] for start in range(0, len(indices), micro_batch_size)]


def training_slices(
    num_samples: int, num_updates: int, micro_batch_size: int, samples_per_unit: int = 1
) -> list[list[list[int]]]:
    """Sample indices by update and micro-batch."""
    return [
        micro_batches(mini, micro_batch_size, samples_per_unit)
        for mini in mini_batches(num_samples, num_updates, samples_per_unit)
    ]
