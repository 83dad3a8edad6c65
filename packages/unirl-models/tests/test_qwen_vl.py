"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 against transformers' own forward and generate; tolerances as in test_ar_stage."""

import json
from typing import Any

import pytest
import torch
import transformers

from unirl.models.qwen3_5.bundle import Qwen35VLBundle
from unirl.models.qwen3_5.pipeline import Qwen35VLPipeline
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.types.errors import CheckpointError, ConfigError, ContractError, DataError
from unirl.types.media import ImageLists, Images, Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

from .tiny_text import PATCH_SIZE, qwen_vl, save_vision_model

PARAMS = ARSamplingParams(temperature=0.9, max_new_tokens=6, seed=2)
GREEDY = ARSamplingParams(temperature=0, max_new_tokens=6)
TEXTS = ["what is it?", "compare them", "no picture here", "and this, at some length?"]


@pytest.fixture(scope="module", params=sorted(PATCH_SIZE))
def pipeline(request, tmp_path_factory):
    """Read-only."""
    folder = save_vision_model(qwen_vl(request.param), tmp_path_factory.mktemp(request.param))
    if request.param == "qwen3_5":
        return Qwen35VLPipeline(Qwen35VLBundle(str(folder)))
    return QwenVLPipeline(QwenVLBundle(str(folder)))


def rounding(pipeline) -> float:
    """How far two computations of one log-prob may be apart."""
    return 4e-5 if pipeline.bundle.recurrent_class_names else 3e-6


def picture(height: int, width: int, seed: int) -> torch.Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed))


PICTURES = [[picture(60, 60, 0)], [picture(40, 90, 1), picture(80, 50, 2)], [], [picture(64, 32, 3)]]


def sampled(pipeline, params=PARAMS, texts=TEXTS, pictures=PICTURES) -> tuple[Any, TextSegment]:
    conditions = pipeline.encode({"text": Texts(texts=texts), "image": ImageLists(images=pictures)}, params)
    with pipeline.evaluating():
        return conditions, pipeline.generate(conditions, params, noise_keys=[f"k{i}" for i in range(len(texts))])


def library_model(pipeline) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        pipeline.bundle.pretrained_model, dtype=torch.float32
    )


def library_inputs(pipeline, conditions, row: int) -> dict[str, torch.Tensor]:
    """One sample as the library's processor would hand it to its model, which finds the positions itself."""
    prompt = conditions["prompt"].unpack("tokens")[row][None]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    if conditions["images"].grids[row]:
        inputs["pixel_values"] = conditions["images"].unpack("patches")[row]
        inputs["image_grid_thw"] = torch.tensor(conditions["images"].grids[row])
        inputs["mm_token_type_ids"] = (prompt == pipeline.bundle.image_token_id).int()
    return inputs


def test_log_probs_are_those_of_the_librarys_own_model(pipeline):
    conditions, segment = sampled(pipeline)
    replayed = pipeline.replay(conditions, segment, PARAMS)
    model = library_model(pipeline)
    for row, completion in enumerate(segment.unpack("tokens")):
        inputs = library_inputs(pipeline, conditions, row)
        length = inputs["input_ids"].shape[1]
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            if name in inputs:
                tail = completion if name == "input_ids" else torch.full_like(completion, int(name == "attention_mask"))
                inputs[name] = torch.cat([inputs[name], tail[None].to(inputs[name].dtype)], dim=1)
        with torch.no_grad():
            logits = model(**inputs).logits[0, length - 1 : -1].double() / PARAMS.temperature
        expected = logits.log_softmax(-1).gather(-1, completion[:, None]).squeeze(-1).float()
        cut = slice(*segment.cu_seqlens[row : row + 2].tolist())
        torch.testing.assert_close(replayed.logp_N[cut].detach(), expected, rtol=0, atol=rounding(pipeline))
        torch.testing.assert_close(segment.unpack("log_probs")[row], expected, rtol=0, atol=rounding(pipeline))


