"""Text encoders of a pipeline: what the cached conditioning asks of them. Shape letters: see `unirl.models`."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unirl.models.diffusers_pipeline.resting import Resting
from unirl.models.extras import from_extra
from unirl.types.conditions import TextEmbedCondition
from unirl.types.errors import ConfigError

with from_extra("diffusers"):
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Elements of each weight that enter the fingerprint: enough that a trained copy differs, cheap for 5e9 parameters.
_SAMPLES_PER_WEIGHT = 16
# Encoded with each tokenizer for the fingerprint: two vocabularies that agree on this are the same family.
_PROBE = "A photo of 3 cats, unbelievably fluffy & GREY; cafe \N{LATIN SMALL LETTER E WITH ACUTE}."


class TextEncoders(ABC):
    """The text encoders of a family and their tokenizers, by component; None where the pipeline leaves one out.

    A family says how its encoders read a batch of texts, `_encode`.
    """

    def __init__(
        self,
        encoders: Mapping[str, PreTrainedModel | None],
        tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
    ) -> None:
        self.encoders = {name: encoder for name, encoder in encoders.items() if encoder is not None}
        """Empty once dropped."""
        self.tokenizers = {name: tokenizer for name, tokenizer in tokenizers.items() if tokenizer is not None}
        self.resting: Resting | None = None
        """Set where the encoders rest in host memory between the prompts of one rollout and the next."""
        self.fingerprint = _fingerprint(encoders.values(), self.tokenizers.values())
        """Names everything but the text that an embedding depends on: weights, dtypes, tokenizers."""

    @abstractmethod
    def _encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """`encode`, with the encoders known to be there."""

    @property
    def is_dropped(self) -> bool:
        """True if the encoders have been freed."""
        return not self.encoders

    def visiting(self) -> AbstractContextManager[None]:
        """Encoders that rest in host memory stay on the device within it, once a text has brought them there."""
        return nullcontext() if self.resting is None else self.resting.visit()

    def bring(self) -> None:
        """Move encoders that rest in host memory to the device. Called within `visiting`, before they encode."""
        if self.resting is not None:
            self.resting.bring(self.encoders.values())

    def drop(self) -> None:
        """Let go of the encoders; tokenizers and fingerprint stay."""
        self.encoders = {}

    @torch.no_grad()
    def encode(self, texts: Sequence[str], max_sequence_length: int) -> TextEmbedCondition:
        """One row per text, in the encoders' dtype, on their device.

        Families whose texts differ in length set `attention_mask`; the cache then keeps the tokens that count.
        Raises ConfigError if the encoders were dropped.
        """
        self.require_encoders(texts)
        return self._encode(texts, max_sequence_length)

    def require_encoders(self, texts: Sequence[str]) -> None:
        """Raises ConfigError if the encoders that these texts need were dropped."""
        if self.is_dropped:
            raise ConfigError(
                f"{len(texts)} prompts are not in the embedding cache and the text encoders were dropped; the first is "
                f"{texts[0]!r}. Encode every prompt of the run before drop_text_encoders(), the negative prompt and "
                "held-out prompts included and with the same max_sequence_length, or keep the encoders."
            )

    def encode_streams(self, texts: Sequence[str], max_sequence_length: int) -> dict[str, TextEmbedCondition]:
        """Everything that the model reads of the texts, by slot: "text" and further streams. See `encode`."""
        text = self.encode(texts, max_sequence_length)
        with torch.no_grad():
            return {"text": text, **self._encode_beside(texts)}

    def tokens(
        self,
        texts: Sequence[str],
        max_length: int,
        *,
        suffix: str = "",
        padding: Literal["max_length", "longest"] = "max_length",
        add_special_tokens: bool = True,
    ) -> Any:  # Any: a BatchEncoding, which types its tensors by name
        """Ids and mask [B, L] by the tokenizer of that suffix, on the device of its encoder.

        Texts are cut at `max_length` and filled up to it, or to the longest of them. add_special_tokens: False for
        texts that have the marks of their beginning and end.
        """
        tokens = self.tokenizers[f"tokenizer{suffix}"](
            list(texts),
            padding=padding,
            max_length=max_length,
            truncation=True,
            add_special_tokens=add_special_tokens,
            return_tensors="pt",
        )
        return tokens.to(self.encoders[f"text_encoder{suffix}"].device)

    def token_limits(self, max_sequence_length: int) -> dict[str, int]:
        """Most tokens of a text that each tokenizer keeps, by its suffix. Families with other lengths override this."""
        return {"": max_sequence_length}

    def cut_tokens(self, texts: Sequence[str], max_sequence_length: int) -> list[int]:
        """Tokens of each text that no encoder reads, because the text is too long for each: the fewest that one cuts.

        End marks and start marks count as the tokenizer counts them; a template around the text does not.
        """
        cut = []
        for suffix, limit in self.token_limits(max_sequence_length).items():
            tokenizer = self.tokenizers.get(f"tokenizer{suffix}")
            if tokenizer is not None:
                lengths = [len(ids) for ids in tokenizer(list(texts), verbose=False).input_ids]
                cut.append([max(0, length - limit) for length in lengths])
        return [min(each) for each in zip(*cut, strict=True)] if cut else [0] * len(texts)

    def _encode_beside(self, texts: Sequence[str]) -> dict[str, TextEmbedCondition]:
        """Streams of another width than "text", by slot. A family that has some overrides this."""
        del texts
        return {}


# Any: models and tokenizers of transformers type their calls by keyword.
def user_turns(tokenizer: Any, texts: Sequence[str], *, enable_thinking: bool) -> list[str]:
    """Each text as the turn of a user in Qwen3's template of a conversation, up to where the answer begins."""
    turns = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )


