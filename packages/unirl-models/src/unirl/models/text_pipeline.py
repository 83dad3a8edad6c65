"""The object that engines and trainers hold: a text adapter and its stage under one roof.

Implements `unirl.types.protocols.models.AutoregressivePipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from unirl.models.ar import ARStage, ReplayedTokens
from unirl.models.evaluation_mode import evaluating
from unirl.models.text_adapter import LanguageBundle, TextAdapter
from unirl.types.conditions import Condition
from unirl.types.media import Primitive, Texts
from unirl.types.protocols.models import Conditions
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment


class AutoregressivePipeline:
    """A language model that can sample completions and replay them. packed: see `ARStage`."""

    def __init__(self, adapter: TextAdapter, *, packed: bool | None = None) -> None:
        self.adapter = adapter
        self.ar = ARStage(adapter, packed=packed)

    @property
    def bundle(self) -> LanguageBundle:
        """The model's modules and what training needs to know of them."""
        return self.adapter.bundle

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return self.adapter.context_length

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token of the model's tokenizer with its id."""
        return self.bundle.tokenizer.get_vocab()

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths in pixels of the images that texts may ask for; none where they ask for none."""
        return ()

    def chosen_sizes(self, segment: TextSegment) -> list[tuple[int, int] | None]:
        """Height and width of the image that each text asks for; None of one that asks for none."""
        return [None] * segment.batch_size

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """Tokens that end a sample: the model's and those of `params`, sorted."""
        return self.adapter.stop_token_ids(params)

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples, see `TextAdapter.encode`."""
        return self.adapter.encode(primitives, params)

    def decode(self, segment: TextSegment) -> Texts:
        """The text of each sample, without special tokens."""
        return self.adapter.decode(segment)

    def generate(
        self,
        conditions: Conditions,
        params: ARSamplingParams,
        *,
        noise_keys: Sequence[str],
        any_rank: Callable[[bool], bool] | None = None,
    ) -> TextSegment:
        """Completions of B prompts, see `ARStage.generate`. Call inside `evaluating()`."""
        return self.ar.generate(conditions, params, noise_keys=noise_keys, any_rank=any_rank)

    def replay(self, conditions: Conditions, segment: TextSegment, params: ARSamplingParams) -> ReplayedTokens:
        """Log-probs and entropies of stored tokens under the present weights, see `ARStage.replay`."""
        return self.ar.replay(conditions, segment, params)

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients; each submodule gets its own mode back afterwards."""
        return evaluating(self.bundle)
