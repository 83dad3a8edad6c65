"""The real vLLM with a Qwen3-Omni of two random layers: sounds and images reach it, and every tensor of a push."""

import importlib
from typing import Any

import pytest
import torch
from acting_tensors import assert_every_tensor_acts

from unirl.distributed.weight_sync.full import FullWeightSync
from unirl.models.qwen3_omni.bundle import Qwen3OmniThinkerBundle
from unirl.models.qwen3_omni.pipeline import Qwen3OmniThinkerPipeline
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.types.media import Audios, ImageLists, Texts
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams

_models: Any = importlib.import_module("packages.unirl-models.tests.tiny_text")  # Any: a folder with a dash
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PARAMS = ARSamplingParams(temperature=0.9, max_new_tokens=6, seed=1)
RATE = 16000
SECONDS = (1.0, 1.2341875, 0.0, 1.6)
"""One is no whole number of frames, and one prompt has none."""
UNREAD = (".visual.merger_list.1.", ".self_attn.k_proj.bias")
"""The first is added to places of the image behind the last of two layers, where no answer reads it, the second to all
scores of a softmax alike."""


def request(pipeline) -> RolloutReq:
    """A sound alone, a sound and an image, neither, and an image before a sound."""
    generator = torch.Generator().manual_seed(0)
    sounds = [torch.rand(int(RATE * each), generator=generator) - 0.5 for each in SECONDS]
    side = pipeline.bundle.image_processor.patch_size * pipeline.bundle.image_processor.merge_size
    pixels = [(torch.rand(3, 2 * side, columns * side, generator=generator) * 255).round() / 255 for columns in (2, 3)]
    texts = ["what is said?", "hear <audio> and see <image>", "nothing here", "and this, at some length?"]
    return RolloutReq(
        sample_ids=[f"s{row}" for row in range(4)],
        group_ids=list(texts),
        primitives={
            "text": Texts(texts=texts),
            "image": ImageLists(images=[[], [pixels[0]], [], [pixels[1]]]),
            "audio": Audios.pack(waveform=sounds, sample_rate=RATE),
        },
        sampling_params=PARAMS,
    )


def test_every_tensor_of_a_push_acts_on_answers_about_sounds_and_pictures(vllm_python, tmp_path):
    # Wide enough for the kernel of experts on a CPU, which pads narrower ones, and does not take a push of them.
    folder = str(_models.save_whole_omni(_models.qwen3_omni(moe_intermediate_size=64), tmp_path))
    bundle = Qwen3OmniThinkerBundle(folder, freeze_vision=False, freeze_audio=False)
    pipeline = Qwen3OmniThinkerPipeline(bundle)
    backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-3))
    engine = VLLMRolloutEngine(
        pipeline,
        model=folder,
        device="cpu",
        python=vllm_python,
        dtype="fp32",
        context_length=256,
        kv_cache_bytes=64 << 20,
    )
    options: dict[str, Any] = {"sampling": PARAMS, "dtype": "fp32", "canary_tolerance": 1e-4}
    sync = FullWeightSync(backend, engine, pipeline, **options)
    try:
        assert_every_tensor_acts(engine, pipeline, backend, sync, request(pipeline), UNREAD)
    finally:
        engine.shutdown()
