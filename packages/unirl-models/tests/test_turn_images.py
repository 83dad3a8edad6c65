"""Images between the turns of Qwen2.5-VL, Qwen3-VL and Qwen3.5: one forward of all scores what was seen and written in
turns."""

from typing import Any

import pytest
import torch

from unirl.models.qwen3_5.bundle import Qwen35VLBundle
from unirl.models.qwen3_5.pipeline import Qwen35VLPipeline
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.types.conditions import ImagePatchCondition, PromptCondition
from unirl.types.errors import ContractError, DataError
from unirl.types.media import ImageLists, Texts, shown_image, shown_pixels
from unirl.types.messages import Message, ShownImage
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

from .tiny_text import PATCH_SIZE, VISION_TEMPLATE, qwen_vl, save_vision_model

PARAMS = ARSamplingParams(temperature=0.9, max_new_tokens=5, seed=1)


@pytest.fixture(scope="module", params=sorted(PATCH_SIZE))
def pipeline(request, tmp_path_factory) -> QwenVLPipeline:
    """Read-only."""
    folder = save_vision_model(qwen_vl(request.param), tmp_path_factory.mktemp(request.param))
    (folder / "chat_template.jinja").write_text(VISION_TEMPLATE)
    if request.param == "qwen3_5":
        return Qwen35VLPipeline(Qwen35VLBundle(str(folder)))
    return QwenVLPipeline(QwenVLBundle(str(folder)))


def rounding(pipeline) -> float:
    """As in test_ar_stage."""
    return 4e-5 if pipeline.bundle.recurrent_class_names else 3e-6


def image(height: int, width: int, seed: int) -> torch.Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed))


SHOWN = [shown_image(image(40, 90, 1)), shown_image(image(64, 64, 2))]
TALK = [
    (Message("tool", "look", (SHOWN[0],)),),
    (Message("tool", "", tuple(SHOWN)), Message("user", "and a text: <|image_pad|>")),
]


def conversation(pipeline, rows=(0, 1)) -> tuple[Any, list[list[int]], Any]:
    """Conditions, tokens behind the prompt and which of them were written, of samples that see TALK between three
    turns."""
    images = [[[image(60, 60, 0)], []][row] for row in rows]
    texts = Texts(texts=["what is it?" for _ in rows])
    conditions = pipeline.encode({"text": texts, "image": ImageLists(images=images)}, PARAMS)
    prompts = conditions["prompt"].unpack("tokens")
    written = [torch.randint(0, 250, (3, 4), generator=torch.Generator().manual_seed(row)) for row in rows]
    seen = [[(0, conditions["images"].select([row]))] for row in range(len(rows))]
    tokens: list[list[int]] = [[] for _ in rows]
    masks: list[list[bool]] = [[] for _ in rows]
    for row, prompt in enumerate(prompts):
        for turn in range(3):
            tokens[row] += [*written[row][turn].tolist(), pipeline.bundle.tokenizer.eos_token_id]
            masks[row] += [True] * 5
            if turn < 2:
                bridge = pipeline.bridge(TALK[turn])
                seen[row].append((len(prompt) + len(tokens[row]), bridge.images))
                tokens[row] += bridge.tokens
                masks[row] += [False] * len(bridge.tokens)
    return {**conditions, "images": ImagePatchCondition.in_turns(seen)}, tokens, masks


def segment_of(tokens, masks) -> TextSegment:
    return TextSegment.pack(
        tokens=[torch.tensor(row) for row in tokens], loss_mask=[torch.tensor(row) for row in masks], params=PARAMS
    )


def library_logp(pipeline, conditions, row: int, tokens: list[int]) -> torch.Tensor:
    """Log-probs of the tokens by one forward of the library's own model, which finds the positions itself."""
    prompt = conditions["prompt"].unpack("tokens")[row]
    whole = torch.cat([prompt, torch.tensor(tokens)])[None]
    grids = conditions["images"].grids[row]
    with torch.no_grad(), pipeline.evaluating():
        logits = pipeline.bundle.model(
            input_ids=whole,
            attention_mask=torch.ones_like(whole),
            pixel_values=conditions["images"].unpack("patches")[row],
            image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=(whole == pipeline.bundle.image_token_id).int(),
        ).logits
    logp = (logits[0, len(prompt) - 1 : -1].double() / PARAMS.temperature).log_softmax(-1)
    return logp.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1).float()


def test_the_images_of_a_message_are_the_same_in_both_forms():
    first = image(5, 7, 0)
    shown = shown_image(first)
    assert (shown.height, shown.width) == (5, 7)
    torch.testing.assert_close(shown_pixels(shown), (first * 255).round() / 255)
    assert shown_image(shown_pixels(shown)) == shown and hash(shown) == hash(shown_image(first))
    with pytest.raises(ContractError, match=r"an image of a message must be \[3, H, W\], got \[1, 5, 7\]"):
        shown_image(first[:1])
    with pytest.raises(ContractError, match="an image of 2 x 2 pixels has 3 bytes"):
        ShownImage(2, 2, b"abc")