def test_greedy_sampling_is_the_librarys(pipeline):
    conditions, segment = sampled(pipeline, GREEDY)
    model = library_model(pipeline)
    for row, completion in enumerate(segment.unpack("tokens")):
        inputs = library_inputs(pipeline, conditions, row)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=6)
        assert out[0, inputs["input_ids"].shape[1] :].tolist() == completion.tolist()


def test_padded_replay_agrees_with_packed(pipeline):
    assert pipeline.is_packed
    conditions, segment = sampled(pipeline)
    padded = AutoregressivePipeline(pipeline.adapter, packed=False).replay(conditions, segment, PARAMS)
    packed = pipeline.replay(conditions, segment, PARAMS)
    torch.testing.assert_close(packed.logp_N, padded.logp_N, rtol=0, atol=rounding(pipeline))


def test_a_selection_of_samples_takes_its_images_along(pipeline):
    conditions, segment = sampled(pipeline)
    rows = [3, 1]
    chosen = {name: condition.select(rows) for name, condition in conditions.items()}
    whole = pipeline.replay(conditions, segment, PARAMS).logp_N.split(segment.lengths.tolist())
    part = pipeline.replay(chosen, segment.select(rows), PARAMS).logp_N
    torch.testing.assert_close(part, torch.cat([whole[row] for row in rows]), rtol=0, atol=rounding(pipeline))


def test_what_is_in_a_picture_matters(pipeline):
    conditions, segment = sampled(pipeline)
    images = conditions["images"]
    other = {**conditions, "images": images.replace(patches=images.patches.flip(0))}
    before, after = (
        pipeline.replay(c, segment, PARAMS).logp_N.detach().split(segment.lengths.tolist()) for c in (conditions, other)
    )
    assert [float((a - b).abs().max()) > 1e-3 for a, b in zip(before, after, strict=True)] == [True, True, False, True]


