"""Draws against exact distributions, and truncation against transformers' own."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from unirl.models import token_sampling
from unirl.models.token_sampling import draw, placed, truncated, uniforms
from unirl.types.sampling import ARSamplingParams


def logits(rows: int, words: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.8}])
def test_evenly_spread_numbers_draw_each_word_as_often_as_it_is_probable(changes):
    """Inversion: of n even numbers per word of probability p gets n p, within one at either end of its interval."""
    count = 4000
    params = ARSamplingParams(temperature=0.8, **changes)
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    row = logits(1)
    drawn, logp = draw(row.expand(count, -1), even, params)
    expected = truncated((row / 0.8).log_softmax(-1), params.top_p, params.top_k)[0].exp()
    torch.testing.assert_close(drawn.bincount(minlength=9).double(), count * expected.double(), rtol=0, atol=1.01)
    torch.testing.assert_close(logp, expected.log()[drawn])


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (1.0, 4), (0.7, 0), (0.7, 4), (0.01, 0), (1.0, 100)])
def test_truncation_keeps_the_words_that_transformers_keeps(top_p, top_k):
    scores = (logits(40, words=20) / 1.1).log_softmax(-1)
    expected = scores
    ids = torch.zeros(40, 1, dtype=torch.long)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    torch.testing.assert_close(truncated(scores, top_p, top_k), expected.log_softmax(-1), rtol=0, atol=1e-5)


def test_impossible_words_are_never_drawn_not_even_at_the_ends():
    row = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).expand(3, -1)
    ends = torch.tensor([0.0, 0.2, 1.0 - 2.0**-53], dtype=torch.float64)
    drawn, logp = draw(row, ends, ARSamplingParams(temperature=1.0))
    assert drawn.tolist() == [1, 1, 3]
    assert torch.isfinite(logp).all()


def test_a_greedy_draw_takes_the_most_probable_word():
    rows = logits(6)
    drawn, _ = draw(rows, torch.rand(6, dtype=torch.float64), ARSamplingParams(temperature=0))
    assert torch.equal(drawn, rows.argmax(-1))


def test_numbers_belong_to_the_sample_and_not_to_its_batch():
    together = uniforms(["a", "b", "c"], 7, 5)
    assert together.dtype == torch.float64 and bool(((together >= 0) & (together < 1)).all())
    assert torch.equal(uniforms(["c"], 7, 5)[0], together[2])
    assert not torch.equal(uniforms(["c"], 8, 5)[0], together[2])
    # Longer completions begin with the same numbers, so max_new_tokens changes no token that both have.
    assert torch.equal(uniforms(["c"], 7, 9)[0, :5], together[2])


def test_numbers_are_finer_than_float32():
    """24 bits could never choose a word of less than 6e-8, of which a large vocabulary has many."""
    found = uniforms(["a"], 0, 64)[0]
    assert bool((found != found.float().double()).any())


def test_numbers_on_a_device_are_those_of_the_cpu_and_stay_below_one_in_float32(monkeypatch):
    drawn = uniforms(["a", "b"], 3, 50)
    assert torch.equal(placed(drawn, torch.device("cpu")), drawn)
    largest = torch.tensor([[1 - 2.0**-48]], dtype=torch.float64)
    assert torch.equal(placed(largest, torch.device("cpu")), largest)
    monkeypatch.setattr(token_sampling, "wide_float", lambda device: torch.float32)
    narrow = placed(torch.cat([drawn.flatten()[None], largest], dim=1), torch.device("cpu"))
    assert narrow.dtype == torch.float32 and float(narrow.max()) < 1
    torch.testing.assert_close(narrow[0, :-1].double(), drawn.flatten(), rtol=0, atol=2.0**-24)
