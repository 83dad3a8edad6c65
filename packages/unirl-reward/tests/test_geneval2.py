"""GenEval 2 by hand-worked probabilities, and on a tiny random model."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from unirl.reward.local.judges.geneval2 import GenEval2Scorer, soft_tifa
from unirl.reward.local.judges.judge import JudgeError, Question, Reply
from unirl.reward.local.judges.vlm_judge import VLMJudge
from unirl.types.errors import ConfigError, RewardError
from unirl.types.media import Texts, Videos
from unirl.types.reward import RewardRequest

from .vlm_folders import write_qwen_vl

ATOMS = [["How many birds are in the image?", "five"], ["Are the birds blue?", "Yes"]]


class RecordedJudge:
    """Answers with given probabilities or replies in order and keeps what it was asked."""

    has_probabilities = True

    def __init__(self, found):
        self.found = list(found)
        self.questions: list[Question] = []
        self.answers: list[str] = []

    def modules(self):
        return []

    def answer_probabilities(self, questions, answers):
        self.questions += questions
        self.answers += answers
        return [self.found.pop(0) for _ in questions]

    def replies(self, questions, max_tokens):
        self.questions += questions
        return [
            each if isinstance(each, JudgeError) else Reply(each) for each in map(self.found.pop, [0] * len(questions))
        ]


def with_atoms(request, atoms):
    return request.replace(metadata=[{"vqa_list": each} for each in atoms])


def test_the_mean_of_the_atoms_by_hand():
    assert soft_tifa([0.5, 0.125], "gm") == pytest.approx(0.25)
    assert soft_tifa([0.5, 0.125], "am") == pytest.approx(0.3125)
    assert soft_tifa([1.0, 0.0], "gm") == pytest.approx(1e-150)
    assert soft_tifa([0.0], "am") == 0.0


@pytest.mark.parametrize(("mean", "expected"), [("gm", [0.25, 0.9]), ("am", [0.3125, 0.9])])
def test_a_score_is_the_mean_over_the_questions_of_its_prompt(make_request, mean, expected):
    judge = RecordedJudge([0.5, 0.125, 0.9])
    request = with_atoms(make_request(num_samples=2), [ATOMS, [["Is it day?", "Yes"]]])
    found = GenEval2Scorer(judge=judge, mean=mean).score(request)
    assert found.rewards.tolist() == pytest.approx(expected)
    assert judge.answers == ["five", "Yes", "Yes"]
    assert judge.questions[1].text == "Are the birds blue? Answer in one word."
    shown = np.asarray(judge.questions[2].pictures[0])
    assert np.array_equal(shown, (request.pixels[1] * 255).round().byte().permute(1, 2, 0).numpy())


def test_questions_may_come_from_the_published_file(make_request, tmp_path):
    rows = [{"prompt": "prompt 0", "vqa_list": ATOMS, "skills": []}, {"prompt": "prompt 1", "vqa_list": ATOMS[:1]}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    judge = RecordedJudge([0.5, 0.5, 0.25])
    scorer = GenEval2Scorer(judge=judge, questions_file=str(tmp_path / "data.jsonl"))
    assert scorer.score(make_request(num_samples=2)).rewards.tolist() == pytest.approx([0.5, 0.25])
    judge.found = [0.75]
    own = with_atoms(make_request(num_samples=1), [[["Is it day?", "Yes"]]])
    assert scorer.score(own).rewards.tolist() == [0.75]


def test_a_question_without_an_answer_fails_its_sample_and_says_why(make_request):
    request = with_atoms(make_request(num_samples=2), [ATOMS, ATOMS])
    found = [0.5, JudgeError("the endpoint is gone"), 0.5, 0.5]
    answer = GenEval2Scorer(judge=RecordedJudge(found)).score_isolated(request, "batch")
    assert answer.successes == [False, True]
    assert answer.errors[0] == "the endpoint is gone"
    assert math.isnan(answer.rewards[0]) and answer.rewards[1] == 0.5
    with pytest.raises(RewardError, match="s0: the endpoint is gone"):
        GenEval2Scorer(judge=RecordedJudge(found)).score(request)


@pytest.mark.parametrize(
    ("atoms", "text"),
    [
        ([], "sample s0 .'prompt 0'. has no questions.*vqa_list.*questions_file"),
        (None, "has no questions"),
        ("Is it day?", "vqa_list is a str"),
        ([["Is it day?"]], r"vqa_list holds \['Is it day\?'\]"),
        ([["How many?", 5]], "two strings"),
    ],
)
def test_a_sample_without_questions_is_an_error_and_no_zero(make_request, atoms, text):
    with pytest.raises(ConfigError, match=text):
        GenEval2Scorer(judge=RecordedJudge([])).score(with_atoms(make_request(num_samples=1), [atoms]))


def test_impossible_arguments_say_what_to_change(tmp_path):
    with pytest.raises(ConfigError, match="mean = 'hm' must be one of"):
        GenEval2Scorer(judge=RecordedJudge([]), mean="hm")  # ty: ignore[invalid-argument-type]
    with pytest.raises(ConfigError, match="cannot read questions_file '/no/file'"):
        GenEval2Scorer(judge=RecordedJudge([]), questions_file="/no/file")
    (tmp_path / "data.jsonl").write_text('{"prompt": "x", "vqa_list": []}\n{"prompt": "y"}\n')
    with pytest.raises(ConfigError, match="line 2 is no object with prompt and vqa_list"):
        GenEval2Scorer(judge=RecordedJudge([]), questions_file=str(tmp_path / "data.jsonl"))


def test_of_a_video_the_judge_sees_frames_in_order():
    frames = [torch.full((5, 3, 8, 8), 0.0) + torch.arange(5)[:, None, None, None] / 5, torch.ones(2, 3, 8, 8)]
    request = RewardRequest(
        sample_ids=["a", "b"],
        group_ids=["a", "b"],
        primitives={"text": Texts(texts=["x", "y"])},
        generated={"video": Videos.pack(frames=frames)},
        metadata=[{"vqa_list": [["Is it day?", "Yes"]]}] * 2,
    )
    judge = RecordedJudge([0.5, 0.25])
    assert GenEval2Scorer(judge=judge, num_frames=3).score(request).rewards.tolist() == [0.5, 0.25]
    first = [np.asarray(picture)[0, 0, 0] for picture in judge.questions[0].pictures]
    assert first == [0, 102, 204]
    assert len(judge.questions[1].pictures) == 2


def test_a_local_model_gives_the_probability_that_it_answers_and_moves_with_the_scorer(make_request, tmp_path):
    judge = VLMJudge(model=write_qwen_vl(tmp_path, "qwen2_5_vl"), dtype="fp32")
    request = with_atoms(make_request(num_samples=2, size=64), [ATOMS, ATOMS[1:]])
    scorer = GenEval2Scorer(judge=judge)
    picture = Image.fromarray((request.pixels[1] * 255).round().byte().permute(1, 2, 0).numpy())
    (expected,) = judge.answer_probabilities([Question("Are the birds blue? Answer in one word.", (picture,))], ["Yes"])
    assert scorer.score(request).rewards[1].item() == pytest.approx(expected, rel=1e-5)
    assert scorer.modules() == judge.modules()
    scorer.offload()
    with pytest.raises(RewardError, match="geneval2 is offloaded"):
        scorer.score(request)