def test_prompts_hold_one_token_a_merged_patch(pipeline):
    conditions, _ = sampled(pipeline)
    patch = pipeline.bundle.image_processor.patch_size
    counts = [int((tokens == pipeline.bundle.image_token_id).sum()) for tokens in conditions["prompt"].unpack("tokens")]
    grids = conditions["images"].grids
    assert counts == [sum(t * h * w // 4 for t, h, w in sample) for sample in grids]
    assert [len(sample) for sample in grids] == [1, 2, 0, 1]
    # 60 pixels are 4 patches of 14 or 16; the rest keep their aspect ratio.
    assert grids[0] == ((1, 4, 4),) and conditions["images"].patches.shape[1] == 2 * 3 * patch**2
    first = pipeline.bundle.tokenizer.decode(conditions["prompt"].unpack("tokens")[0].tolist())
    assert first == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>"
        "what is it?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_one_image_a_sample_may_come_as_a_batch(pipeline):
    pixels = torch.stack([picture(56, 56, 0), picture(56, 56, 1)])
    texts = Texts(texts=TEXTS[:2])
    batch = pipeline.encode({"text": texts, "image": Images(pixels=pixels)}, PARAMS)
    lists = pipeline.encode({"text": texts, "image": ImageLists(images=[[p] for p in pixels])}, PARAMS)
    assert all(batch[name].equals(lists[name]) for name in ("prompt", "images"))


def test_text_alone_needs_no_images(pipeline):
    conditions = pipeline.encode({"text": Texts(texts=["hi", "hello"])}, PARAMS)
    assert set(conditions) == {"prompt"}
    with pipeline.evaluating():
        segment = pipeline.generate(conditions, PARAMS, noise_keys=["a", "b"])
    replayed = pipeline.replay(conditions, segment, PARAMS)
    torch.testing.assert_close(replayed.logp_N.detach(), segment.log_probs, rtol=0, atol=rounding(pipeline))


def test_the_vision_tower_is_frozen_unless_asked_for(pipeline):
    vision = [p for n, p in pipeline.bundle.model.named_parameters() if ".visual." in n]
    assert vision and not any(p.requires_grad for p in vision)
    free = type(pipeline)(type(pipeline.bundle)(pipeline.bundle.pretrained_model, freeze_vision=False))
    conditions, segment = sampled(free)
    free.replay(conditions, segment, PARAMS).logp_N.sum().backward()
    gradients = {n: p.grad for n, p in free.bundle.model.named_parameters() if ".visual." in n}
    assert all(gradient is not None for gradient in gradients.values())


def test_a_model_without_template_gets_its_placeholders_first(tmp_path):
    folder = save_vision_model(qwen_vl("qwen3_vl"), tmp_path, chat_template=None)
    pipeline: Any = QwenVLPipeline(QwenVLBundle(str(folder)))
    assert (
        pipeline.adapter.prompt_with("hi", {"image": 1})
        == pipeline.bundle.tokenizer("<|vision_start|><|image_pad|><|vision_end|>hi")["input_ids"]
    )


def test_what_does_not_fit_is_named(pipeline, tmp_path):
    image = ImageLists(images=[[picture(56, 56, 0)]])
    with pytest.raises(ConfigError, match="a prompt with 1 images has 2 image placeholders"):
        pipeline.encode({"text": Texts(texts=["a <|image_pad|>"]), "image": image}, PARAMS)
    with pytest.raises(ConfigError, match="'image' must hold Images or ImageLists, got Texts"):
        pipeline.encode({"text": Texts(texts=["a"]), "image": Texts(texts=["b"])}, PARAMS)
    with pytest.raises(ConfigError, match="the request has {'video'"):
        pipeline.encode({"video": Texts(texts=["a"])}, PARAMS)
    folder = pipeline.bundle.pretrained_model
    with pytest.raises(ConfigError, match="min_pixels = 90000 must be above 0 and at most max_pixels = 80000"):
        type(pipeline.bundle)(folder, min_pixels=90000, max_pixels=80000)


def test_an_image_processor_of_another_model_is_refused(tmp_path):
    folder = save_vision_model(qwen_vl("qwen3_vl"), tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "patch_size": 14}))
    with pytest.raises(CheckpointError, match="image processor has patch_size = 14, the vision tower 16"):
        QwenVLBundle(str(folder))


def test_fewer_pixels_make_shorter_prompts(pipeline):
    patch = PATCH_SIZE[pipeline.bundle.folder.config["model_type"]]
    small: Any = type(pipeline)(type(pipeline.bundle)(pipeline.bundle.pretrained_model, max_pixels=4 * patch**2))
    one = {"text": Texts(texts=["a"]), "image": Images(pixels=picture(80, 80, 0)[None])}
    assert small.encode(one, PARAMS)["images"].grids == [((1, 2, 2),)]
    assert len(pipeline.encode(one, PARAMS)["images"].patches) > 4


def test_images_stand_where_the_text_says_so(pipeline):
    adapter: Any = pipeline.adapter
    decode = pipeline.bundle.tokenizer.decode
    marked = decode(adapter.prompt_with("see <image> and <image>.", {"image": 2}))
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    assert marked == f"<|im_start|>user\nsee {one} and {one}.<|im_end|>\n<|im_start|>assistant\n"
    leading = adapter.prompt_with("<image><image>hi", {"image": 2})
    assert leading == adapter.prompt_with("hi", {"image": 2})
    assert "<image>" in decode(adapter.prompt_with("<image>", {"image": 0}))
    with pytest.raises(ConfigError, match="a prompt with 2 images says <image> 1 times: 'a <image>'"):
        adapter.prompt_with("a <image>", {"image": 2})


def test_equal_prompts_are_read_once_and_others_are_not_mistaken_for_them(pipeline):
    first, second = picture(56, 56, 0), picture(56, 56, 1)
    shown = [[first], [second], [first.clone()], [first, second], [first]]
    texts = ["what?"] * 4 + ["how?"]
    widths: list[int] = []
    handle = pipeline.bundle.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    conditions, segment = sampled(pipeline, texts=texts, pictures=shown)
    handle.remove()
    assert widths[0] == 4
    replayed = pipeline.replay(conditions, segment, PARAMS)
    torch.testing.assert_close(replayed.logp_N.detach(), segment.log_probs, rtol=0, atol=rounding(pipeline))


