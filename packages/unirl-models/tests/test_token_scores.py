"""Scores of tokens against float64, in chunks that never hold more logits than they may."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.models.token_scores import ScoringHead, chunked_scores, softmax_scores
from unirl.types.errors import ConfigError

WIDTH, WORDS, TOKENS = 6, 50, 23


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def projection(*, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(WIDTH, WORDS, bias=bias)
    layer.weight.data = values(WORDS, WIDTH, seed=1)
    return layer


def tokens() -> torch.Tensor:
    return torch.arange(TOKENS) * 7 % WORDS


class LargestTensor(TorchDispatchMode):
    """Watches every operation, backward included, for the largest tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_scores_are_those_of_the_softmax_at_the_temperature():
    logits, chosen, temperature = values(TOKENS, WORDS) * 3, tokens(), 0.7
    scaled = logits.double() / temperature
    probability = scaled.exp() / scaled.exp().sum(-1, keepdim=True)
    logp, entropy, collision = softmax_scores(logits, chosen, temperature)
    assert logp.dtype == entropy.dtype == collision.dtype == torch.float32
    torch.testing.assert_close(logp.double(), probability.log()[range(TOKENS), chosen], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy.double(), -(probability * probability.log()).sum(-1), rtol=0, atol=2e-6)
    torch.testing.assert_close(collision.double(), probability.square().sum(-1), rtol=0, atol=1e-6)


def test_entropy_of_four_equal_words_is_log_four_also_where_others_are_impossible():
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0, -torch.inf]], requires_grad=True)
    logp, entropy, collision = softmax_scores(logits, torch.tensor([1]), 2.0)
    torch.testing.assert_close(collision, torch.tensor([0.25]))
    assert not collision.requires_grad
    torch.testing.assert_close(entropy, torch.tensor([4.0]).log())
    torch.testing.assert_close(logp, -torch.tensor([4.0]).log())
    (gradient,) = torch.autograd.grad(entropy.sum() + logp.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[-0.125, 0.375, -0.125, -0.125, 0.0]]))


@pytest.mark.parametrize("size", [1, 5, TOKENS, 100])
def test_chunks_change_neither_scores_nor_gradients(size):
    hidden, layer = values(TOKENS, WIDTH).requires_grad_(), projection(bias=True)
    weights = values(2, TOKENS, seed=2)

    def gradients(logp, entropy, collision):
        total = (weights[0] * logp + weights[1] * entropy).sum()
        return logp, entropy, collision, *torch.autograd.grad(total, [hidden, *layer.parameters()])

    whole = gradients(*softmax_scores(layer(hidden), tokens(), 1.3))
    parts = gradients(*chunked_scores(layer, hidden, tokens(), 1.3, tokens_per_chunk=size))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("num_tokens", [16, 256])
def test_no_tensor_exceeds_the_chunk_whatever_the_batch(num_tokens):
    words, width, chunk = 4096, 4, 16384
    layer = nn.Linear(width, words, bias=False)
    head = ScoringHead(layer, chunk_logits=chunk)
    hidden = values(1, num_tokens, width).requires_grad_()
    places = torch.arange(num_tokens)
    with LargestTensor() as watch, head.scoring(places, places, 1.0):
        logp, entropy, _, _ = head(hidden)
        (logp.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    # The weight's gradient is as large as the weight; nothing else may exceed a chunk.
    assert watch.numel == max(chunk, words * width)


class MostAlive(TorchDispatchMode):
    """Watches every operation, backward included, for the most bytes that tensors made within it hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("used", ["logp", "entropy", "both"])
def test_a_backward_pass_holds_no_more_chunks_of_more_tokens(used: str):
    """A score that no loss uses, held until after the backward pass as stats of a replay are, keeps no logits."""
    words, width, most = 4096, 4, []
    for num_tokens in (16, 256):
        head = ScoringHead(nn.Linear(width, words, bias=False), chunk_logits=8 * words)
        hidden, places = values(1, num_tokens, width).requires_grad_(), torch.arange(num_tokens)
        with MostAlive() as watch, head.scoring(places, places, 1.0):
            logp, entropy, _, _ = head(hidden)
            {"logp": logp, "entropy": entropy, "both": logp + entropy}[used].sum().backward()
        assert logp.numel() == entropy.numel() == num_tokens
        most.append(watch.most)
    assert most[1] < most[0] + 4 * 8 * words


def test_a_head_scores_the_tokens_behind_the_places_it_is_asked_for():
    layer = projection()
    head, hidden = ScoringHead(layer), values(2, 4, WIDTH)
    places, chosen = torch.tensor([6, 1, 3]), torch.tensor([4, 0, 49])
    with head.scoring(places, chosen, 2.0):
        *scores, states = head(hidden)
    assert torch.equal(states, torch.stack([hidden[1, 2], hidden[0, 1], hidden[0, 3]]))
    expected = softmax_scores(layer(states), chosen, 2.0)
    torch.testing.assert_close(tuple(scores), expected, rtol=0, atol=1e-6)


def test_a_head_is_the_projection_it_replaces():
    layer = projection(bias=True)
    head, hidden = ScoringHead(layer), values(2, 3, WIDTH)
    assert head.weight is layer.weight and head.bias is layer.bias
    assert list(head.state_dict()) == list(layer.state_dict())
    assert torch.equal(head(hidden), layer(hidden))
    with pytest.raises(RuntimeError, match="stop"), head.scoring(torch.arange(2), torch.arange(2), 1.0):
        raise RuntimeError("stop")
    assert torch.equal(head(hidden), layer(hidden))


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="chunk_logits = 0 must be at least 1"):
        ScoringHead(projection(), chunk_logits=0)
