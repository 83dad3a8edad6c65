"""The critic: zero at the start, one set of weights for every geometry, and what it reads."""

import pytest
import torch
from torch import nn

from unirl.algorithms.critic import NUM_FREQUENCIES, LatentCritic, noise_level_features, pooled_text
from unirl.types.conditions import TextEmbedCondition, TextTokenCondition
from unirl.types.errors import ConfigError, ContractError

SIGMAS = torch.tensor([1.0, 0.75, 0.0])
GEOMETRIES = {"image": (4, 8, 8), "wide": (4, 6, 10), "video": (4, 5, 8, 8), "packed": (64, 4), "small": (4, 1, 1)}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moved(critic: LatentCritic) -> LatentCritic:
    """With a last layer that is not zero."""
    nn.init.normal_(critic.value.weight, generator=torch.Generator().manual_seed(1))
    return critic


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_values_are_zero_at_the_start_whatever_the_geometry(name: str):
    values = LatentCritic(4, 6)(draw(3, *GEOMETRIES[name]), SIGMAS, draw(3, 6))
    assert torch.equal(values, torch.zeros(3))


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_a_value_depends_on_latent_noise_level_and_text_of_its_own_row(name: str):
    critic = moved(LatentCritic(4, 6))
    x, text = draw(3, *GEOMETRIES[name]), draw(3, 6, seed=2)
    base = critic(x, SIGMAS, text)
    assert base.shape == (3,) and base.unique().numel() == 3
    for changed in (
        critic(torch.cat([x[:1] + 1, x[1:]]), SIGMAS, text),
        critic(x, torch.tensor([0.9, 0.75, 0.0]), text),
        critic(x, SIGMAS, torch.cat([text[:1].flip(1), text[1:]])),
    ):
        assert abs(float((changed[0] - base[0]).detach())) > 1e-4
        torch.testing.assert_close(changed[1:], base[1:], rtol=0, atol=0)


def test_a_grid_as_fine_as_the_latent_keeps_every_element():
    critic = LatentCritic(4, grid=8)
    x = draw(2, 4, 8, 8)
    torch.testing.assert_close(critic._pooled(x), x.flatten(1), rtol=0, atol=0)
    coarse = LatentCritic(4, grid=2)._pooled(x)
    torch.testing.assert_close(coarse, x.unflatten(2, (2, 4)).unflatten(4, (2, 4)).mean(dim=(3, 5)).flatten(1))


def test_a_video_of_equal_frames_is_worth_its_frame_and_a_packed_sequence_its_stretches():
    critic = moved(LatentCritic(4, grid=2))
    image = draw(3, 4, 4, 4)
    video = image[:, :, None].expand(3, 4, 7, 4, 4)
    torch.testing.assert_close(critic(video, SIGMAS, None), critic(image, SIGMAS, None))
    packed = draw(3, 8, 4)
    means = packed.unflatten(1, (4, 2)).mean(dim=2).transpose(1, 2).flatten(1)
    torch.testing.assert_close(critic._pooled(packed), means)


def test_the_weights_come_from_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = LatentCritic(4, 6, seed=1)
    assert torch.equal(torch.rand(4), expected)
    second, other = LatentCritic(4, 6, seed=1), LatentCritic(4, 6, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.latent.weight, other.latent.weight)


def test_noise_levels_are_told_apart():
    features = noise_level_features(torch.tensor([0.0, 1 / 256, 1.0]))
    assert features.shape == (3, 2 * NUM_FREQUENCIES)
    assert torch.equal(features[0], torch.cat([torch.zeros(NUM_FREQUENCIES), torch.ones(NUM_FREQUENCIES)]))
    assert float((features[0] - features[1]).abs().max()) > 0.5
    assert float(features[2, 0]) == pytest.approx(0.841470985)


def test_text_is_the_pooled_embedding_or_the_mean_of_the_tokens_that_count():
    embeds = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]])
    mask = torch.tensor([[1, 1, 0]])
    pooled = torch.tensor([[7.0, 8.0]])
    assert torch.equal(pooled_text({"text": TextEmbedCondition(embeds=embeds, pooled=pooled)}), pooled)  # ty: ignore[invalid-argument-type]
    masked = pooled_text({"text": TextEmbedCondition(embeds=embeds, attention_mask=mask)})
    assert masked is not None and masked.tolist() == [[2.0, 4.0]]
    whole = pooled_text({"text": TextEmbedCondition(embeds=embeds)})
    assert whole is not None and torch.allclose(whole, torch.tensor([[13 / 3, 17 / 3]]))
    assert pooled_text({}) is None
    assert pooled_text({"text": TextTokenCondition(input_ids=mask, attention_mask=mask)}) is None


def test_sizes_that_do_not_fit_name_the_option_to_change():
    with pytest.raises(ContractError, match=r"latent_channels = 16 does not fit latents \(4, 8, 8\)"):
        LatentCritic(16)(draw(3, 4, 8, 8), SIGMAS, None)
    with pytest.raises(ContractError, match="condition_dim = 6, but the conditions hold none as pooled text"):
        LatentCritic(4, 6)(draw(3, 4, 8, 8), SIGMAS, None)
    with pytest.raises(ContractError, match=r"hold one of width \(5,\) as pooled text"):
        LatentCritic(4, 6)(draw(3, 4, 8, 8), SIGMAS, draw(3, 5))
    with pytest.raises(ConfigError, match="algorithm.critic.grid = 0 must be at least 1"):
        LatentCritic(4, grid=0)
