"""How Qwen3-Omni's Thinker reads prompts with images and a sound.

Legend: N frames of mel values, M mel bins, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.extras import from_extra
from unirl.models.qwen3_omni.bundle import Qwen3OmniThinkerBundle
from unirl.models.qwen_vl.adapter import QwenVLAdapter, pictures_of
from unirl.models.qwen_vl.images import Grid
from unirl.types.conditions import Condition, PromptCondition, SoundFrameCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.media import Audios, Primitive
from unirl.types.protocols.models import Conditions

with from_extra("transformers"):
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths


class Qwen3OmniAdapter(QwenVLAdapter):
    """The Thinker of Qwen3-Omni, see `QwenVLAdapter`.

    The sound of a prompt stands where its text has "<audio>", before the text and after the images where it has none.
    """

    read_media = frozenset({"image", "audio"})
    reads = "'text': Texts, 'image' and 'audio': Audios"
    bundle: Qwen3OmniThinkerBundle  # ty: ignore[incompatible-mutable-override]  # set once, by the constructor

    def prompts_of(
        self, texts: Sequence[str], primitives: Mapping[str, Primitive]
    ) -> tuple[list[list[int]], dict[str, Condition]]:
        """As `QwenVLAdapter.prompts_of`, and with the slot "audio" also {"sounds": SoundFrameCondition}.

        "audio" holds Audios with one waveform [L] per sample, empty where a prompt has none, at the rate of the feature
        extractor. Raises ConfigError for another number, rate or layout, and what the base raises.
        """
        sounds, images = primitives.get("audio"), primitives.get("image")
        if sounds is None:
            return super().prompts_of(texts, primitives)
        if not isinstance(sounds, Audios):
            raise self.unread(primitives)
        frames = self._frames(sounds, len(texts))
        shown = self.images_of([[]] * len(texts) if images is None else pictures_of(images, len(texts)))
        prompts = [
            self._prompt(text, grid, len(own)) for text, grid, own in zip(texts, shown.grids, frames, strict=True)
        ]
        device = self.bundle.device
        media: dict[str, Condition] = {"sounds": SoundFrameCondition.pack(frames=[own.to(device) for own in frames])}
        return prompts, media if images is None else {**media, "images": shown}

    def prompt_keys(self, conditions: Conditions) -> list[Hashable]:
        """See `TextAdapter.prompt_keys`; sounds count by their frames."""
        keys, sounds = super().prompt_keys(conditions), conditions.get("sounds")
        if not isinstance(sounds, SoundFrameCondition):
            return keys
        return list(zip(keys, (own.cpu().numpy().tobytes() for own in sounds.unpack("frames")), strict=True))

    def positions(self, conditions: Conditions, lengths: Sequence[int]) -> list[Tensor]:
        """See `QwenVLAdapter.positions`; a sound's tokens stand one after the other, as words do."""
        sounds = conditions.get("sounds")
        prompts = conditions["prompt"]
        if isinstance(sounds, SoundFrameCondition) and isinstance(prompts, PromptCondition):
            heard = [int((prompt == self.bundle.audio_token_id).sum()) for prompt in prompts.unpack("tokens")]
            taken = [self._num_tokens(int(frames)) for frames in sounds.lengths]
            if heard != taken:
                row = next(i for i, pair in enumerate(zip(heard, taken, strict=True)) if pair[0] != pair[1])
                raise ContractError(
                    f"the prompt of sample {row} has {heard[row]} audio tokens, but its sound takes {taken[row]}. "
                    "Prompt and sound must come from one encoding."
                )
        return super().positions(conditions, lengths)

    def model_inputs(self, conditions: Conditions) -> dict[str, Tensor]:
        """See `QwenVLAdapter.model_inputs`; and mel values [sounds, M, N], padded, with their mask."""
        inputs, sounds = super().model_inputs(conditions), conditions.get("sounds")
        if not isinstance(sounds, SoundFrameCondition) or len(sounds.frames) == 0:
            return inputs
        heard = [own for own in sounds.unpack("frames") if len(own)]
        chunk = 2 * self.bundle.model.config.audio_config.n_window
        if max(map(len, heard)) < chunk:
            # The encoder pads what is shorter than a chunk to the longest of its batch, and reads some of the padding:
            # with silence of a whole chunk behind it, a sound does not depend on its neighbours. Nothing is heard of
            # it: the prompts have no tokens for it.
            heard.append(heard[0].new_zeros(chunk, heard[0].shape[1]))
        frames = torch.nn.utils.rnn.pad_sequence(heard, batch_first=True)
        lengths = torch.tensor([len(own) for own in heard], device=frames.device)
        mask = torch.arange(frames.shape[1], device=frames.device) < lengths[:, None]
        return {**inputs, "input_features": frames.transpose(1, 2), "feature_attention_mask": mask.long()}

    def _prompt(self, text: str, grid: tuple[Grid, ...], num_frames: int) -> list[int]:
        tokens = self.prompt_with(text, {"image": len(grid), "audio": int(num_frames > 0)})
        placeholder = self.bundle.audio_token_id
        if tokens.count(placeholder) != int(num_frames > 0):
            raise ConfigError(
                f"a prompt with {int(num_frames > 0)} sounds has {tokens.count(placeholder)} audio placeholders. "
                "Remove them from its text, or correct the chat template."
            )
        heard = [placeholder] * self._num_tokens(num_frames)
        tokens = [copy for token in tokens for copy in (heard if token == placeholder else [token])]
        return self.with_images(tokens, grid)

    def _num_tokens(self, num_frames: int) -> int:
        """Tokens of a sound, as the audio encoder thins its frames."""
        window = self.bundle.model.config.audio_config.n_window
        return int(_get_feat_extract_output_lengths(num_frames, window)) if num_frames else 0

    def _frames(self, sounds: Audios, num_samples: int) -> list[Tensor]:
        """Log-mel values [N, M] of each sample's sound; equal sounds are transformed once."""
        extractor = self.bundle.feature_extractor
        if (
            sounds.waveform.ndim != 1
            or sounds.batch_size != num_samples
            or sounds.sample_rate != extractor.sampling_rate
        ):
            raise ConfigError(
                f"the slot 'audio' must hold {num_samples} waveforms [L] at {extractor.sampling_rate} Hz, one per "
                f"text; got {sounds.batch_size} of {list(sounds.waveform.shape[1:]) or 'one'} channels at "
                f"{sounds.sample_rate} Hz"
            )
        known: dict[bytes, Tensor] = {}
        found = []
        for waveform in sounds.unpack("waveform"):
            # Whole frames alone: the library leaves out the last one, of whose samples its neighbours see a part.
            numbers = waveform[: len(waveform) // extractor.hop_length * extractor.hop_length].float().cpu().numpy()
            key = numbers.tobytes()
            if key not in known:
                known[key] = self._mel(numbers) if len(numbers) else torch.zeros(0, extractor.feature_size)
            found.append(known[key])
        return found

    def _mel(self, waveform: Any) -> Tensor:  # Any: an array of NumPy, which is not imported here
        extractor = self.bundle.feature_extractor
        out = extractor(
            waveform,
            sampling_rate=extractor.sampling_rate,
            padding="longest",
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return out["input_features"][0].T[out["attention_mask"][0].bool()].float()

    def _rope_index(self, prompt: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """See `QwenVLAdapter`. The library counts a sound's tokens one by one, as it does words: none is said to it."""
        config = self.bundle.model.config
        is_sound = (prompt == config.audio_token_id) | (prompt == config.audio_start_token_id)
        places, _ = self.bundle.model.get_rope_index(
            torch.where(is_sound, 0, prompt)[None],
            image_grid_thw=torch.tensor(grids, dtype=torch.long, device=prompt.device),
            attention_mask=torch.ones_like(prompt)[None],
        )
        return places[:, 0].long()