def test_what_stands_between_turns_is_what_the_template_writes(pipeline):
    tokenizer = pipeline.bundle.tokenizer
    for messages, contents in zip(
        TALK,
        (
            [[{"type": "image"}, {"type": "text", "text": "look"}]],
            [[{"type": "image"}, {"type": "image"}, {"type": "text", "text": ""}], "and a text: <|image_pad|>"],
        ),
        strict=True,
    ):
        said = [{"role": each.role, "content": content} for each, content in zip(messages, contents, strict=True)]
        first = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "WRITTEN"}]
        rendered = tokenizer.apply_chat_template([*first, *said], tokenize=False, add_generation_prompt=True)
        behind = rendered.partition("WRITTEN<|im_end|>")[2]
        bridge = pipeline.bridge(messages)
        shown = tokenizer.decode(bridge.tokens).replace("<|image_pad|>" * 2, "<|image_pad|>")
        while "<|image_pad|><|image_pad|>" in shown:
            shown = shown.replace("<|image_pad|><|image_pad|>", "<|image_pad|>")
        assert shown == behind
        token, per_token = pipeline.bundle.image_token_id, pipeline.bundle.patches_per_token
        sizes = [t * h * w // per_token for t, h, w in bridge.images.grids[0]]
        assert bridge.tokens.count(token) == sum(sizes), "a spelled placeholder is text"
        for place, size in zip(bridge.images.places[0], sizes, strict=True):
            assert bridge.tokens[place : place + size] == [token] * size and bridge.tokens[place - 1] != token


def test_positions_are_those_of_one_forward_of_the_whole_conversation(pipeline):
    conditions, tokens, _ = conversation(pipeline)
    prompts = conditions["prompt"].unpack("tokens")
    lengths = [len(prompt) + len(row) for prompt, row in zip(prompts, tokens, strict=True)]
    found = pipeline.adapter.positions(conditions, lengths)
    for row, prompt in enumerate(prompts):
        whole = torch.cat([prompt, torch.tensor(tokens[row])])
        expected, _ = pipeline.bundle.model.model.get_rope_index(
            whole[None],
            mm_token_type_ids=(whole == pipeline.bundle.image_token_id).int()[None],
            image_grid_thw=torch.tensor(conditions["images"].grids[row]),
        )
        assert torch.equal(found[row], expected[:, 0])
    cut = [length - 40 for length in lengths]
    for row, places in enumerate(pipeline.adapter.positions(conditions, cut)):
        assert torch.equal(places, found[row][:, : cut[row]]), "also of a part"


@pytest.mark.parametrize("packed", [True, False])
def test_a_replay_scores_a_conversation_as_the_library_does(pipeline, packed):
    conditions, tokens, masks = conversation(pipeline)
    own = QwenVLPipeline(pipeline.bundle, packed=packed)
    replayed = own.replay(conditions, segment_of(tokens, masks), PARAMS).logp_N.detach().split([*map(len, tokens)])
    for row in range(2):
        torch.testing.assert_close(
            replayed[row], library_logp(pipeline, conditions, row, tokens[row]), rtol=0, atol=rounding(pipeline)
        )


def test_each_turn_reads_a_prefix_of_the_conversation_and_the_replay_has_the_bits_of_the_last(pipeline):
    """One token per turn and one sample: then rollout and replay are forwards of the same shape."""
    one = ARSamplingParams(temperature=0.9, max_new_tokens=1, seed=5)
    conditions = pipeline.encode({"text": Texts(texts=["hm?"]), "image": ImageLists(images=[[image(60, 60, 0)]])}, one)
    own = QwenVLPipeline(pipeline.bundle, packed=False)
    prompt = conditions["prompt"].tokens.tolist()
    asked: Any = None
    last: Any = None
    seen, tokens, masks = [(0, conditions["images"])], [], []
    for turn in range(3):
        asked = {
            "prompt": PromptCondition.pack(tokens=[torch.tensor(prompt + tokens)]),
            "images": ImagePatchCondition.in_turns([seen]),
        }
        with own.evaluating():
            last = own.generate(asked, one, noise_keys=[f"turn {turn}"])
        tokens += last.tokens.tolist()
        masks += [True]
        if turn < 2:
            bridge = own.bridge(TALK[turn])
            seen.append((len(prompt) + len(tokens), bridge.images))
            tokens += bridge.tokens
            masks += [False] * len(bridge.tokens)
    whole = {**conditions, "images": ImagePatchCondition.in_turns([seen])}
    assert asked["prompt"].tokens.tolist() == prompt + tokens[:-1], "the last turn read all before it"
    with own.evaluating():
        replayed = own.replay(whole, segment_of([tokens], [masks]).replace(params=one), one)
        of_last = own.replay(asked, last, one)
    drawn: Any = last.log_probs
    assert torch.equal(of_last.logp_N, drawn)
    assert torch.equal(replayed.hidden_N[-1], of_last.hidden_N[-1])
    # The output projection has one row there, and one per token here.
    torch.testing.assert_close(replayed.logp_N[-1:], drawn, rtol=0, atol=rounding(pipeline))


def test_a_placeholder_that_the_model_writes_behind_images_is_a_word(pipeline):
    conditions, tokens, masks = conversation(pipeline)
    token = pipeline.bundle.image_token_id
    assert pipeline.media_tokens == {token}
    tokens[0][-2] = token
    segment = segment_of(tokens, masks)
    read = pipeline.adapter.as_read(conditions, segment.unpack("tokens"))
    assert int(read[0][-2]) == token + pipeline.bundle.alias_offset
    assert (read[0] == token).sum() == sum(each == token for each in tokens[0]) - 1
    assert bool(torch.isfinite(pipeline.replay(conditions, segment, PARAMS).logp_N).all())


def test_images_and_tokens_of_different_conversations_are_refused(pipeline):
    conditions, tokens, masks = conversation(pipeline)
    tokens[1], masks[1] = tokens[1][1:], masks[1][1:]
    with pytest.raises(ContractError, match="Tokens and images must come from one conversation"):
        pipeline.replay(conditions, segment_of(tokens, masks), PARAMS)
    with pytest.raises(ContractError, match="each image needs one"):
        conditions["images"].replace(places=[(), ()])


def test_gradients_of_a_batch_are_the_sum_of_those_of_its_samples(pipeline):
    def gradient(rows):
        conditions, tokens, masks = conversation(pipeline, rows=rows)
        segment = segment_of(tokens, masks)
        pipeline.bundle.model.zero_grad()
        pipeline.replay(conditions, segment, PARAMS).logp_N[segment.trained].sum().backward()
        return {
            name: each.grad.clone() for name, each in pipeline.bundle.model.named_parameters() if each.grad is not None
        }

    together, first, second = gradient((0, 1)), gradient((0,)), gradient((1,))
    assert len(together) > 10
    for name, found in together.items():
        torch.testing.assert_close(found, first[name] + second[name], rtol=1e-4, atol=1e-5 * float(found.abs().max()))
    pipeline.bundle.model.zero_grad()


def test_an_image_that_cannot_be_resized_is_named(pipeline):
    stripe = ShownImage(1, 300, bytes(900))
    with pytest.raises(DataError, match="an image of 300 x 1 pixels cannot be resized"):
        pipeline.bridge([Message("tool", "", (stripe,))])


def test_a_conversation_of_the_data_is_read_as_a_rollout_of_it(pipeline):
    tokenizer = pipeline.bundle.tokenizer
    first = shown_image(image(60, 60, 0))
    turns = ["one", "two words", "end"]
    said = [Message("user", "what is it?", (first,)), Message("assistant", turns[0])]
    said += [*TALK[0], Message("assistant", turns[1]), *TALK[1], Message("assistant", turns[2])]
    found = pipeline.conversation(said)

    pixels = ImageLists(images=[[shown_pixels(first)]])
    conditions = pipeline.encode({"text": Texts(texts=["what is it?"]), "image": pixels}, PARAMS)
    (prompt,) = conditions["prompt"].unpack("tokens")
    seen, tokens, is_written = [(0, conditions["images"])], [], []
    for turn, text in enumerate(turns):
        own = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        tokens += own
        is_written += [True] * len(own)
        if turn < 2:
            bridge = pipeline.bridge(TALK[turn])
            seen.append((len(prompt) + len(tokens), bridge.images))
            tokens += bridge.tokens
            is_written += [False] * len(bridge.tokens)
    rolled = ImagePatchCondition.in_turns([seen])
    assert (found.prompt, found.tokens, found.is_written) == (prompt.tolist(), tokens, is_written)
    assert found.images.grids == rolled.grids and found.images.places == rolled.places
    assert torch.equal(found.images.patches, rolled.patches)


def test_images_before_the_first_turn_stand_where_their_messages_say(pipeline):
    first, second = SHOWN
    answer = Message("assistant", "yes")
    pixels = ImageLists(images=[[shown_pixels(first), shown_pixels(second)]])
    text = "is <image> like <image>?"
    conditions = pipeline.encode({"text": Texts(texts=[text]), "image": pixels}, PARAMS)
    found = pipeline.conversation([Message("user", text, (first, second)), answer])
    assert found.prompt == conditions["prompt"].tokens.tolist()
    assert found.images.places == conditions["images"].places
    apart = pipeline.conversation([Message("user", "is", (first,)), Message("user", "like", (second,)), answer])
    assert apart.images.grids == found.images.grids and apart.prompt != found.prompt
    assert pipeline.conversation([Message("user", "hi"), answer]).images is None
