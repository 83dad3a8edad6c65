"""GenEval through real detectors and a real CLIP, tiny and random, against transformers' own calls."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from unirl.reward.local.detection.colours import ColourClassifier, cut_out
from unirl.reward.local.detection.detectors import BoxDetector, MaskDetector, OpenVocabularyDetector
from unirl.reward.local.detection.geneval import GenEvalScorer
from unirl.reward.local.detection.geneval_rules import COLOURS, Detection
from unirl.reward.local.pixels import to_pictures
from unirl.types.errors import ConfigError, RewardError

LABELS = {0: "dog", 1: "mouse", 2: "cat"}


@pytest.fixture(scope="module")
def detr(tmp_path_factory):
    path = tmp_path_factory.mktemp("detr")
    torch.manual_seed(0)
    layers: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    backbone = transformers.ResNetConfig(**layers)
    config: Any = transformers.DetrConfig(
        backbone_config=backbone,
        num_queries=6,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        id2label=LABELS,
    )
    model: Any = transformers.DetrForObjectDetection(config).eval()
    model.class_labels_classifier.weight.data.mul_(10)
    model.save_pretrained(path)
    size = {"shortest_edge": 32, "longest_edge": 64}
    transformers.DetrImageProcessorPil(size=size).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory):
    path = tmp_path_factory.mktemp("mask2former")
    torch.manual_seed(0)
    layers: dict[str, Any] = {"image_size": 32, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
    layers |= {"window_size": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    backbone = transformers.SwinConfig(**layers)
    config: Any = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=5,
        id2label=LABELS,
    )
    model: Any = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    model.class_predictor.weight.data.mul_(30)
    model.save_pretrained(path)
    size = {"height": 64, "width": 64}
    transformers.Mask2FormerImageProcessorPil(size=size, ignore_index=255).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def owlv2(tmp_path_factory, clip_folder):
    path = tmp_path_factory.mktemp("owlv2")
    torch.manual_seed(0)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(clip_folder)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 40, "eos_token_id": tokenizer.eos_token_id}
    config: Any = transformers.Owlv2Config(
        text_config=tower | text, vision_config=tower | {"image_size": 32, "patch_size": 8}, projection_dim=16
    )
    transformers.Owlv2ForObjectDetection(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    transformers.Owlv2ImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(path)
    return str(path)


def pictures(count=2, size=48):
    pixels = torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(3))
    return to_pictures(pixels)


def flat(found):
    return [(each.label, each.score, each.box) for each in found]


def test_boxes_are_those_of_transformers_own_post_processing(detr):
    seen = pictures()
    found = BoxDetector(model=detr).detect(seen, 0.2)
    model: Any = transformers.DetrForObjectDetection.from_pretrained(detr)
    processor: Any = transformers.DetrImageProcessorPil.from_pretrained(detr)
    for picture, mine in zip(seen, found, strict=True):
        with torch.no_grad():
            outputs = model.eval()(**processor(images=[picture], return_tensors="pt"))
        (expected,) = processor.post_process_object_detection(outputs, threshold=0.2, target_sizes=[(48, 48)])
        assert len(mine) == len(expected["scores"]) > 0
        assert [each.label for each in mine] == [LABELS[i] for i in expected["labels"].tolist()]
        assert [each.score for each in mine] == pytest.approx(expected["scores"].tolist(), abs=1e-5)
        boxes = torch.tensor([each.box for each in mine])
        torch.testing.assert_close(boxes, expected["boxes"], rtol=0, atol=1e-3)


def test_masks_are_those_of_transformers_and_boxes_lie_around_them(mask2former):
    seen = pictures()
    found = MaskDetector(model=mask2former).detect(seen, 0.1)
    model: Any = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(mask2former)
    processor: Any = transformers.Mask2FormerImageProcessorPil.from_pretrained(mask2former)
    for picture, mine in zip(seen, found, strict=True):
        with torch.no_grad():
            outputs = model.eval()(**processor(images=[picture], return_tensors="pt"))
        (expected,) = processor.post_process_instance_segmentation(
            outputs, threshold=0.1, target_sizes=[(48, 48)], return_binary_maps=True
        )
        assert len(mine) == len(expected["segments_info"]) > 0
        assert [each.score for each in mine] == pytest.approx([i["score"] for i in expected["segments_info"]], abs=1e-4)
        for each in mine:
            assert each.mask is not None and each.mask.shape == (48, 48)
            x0, y0, x1, y1 = (int(value) for value in each.box)
            inside = torch.zeros_like(each.mask)
            inside[y0:y1, x0:x1] = True
            assert not (each.mask & ~inside).any()
            assert each.mask[y0].any() and each.mask[y1 - 1].any()
            assert each.mask[:, x0].any() and each.mask[:, x1 - 1].any()
    assert MaskDetector(model=mask2former).detect(seen, 1.0) == [[], []]


def test_an_open_detector_finds_the_classes_that_are_named(owlv2):
    seen = pictures()
    detector = OpenVocabularyDetector(model=owlv2, labels=["dog", "tv remote"])
    assert detector.labels == ["dog", "tv remote"]
    found = detector.detect(seen, 0.0)
    model: Any = transformers.Owlv2ForObjectDetection.from_pretrained(owlv2)
    processor: Any = transformers.Owlv2ImageProcessorPil.from_pretrained(owlv2)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(owlv2)
    asked = ["a photo of a dog", "a photo of a tv remote"]
    texts = tokenizer(asked, padding="max_length", max_length=40, return_tensors="pt")
    with torch.no_grad():
        outputs = model.eval()(**processor(images=[seen[1]], return_tensors="pt"), **texts)
    (expected,) = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[(48, 48)])
    assert [each.label for each in found[1]] == [["dog", "tv remote"][i] for i in expected["labels"].tolist()]
    assert [each.score for each in found[1]] == pytest.approx(expected["scores"].tolist(), abs=1e-5)


def test_a_colour_is_the_nearest_of_the_averaged_words(clip_folder):
    (picture,) = pictures(1)
    found = Detection("dog", 0.9, (4.4, 5.6, 40.2, 44.0))
    model: Any = transformers.CLIPModel.from_pretrained(clip_folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(clip_folder)
    processor: Any = transformers.CLIPImageProcessorPil.from_pretrained(clip_folder)
    crop = picture.crop((4, 6, 40, 44))
    scores = []
    with torch.no_grad():
        seen = model.get_image_features(**processor(images=[crop], return_tensors="pt")).pooler_output[0]
        for colour in COLOURS:
            texts = [
                f"a photo of a {colour} dog",
                f"a photo of a {colour}-colored dog",
                f"a photo of a {colour} object",
            ]
            embedded = [
                model.get_text_features(
                    **tokenizer([text], truncation=True, max_length=24, return_tensors="pt")
                ).pooler_output[0]
                for text in texts
            ]
            words = torch.stack([each / each.norm() for each in embedded]).mean(0)
            scores.append((seen @ words / (seen.norm() * words.norm())).item())
    classifier = ColourClassifier(model=clip_folder)
    assert classifier.colours(picture, [found, found]) == [COLOURS[int(np.argmax(scores))]] * 2
    assert np.ptp(scores) > 1e-3


def test_what_lies_outside_of_a_mask_is_grey():
    picture = Image.new("RGB", (8, 8), (255, 0, 0))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:4, 2:6] = True
    cut = np.asarray(cut_out(picture, Detection("dog", 1.0, (1, 1, 6, 5), mask)))
    assert cut.shape == (4, 5, 3)
    assert cut[1, 1].tolist() == [255, 0, 0] and cut[0, 0].tolist() == [0x99] * 3
    assert cut_out(picture, Detection("dog", 1.0, (3.2, 3.2, 3.3, 3.4))).size == (1, 1)


def asking(request, *clauses, **row):
    return request.replace(metadata=[{"include": list(clauses), **row} for _ in request.sample_ids])


class Found:
    """A detector that finds what it is told to, with the labels of COCO."""

    labels = ("dog", "mouse")

    def __init__(self, *objects):
        self.objects = list(objects)
        self.thresholds: list[float] = []

    def modules(self):
        return []

    def detect(self, pictures, threshold):
        self.thresholds.append(threshold)
        return [self.objects for _ in pictures]


def test_score_type_chooses_the_reward_and_the_others_report(make_request):
    two = Found(Detection("dog", 0.9, (0, 0, 4, 4)), Detection("dog", 0.8, (8, 8, 12, 12)))
    request = asking(make_request(num_samples=2), {"class": "dog", "count": 1})
    found = {
        kind: GenEvalScorer(detector=two, score_type=kind).score(request) for kind in ("strict", "score", "reward")
    }
    assert {kind: answer.rewards.tolist() for kind, answer in found.items()} == {
        "strict": [0.0, 0.0],
        "score": [0.0, 0.0],
        "reward": [1.0, 1.0],
    }
    assert found["strict"].component_rewards["geneval/reward"].tolist() == [1.0, 1.0]


def test_counting_asks_for_more_certainty(make_request):
    detector = Found(Detection("dog", 0.95, (0, 0, 4, 4)), Detection("dog", 0.5, (8, 8, 12, 12)))
    scorer = GenEvalScorer(detector=detector, score_type="strict")
    two = {"class": "dog", "count": 2}
    assert scorer.score(asking(make_request(num_samples=1), two, tag="two_object")).rewards.tolist() == [1.0]
    assert scorer.score(asking(make_request(num_samples=1), two, tag="counting")).rewards.tolist() == [0.0]
    assert detector.thresholds == [0.3, 0.3]


def test_genevals_names_of_classes_are_cocos(make_request):
    scorer = GenEvalScorer(detector=Found(Detection("mouse", 0.9, (0, 0, 4, 4))))
    asked = asking(make_request(num_samples=1), {"class": "computer mouse", "count": 1})
    assert scorer.score(asked).rewards.tolist() == [1.0]
    with pytest.raises(ConfigError, match="'mouse', which the detector does not know.*'computer mouse'"):
        scorer.score(asking(make_request(num_samples=1), {"class": "mouse", "count": 1}))


def test_the_whole_path_on_tiny_models_does_not_depend_on_the_batch(make_request, mask2former, clip_folder):
    request = asking(make_request(num_samples=3, size=48), {"class": "dog", "count": 1, "color": "red"})
    detector, colours = MaskDetector(model=mask2former), ColourClassifier(model=clip_folder)
    settings: dict[str, Any] = {"detector": detector, "colours": colours, "threshold": 0.1, "counting_threshold": 0.1}
    three = GenEvalScorer(**settings, batch_size=3).score(request)
    one = GenEvalScorer(**settings, batch_size=1).score(request)
    assert torch.equal(three.rewards, one.rewards)
    scorer = GenEvalScorer(**settings)
    assert len(scorer.modules()) == 2
    scorer.offload()
    with pytest.raises(RewardError, match="geneval is offloaded"):
        scorer.score(request)


def test_colours_without_a_classifier_are_an_error(make_request):
    scorer = GenEvalScorer(detector=Found(Detection("dog", 0.9, (0, 0, 4, 4))))
    asked = asking(make_request(num_samples=1), {"class": "dog", "count": 1, "color": "red"})
    with pytest.raises(ConfigError, match="a prompt asks for a color, but `colours` is None"):
        scorer.score(asked)


def test_a_sample_without_a_row_is_named(make_request):
    with pytest.raises(ConfigError, match="scorer geneval: sample s0 has no include clauses"):
        GenEvalScorer(detector=Found()).score(make_request(num_samples=1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"score_type": "soft"}, "score_type = 'soft' must be one of"),
        ({"threshold": 1.5}, r"threshold = 1.5 must lie in \[0, 1\]"),
        ({"max_objects": 0}, "max_objects = 0 must be at least 1"),
    ],
)
def test_impossible_arguments_say_what_to_change(changes, text):
    settings: dict[str, Any] = {"detector": Found()}
    with pytest.raises(ConfigError, match=text):
        GenEvalScorer(**(settings | changes))


def test_models_that_cannot_be_loaded_are_named(tmp_path, clip_folder):
    with pytest.raises(ConfigError, match="detector ./nowhere/at/all: model = './nowhere/at/all' is no folder"):
        BoxDetector(model="./nowhere/at/all")
    with pytest.raises(ConfigError, match="cannot load it as MaskDetector"):
        MaskDetector(model=clip_folder)
    with pytest.raises(ConfigError, match="it needs labels"):
        OpenVocabularyDetector(model=clip_folder, labels=[])
    with pytest.raises(ConfigError, match="colour classifier .*: cannot load it"):
        ColourClassifier(model=str(tmp_path))
