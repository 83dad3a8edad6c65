"""Text of Stable Diffusion 3: two CLIP encoders side by side, T5 after them, both pooled vectors end to end.

    embeds = cat over tokens (pad (cat over width (clip[-2], clip_2[-2])), t5)      [B, 77 + max_sequence_length, D]
    pooled = cat (clip.text_embeds, clip_2.text_embeds)                               [B, P]

Equal to StableDiffusion3Pipeline.encode_prompt of diffusers, bit for bit on the same batch. Shape letters: see
`unirl.models`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unirl.types.errors import ConfigError

try:
    from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase, T5EncoderModel
except ImportError as error:
    raise ImportError(
        "unirl.models.sd3 needs diffusers and transformers: pip install 'unirl-models[diffusers]'"
    ) from error

MAX_SEQUENCE_LENGTH = 512
"""Longest T5 part that the model was trained with."""
DEFAULT_SEQUENCE_LENGTH = 256

# Elements of each weight that enter the fingerprint: enough that a trained copy differs, cheap for 5e9 parameters.
_SAMPLES_PER_WEIGHT = 16
# Encoded with each tokenizer for the fingerprint: two vocabularies that agree on this are the same family.
_PROBE = "A photo of 3 cats, unbelievably fluffy & GREY; cafe \N{LATIN SMALL LETTER E WITH ACUTE}."


class SD3TextEncoders:
    """The three encoders and their tokenizers. `t5` is None for a pipeline without it; all are None once dropped.

    width: D of the joint attention, to which the CLIP part is padded.
    """

    def __init__(
        self,
        *,
        clip: CLIPTextModelWithProjection,
        clip_2: CLIPTextModelWithProjection,
        t5: T5EncoderModel | None,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_2: PreTrainedTokenizerBase,
        tokenizer_3: PreTrainedTokenizerBase | None,
        width: int,
    ) -> None:
        self.clip: CLIPTextModelWithProjection | None = clip
        self.clip_2: CLIPTextModelWithProjection | None = clip_2
        self.t5 = t5
        self.tokenizer = tokenizer
        self.tokenizer_2 = tokenizer_2
        self.tokenizer_3 = tokenizer_3
        self.width = width
        self.fingerprint = self._fingerprint()
        """Names everything but the text that an embedding depends on: weights, dtypes, tokenizers."""

    @property
    def is_dropped(self) -> bool:
        """Whether the encoders have been freed."""
        return self.clip is None

    def modules(self) -> list[nn.Module]:
        """The encoders that are there."""
        return [module for module in (self.clip, self.clip_2, self.t5) if module is not None]

    def drop(self) -> None:
        """Let go of the encoders; tokenizers and fingerprint stay."""
        self.clip = self.clip_2 = self.t5 = None

    @torch.no_grad()
    def encode(self, texts: Sequence[str], max_sequence_length: int) -> tuple[Tensor, Tensor]:
        """(embeds [B, L, D], pooled [B, P]) in the encoders' dtype, on their device.

        Raises ConfigError where the encoders were dropped.
        """
        if self.clip is None or self.clip_2 is None:
            raise ConfigError(
                f"{len(texts)} prompts are not in the embedding cache and the text encoders were dropped; the first is "
                f"{texts[0]!r}. Encode every prompt of the run before drop_text_encoders(), the negative prompt and "
                "held-out prompts included and with the same max_sequence_length, or keep the encoders."
            )
        hidden, pooled = self._encode_clip(texts, self.clip, self.tokenizer)
        hidden_2, pooled_2 = self._encode_clip(texts, self.clip_2, self.tokenizer_2)
        clip = torch.cat([hidden, hidden_2], dim=-1)
        t5 = self._encode_t5(texts, max_sequence_length, like=clip)
        clip = nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        return torch.cat([clip, t5], dim=-2), torch.cat([pooled, pooled_2], dim=-1)

    def _encode_clip(
        self, texts: Sequence[str], encoder: CLIPTextModelWithProjection, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[Tensor, Tensor]:
        # Both CLIP encoders read the length of the first tokenizer, as diffusers does.
        ids = tokenizer(
            list(texts),
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        out = encoder(ids.to(encoder.device), output_hidden_states=True)
        return out.hidden_states[-2].to(encoder.dtype), out.text_embeds

    def _encode_t5(self, texts: Sequence[str], max_sequence_length: int, *, like: Tensor) -> Tensor:
        if self.t5 is None or self.tokenizer_3 is None:
            return like.new_zeros(len(texts), max_sequence_length, self.width)
        ids = self.tokenizer_3(
            list(texts),
            padding="max_length",
            max_length=max_sequence_length,
            truncation=True,
            add_special_tokens=True,
            return_tensors="pt",
        ).input_ids
        return self.t5(ids.to(self.t5.device))[0].to(self.t5.dtype)

    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for tokenizer in (self.tokenizer, self.tokenizer_2, self.tokenizer_3):
            if tokenizer is not None:
                probe = tokenizer(_PROBE, truncation=True).input_ids
                facts = (len(tokenizer), tokenizer.model_max_length, probe)
                digest.update(repr(facts).encode())
        for encoder in (self.clip, self.clip_2, self.t5):
            digest.update(b"none" if encoder is None else _weights_digest(encoder))
        return digest.hexdigest()


def _weights_digest(module: nn.Module) -> bytes:
    """A hash of names, shapes, dtypes and a few elements of every weight; one transfer from the device."""
    digest = hashlib.blake2b(digest_size=16)
    samples = []
    for name, weight in module.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        samples.append(flat[:: max(1, flat.numel() // _SAMPLES_PER_WEIGHT)][: 2 * _SAMPLES_PER_WEIGHT].float())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.digest()