def ragged(rows: Sequence[Tensor]) -> TextEmbedCondition:
    """Texts [L_i, D] of different lengths, padded with zeros to the longest, and the mask of what counts."""
    lengths = [len(row) for row in rows]
    embeds = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    places = torch.arange(embeds.shape[1], device=embeds.device)
    mask = (places[None] < torch.tensor(lengths, device=embeds.device)[:, None]).long()
    return TextEmbedCondition(embeds=embeds, attention_mask=mask)


# Any: as above.
def language_states(
    encoder: Any, tokens: Any, *, layer: int, start: int = 0, stop: int | None = None
) -> TextEmbedCondition:
    """Hidden states of a language model over tokens with a mask: ragged, and without the template before the prompt.

    layer: of `hidden_states`; -1 is the last. start: tokens of the template. stop: number of tokens after which
    the rest is left out.
    """
    tokens = tokens.to(encoder.device)
    out = encoder(
        input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True, use_cache=False
    )
    hidden = out.hidden_states[layer]
    return ragged([row[mask.bool()][start:stop] for row, mask in zip(hidden, tokens.attention_mask, strict=True)])


def _fingerprint(encoders: Iterable[nn.Module | None], tokenizers: Iterable[PreTrainedTokenizerBase]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tokenizer in tokenizers:
        probe = tokenizer(_PROBE, truncation=True).input_ids
        facts = (len(tokenizer), tokenizer.model_max_length, probe)
        digest.update(repr(facts).encode())
    for encoder in encoders:
        digest.update(b"none" if encoder is None else weights_digest(encoder))
    return digest.hexdigest()


def weights_digest(module: nn.Module) -> bytes:
    """A hash of names, shapes, dtypes and a few elements of every weight; one transfer from the device."""
    digest = hashlib.blake2b(digest_size=16)
    samples: list[Tensor] = []
    for name, weight in module.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        samples.append(flat[:: max(1, flat.numel() // _SAMPLES_PER_WEIGHT)][: 2 * _SAMPLES_PER_WEIGHT].float())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.digest()
