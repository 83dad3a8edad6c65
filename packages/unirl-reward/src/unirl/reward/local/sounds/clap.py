"""CLAP score: how well a sound fits a text, as a CLAP model hears it.

Source: CLAP, arXiv 2211.06687.
Legend: b samples, L samples of a waveform, C channels, W windows of one, D embedding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from unirl.reward.base import LocalScorer
from unirl.reward.card import ScorerCard
from unirl.reward.local.pretrained import check_dtype, load_complete, load_transformers, on_one_line
from unirl.reward.local.video.frames import videos_of
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ConfigError
from unirl.types.media import Audios
from unirl.types.precision import DTYPES
from unirl.types.reward import RewardRequest

SOUND_KEY = "sound"
"""Field of a prompt's metadata with the words of its sound, for prompts that describe more than that."""


@bounded("scorer")
class CLAPScorer(LocalScorer):
    """cos(sound, text) of a CLAP model for each sound, or the sound of each video.

    model: folder or hub id of a transformers ClapModel with its tokenizer and feature extractor. dtype: of it.
    The text is the prompt's `sound` in its metadata, else the prompt. Channels are averaged, and the waveform is
    brought to the model's rate. Of a sound that is longer than the model hears at once windows of equal length are
    judged, the last one up to the end, and the cosine is their mean: the extractor itself would draw places. A video
    without sound fails.
    Needs the extra `sound`. The published weights themselves were not at hand.
    Raises ConfigError if the model cannot be loaded, ImportError without transformers or scipy.
    """

    model_billions = 0.154
    card = ScorerCard(
        name="clap",
        summary="how well a sound, or that of a video, fits its text",
        media=("video", "audio"),
        needs="prompt, or metadata sound; videos with sound",
        low=-1,
        high=1,
        typical="0.1 to 0.5",
        extra="sound",
        source="CLAP, arXiv 2211.06687",
    )

    def __init__(
        self,
        *,
        model: str = "laion/clap-htsat-fused",
        dtype: str = "fp32",
        device: str = "cpu",
        name: str = "clap",
        batch_size: PositiveInt = 4,
    ) -> None:
        super().__init__(name=name, batch_size=batch_size, device=device)
        check_dtype(dtype, name)
        transformers = load_transformers(f"scorer {name}", "sound")
        _require_scipy(name)
        loaded = load_complete(transformers.ClapModel, model, f"scorer {name}: model", dtype=torch.float32)
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            self._extractor = transformers.ClapFeatureExtractor.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"scorer {name}: model = {model!r} has no tokenizer or feature extractor: {on_one_line(error)}"
            ) from error
        self._model = loaded.to(device=device, dtype=DTYPES[dtype]).eval().requires_grad_(False)

    def modules(self) -> list[nn.Module]:
        """The CLAP model."""
        return [self._model]

    def score_batch(self, request: RewardRequest) -> Tensor:
        """Cosines, float32 [b]. Raises ValueError for a video without sound."""
        made = request.generated.get("audio")
        sounds = made if isinstance(made, Audios) else videos_of(request).audio
        waveforms = [] if sounds is None else sounds.unpack("waveform")
        if sounds is None or sounds.sample_rate is None or not all(len(waveform) for waveform in waveforms):
            what = "its video" if sounds is not made else "it"
            raise ValueError(f"{what} has no sound, or none of a known rate; take a model that makes one (LTX-2)")
        found = []
        for waveform, prompt, row in zip(waveforms, request.prompts, request.metadata, strict=True):
            text = (row or {}).get(SOUND_KEY) or prompt
            found.append(self._cosine(mono(waveform, sounds.sample_rate, self._extractor.sampling_rate), str(text)))
        return torch.stack(found)

    def _cosine(self, waveform: np.ndarray, text: str) -> Tensor:
        """Mean cosine of the windows of a waveform [L] at the model's rate and a text."""
        text_D = self._embedded_text(text)
        sound_WD = torch.stack(
            [self._embedded_sound(part) for part in windows(waveform, self._extractor.nb_max_samples)]
        )
        return (sound_WD @ text_D).mean()

    def _embedded_sound(self, waveform: np.ndarray) -> Tensor:
        # One by one: among several the extractor draws one that it takes for a part of a longer sound.
        ready = self._extractor(waveform, sampling_rate=self._extractor.sampling_rate, return_tensors="pt")
        features = ready["input_features"].to(self.device, self._model.dtype)
        found = self._model.get_audio_features(input_features=features, is_longer=ready["is_longer"].to(self.device))
        return nn.functional.normalize(found.pooler_output.float(), dim=-1)[0]

    def _embedded_text(self, text: str) -> Tensor:
        tokens = self._tokenizer(text, truncation=True, return_tensors="pt").to(self.device)
        found = self._model.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return nn.functional.normalize(found.pooler_output.float(), dim=-1)[0]


def mono(waveform: Tensor, rate: int, wanted: int) -> np.ndarray:
    """A waveform [L] or [L, C] as float32 [L'] with one channel at the wanted rate."""
    from scipy.signal import resample_poly

    own = waveform.detach().float().cpu().numpy()
    own = own.mean(axis=1) if own.ndim == 2 else own
    if rate == wanted:
        return own
    shared = math.gcd(rate, wanted)
    return resample_poly(own, wanted // shared, rate // shared).astype(np.float32)


def windows(waveform: np.ndarray, length: int) -> list[np.ndarray]:
    """Windows of a waveform, all of `length` but of a shorter one: one after the other, the last one up to the end."""
    if len(waveform) <= length:
        return [waveform]
    starts = [*range(0, len(waveform) - length, length), len(waveform) - length]
    return [waveform[start : start + length] for start in starts]


def _require_scipy(name: str) -> None:
    try:
        import scipy.signal  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"scorer {name} needs scipy. Install it with: pip install 'unirl-reward[sound]'") from error
