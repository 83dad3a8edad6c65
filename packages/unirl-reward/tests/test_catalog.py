"""The catalogue finds every scorer by its card, and the card says what the class does."""

import importlib
import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import unirl.reward
from unirl.reward.base import LocalScorer
from unirl.reward.card import Normalisation, ScorerCard
from unirl.reward.catalog import CATALOG, cards_in, named_as
from unirl.reward.function import FunctionRewardScorer, imported
from unirl.reward.local.detection.colours import ColourClassifier
from unirl.reward.local.detection.detectors import MaskDetector, OpenVocabularyDetector
from unirl.reward.local.images.clip import CLIPRewardScorer
from unirl.reward.local.images.compressibility import JPEGCompressibilityScorer, JPEGIncompressibilityScorer
from unirl.reward.local.images.hpsv2 import HPSv2RewardScorer
from unirl.reward.local.judges.vlm_judge import VLMJudge
from unirl.reward.local.ocr.got_ocr import GOTOCRScorer
from unirl.reward.local.vision_language.hpsv3 import HPSv3Scorer
from unirl.reward.local.vision_language.video_align import VideoAlignScorer
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Texts
from unirl.types.reward import RewardRequest

PACKAGE = Path(unirl.reward.__path__[0])


def shipped_scorers():
    """Every concrete scorer class of the package."""
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    modules = [importlib.import_module(".".join(("unirl.reward", *path.parts))) for path in paths]
    return {
        f"{value.__module__}.{value.__name__}": value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, LocalScorer)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    }


def test_every_scorer_of_the_package_is_in_the_catalogue_and_holds_its_card():
    scorers = shipped_scorers()
    assert {card.target for card in CATALOG.values()} == set(scorers)
    assert {named_as(target) for target in scorers} == set(CATALOG)
    held = {name: scorers.get(card.target, LocalScorer).card for name, card in CATALOG.items()}
    assert held == CATALOG


PLANTED = """
import a_model_library_that_nobody_has
from unirl.reward.base import LocalScorer
from unirl.reward.card import Normalisation, ScorerCard

class Contrast(LocalScorer):
    card = ScorerCard(
        name="contrast", summary="contrast", media=("image",), low=-1, source="here", normalisation=Normalisation(4)
    )
"""


