"""WISE, UnifiedReward and EditReward: what they ask, and what they read from given replies."""

import math

import numpy as np
import pytest

from unirl.reward.local.judges.edit_reward import EditRewardScorer
from unirl.reward.local.judges.judge import JudgeError, Reply, Step
from unirl.reward.local.judges.unified_reward import UnifiedRewardScorer
from unirl.reward.local.judges.vlm_judge import VLMJudge
from unirl.reward.local.judges.wise import WISEScorer
from unirl.types.errors import ConfigError, RewardError
from unirl.types.media import Images

from .test_geneval2 import RecordedJudge
from .vlm_folders import write_qwen_vl

WISE = "Consistency: {}\nRealism: {}\nAesthetic Quality: {}"
UNIFIED = (
    'Word-wise Scores: [["a", 0.3], ["Style", 2.0]]\n\n'
    "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"
)


def explained(request):
    return request.replace(metadata=[{"explanation": f"meaning {i}"} for i in range(len(request.sample_ids))])


def edited(request):
    sources = Images(pixels=1 - request.pixels)
    return request.replace(primitives=request.primitives | {"image": sources})


def as_bytes(pixels):
    return (pixels * 255).round().byte().permute(1, 2, 0).numpy()


def test_wiscore_weighs_the_three_ratings(make_request):
    judge = RecordedJudge([WISE.format(2, 1, 0), WISE.format(1, 2, 2), WISE.format(0, 0, 0), WISE.format(2, 2, 2)])
    found = WISEScorer(judge=judge).score(explained(make_request(num_samples=4)))
    assert found.rewards.tolist() == pytest.approx([0.8, 0.65, 0.0, 1.0])
    assert found.component_rewards["wise/realism"].tolist() == [1.0, 2.0, 0.0, 2.0]
    assert "Prompt: prompt 1\n" in judge.questions[1].text and "meaning 1" in judge.questions[1].text
    assert len(judge.questions[1].pictures) == 1


def test_expected_ratings_are_means_under_the_judges_probabilities(make_request):
    text = WISE.format(2, 1, 0)
    likely = {"0": 0.25, "1": 0.25, "2": 0.5}

    class Unsure(RecordedJudge):
        def replies(self, questions, max_tokens):
            return [Reply(text, tuple(Step(character, likely) for character in text)) for _ in questions]

    found = WISEScorer(judge=Unsure([]), ratings="expected").score(explained(make_request(num_samples=1)))
    assert found.component_rewards["wise/aesthetic"].tolist() == [1.25]
    assert found.rewards.tolist() == pytest.approx([1.25 / 2])


def test_expected_ratings_need_a_judge_with_probabilities():
    judge = RecordedJudge([])
    judge.has_probabilities = False
    with pytest.raises(ConfigError, match="scorer wise: its judge gives no probabilities. Set ratings to written"):
        WISEScorer(judge=judge, ratings="expected")


def test_a_sample_without_an_explanation_is_an_error(make_request):
    with pytest.raises(ConfigError, match="scorer wise: sample s0 has no explanation of its prompt"):
        WISEScorer(judge=RecordedJudge([])).score(make_request(num_samples=1))


def test_unified_reward_is_the_mean_rating_and_over_five_where_asked(make_request):
    replies = [UNIFIED.format(4.5, 3, 2.25), UNIFIED.format(5, 5, 5)]
    request = make_request(num_samples=2)
    found = UnifiedRewardScorer(judge=RecordedJudge(replies)).score(request)
    assert found.rewards.tolist() == pytest.approx([3.25, 5.0])
    assert found.component_rewards["unified_reward/style"].tolist() == [2.25, 5.0]
    normalised = UnifiedRewardScorer(judge=RecordedJudge(replies), normalise=True).score(request)
    assert normalised.rewards.tolist() == pytest.approx([0.65, 1.0])
    only = {"alignment": 1.0, "coherence": 0.0, "style": 0.0}
    found = UnifiedRewardScorer(judge=RecordedJudge(replies), component_weights=only).score(request)
    assert found.rewards.tolist() == [4.5, 5.0]


def test_the_published_wording_can_be_given_and_needs_the_caption(make_request):
    judge = RecordedJudge([UNIFIED.format(1, 1, 1)])
    braces = UnifiedRewardScorer(judge=judge, instruction='{"caption": [{prompt}]}')
    braces.score(make_request(num_samples=1))
    assert judge.questions[0].text == '{"caption": [prompt 0]}'
    with pytest.raises(ConfigError, match="instruction has no {prompt}"):
        UnifiedRewardScorer(judge=judge, instruction="rate it")


def test_an_edit_is_shown_after_its_source(make_request):
    judge = RecordedJudge(
        ["Instruction Following: 4\nVisual Quality: 1", "Instruction Following: 2\nVisual Quality: 3"]
    )
    request = edited(make_request(num_samples=2))
    found = EditRewardScorer(judge=judge).score(request)
    assert found.rewards.tolist() == [2.5, 2.5]
    assert found.component_rewards["edit_reward/edit_following"].tolist() == [4.0, 2.0]
    source, edit = judge.questions[1].pictures
    assert np.array_equal(np.asarray(source), as_bytes(1 - request.pixels[1]))
    assert np.array_equal(np.asarray(edit), as_bytes(request.pixels[1]))
    assert "prompt 1" in judge.questions[1].text


def test_an_edit_without_a_source_is_an_error(make_request):
    with pytest.raises(ConfigError, match=r"edit_reward compares an edit .* inputs \['text'\]"):
        EditRewardScorer(judge=RecordedJudge([])).score(make_request(num_samples=1))


def test_a_reply_that_cannot_be_read_fails_its_sample_and_is_never_a_number(make_request):
    request = make_request(num_samples=3)
    replies = ["I would rather not.", JudgeError("time-out"), UNIFIED.format(4, 4, 4)]
    found = UnifiedRewardScorer(judge=RecordedJudge(replies)).score_isolated(request, "batch")
    assert found.successes == [False, False, True]
    assert "'I would rather not.' gives no rating of Alignment Score" in str(found.errors[0])
    assert found.errors[1] == "time-out"
    assert all(math.isnan(value) for value in found.rewards[:2]) and found.rewards[2] == pytest.approx(4.0)
    with pytest.raises(RewardError, match="unified_reward has no finite reward for 2 samples"):
        UnifiedRewardScorer(judge=RecordedJudge(replies)).score(request)


def test_impossible_arguments_say_what_to_change():
    with pytest.raises(ConfigError, match="ratings = 'guessed' must be one of"):
        WISEScorer(judge=RecordedJudge([]), ratings="guessed")  # ty: ignore[invalid-argument-type]
    with pytest.raises(ConfigError, match=r"component_weights are of \['alignment'\], expected exactly"):
        UnifiedRewardScorer(judge=RecordedJudge([]), component_weights={"alignment": 1.0})


def test_a_random_model_writes_no_ratings_and_so_fails_every_sample(make_request, tmp_path):
    judge = VLMJudge(model=write_qwen_vl(tmp_path, "qwen2_5_vl"), dtype="fp32")
    scorer = EditRewardScorer(judge=judge, max_tokens=4)
    found = scorer.score_isolated(edited(make_request(num_samples=2, size=64)), "batch")
    assert found.successes == [False, False]
    assert all("gives no rating of Instruction Following" in str(error) for error in found.errors)
