import hashlib

import pytest
import scipy.stats
import torch

from unirl.sde.noise import initial_noise, keyed_normal, keyed_permutation, keyed_uniform, noise_seed, step_noise

KEYS = ["r0:prompt:1:sample:0", "r0:prompt:1:sample:1", "r0:prompt:2:sample:0"]
SHAPE = (4, 8, 8)


def test_seed_is_the_documented_hash():
    digest = hashlib.blake2b(b"42::a", digest_size=8).digest()
    assert noise_seed(42, "a") == int.from_bytes(digest, "big") % 2**63
    # Pinned: a change would silently change every rollout.
    assert noise_seed(0, "prompt:0:sample:0") == 7105782737080619340


def test_noise_is_float32_on_the_cpu_with_one_row_per_key():
    for noise in (initial_noise(KEYS, 1, SHAPE), step_noise(KEYS, 3, 1, SHAPE), keyed_uniform(KEYS, 1, SHAPE)):
        assert noise.shape == (3, *SHAPE) and noise.dtype == torch.float32 and noise.device.type == "cpu"
    assert initial_noise([], 1, SHAPE).shape == (0, *SHAPE)


def test_noise_does_not_depend_on_the_batch_or_its_order():
    whole = initial_noise(KEYS, 1, SHAPE)
    assert torch.equal(initial_noise(KEYS[::-1], 1, SHAPE), whole.flip(0))
    for row, key in enumerate(KEYS):
        assert torch.equal(initial_noise([key], 1, SHAPE)[0], whole[row])
        assert torch.equal(step_noise([key], 5, 1, SHAPE)[0], step_noise(KEYS, 5, 1, SHAPE)[row])


def test_equal_keys_share_noise_and_different_ones_do_not():
    noise = initial_noise(["a", "a", "b"], 1, SHAPE)
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert not torch.equal(noise, initial_noise(["a", "a", "b"], 2, SHAPE))


def test_every_step_has_its_own_noise():
    drawn = [initial_noise(["a"], 1, SHAPE), *(step_noise(["a"], step, 1, SHAPE) for step in range(12))]
    assert len({tuple(noise.flatten().tolist()) for noise in drawn}) == 13
    assert torch.equal(step_noise(["a"], 7, 1, SHAPE), keyed_normal(["a::step::7"], 1, SHAPE))


def test_noise_leaves_the_global_generator_and_ignores_the_process_defaults():
    expected = initial_noise(KEYS, 1, SHAPE)
    state = torch.get_rng_state()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            again = initial_noise(KEYS, 1, SHAPE)
            order = keyed_permutation("a", 0, 5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again, expected)
    assert order.device.type == "cpu"
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)


def test_keys_that_agree_in_half_of_their_hash_draw_independent_noise():
    # torch's CPU generator drops the upper half of a seed: 100,000 keys hold such pairs for either half.
    def half_equal(shift: int) -> tuple[str, str]:
        seen: dict[int, str] = {}
        for index in range(400_000):
            digest = hashlib.blake2b(f"0::r0:{index}".encode(), digest_size=8).digest()
            half = int.from_bytes(digest, "big") >> shift & 0xFFFFFFFF
            if half in seen:
                return seen[half], f"r0:{index}"
            seen[half] = f"r0:{index}"
        raise AssertionError("no two keys agree")

    for shift in (0, 32):
        a, b = keyed_normal(half_equal(shift), 0, (2**16,)).double()
        # 2^16 products of independent normals: a correlation of 1.6e-2 would be four standard errors.
        assert abs(float((a * b).mean())) < 1.6e-2
        assert abs(float((a.square() * b.square()).mean()) - 1) < 5e-2
        order_a, order_b = (keyed_permutation(key, 0, 50).tolist() for key in half_equal(shift))
        assert order_a != order_b


def test_a_hash_of_two_equal_halves_draws_noise(monkeypatch):
    hashes = {"same": 7 << 32 | 7, "other": 9 << 32 | 7}
    monkeypatch.setattr("unirl.sde.noise._hash", lambda base_seed, key: hashes[key])
    same, other = keyed_uniform(["same", "other"], 0, (4096,)).double()
    assert abs(float(same.mean()) - 0.5) < 0.02 and abs(float(same.std()) - 12**-0.5) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([same, other]))[0, 1])) < 0.06


def test_noise_follows_the_normal_distribution_in_its_tails_too():
    noise = keyed_normal([f"key{index}" for index in range(16)], 3, (2**16,)).flatten().double()
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand draws.
    assert scipy.stats.kstest(noise.numpy(), "norm").statistic < 1.95 / noise.numel() ** 0.5
    assert float((noise.abs() > 4).double().mean()) == pytest.approx(6.33e-5, rel=0.5)
    assert torch.isfinite(noise).all()


def test_the_extreme_uniform_numbers_give_finite_symmetric_normals(monkeypatch):
    ends = torch.tensor([0.0, 1 - 2.0**-24], dtype=torch.float32)
    monkeypatch.setattr("unirl.sde.noise._uniform", lambda hashes, shape, dtype: ends.clone()[None])
    low, high = keyed_normal(["a"], 0, (2,))[0].tolist()
    assert low == -high and high == pytest.approx(5.42, abs=0.01)


def test_normal_noise_has_the_moments_of_a_standard_normal():
    # 2^20 draws: the mean is known to 1e-3, the variance to 1.4e-3, the fourth moment to about 1e-2.
    noise = initial_noise([f"key{index}" for index in range(256)], 0, (4096,)).double()
    assert noise.mean().item() == pytest.approx(0, abs=5e-3)
    assert noise.var().item() == pytest.approx(1, abs=7e-3)
    assert noise.pow(4).mean().item() == pytest.approx(3, abs=6e-2)
    # Between keys: 256 first elements, one per generator, are as independent as those within a key.
    assert noise[:, 0].mean().item() == pytest.approx(0, abs=0.25)
    correlation = (noise[:-1] * noise[1:]).mean()
    assert correlation.item() == pytest.approx(0, abs=5e-3)


def test_uniform_noise_covers_the_unit_interval():
    noise = keyed_uniform([f"key{index}" for index in range(64)], 0, (1024,))
    assert noise.min() >= 0 and noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=6e-3)


def test_permutation_is_one():
    order = keyed_permutation("a", 0, 50)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(50))
    assert order.tolist() != keyed_permutation("b", 0, 50).tolist()


def test_a_single_string_is_not_a_sequence_of_keys():
    with pytest.raises(ValueError, match="keys = 'abc' is one string"):
        initial_noise("abc", 0, SHAPE)