def test_a_replay_of_the_same_samples_has_the_same_bits(pipeline):
    conditions, segment = sampled(pipeline)
    first, second = (pipeline.replay(conditions, segment, PARAMS) for _ in range(2))
    assert torch.equal(first.logp_N, second.logp_N) and torch.equal(first.entropy_N, second.entropy_N)


def test_equal_images_are_processed_once(pipeline, monkeypatch):
    processor, calls = pipeline.bundle.image_processor, []

    def counting(**arguments):
        calls.append(1)
        return processor(**arguments)

    monkeypatch.setattr(pipeline.bundle, "image_processor", counting)
    image = picture(56, 56, 0)
    shown = ImageLists(images=[[image, image], [image.clone(), picture(56, 56, 1)]])
    conditions = pipeline.encode({"text": Texts(texts=["a", "b"]), "image": shown}, PARAMS)
    assert len(calls) == 2 and [len(grid) for grid in conditions["images"].grids] == [2, 2]


def test_images_that_do_not_fit_are_named(pipeline, tmp_path):
    text = Texts(texts=["a"])

    def encode(*images, params=PARAMS):
        return pipeline.encode({"text": text, "image": ImageLists(images=[list(images)])}, params)

    with pytest.raises(DataError, match=r"an image of 900 x 2 pixels cannot be resized: .*aspect ratio"):
        encode(picture(2, 900, 0))
    with pytest.raises(DataError, match="an image has 1 channels"):
        encode(picture(56, 56, 0)[:1])
    many = [picture(112, 112, i) for i in range(40)]
    with pytest.raises(ConfigError, match=r"\(\d+ of them of its images\).*Lower bundle.max_pixels, shorten or drop"):
        encode(*many)
    with pytest.raises(ConfigError, match="the slot 'image' has 2 samples, 'text' 1"):
        pipeline.encode({"text": text, "image": ImageLists(images=[[], []])}, PARAMS)


def test_images_of_another_encoding_than_the_prompt_are_refused(pipeline):
    conditions, segment = sampled(pipeline)
    swapped = {**conditions, "images": conditions["images"].select([1, 0, 2, 3])}
    with pytest.raises(ContractError, match=r"sample 0 has \d+ image tokens, but its images .* take \d+"):
        pipeline.replay(swapped, segment, PARAMS)
    with pytest.raises(ContractError, match="image tokens, but its images"):
        pipeline.replay({"prompt": conditions["prompt"]}, segment, PARAMS)


def test_a_placeholder_that_the_model_writes_itself_is_a_word(pipeline):
    image_token = pipeline.bundle.image_token_id
    pictures = [[picture(60, 60, 0)], []]
    conditions = pipeline.encode({"text": Texts(texts=["a", "b"]), "image": ImageLists(images=pictures)}, PARAMS)
    completion = torch.tensor([65, image_token, image_token, 66])
    replayed = pipeline.replay(conditions, TextSegment.pack(tokens=[completion, completion]), PARAMS)
    expected = []
    for row in range(2):
        model = library_model(pipeline)  # anew: it remembers where the images of the last prompt ended
        inputs, cache = library_inputs(pipeline, conditions, row), transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            logits = [model(**inputs, past_key_values=cache).logits[:, -1]]
            # Behind the prompt the library has no images any more, and reads every token as a word.
            for token in completion[:-1]:
                logits.append(model(input_ids=token.view(1, 1), past_key_values=cache).logits[:, -1])
        scores = (torch.cat(logits) / PARAMS.temperature).log_softmax(-1)
        expected.append(scores.gather(-1, completion[:, None]).squeeze(-1))
    torch.testing.assert_close(replayed.logp_N.detach(), torch.cat(expected), rtol=0, atol=rounding(pipeline))
