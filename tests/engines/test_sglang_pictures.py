"""The real SGLang with a Qwen2.5-VL or Qwen3-VL of two random layers: images reach it, and every tensor of a push."""

import importlib
from typing import Any

import pytest
import torch
from acting_tensors import assert_every_tensor_acts
from album import Album
from letters_model import TOLERANCE, LetterCodec

from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.pipeline import QwenVLPipeline
from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine
from unirl.rollout.turns.engine import TurnsEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.types.conditions import PromptCondition
from unirl.types.episodes import EPISODE
from unirl.types.errors import ConfigError
from unirl.types.media import ImageLists, Texts, shown_image
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus

_models: Any = importlib.import_module("packages.unirl-models.tests.tiny_text")  # Any: a folder with a dash
pytestmark = [pytest.mark.sglang, pytest.mark.slow]
PARAMS = ARSamplingParams(temperature=0.9, max_new_tokens=6, seed=1)
SIZES = [(2, 2), (3, 2), (2, 4)]
"""In tokens, so that no image is resized: SGLang resamples otherwise than the pipeline."""

UNREAD = ".deepstack_merger_list.1."
"""Part of Qwen3-VL that is added to places of the image behind the last of two layers, where no answer reads it."""


def request(pipeline) -> RolloutReq:
    """A question about an image each, and one without any."""
    generator, side = torch.Generator().manual_seed(0), token_side(pipeline.bundle)
    pixels = [torch.rand(3, rows * side, columns * side, generator=generator) for rows, columns in SIZES]
    pictures = [[(each * 255).round() / 255] for each in pixels]
    texts = ["what is it?", "and this, at some length?", "how many?", "no picture"]
    return RolloutReq(
        sample_ids=[f"s{row}" for row in range(4)],
        group_ids=list(texts),
        primitives={"text": Texts(texts=texts), "image": ImageLists(images=[*pictures, []])},
        sampling_params=PARAMS,
    )


def with_a_video_that_is_not_there(pipeline) -> RolloutReq:
    """`request` with the token that stands for a video behind the second prompt, as a model may write it in a turn."""
    req = request(pipeline)
    given = pipeline.encode(req.primitives, PARAMS)
    tokens = given["prompt"].unpack("tokens")
    tokens[1] = torch.cat([tokens[1], torch.tensor([pipeline.bundle.model.config.video_token_id])])
    return req.replace(request_conditions={**given, "prompt": PromptCondition.pack(tokens=tokens)})


def token_side(bundle) -> int:
    """Pixels on a side of the patches that are one token."""
    return bundle.image_processor.patch_size * bundle.image_processor.merge_size


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.nightly)])
def test_every_tensor_of_a_push_acts_on_answers_about_pictures(model_type, sglang_python, tmp_path):
    folder = str(_models.save_vision_model(_models.qwen_vl(model_type), tmp_path))
    bundle = QwenVLBundle(folder, freeze_vision=False)
    pipeline = QwenVLPipeline(bundle)
    backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-3))
    engine = SGLangRolloutEngine(
        pipeline,
        model=folder,
        device="cpu",
        python=sglang_python,
        dtype="fp32",
        kv_cache_tokens=4096,
        engine_args={"disable-fast-image-processor": True},
    )
    options: dict[str, Any] = {"sampling": PARAMS, "dtype": "fp32", "canary_tolerance": 1e-4}
    sync = FullWeightSync(backend, engine, pipeline, canary_image_size=2 * token_side(bundle), **options)
    try:
        assert_every_tensor_acts(engine, pipeline, backend, sync, request(pipeline), [UNREAD])
    finally:
        engine.shutdown()


@pytest.mark.nightly
def test_images_that_an_environment_shows_between_turns_are_those_of_a_replay(sglang_python, tmp_path):
    folder = str(_models.save_vision_model(_models.qwen_vl("qwen2_5_vl"), tmp_path))
    (tmp_path / "chat_template.jinja").write_text(_models.VISION_TEMPLATE)
    pipeline = QwenVLPipeline(QwenVLBundle(folder))
    asked = request(pipeline)
    shown: Any = asked.primitives["image"]
    engine = SGLangRolloutEngine(
        pipeline,
        model=folder,
        device="cpu",
        python=sglang_python,
        dtype="fp32",
        kv_cache_tokens=4096,
        engine_args={"disable-fast-image-processor": True},
    )
    pages = [shown_image(images[0]) for images in shown.images[:3]]
    turns = TurnsEngine(engine, pipeline, environment=Album(pages), max_turns=4)
    # Every byte ends a turn, so that a random model has several.
    params = ARSamplingParams(temperature=0.9, max_new_tokens=12, seed=1, stop_token_ids=tuple(range(0, 256, 3)))
    try:
        track: Any = turns.generate(asked.replace(sampling_params=params)).root_track()
        refused: Any = engine.generate(with_a_video_that_is_not_there(pipeline)).root_track()
    finally:
        turns.shutdown()
    assert [status == SegmentStatus.FAILED for status in refused.segment.status.tolist()] == [False, True, False, False]
    assert "answered 400" in refused.metadata[1][EPISODE]["reason"] and min(refused.segment.lengths.tolist()) == 0
    ends = [row[EPISODE]["end"] for row in track.metadata]
    assert "answered" in ends and max(track.counts["turns"].tolist()) == 3
    grids = [len(grid) for grid in track.conditions["images"].grids]
    assert max(grids) == 4, "one of the prompt, and three between turns"
    with pipeline.evaluating(), torch.no_grad():
        replayed = pipeline.replay(track.conditions, track.segment, params).logp_N
    written = track.segment.trained
    assert float((replayed - track.segment.log_probs)[written].abs().max()) < TOLERANCE


def test_a_model_whose_pictures_sglang_would_take_for_embeddings_is_refused(tmp_path):
    model = _models.qwen_vl("qwen2_5_vl")
    model.config.vision_config.patch_size = 8
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"patches of 3 \* 2 \* 8 \* 8 = 384 numbers.*Qwen2.5-VL alone with 1176"):
        SGLangRolloutEngine(LetterCodec(), model=str(tmp_path))
