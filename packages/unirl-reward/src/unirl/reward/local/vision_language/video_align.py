"""VideoAlign: visual quality, motion quality and text alignment of a video, by a Qwen2-VL with a reward head.

Legend: b samples, F frames, C H W pixels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import ScorerCard
from unirl.reward.local.pixels import to_bytes
from unirl.reward.local.preprocess import resized
from unirl.reward.local.pretrained import check_dtype, load_state
from unirl.reward.local.video.frames import frames_of
from unirl.reward.local.vision_language.qwen_vl import QwenVLReader
from unirl.reward.local.vision_language.reward_head import PROMPT, load_reward_model, merged_lora, read_instruction
from unirl.types.bounds import PositiveInt
from unirl.types.errors import ConfigError
from unirl.types.media import Videos
from unirl.types.precision import DTYPES
from unirl.types.reward import RewardRequest

COMPONENTS = ("VQ", "MQ", "TA")
REWARD_TOKENS = tuple(f"<|{component}_reward|>" for component in COMPONENTS)
MIN_PIXELS = 128 * 28 * 28
"""Smallest area of a resized frame, as Qwen's own preprocessing of videos has it."""
MIN_FRAMES, MAX_FRAMES, FRAME_FACTOR = 4, 768, 2


class VideoAlignScorer(LocalScorer):
    """Weighted sum of VQ, MQ and TA, each standardised; by default their sum, which the authors call Overall.

    instruction_file: the text that the model was trained to read after the video, the published template
    "detailed_special" (prompt_template.py of KwaiVGI/VideoAlign) with {text_prompt} for the prompt. Another wording
    gives other numbers, so there is no default.
    model: folder of the published checkpoint (KwaiVGI/VideoReward): model_config.json and checkpoint-<step>/model.pth,
    of which the last step is taken. base: folder or hub id of the Qwen2-VL that it was trained from; None: the one that
    model_config.json names.
    component_weights: of VQ, MQ, TA; None: 1 each. is_standardised: (value - mean) / std of each, by the constants of
    model_config.json, as the authors do unless told otherwise.
    dtype: of the backbone; the head runs in fp32, where the authors' runs in the backbone's precision.
    Frames are taken evenly at the rate of model_config.json (2 a second), at least 4 and an even number, and resized to
    at most its max_frame_pixels, so the request's videos must know their fps.
    Layout of weights (LoRA under PEFT's names, merged here), head, positions and preprocessing follow the public code
    of VideoAlign and of its ports; the published weights were not at hand, so the layout is checked on random weights
    only.
    Raises ConfigError if files are missing or do not fit, ImportError without transformers. Extra `clip`.
    Source: VideoAlign, Improving Video Generation with Human Feedback (arXiv 2501.13918).
    """

    model_billions = 2.209
    card = ScorerCard(
        name="video_align",
        summary="visual quality, motion quality and text alignment, by a vision-language model with a reward head",
        media=("video",),
        needs="prompt",
        typical="standard deviations, summed over the three",
        extra="clip",
        source="VideoAlign, arXiv 2501.13918",
    )

    def __init__(
        self,
        *,
        instruction_file: str,
        model: str,
        base: str | None = None,
        component_weights: Mapping[str, float] | None = None,
        is_standardised: bool = True,
        dtype: str = "bf16",
        device: str = "cpu",
        name: str = "video_align",
        batch_size: PositiveInt = 2,
    ) -> None:
        weights = dict.fromkeys(COMPONENTS, 1.0) if component_weights is None else dict(component_weights)
        super().__init__(name=name, batch_size=batch_size, device=device, component_weights=weights)
        owner = f"scorer {name}"
        if set(weights) != set(COMPONENTS):
            raise ConfigError(f"{owner}: component_weights are of {sorted(weights)}, expected {sorted(COMPONENTS)}")
        check_dtype(dtype, name)
        self._instruction = read_instruction(instruction_file, REWARD_TOKENS, owner)
        settings = _settings(model, owner)
        checkpoint = _last_checkpoint(model, owner)
        base = settings["model_config"]["model_name_or_path"] if base is None else base
        self._reader = QwenVLReader(base, owner, tokens=REWARD_TOKENS)
        state = load_state(checkpoint, "model.pth", f"{owner}: model")
        if settings["peft_lora_config"].get("lora_enable"):
            state = merged_lora(state, _scale(settings["peft_lora_config"]))
        self._model = load_reward_model(
            state,
            base=base,
            tokens=[self._reader.tokenizer.convert_tokens_to_ids(token) for token in REWARD_TOKENS],
            num_words=len(self._reader.tokenizer),
            dtype=DTYPES[dtype],
            option=f"{owner}: model = {model!r}",
        ).to(device)
        data = settings["data_config"]
        self.fps: float = data["fps"]
        self.num_frames: int | None = data.get("num_frames")
        self.max_pixels: int = data["max_frame_pixels"]
        self._standards = _standards(settings, owner) if is_standardised else {key: (0.0, 1.0) for key in COMPONENTS}

    def modules(self) -> list[nn.Module]:
        """The model with its head."""
        return [self._model]

    def score_batch(self, request: RewardRequest) -> dict[str, Tensor]:
        """VQ, MQ and TA, float32 [b]."""
        for prompt in request.prompts:
            self._reader.check_text(prompt)
        found = [self._reader.patches(self._seen(frames, request)) for frames in frames_of(request)]
        pixels, grids = torch.cat([each for each, _ in found]), torch.cat([grid for _, grid in found])
        texts = [self._instruction.replace(PROMPT, prompt) for prompt in request.prompts]
        chats = [self._reader.chat(text, num_videos=1) for text in texts]
        inputs = self._reader.tokens(chats, video_grids=grids, padding_side="right")
        inputs |= {"pixel_values_videos": pixels.to(self._model.backbone.dtype), "video_grid_thw": grids}
        heads_bKO = self._model({key: value.to(self.device) for key, value in inputs.items()})
        # One output serves all three tokens; of three outputs each token has its own.
        values_bK = heads_bKO.diagonal(dim1=1, dim2=2) if heads_bKO.shape[2] == len(COMPONENTS) else heads_bKO[..., 0]
        return {
            key: (values_bK[:, i] - mean) / std
            for i, (key, (mean, std)) in enumerate((key, self._standards[key]) for key in COMPONENTS)
        }

    def _seen(self, frames_FCHW: Tensor, request: RewardRequest) -> Tensor:
        """The frames that the model sees, resized, in bytes / 255."""
        videos = request.generated["video"]
        fps = videos.fps if isinstance(videos, Videos) else None
        if fps is None and self.num_frames is None:
            raise ConfigError(
                f"scorer {self.name} takes {self.fps} frames per second, but the videos have no fps; set it"
            )
        wanted = self.num_frames if fps is None or self.num_frames is not None else len(frames_FCHW) / fps * self.fps
        chosen = frames_FCHW[sampled(len(frames_FCHW), wanted)]
        chosen = torch.from_numpy(to_bytes(chosen)).permute(0, 3, 1, 2).float()
        size = self._reader.resized_hw(*chosen.shape[-2:], MIN_PIXELS, self.max_pixels)
        fitted = chosen if size == chosen.shape[-2:] else resized(chosen, size).clamp(0, 255).round()
        return fitted / 255


