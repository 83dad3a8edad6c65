"""HunyuanImage3 as a language model: against a plain recomputation in float64, its forced words, and kept experts.

Float32, one thread, tiny random weights in the published layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.hunyuan_image3.pipeline import EXPERTS, HunyuanImage3Pipeline, HunyuanImage3TextPipeline
from unirl.models.hunyuan_image3.sizes import sizes
from unirl.models.hunyuan_image3.text_adapter import HunyuanImage3TextAdapter
from unirl.models.packed.contexts import rows_of_ids
from unirl.models.packed.given_images import GivenImage, given_images
from unirl.sde.kernels import FlowSDEStrategy
from unirl.types.conditions import ExpertCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import ImageLists, Primitive, Texts
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import TextSegment

from .contract import KEYS, TEXTS
from .hunyuan_image3_reference import Reference, TokenSequence
from .tiny_hunyuan_image3 import TINY, save_hunyuan_image3, weights

WRITING = ARSamplingParams(temperature=1.0, max_new_tokens=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    return save_hunyuan_image3(tmp_path_factory.mktemp("hunyuan_image3_text") / "model")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> HunyuanImage3Bundle:
    """Read-only: tests that change weights load their own."""
    return HunyuanImage3Bundle(str(folder))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(weights(), TINY)


def written(writer: HunyuanImage3TextPipeline, primitives: dict[str, Primitive]) -> tuple[dict[str, Any], TextSegment]:
    """Conditions and completions."""
    conditions: dict[str, Any] = dict(writer.encode(primitives, WRITING))
    with writer.evaluating():
        return conditions, writer.generate(conditions, WRITING, noise_keys=KEYS)


def _say(reference: Reference, sequence: TokenSequence, ids: Sequence[int]) -> None:
    for number in ids:
        sequence.word(reference.word(number))


def _show(
    reference: Reference, bundle: HunyuanImage3Bundle, sequence: TokenSequence, image: GivenImage, block: int
) -> None:
    (rows, columns), patch_grid = image.grids
    ids = bundle.tokenizer(f"<boi><img_size_64><img_ratio_{sizes(64).index((rows * 16, columns * 16))}>")["input_ids"]
    _say(reference, sequence, ids)
    sequence.word(reference.time("timestep_emb", 0.0))
    latent = image.latents.T.unflatten(1, (rows, columns))
    sequence.image(reference.latent_tokens(latent, 0.0), rows, columns, block=block)
    sequence.word(reference.word(bundle.words.separator), block=block)
    with torch.no_grad():
        seen = bundle.images.visual_tokens(image.patches, [patch_grid])[0].double()
    count = patch_grid[0] * patch_grid[1]
    sequence.image(seen[:count], *patch_grid, block=block)
    for padding in seen[count:]:
        sequence.word(padding, block=block)
    _say(reference, sequence, [bundle.words.image_end])


def pictures() -> dict[str, Primitive]:
    """One image, none, and two."""
    generator = torch.Generator().manual_seed(5)
    shapes = [[(40, 50)], [], [(64, 33), (32, 96)]]
    return {
        "image": ImageLists(images=[[torch.rand(3, *size, generator=generator) for size in each] for each in shapes])
    }


@pytest.mark.parametrize("has_images", [False, True])
def test_log_probs_equal_a_plain_recomputation(
    has_images: bool, bundle: HunyuanImage3Bundle, reference: Reference
) -> None:
    """Sampled with a cache and replayed in one packed forward; 1e-4 nats of log-probs of 2 to 12."""
    writer = HunyuanImage3TextPipeline(bundle)
    primitives: dict[str, Primitive] = {"text": Texts(texts=list(TEXTS)), **(pictures() if has_images else {})}
    conditions, segment = written(writer, primitives)
    replayed = writer.replay(conditions, segment, WRITING)
    torch.testing.assert_close(replayed.logp_N.detach(), segment.log_probs, rtol=1e-5, atol=1e-5)
    assert torch.equal(replayed.logp_N, writer.replay(conditions, segment, WRITING).logp_N)
    assert segment.loss_mask is None
    tokenizer, images = bundle.tokenizer, given_images(conditions, 3)
    expected = []
    for text, shown, tokens in zip(TEXTS, images, segment.unpack("tokens"), strict=True):
        sequence = TokenSequence()
        _say(reference, sequence, tokenizer("<|startoftext|>User: ")["input_ids"])
        for number, image in enumerate(shown):
            _show(reference, bundle, sequence, image, number)
        _say(reference, sequence, tokenizer(f"{text}\n\nAssistant: ")["input_ids"])
        length = len(sequence.tokens)
        _say(reference, sequence, tokens.tolist())
        logp = reference.logits(sequence)[length - 1 : -1].log_softmax(-1)
        expected.append(logp.gather(1, tokens[:, None]).squeeze(1))
    torch.testing.assert_close(replayed.logp_N.detach().double(), torch.cat(expected), rtol=1e-4, atol=1e-4)
    if has_images:
        without = writer.encode({"text": primitives["text"]}, WRITING)
        blind = writer.replay(without, segment, WRITING).logp_N
        assert float((blind - replayed.logp_N).detach().abs().max()) > 0.01


def test_a_text_does_not_depend_on_its_neighbours(bundle: HunyuanImage3Bundle) -> None:
    """Samples that end early leave the cache, prompts that repeat are run once; each draws what it draws alone."""
    writer = HunyuanImage3TextPipeline(bundle)
    texts, keys = ["fog", "a red cat", "fog"], ["a", "b", "c"]
    stop = dataclasses.replace(WRITING, max_new_tokens=16, stop_token_ids=tuple(range(0, 256, 9)))
    with writer.evaluating():
        together = writer.generate(writer.encode({"text": Texts(texts=texts)}, stop), stop, noise_keys=keys)
        for row, (text, key) in enumerate(zip(texts, keys, strict=True)):
            alone = writer.generate(writer.encode({"text": Texts(texts=[text])}, stop), stop, noise_keys=[key])
            assert alone.tokens.tolist() == together.unpack("tokens")[row].tolist()
    assert len(set(together.lengths.tolist())) > 1


# Thoughts, captions and sizes ----------------------------------------------------------------------------------------


def test_words_follow_where_the_format_leaves_no_choice(bundle: HunyuanImage3Bundle) -> None:
    """For a thought and a caption: after the thought its caption, then the words of an image, then the best size."""
    words = bundle.words
    adapter = HunyuanImage3TextAdapter(bundle, task="think_recaption", chooses_size=True)
    rows = [
        [5, words.think_end],
        [5, words.recaption_end],
        [words.recaption_end, words.answer],
        [words.answer, words.image_begin],
        [words.image_begin, words.size],
        [5, words.answer],
        [5, 6],
    ]
    logits = torch.zeros(len(rows), bundle.vocabulary_size)
    # The best of all, which divides into no latent; then one that the model makes.
    logits[:, words.ratios[1]], logits[:, words.ratios[8]], logits[:, 5] = 2.0, 1.0, 3.0
    forced = adapter.forced(torch.tensor(rows), logits)
    assert forced is not None
    expected = [words.recaption, words.answer, words.image_begin, words.size, words.ratios[8], -1, -1]
    assert forced.tolist() == expected
    beginning = adapter.forced(torch.zeros(2, 0, dtype=torch.long), logits[:2])
    assert beginning is not None and beginning.tolist() == [-1, -1]
    assert HunyuanImage3TextAdapter(bundle).forced(torch.tensor(rows), logits) is None


def test_the_model_thinks_captions_and_chooses_a_size(folder: Path) -> None:
    """A model that writes one end mark or the other: forced words have log-prob 0 and are left out of the loss."""
    bundle = HunyuanImage3Bundle(str(folder))
    words = bundle.words
    with torch.no_grad():
        bundle.head.weight.zero_()
        direction = torch.zeros(TINY.decoder.hidden_size).index_fill(0, torch.tensor(0), 1000.0)
        bundle.head.weight[words.think_end], bundle.head.weight[words.recaption_end] = direction, -direction
    writer = HunyuanImage3TextPipeline(bundle, task="think_recaption", chooses_size=True)
    longer = dataclasses.replace(WRITING, max_new_tokens=24)
    conditions = writer.encode({"text": Texts(texts=list(TEXTS))}, longer)
    with writer.evaluating():
        segment = writer.generate(conditions, longer, noise_keys=KEYS)
    assert segment.loss_mask is not None and segment.log_probs is not None
    followed = {words.think_end: words.recaption, words.recaption_end: words.answer, words.answer: words.image_begin}
    for tokens, logp, mask in zip(
        *(segment.unpack(name) for name in ("tokens", "log_probs", "loss_mask")), strict=True
    ):
        assert mask[0] and int(tokens[-1]) in words.ratios
        for place in range(1, len(tokens)):
            last = int(tokens[place - 1])
            is_forced = last in followed or last in (words.image_begin, words.size)
            assert bool(mask[place]) != is_forced
            assert not is_forced or float(logp[place]) == 0
            assert last not in followed or int(tokens[place]) == followed[last]
    replayed = writer.replay(conditions, segment, longer).logp_N.detach()
    torch.testing.assert_close(replayed[segment.loss_mask], segment.log_probs[segment.loss_mask], rtol=1e-5, atol=1e-5)
    assert all(size in sizes(64) and size[0] % 16 == size[1] % 16 == 0 for size in writer.chosen_sizes(segment))
    # What was written is the thought of the image, word for word.
    chosen = writer.chosen_sizes(segment)[0]
    assert chosen is not None
    height, width = chosen
    texts = writer.decode(segment).texts
    assert all(text.startswith("<think>") and text.endswith("</recaption>") for text in texts)
    drawing = DiffusionSamplingParams(num_inference_steps=2, guidance_scale=1.0, height=height, width=width, eta=0.7)
    painter = HunyuanImage3Pipeline(bundle, FlowSDEStrategy())
    drawn = painter.encode({"text": Texts(texts=list(TEXTS)), "thought": Texts(texts=texts)}, drawing)
    prompt = conditions["prompt"].select([0]).tokens  # ty: ignore[missing-attribute] - a PromptCondition
    expected = [*prompt.tolist(), *segment.unpack("tokens")[0].tolist()]
    assert rows_of_ids(drawn, "text")[0] == expected


@pytest.mark.parametrize(
    ("task", "start", "stop"),
    [("answer", [], "answer_end"), ("think", ["think"], "think_end"), ("recaption", ["recaption"], "recaption_end")],
)
def test_tasks_begin_and_end_with_their_marks(
    task: Any, start: list[str], stop: str, bundle: HunyuanImage3Bundle
) -> None:
    writer, words = HunyuanImage3TextPipeline(bundle, task=task, system_prompt=" be brief "), bundle.words
    said = "<|startoftext|>be brief\n\nUser: fog\n\nAssistant: " + "".join(f"<{name}>" for name in start)
    prompt = writer.encode({"text": Texts(texts=["fog"])}, WRITING)["prompt"]
    assert bundle.tokenizer.decode(prompt.tokens) == said  # ty: ignore[missing-attribute] - a PromptCondition
    assert writer.stop_token_ids(WRITING) == tuple(sorted({words.end, getattr(words, stop)}))


# Experts -------------------------------------------------------------------------------------------------------------


def test_kept_experts_are_replayed(folder: Path, reference: Reference) -> None:
    """After the gates have changed: log-probs are those of the kept experts, and differ from those of the new ones."""
    bundle = HunyuanImage3Bundle(str(folder), trains="all")
    writer = HunyuanImage3TextPipeline(bundle, replays_experts=True)
    conditions, segment = written(writer, {"text": Texts(texts=list(TEXTS))})
    kept = conditions[EXPERTS]
    assert isinstance(kept, ExpertCondition) and kept.experts.shape[1] == 4
    free = {"prompt": conditions["prompt"]}
    before = writer.replay(conditions, segment, WRITING).logp_N.detach()
    assert torch.equal(before, writer.replay(free, segment, WRITING).logp_N.detach())
    generator = torch.Generator().manual_seed(9)
    changed = dict(reference.weights)
    with torch.no_grad():
        for name, parameter in bundle.decoder.named_parameters():
            if ".gate." in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
                changed[name] = parameter.double()
    other = Reference(changed, TINY)
    replayed = writer.replay(conditions, segment, WRITING).logp_N.detach()
    assert float((replayed - writer.replay(free, segment, WRITING).logp_N.detach()).abs().max()) > 1e-3
    expected = []
    rows = zip(TEXTS, segment.unpack("tokens"), kept.unpack("experts"), strict=True)
    for text, tokens, experts in rows:
        sequence = TokenSequence()
        prompt = bundle.tokenizer(f"<|startoftext|>User: {text}\n\nAssistant: ")["input_ids"]
        _say(other, sequence, [*prompt, *tokens.tolist()[:-1]])
        hidden = other.hidden(sequence, [part.long() for part in experts.split(2, dim=-1)])
        logits: Tensor = other.linear("lm_head", other.rms("model.ln_f", hidden))[len(prompt) - 1 :]
        expected.append(logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))
    torch.testing.assert_close(replayed.double(), torch.cat(expected), rtol=1e-4, atol=1e-4)
    # Any order and part of the batch keeps its own.
    part = {name: condition.select([2, 0]) for name, condition in conditions.items()}
    found = writer.replay(part, segment.select([2, 0]), WRITING).logp_N.detach()
    parts = replayed.split(segment.lengths.tolist())
    torch.testing.assert_close(found, torch.cat([parts[2], parts[0]]), rtol=1e-5, atol=1e-5)
    with pytest.raises(ContractError, match="expert indices of another batch"):
        writer.replay({**free, EXPERTS: kept.select([1, 0, 2])}, segment, WRITING)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_refused(bundle: HunyuanImage3Bundle) -> None:
    with pytest.raises(ConfigError, match="task = 'draw' must be one of answer, think"):
        HunyuanImage3TextPipeline(bundle, task="draw")  # ty: ignore[invalid-argument-type] - the mistake
    with pytest.raises(ConfigError, match="chooses_size does nothing for an answer"):
        HunyuanImage3TextPipeline(bundle, chooses_size=True)
    writer = HunyuanImage3TextPipeline(bundle, task="recaption")
    with pytest.raises(ConfigError, match="reads 'text'"):
        writer.encode({"thought": Texts(texts=["a"])}, WRITING)
    with pytest.raises(ConfigError, match="more than the context of 512"):
        writer.encode({"text": Texts(texts=["a" * 500])}, WRITING)


def test_a_text_that_ended_before_it_chose_has_no_size(bundle: HunyuanImage3Bundle) -> None:
    choosing = HunyuanImage3TextPipeline(bundle, task="recaption", chooses_size=True)
    place = 16
    assert sizes(64)[place] == (64, 64) and (64, 64) in choosing.image_sizes
    rows = [torch.tensor([5]), torch.tensor([5, bundle.words.ratios[place]]), torch.tensor([], dtype=torch.long)]
    segment = TextSegment.pack(tokens=rows, params=WRITING)
    assert choosing.chosen_sizes(segment) == [None, (64, 64), None]
    plain = HunyuanImage3TextPipeline(bundle, task="recaption")
    assert plain.image_sizes == () and plain.chosen_sizes(segment) == [None] * 3
