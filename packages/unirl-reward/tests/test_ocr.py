"""The OCR reward: its formula, and what RapidOCR, GOT-OCR 2.0 and PaddleOCR read."""

import inspect
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from unirl.reward.local.ocr.got_ocr import GOTOCRScorer
from unirl.reward.local.ocr.ocr import OCRScorer, quoted, similarity
from unirl.reward.local.ocr.paddle_ocr import PaddleOCRScorer
from unirl.reward.local.ocr.rapid_ocr import RapidOCRScorer
from unirl.reward.local.pixels import to_pictures
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError, ContractError

# The formula


@pytest.mark.parametrize(
    ("target", "text", "expected"),
    [
        ("Open", "OPEN", 1),
        ("New York", "welcome to newyork city", 1),
        ("cat", "bat", 2 / 3),
        ("cat", "", 0),
        ("cat", "a very long other sentence", 0),
        ("kitten", "sitting", 1 - 3 / 6),
        ("ab", "ba", 0),
        ("hello", "helo", 0.8),
    ],
)
def test_similarity_on_cases_worked_by_hand(target, text, expected):
    assert similarity(target, text) == pytest.approx(expected, abs=1e-12)


def distance(a, b):
    """Levenshtein's, by the textbook recurrence."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


WORDS = st.text(alphabet="abc", min_size=1, max_size=8)


@given(WORDS, WORDS)
@settings(max_examples=100, deadline=None)
def test_similarity_is_one_less_the_capped_distance_a_letter(target, text):
    expected = 1.0 if target in text else 1 - min(distance(target, text), len(target)) / len(target)
    assert similarity(target, text) == pytest.approx(expected) and 0 <= similarity(target, text) <= 1


def test_the_first_quotes_of_a_prompt_hold_the_target():
    assert quoted('a sign that says "Open 24h" and "Closed"', "ocr") == "Open 24h"
    assert quoted("a sign that says \u201cOpen\u201d", "ocr") == "Open"


@pytest.mark.parametrize("prompt", ["a sign", "a sign 'Open'", 'a sign ""', 'a sign " "', 'a "sign'])
def test_a_prompt_that_quotes_nothing_raises(prompt):
    with pytest.raises(ContractError, match="scorer ocr: the prompt .* quotes no text"):
        quoted(prompt, "ocr")


class Reader(OCRScorer):
    def __init__(self, texts, batch_size=8):
        super().__init__(name="reader", batch_size=batch_size)
        self.texts = list(texts)

    def read(self, pictures):
        found = [self.texts.pop(0) for _ in pictures]
        for text in found:
            if isinstance(text, Exception):
                raise text
        return found


def test_a_failure_to_read_is_a_failed_sample_and_never_zero(make_request):
    request = make_request(num_samples=2, per_group=1, prompts=['"a"', '"b"'])
    broken = Reader([RuntimeError("no light"), "b"], batch_size=1)
    found = RewardService([broken], on_failure="drop_group").score(request)
    assert found.successes == [False, True] and found.rewards[0].isnan() and found.rewards[1] == 1
    assert "no light" in str(found.errors[0])


# RapidOCR


def rendered(*lines):
    """Images of black text on white, as pixels [b, 3, 128, 160]."""
    pictures = []
    for line in lines:
        picture = Image.new("RGB", (160, 128), "white")
        ImageDraw.Draw(picture).text((12, 40), line, fill="black", font=ImageFont.load_default(size=32))
        pictures.append(np.asarray(picture))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


@pytest.fixture(scope="module")
def rapid():
    return RapidOCRScorer(num_threads=1)


def test_rapidocr_reads_rendered_text(rapid, make_request):
    prompts = ['a card "Hi 2024"', 'a card "OPEN"', 'a card "OPEN"', 'a card "Hello"']
    request = make_request(num_samples=4, prompts=prompts, pixels=rendered("Hi 2024", "OPEN", "OPEM", ""))
    scored = rapid.score(request)
    assert scored.rewards.tolist() == [1.0, 1.0, 0.75, 0.0]
    assert rapid.score(request.select([2])).rewards.item() == 0.75


def test_a_failure_of_rapidocr_is_told(rapid, monkeypatch):
    def fail(picture):
        raise Exception("onnxruntime fell over")

    monkeypatch.setattr(rapid, "_engine", fail)
    with pytest.raises(RuntimeError, match="RapidOCR failed: Exception: onnxruntime fell over"):
        rapid.read([Image.new("RGB", (32, 32))])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_threads": 0}, "num_threads = 0 must be"),
        ({"settings": {"Rec.no_such_key": 1}}, r"RapidOCR has no settings \['Rec.no_such_key'\]"),
        ({"settings": {"Global.use_rec": False}}, "detection and recognition must be on"),
    ],
)
def test_settings_that_rapidocr_cannot_use_are_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        RapidOCRScorer(**keywords)


@pytest.mark.parametrize(
    ("module", "scorer", "extra"),
    [
        ("rapidocr", RapidOCRScorer, "ocr"),
        ("paddleocr", PaddleOCRScorer, "paddleocr"),
        ("transformers", GOTOCRScorer, "got-ocr"),
    ],
)
def test_without_its_engine_a_scorer_names_the_extra(module, scorer, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"unirl-reward\[{extra}\]"):
        scorer()


# GOT-OCR 2.0


@pytest.fixture(scope="module")
def got_folder(tmp_path_factory):
    """A GOT-OCR 2.0 folder as the hub has them: random towers, a byte tokenizer, an image processor."""
    path = tmp_path_factory.mktemp("got")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone,
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"],
    )
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.GotOcr2Config(
        vision_config=vision | {"image_size": 64, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 16},
        text_config=text | {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "initializer_range": 0.3},
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
    )
    model = transformers.GotOcr2ForConditionalGeneration(config)
    for parameter in model.model.vision_tower.parameters():  # its own initial scale is 1e-10: every image alike
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    transformers.GotOcr2ImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(path)
    return str(path)


def test_got_ocr_reads_what_transformers_own_pipeline_reads(got_folder, make_request):
    request = make_request(num_samples=3, size=48, prompts=['"a"'] * 3)
    scorer = GOTOCRScorer(model=got_folder, max_new_tokens=12)
    found = scorer.read(to_pictures(request.pixels))
    processor: Any = transformers.AutoProcessor.from_pretrained(got_folder, use_fast=False)
    model: Any = transformers.GotOcr2ForConditionalGeneration.from_pretrained(got_folder)
    expected = []
    for picture in to_pictures(request.pixels):
        ready = processor(picture, return_tensors="pt", num_image_tokens=1)
        written = model.generate(
            **ready, do_sample=False, max_new_tokens=12, tokenizer=processor.tokenizer, stop_strings="<|im_end|>"
        )
        expected.append(processor.decode(written[0, ready["input_ids"].shape[1] :], skip_special_tokens=True))
    assert found == expected and len(set(found)) > 1
    prompts = [f'a sign "{found[0][:3]}"', '"zzzzz"', '"zzzzz"']
    rewards = scorer.score(make_request(num_samples=3, size=48, prompts=prompts)).rewards
    assert rewards[0] == 1 and rewards.tolist()[1:] == [similarity("zzzzz", text) for text in found[1:]]
    assert scorer.read(to_pictures(request.pixels[1:2])) == found[1:2]


def test_got_ocr_prepares_pictures_as_the_official_processor_does(got_folder, make_request):
    pictures = to_pictures(make_request(num_samples=2, size=48).pixels)
    scorer = GOTOCRScorer(model=got_folder)
    official = transformers.GotOcr2ImageProcessorPil.from_pretrained(got_folder)(pictures, return_tensors="pt")
    ready = scorer._processor(images=pictures, num_image_tokens=1, return_tensors="pt")
    torch.testing.assert_close(ready["pixel_values"], official["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0 must be at least 1"),
        ({"model": "/no/such/folder"}, "model = '/no/such/folder' is no folder"),
        ({"dtype": "int8"}, "dtype = 'int8' must be one of"),
    ],
)
def test_impossible_arguments_of_got_ocr_are_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        GOTOCRScorer(**keywords)


def test_a_folder_without_got_ocr_is_named(clip_folder):
    with pytest.raises(ConfigError, match="scorer got_ocr: model = .* cannot be loaded"):
        GOTOCRScorer(model=clip_folder)


# PaddleOCR


def test_paddleocr_takes_what_the_scorer_gives_it():
    paddleocr = pytest.importorskip("paddleocr", reason="its extra conflicts with the engines of the workspace")
    made = inspect.signature(paddleocr.PaddleOCR.__init__).parameters
    for name in ("text_detection_model_dir", "text_recognition_model_dir", "text_detection_model_name", "lang"):
        assert name in made
    for name in ("use_doc_orientation_classify", "use_doc_unwarping", "use_textline_orientation"):
        assert name in made
    assert "input" in inspect.signature(paddleocr.PaddleOCR.predict).parameters


def test_folders_of_paddleocr_come_in_pairs():
    with pytest.raises(ConfigError, match="recognition_dir = None. Give both or neither"):
        PaddleOCRScorer(detection_dir="models/det")