def sampled(num_frames: int, wanted: float | None) -> list[int]:
    """Positions of an even number of frames near `wanted`, 4 to 768, from the first to the last.

    Raises ValueError for a video of one frame.
    """
    most = min(MAX_FRAMES, num_frames) // FRAME_FACTOR * FRAME_FACTOR
    near = min(max(wanted if wanted is not None else most, MIN_FRAMES), most)
    count = min(round(near / FRAME_FACTOR) * FRAME_FACTOR, num_frames)
    if count < FRAME_FACTOR:
        raise ValueError(f"a video of {num_frames} frames is too short, it needs at least {FRAME_FACTOR}")
    return torch.linspace(0, num_frames - 1, count).round().long().tolist()


def _settings(model: str, owner: str) -> dict[str, Any]:  # Any: a JSON file
    path = Path(model) / "model_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in ("data_config", "model_config", "peft_lora_config") if key not in found]
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{owner}: model = {model!r} has no readable model_config.json: {error}") from error
    if missing or not {"fps", "max_frame_pixels"} <= set(found["data_config"]):
        raise ConfigError(f"{owner}: {path} lacks {missing or 'fps or max_frame_pixels in data_config'}")
    return found


def _last_checkpoint(model: str, owner: str) -> str:
    steps = {int(found[1]): path for path in Path(model).glob("checkpoint-*") if (found := _step(path)) is not None}
    if not steps:
        raise ConfigError(f"{owner}: model = {model!r} has no folder checkpoint-<step>. Give the published folder.")
    return str(steps[max(steps)])


def _step(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def _scale(lora: Mapping[str, Any]) -> float:  # Any: a JSON file
    rank = lora["lora_r"]
    return lora["lora_alpha"] / (math.sqrt(rank) if lora.get("use_rslora") else rank)


def _standards(settings: Mapping[str, Any], owner: str) -> dict[str, tuple[float, float]]:  # Any: a JSON file
    found = settings.get("inference_config") or {}
    missing = [f"{key}_{kind}" for key in COMPONENTS for kind in ("mean", "std") if f"{key}_{kind}" not in found]
    if missing:
        raise ConfigError(
            f"{owner}: inference_config of model_config.json lacks {missing}. Set is_standardised to false."
        )
    return {key: (found[f"{key}_mean"], found[f"{key}_std"]) for key in COMPONENTS}
