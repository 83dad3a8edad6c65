"""What the scripts that make the small bases share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unirl.pretraining import flow_matching
from unirl.pretraining.flow_matching import LatentBank, train_on_bank
from unirl.pretraining.muon import Muon, orthogonalised
from unirl.pretraining.probing import SPECIALS, token_ids, word_tokenizer


def test_muon_takes_a_convolution_as_the_matrix_of_its_filters() -> None:
    torch.manual_seed(0)
    filters = nn.Parameter(torch.randn(4, 3, 1, 3, 3))
    matrix = nn.Parameter(filters.detach().flatten(1).clone())
    gradient = torch.randn(4, 27)
    filters.grad, matrix.grad = gradient.view_as(filters).clone(), gradient.clone()
    Muon([filters], lr=0.1).step()
    Muon([matrix], lr=0.1).step()
    torch.testing.assert_close(filters.flatten(1), matrix)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(3, 6, 20)))
    assert 0.6 < singular.min() and singular.max() < 1.3


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_velocity_that_flow_matching_learns_leads_from_the_latent_to_the_noise(monkeypatch, shift) -> None:
    """With one latent c, noisy = (1 - sigma) c + sigma noise, so the velocity noise - c is (noisy - c) / sigma."""
    torch.manual_seed(0)
    clean = torch.randn(1, 1, 2, 3, 3)
    bank = LatentBank(clean, torch.zeros_like(clean), torch.zeros(1, 1, dtype=torch.long), torch.ones(1))
    seen: list[tuple[Tensor, Tensor]] = []
    losses: list[float] = []

    def predict_velocity(noisy_B: Tensor, sigma_B: Tensor, row_B: Tensor) -> Tensor:
        seen.append((sigma_B, row_B))
        return (noisy_B - clean[0]) / sigma_B.view(-1, 1, 1, 1)

    def without_optimiser(model, batch_loss, *, num_steps, after_step, **rest) -> None:
        for step in range(1, num_steps + 1):
            losses.append(batch_loss().item())
            after_step(step)

    monkeypatch.setattr(flow_matching, "fit", without_optimiser)
    averages: list[nn.Module] = []
    train_on_bank(
        nn.Linear(1, 1),
        bank,
        predict_velocity,
        num_steps=4,
        shift=shift,
        null_fraction=0.5,
        is_hidden=lambda name: True,
        snapshot=averages.append,
        every=2,
        batch_size=16,
    )
    # float32: an error of 1e-7 of the noisy latent over a sigma of 1e-3 at least.
    assert max(losses) < 1e-6 and len(averages) == 2
    for sigma_B, row_B in seen:
        u_B = sigma_B / (shift - (shift - 1) * sigma_B)
        assert (u_B.sort().values * 16).floor().tolist() == list(range(16))
        assert set(row_B.tolist()) == {0, 1}


def test_a_word_tokenizer_drops_articles_and_joins_phrases() -> None:
    vocabulary = {word: index for index, word in enumerate((*SPECIALS, "red", "circle", "moves left"))}
    tokenizer = word_tokenizer(vocabulary, joined=["moves left"], has_start=False, max_length=6)
    names = {index: word for word, index in vocabulary.items()}
    ids = token_ids(tokenizer, ["a red circle moves left"])[0].tolist()
    assert [names[index] for index in ids] == ["red", "circle", "moves left", "</s>", "<pad>", "<pad>"]