def test_a_scorer_joins_the_catalogue_by_its_file_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "contrast.py").write_text(PLANTED)
    (tmp_path / "__init__.py").write_text(PLANTED.replace("contrast", "brightness").replace("Contrast", "Brightness"))
    (tmp_path / "helper.py").write_text("def helper(): return ScorerCard(name='none')\n")
    found = cards_in(tmp_path, "planted")
    assert list(found) == ["brightness", "contrast"]
    assert found["brightness"].target == "planted.Brightness"
    assert found["contrast"] == ScorerCard(
        target="planted.photos.contrast.Contrast",
        name="contrast",
        summary="contrast",
        media=("image",),
        low=-1,
        source="here",
        normalisation=Normalisation(4),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name="contrast", ', "", r"planted\.contrast\.Contrast: its card has no name\."),
        ('"here"', "HERE", r"planted\.contrast\.Contrast: its card must be ScorerCard\(\.\.\.\) of literals"),
        ('summary="contrast", ', "", "of literals: .* missing 1 required positional argument: 'summary'"),
        ("ScorerCard(\n", "dict(  # ScorerCard(\n", "must be ScorerCard"),
    ],
)
def test_a_card_that_cannot_be_read_is_named(tmp_path, old, new, message):
    assert old in PLANTED
    (tmp_path / "contrast.py").write_text(PLANTED.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        cards_in(tmp_path, "planted")


def test_two_scorers_of_one_name_are_refused(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    message = r"planted\.first\.Contrast and planted\.second\.Contrast are both called 'contrast'"
    with pytest.raises(ConfigError, match=message):
        cards_in(tmp_path, "planted")


@pytest.mark.parametrize("name", CATALOG)
def test_a_card_says_what_the_constructor_does(name):
    card = CATALOG[name]
    keywords = inspect.signature(imported(card.target)).parameters
    if name not in ("function", "pairwise_function", "labels"):
        assert keywords["name"].default == name
    if card.normalisation is None:
        assert "normalise" not in keywords, "a switch that could only be refused"
    else:
        assert keywords["normalise"].default is card.normalisation.is_default
    assert card.low < card.high and card.summary and card.source and card.media
    assert math.isfinite(card.low + card.high) or card.typical, "an open range needs a word on what is usual"


def test_the_catalogue_is_read_without_torch():
    code = "import sys, unirl.reward.catalog; assert not {'torch', 'numpy', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_inputs_and_scale_in_words():
    assert CATALOG["pickscore"].inputs == "image + prompt"
    assert CATALOG["function"].inputs == "image or video or text or audio"
    assert CATALOG["image_reward"].scale == "standard deviations, -2.3 to 2; normalise: (x + 2) / 4, off by default"
    assert CATALOG["shapes_gradient"].scale == "[0, 1]"


def test_normalised_and_raw_rewards_differ_by_the_published_formula(make_request):
    request = make_request(num_samples=3, size=32)
    raw = JPEGCompressibilityScorer().score(request)
    found = JPEGCompressibilityScorer(normalise=True).score(request)
    torch.testing.assert_close(found.rewards, raw.rewards / 500, rtol=0, atol=0)
    assert torch.equal(found.component_rewards["jpeg_compressibility"], found.rewards)
    up = RewardService([JPEGIncompressibilityScorer(normalise=True)]).score(request)
    assert torch.equal(up.rewards, -found.rewards)


class TwoParts(LocalScorer):
    card = ScorerCard(
        target="test.TwoParts", summary="two", media=("image",), source="here", normalisation=Normalisation(4, offset=2)
    )

    def __init__(self, normalise=True):
        super().__init__(name="two", component_weights={"a": 1.0, "b": 2.0}, normalise=normalise)

    def score_batch(self, request):
        number = len(request.sample_ids)
        return {"a": torch.ones(number), "b": torch.full((number,), 0.5)}


def test_the_reward_is_normalised_and_its_components_stay_raw(make_request):
    found = TwoParts().score(make_request(num_samples=2))
    assert found.rewards.tolist() == [1.0, 1.0]  # (1 + 2 * 0.5 + 2) / 4
    assert {key: value.tolist() for key, value in found.component_rewards.items()} == {
        "two/a": [1.0, 1.0],
        "two/b": [0.5, 0.5],
    }


def test_normalising_where_nothing_is_published_is_refused():
    class Plain(LocalScorer):
        def score_batch(self, request):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="scorer plain: normalise is on, but Plain has no published normalisation"):
        Plain(name="plain", normalise=True)


def test_media_that_a_scorer_cannot_see_are_named():
    request = RewardRequest(sample_ids=["a"], generated={"text": Texts(texts=["hello"])})
    with pytest.raises(
        ContractError, match=r"jpeg_compressibility scores generated image; this request has \['text'\]"
    ):
        JPEGCompressibilityScorer().score(request)


def test_normalise_brings_clip_logits_down_by_30_and_hpsv2_keeps_its_cosine(clip_folder, make_request):
    request = make_request()
    raw = CLIPRewardScorer(model=clip_folder, normalise=False).score(request).rewards
    assert torch.equal(CLIPRewardScorer(model=clip_folder).score(request).rewards, raw / 30)
    cosine = HPSv2RewardScorer(checkpoint=None, model=clip_folder).score(request).rewards
    assert cosine.abs().max() <= CATALOG["hpsv2"].high


def test_a_function_has_a_card_too():
    assert FunctionRewardScorer(lambda images, prompts, metadata: [0.0], name="mine").card == CATALOG["function"]


def test_what_names_a_model_says_how_large_it_is():
    """`trainer check --memory` and rehearsals count it; judges and detectors of scorers too."""
    named = []
    for value in (*shipped_scorers().values(), VLMJudge, MaskDetector, OpenVocabularyDetector, ColourClassifier):
        given = inspect.signature(value).parameters
        if {"model", "dtype"} <= given.keys() and given["model"].default is not inspect.Parameter.empty:
            named.append(value)
    assert len(named) > 10
    assert not [value.__name__ for value in named if not getattr(value, "model_billions", 0)]


def test_sizes_are_those_of_the_released_shapes():
    def billions(model):
        return sum(parameter.numel() for parameter in model.parameters()) / 1e9

    of_7b: dict[str, Any] = {
        "text_config": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        "vision_config": {"hidden_size": 3584},
    }
    of_2b: dict[str, Any] = {
        "text_config": {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        "vision_config": {"hidden_size": 1536},
    }
    with torch.device("meta"):
        for values, scorer in ((of_7b, HPSv3Scorer), (of_2b, VideoAlignScorer)):
            backbone = transformers.Qwen2VLModel(transformers.Qwen2VLConfig(**values))
            assert billions(backbone) == pytest.approx(scorer.model_billions, abs=1e-3)
        reader = transformers.GotOcr2ForConditionalGeneration(transformers.GotOcr2Config())
        assert billions(reader) == pytest.approx(GOTOCRScorer.model_billions, abs=1e-3)
