"""Means of samples with 95 % intervals, and differences of two models on the same prompts.

Samples of one prompt resemble each other, so prompts are what is independent. Legend: P prompts, R resamples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NORMAL_975 = statistics.NormalDist().inv_cdf(0.975)
NUM_RESAMPLES = 4000
SEED = 0
"""Seed of the resampling, so that the same scores give the same interval."""
_BLOCK = 1 << 20
"""Indices drawn at a time."""

Values = Sequence[Sequence[float]]
"""Scores of every sample of each of P prompts; at least one each."""


@dataclass(frozen=True)
class Estimate:
    """A mean with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float
    interval: str
    """`wilson`, `bootstrap`, or `combined` from those of categories."""
    num_prompts: int
    num_samples: int


def fraction(values: Values) -> Estimate:
    """Mean of zeros and ones with Wilson's interval.

    Wilson's interval is of independent samples. Of m samples per prompt the number of samples is divided by the design
    effect: the variance of the mean over prompts by that of independent samples, at least 1 and at most m, and m where
    all samples are equal and nothing is known of it. Source of the interval: Wilson 1927; of the correction: Korn and
    Graubard 1998.
    """
    num_prompts, num_samples, mean = _counts(values)
    effect, most = 1.0, num_samples / num_prompts
    if num_samples > num_prompts:
        effect = most
        if num_prompts > 1 and 0 < mean < 1:
            spread = sum(sum(x - mean for x in own) ** 2 for own in values) * num_prompts / (num_prompts - 1)
            effect = min(max(spread / num_samples / (mean * (1 - mean)), 1.0), most)
    low, high = wilson(mean, num_samples / effect)
    return Estimate(mean, low, high, "wilson", num_prompts, num_samples)


def wilson(mean: float, num: float) -> tuple[float, float]:
    """Bounds of Wilson's 95 % interval of a fraction of `num` independent samples."""
    z2 = NORMAL_975**2
    middle = (mean + z2 / (2 * num)) / (1 + z2 / num)
    half = NORMAL_975 / (1 + z2 / num) * math.sqrt(mean * (1 - mean) / num + z2 / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrapped(values: Values) -> Estimate:
    """Mean of any values, with the percentile interval of resampled prompts."""
    num_prompts, num_samples, mean = _counts(values)
    draws_R = _resampled(_sums(values))
    return Estimate(mean, *_bounds(draws_R), "bootstrap", num_prompts, num_samples)


def combined(parts: Mapping[str, Estimate], weights: Mapping[str, float]) -> Estimate:
    """Weighted mean of the values of categories, whose intervals are joined as those of independent estimates.

    weights: equal if empty. Source: Zou and Donner 2008 (MOVER), a sum of estimates.
    """
    raw = {name: weights.get(name, 0.0) if weights else 1.0 for name in parts}
    total = sum(raw.values())
    shares = {name: weight / total for name, weight in raw.items()}
    value = sum(shares[name] * part.value for name, part in parts.items())
    below = math.sqrt(sum((shares[name] * (part.value - part.low)) ** 2 for name, part in parts.items()))
    above = math.sqrt(sum((shares[name] * (part.high - part.value)) ** 2 for name, part in parts.items()))
    return Estimate(
        value,
        value - below,
        value + above,
        "combined",
        sum(part.num_prompts for part in parts.values()),
        sum(part.num_samples for part in parts.values()),
    )


def fraction_difference(before: Values, after: Values) -> Estimate:
    """Fraction of `after` less that of `before`, the same P prompts in the same order.

    Joins the two Wilson intervals, with the correlation of the prompts' values: what is hard for one model is hard for
    the other. It keeps a width where all prompts agree, which resampling does not.
    Source: Newcombe 1998, Statistics in Medicine 17:2635, method 10 (with `fraction`'s intervals).
    """
    first, second = fraction(before), fraction(after)
    means_2P = np.array([[math.fsum(own) / len(own) for own in values] for values in (before, after)])
    is_varied = bool((means_2P.std(axis=1) > 0).all())
    correlation = float(np.corrcoef(means_2P)[0, 1]) if is_varied else 0.0
    value = second.value - first.value

    def half(own: float, other: float) -> float:
        return math.sqrt(max(0.0, own**2 - 2 * correlation * own * other + other**2))

    low = value - half(second.value - second.low, first.high - first.value)
    high = value + half(second.high - second.value, first.value - first.low)
    return Estimate(value, low, high, "wilson", second.num_prompts, second.num_samples)


def mean_difference(before: Values, after: Values) -> Estimate:
    """Mean of `after` less mean of `before`, the same P prompts in the same order, with the interval of resampled
    prompts: both are drawn together, since what makes a prompt hard makes it hard for both."""
    num_prompts, num_samples, mean = _counts(after)
    gain = mean - _counts(before)[2]
    draws_R = _resampled(_sums(after)) - _resampled(_sums(before))
    return Estimate(gain, *_bounds(draws_R), "bootstrap", num_prompts, num_samples)


def _counts(values: Values) -> tuple[int, int, float]:
    num_samples = sum(map(len, values))
    return len(values), num_samples, math.fsum(x for own in values for x in own) / num_samples


def _sums(values: Values) -> np.ndarray:
    """[P, 2]: sum and number of the samples of each prompt."""
    return np.array([(math.fsum(own), len(own)) for own in values])


def _resampled(sums_P2: np.ndarray) -> np.ndarray:
    """[R] means of P prompts drawn with replacement; the same draws for every P prompts."""
    num = len(sums_P2)
    generator = np.random.default_rng(SEED)
    means = []
    left = NUM_RESAMPLES
    while left:
        block = min(left, max(1, _BLOCK // num))
        drawn = sums_P2[generator.integers(num, size=(block, num))].sum(axis=1)
        means.append(drawn[:, 0] / drawn[:, 1])
        left -= block
    return np.concatenate(means)


def _bounds(draws_R: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws_R, (0.025, 0.975))
    return float(low), float(high)
