"""What the scripts that make the small bases share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unirl.pretraining import flow_matching
from unirl.pretraining.command_line import make_checkpoint
from unirl.pretraining.flow_matching import LatentBank, train_flow
from unirl.pretraining.judging import SCORED_AT_ONCE, accuracy
from unirl.pretraining.muon import Muon, orthogonalised
from unirl.pretraining.probing import SPECIALS, token_ids, word_tokenizer
from unirl.pretraining.prompt_files import split_keys
from unirl.pretraining.sampling import euler_sample, shifted_sigmas


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
    scenes = torch.zeros(1, 1, dtype=torch.long)
    bank = LatentBank(clean, torch.zeros_like(clean), scenes, torch.ones(1), null_fraction=0.5)
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
    train_flow(
        nn.Linear(1, 1),
        bank.draw,
        predict_velocity,
        num_steps=4,
        shift=shift,
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


@dataclass(frozen=True)
class Budget:
    """Steps of two stages."""

    text: int = 3
    transformer: int = 5


def test_a_command_line_sets_the_steps_of_each_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[object] = []
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    def pretrain(out: Path, **options: object) -> None:
        made.append((out, options))

    monkeypatch.setattr(sys, "argv", ["pretrain", "--out", str(tmp_path), "--text-steps", "7", "--snapshot-every", "2"])
    make_checkpoint(pretrain, Budget, "A base.")
    assert made == [(tmp_path, {"seed": 0, "budget": Budget(text=7), "snapshot_every": 2})] and threads == [1]
    with pytest.raises(SystemExit):  # a script without snapshots knows no such option
        make_checkpoint(pretrain, Budget, "A base.", has_snapshots=False)


def test_a_fraction_of_each_group_is_held_out_and_a_part_of_both_sides_is_kept() -> None:
    keys = {name: {f"{name} {number}" for number in range(40)} for name in ("few", "many")}
    train, heldout = split_keys(keys, heldout_fraction=0.25, kept={"many": 0.5})
    assert not train & heldout
    for name, numbers in (("few", (30, 10)), ("many", (15, 5))):
        assert tuple(len(side & keys[name]) for side in (train, heldout)) == numbers


def test_accuracy_is_the_mean_over_all_samples_and_over_each_category() -> None:
    sizes: list[int] = []

    def score(batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        sizes.append(len(batch))
        return torch.tensor(batch) % 2, torch.full((len(batch),), 0.25)

    samples = [*range(SCORED_AT_ONCE), 1]
    found = accuracy(score, samples, lambda number: "low" if number < 4 else "high", ["low", "high"])
    strict = (SCORED_AT_ONCE / 2 + 1) / len(samples)
    assert found == {"strict": round(strict, 3), "soft": 0.25, "low": 0.6, "high": 0.5}
    assert sizes == [SCORED_AT_ONCE, 1]


@dataclass(frozen=True)
class Request:
    """For one scene."""

    category: str
    scene: str


def test_a_bank_draws_categories_by_their_shares_and_requests_of_one_equally() -> None:
    latents = torch.arange(6.0).view(6, 1)  # two drawings of each scene
    requests = [Request("common", "a"), Request("common", "b"), Request("rare", "c")]
    bank = LatentBank.of_scenes(
        [(latents[:4], latents[:4] * 0), (latents[4:], latents[4:] * 0)],
        ["a", "b", "c"],
        requests,
        lambda request: request.scene,
        num_captioned=2,
        category_shares={"common": 0.8, "rare": 0.2},
        null_fraction=0.0,
    )
    assert bank.scenes_PN.tolist() == [[0, 0], [1, 1], [2, 2]]
    torch.testing.assert_close(bank.prompt_weights_P, torch.tensor([0.4, 0.4, 0.2]))
    torch.manual_seed(0)
    clean_B1, prompt_B = bank.draw(4000)
    assert torch.equal(clean_B1[:, 0].long() // 2, prompt_B)
    # Of 4000 draws a share has a deviation of 0.008 at most.
    torch.testing.assert_close(prompt_B.bincount() / 4000, torch.tensor([0.4, 0.4, 0.2]), atol=0.03, rtol=0)


def test_euler_steps_along_the_straight_velocity_end_on_the_latent() -> None:
    torch.manual_seed(0)
    noise, clean = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    seen: list[Tensor] = []

    def transformer(*, hidden_states: Tensor, timestep: Tensor, scale: Tensor, return_dict: bool) -> tuple[Tensor]:
        seen.append(timestep)
        return ((noise - clean) * scale,)

    sigmas = shifted_sigmas(3, 3.0)
    found = euler_sample(transformer, {"scale": torch.ones(2, 1, 1)}, noise, sigmas)
    torch.testing.assert_close(found, clean)
    assert torch.equal(torch.stack(seen), 1000 * sigmas[:-1, None].expand(-1, 2))
