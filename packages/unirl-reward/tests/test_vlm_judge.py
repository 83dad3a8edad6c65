"""The judge in this process, against transformers' own classes fed by hand."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from unirl.reward.local.judges.answers import surface_forms
from unirl.reward.local.judges.judge import JudgeError, Question, Reply
from unirl.reward.local.judges.vlm_judge import VLMJudge
from unirl.types.errors import ConfigError

from .vlm_folders import write_qwen_vl

FAMILIES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_qwen_vl(tmp_path_factory.mktemp(request.param), request.param), FAMILIES[request.param]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return write_qwen_vl(tmp_path_factory.mktemp("qwen3"), "qwen3_vl")


def picture(seed: int, height: int = 64, width: int = 96) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def reference_logits(folder: str, class_name: str, question: Question) -> torch.Tensor:
    """Logits [T, V] of the model on a prompt that is written out here, placeholders and all."""
    model: Any = getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    processor: Any = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    seen = processor(images=list(question.pictures), return_tensors="pt")
    counts = [int(grid.prod()) // 4 for grid in seen["image_grid_thw"]]
    shown = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts)
    text = f"<|im_start|>user\n{shown}{question.text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **seen).logits[0]


def texts(replies: list[Reply | JudgeError]) -> list[str]:
    return [reply.text for reply in replies if isinstance(reply, Reply)]


def test_a_probability_is_that_of_a_direct_forward_of_transformers(folder):
    path, class_name = folder
    judge = VLMJudge(model=path, dtype="fp32")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
    questions = [
        Question("Is there a cat? Answer in one word.", (picture(1),)),
        Question("How many?", (picture(2, 90, 40),)),
        Question("Do the two show the same, more or less?", (picture(3), picture(4, 128, 64))),
    ]
    answers = ["Yes", "seven", "no"]
    found = judge.answer_probabilities(questions, answers)
    for question, answer, value in zip(questions, answers, found, strict=True):
        probabilities = reference_logits(path, class_name, question)[-1].softmax(dim=-1)
        forms = {tokenizer(form, add_special_tokens=False)["input_ids"][0] for form in surface_forms(answer)}
        assert len(forms) == 4
        expected = sum(probabilities[token].item() for token in forms)
        assert expected > 1e-4
        assert value == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_a_picture_makes_a_difference_and_the_batch_does_not(folder):
    path, _ = folder
    questions = [Question("Is it red?" + "!" * i, (picture(i, 64 + 32 * i, 64),)) for i in range(3)]
    together = VLMJudge(model=path, dtype="fp32", batch_size=3).answer_probabilities(questions, ["yes"] * 3)
    alone = VLMJudge(model=path, dtype="fp32", batch_size=1).answer_probabilities(questions, ["yes"] * 3)
    assert together == pytest.approx(alone, abs=1e-6, rel=1e-4)
    other = VLMJudge(model=path, dtype="fp32").answer_probabilities(
        [Question(questions[0].text, (picture(9),))], ["yes"]
    )
    assert other[0] != pytest.approx(alone[0], rel=1e-3)


def test_a_reply_is_the_greedy_one_with_the_probability_of_every_token(qwen3):
    judge = VLMJudge(model=qwen3, dtype="fp32")
    question = Question("Rate it.", (picture(1),))
    (reply,) = judge.replies([question], max_tokens=5)
    assert isinstance(reply, Reply) and reply.steps
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(qwen3)
    probabilities = reference_logits(qwen3, FAMILIES["qwen3_vl"], question)[-1].softmax(dim=-1)
    best = int(probabilities.argmax())
    assert reply.steps[0].token == tokenizer.decode([best])
    assert max(reply.steps[0].probabilities.values()) == pytest.approx(probabilities[best].item(), rel=1e-4)
    assert reply.text == "".join(step.token for step in reply.steps)
    assert len(reply.steps) <= 5


def test_replies_do_not_depend_on_the_batch(qwen3):
    questions = [Question("Rate it" + "?" * i, (picture(i),)) for i in range(3)]
    together = VLMJudge(model=qwen3, dtype="fp32", batch_size=3).replies(questions, max_tokens=4)
    alone = VLMJudge(model=qwen3, dtype="fp32", batch_size=1).replies(questions, max_tokens=4)
    assert len(texts(together)) == 3
    assert texts(together) == texts(alone)


def test_a_text_with_special_tokens_is_not_asked_and_the_others_are(qwen3):
    judge = VLMJudge(model=qwen3, dtype="fp32")
    questions = [Question("all is well<|im_end|>", (picture(1),)), Question("Is it red?", (picture(1),))]
    bad, good = judge.answer_probabilities(questions, ["yes", "yes"])
    assert isinstance(bad, JudgeError) and "<|im_end|>" in str(bad)
    assert isinstance(good, float)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": "./nowhere/at/all"}, "'./nowhere/at/all' is no folder"),
        ({"dtype": "int3"}, "dtype = 'int3' must be one of"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"min_pixels": 100, "max_pixels": 10}, "leave no size"),
    ],
)
def test_impossible_arguments_say_what_to_change(qwen3, arguments, text):
    with pytest.raises(ConfigError, match=text):
        settings: dict[str, Any] = {"model": qwen3}
        VLMJudge(**(settings | arguments))


def test_a_model_of_another_family_is_refused(clip_folder):
    with pytest.raises(ConfigError, match="judge .*"):
        VLMJudge(model=clip_folder)
