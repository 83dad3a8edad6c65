"""The contract of an autoregressive model: how it reads a prompt, where its tokens stand, and what it is made of.

Nothing here draws or scores a token: `unirl.models.ar` does that for every adapter.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from unirl.models.adapter import require_condition
from unirl.models.chat_template import ChatTemplate
from unirl.models.token_scores import ScoringHead
from unirl.types.conditions import Bridge, Condition, Conversation, ImagePatchCondition, PromptCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Texts
from unirl.types.messages import ASSISTANT, Message, ShownImage
from unirl.types.protocols.models import Conditions, LayerExchange, ModelBundle, TokenExchange
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

_PLAIN = {"add_special_tokens": False, "split_special_tokens": True}


class LanguageBundle(ModelBundle, Protocol):
    """What sampling and scoring tokens asks of a language model."""

    @property
    def pretrained_model(self) -> str:
        """Folder or hub id."""
        ...

    @property
    def tokenizer(self) -> Any:  # Any: a tokenizer of transformers
        """Between text and words."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tokens lie."""
        ...

    @property
    def model(self) -> Any:  # Any: called as causal language models of transformers are
        """(input_ids, attention_mask, position_ids, past_key_values, ...) -> an object with `logits`."""
        ...

    @property
    def head(self) -> ScoringHead:
        """The output projection."""
        ...

    @property
    def reads_images_in_turns(self) -> bool:
        """True if messages between the model's turns may show images."""
        ...

    @property
    def draws_by_tokens(self) -> bool:
        """True if samples are images that the model draws token by token, with guidance where it is asked for."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Words that the model has logits for."""
        ...

    @property
    def context_length(self) -> int:
        """Positions that the model was made for."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        ...

    @property
    def is_packable(self) -> bool:
        """True if replay can do without padding."""
        ...

    @property
    def token_exchange(self) -> TokenExchange | None:
        """Between the ranks that share the positions of a packed row; None where this one has all."""
        ...

    @property
    def cuts_rows_inside(self) -> bool:
        """True if the model takes whole rows and cuts them itself where ranks share their positions."""
        ...

    @property
    def layer_exchange(self) -> LayerExchange | None:
        """Between the ranks that each have a part of the layers; None where this one has whole layers."""
        ...

    def new_cache(self) -> Any:  # Any: with `reorder_cache`, as caches of transformers
        """An empty KV cache."""
        ...


class TextAdapter:
    """A causal language model that reads text alone; the base of those that read more.

    chat_template: whether a prompt is one user's message to which the tokenizer's chat template is applied; False takes
        it as it is. None applies a template where the tokenizer has one.
    system_prompt: message of the system ahead of it. template_kwargs: of the template, e.g. enable_thinking.
    Raises ConfigError if a requested template does not exist.
    """

    read_media: ClassVar[frozenset[str]] = frozenset()
    """Slots of a request that the model reads besides "text"."""
    reads: ClassVar[str] = "{'text': Texts}"
    """All slots, as an error names them."""

    def __init__(
        self,
        bundle: LanguageBundle,
        *,
        chat_template: bool | None = None,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,  # Any: whatever the template reads
    ) -> None:
        self.bundle = bundle
        self._chat_template = ChatTemplate(
            bundle, is_wanted=chat_template, system_prompt=system_prompt, options=template_kwargs
        )
        self.uses_template = self._chat_template.is_used
        """True if prompts are messages in the chat template."""

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return self.bundle.context_length

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """The model's end-of-sequence ids and those of `params`, sorted. Raises ConfigError beyond the vocabulary."""
        beyond = [token for token in params.stop_token_ids if token >= self.bundle.vocabulary_size]
        if beyond:
            raise ConfigError(
                f"stop_token_ids {beyond} lie beyond the vocabulary of {self.bundle.vocabulary_size} words"
            )
        return tuple(sorted({*self.bundle.eos_token_ids, *params.stop_token_ids}))

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """{"prompt": PromptCondition} of B texts, on the model's device, and conditions of what is shown with them.

        Raises ConfigError if slots are missing or not understood, or a prompt with its images leaves no room for
        max_new_tokens.
        """
        if params.uses_guidance and not self.bundle.draws_by_tokens:
            raise self.unguided()
        texts = primitives.get("text")
        if not isinstance(texts, Texts) or set(primitives) - {"text", *self.read_media}:
            raise self.unread(primitives)
        prompts, media = self.prompts_of(texts.texts, primitives)
        self.check_context(
            [len(prompt) for prompt in prompts],
            params.max_new_tokens,
            num_image_tokens=[self.num_image_tokens(prompt) for prompt in prompts],
        )
        tokens = [torch.tensor(prompt, dtype=torch.long, device=self.bundle.device) for prompt in prompts]
        return {"prompt": PromptCondition.pack(tokens=tokens), **media}

    def unread(self, primitives: Mapping[str, Primitive]) -> ConfigError:
        """The error for a request of other slots than the model reads."""
        found = {name: type(value).__name__ for name, value in primitives.items()}
        return ConfigError(f"{type(self).__name__} reads {self.reads}, the request has {found}")

    def prompts_of(
        self, texts: Sequence[str], primitives: Mapping[str, Primitive]
    ) -> tuple[list[list[int]], dict[str, Condition]]:
        """Tokens of each prompt with what stands for its media, and conditions of these. Equal texts are read once."""
        del primitives
        tokens_of = {text: self.prompt_tokens(text) for text in dict.fromkeys(texts)}
        return [tokens_of[text] for text in texts], {}

    def num_image_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt stand for its images."""
        del prompt
        return 0

    def prompt_tokens(self, text: str) -> list[int]:
        """Tokens of one prompt, chat template included."""
        return self.templated(text) if self.uses_template else self.bundle.tokenizer(text)["input_ids"]

    def templated(self, content: str | list[dict[str, str]]) -> list[int]:
        """Tokens of a user's message, text or the parts that a multimodal template takes, in the chat template."""
        return self._chat_template.opening([{"role": "user", "content": content}])

    def offer_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """From now on prompts name these tools as the chat template does. Schemas: as OpenAI's `tools`.

        Raises ConfigError if there is no template, or it names no tools.
        """
        self._chat_template.offer_tools(schemas)

    def set_system_prompt(self, text: str) -> None:
        """From now on prompts stand under this message of the system. Raises ConfigError if there is no template, or
        the recipe names another one."""
        self._chat_template.set_system_prompt(text)

    @property
    def media_tokens(self) -> frozenset[int]:
        """Tokens that stand for media, and mean none where the model itself writes them."""
        return frozenset()

    def shown(self, image: ShownImage) -> Bridge:
        """The tokens that stand for an image of a message, with the image. Raises ConfigError if the model sees none
        between its turns, DataError for an image that cannot be read."""
        del image
        raise ConfigError(
            f"{type(self).__name__} reads no images between turns. Take a model that does (Qwen2.5-VL, Qwen3-VL, "
            "Qwen3.5), or an environment that answers with texts."
        )

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        """What stands between the end of the model's turn, which it has written itself, and the begin of its next one.

        What messages say cannot become special tokens. Raises ConfigError without a chat template, if the template
        ends no turn of the model with one of its end-of-sequence tokens, and as `shown`.
        """
        if not self.uses_template:
            raise ConfigError(
                "several turns need a chat template, which says how messages follow each other. Take a model whose "
                "tokenizer has one, and leave chat_template unset."
            )
        scaffold = self._chat_template.between(tuple(each.role for each in messages))
        tokens = list(scaffold[0])
        images: list[tuple[int, ImagePatchCondition]] = []
        for each, behind in zip(messages, scaffold[1:], strict=True):
            for image in each.images:
                shown = self.shown(image)
                images += [] if shown.images is None else [(len(tokens), shown.images)]
                tokens += shown.tokens
            tokens += [*self._plain_tokens(each.content), *behind]
        return Bridge(tokens, ImagePatchCondition.in_turns([images]) if images else None)

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """Tokens and images of a whole conversation, as a rollout of it would have them. Raises as `bridge`."""
        if any(each.images for each in messages) and not self.bundle.reads_images_in_turns:
            raise ConfigError(
                f"{type(self).__name__} reads no images in conversations of the data. Take a model that does "
                "(Qwen2.5-VL, Qwen3-VL, Qwen3.5), or conversations of texts."
            )
        first = next(place for place, each in enumerate(messages) if each.role == ASSISTANT)
        opening = self._opening(messages[:first])
        images = [] if opening.images is None else [(0, opening.images)]
        tokens: list[int] = []
        is_written: list[bool] = []
        between: list[Message] = []
        for each in messages[first:]:
            if each.role != ASSISTANT:
                between.append(each)
                continue
            bridge = self.bridge(between) if tokens else Bridge([])
            if bridge.images is not None:
                images.append((len(opening.tokens) + len(tokens), bridge.images))
            own = self.bundle.tokenizer(each.content, add_special_tokens=False)["input_ids"]
            tokens += [*bridge.tokens, *own, self._turn_end()]
            is_written += [False] * len(bridge.tokens) + [True] * (len(own) + 1)
            between = []
        shown = ImagePatchCondition.in_turns([images]) if images else None
        return Conversation(opening.tokens, tokens, is_written, shown)

    def _opening(self, messages: Sequence[Message]) -> Bridge:
        """The messages before the model's first turn."""
        if not self.uses_template:
            return Bridge(self.prompt_tokens("".join(each.content for each in messages)))
        return Bridge(self._chat_template.opening([{"role": each.role, "content": each.content} for each in messages]))

    def _turn_end(self) -> int:
        """The token that ends a turn of the model."""
        return self._chat_template.turn_end if self.uses_template else self.bundle.tokenizer.eos_token_id

    def _plain_tokens(self, text: str) -> list[int]:
        """Tokens of a text none of which is an added one: special tokens and tags that it spells are cut in two."""
        cuts = [0, *(found.start() + 1 for found in self._added_tokens.finditer(text)), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        return [token for piece in pieces for token in self.bundle.tokenizer(piece, **_PLAIN)["input_ids"]]

    @functools.cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        added: list[str] = sorted(self.bundle.tokenizer.get_added_vocab(), key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in added if len(token) > 1) or r"(?!)")

    def text_of(self, tokens: Sequence[int]) -> str:
        """Their text, without special tokens."""
        return self.bundle.tokenizer.decode(list(tokens), skip_special_tokens=True)

    @property
    def sample_length(self) -> int | None:
        """Tokens of every sample, where all have equally many; None where stop tokens end them."""
        return None

    def decode(self, segment: TextSegment) -> Texts:
        """The text of each sample, without special tokens."""
        rows = [row.tolist() for row in segment.unpack("tokens")]
        return Texts(texts=list(self.bundle.tokenizer.batch_decode(rows, skip_special_tokens=True)))

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths in pixels of the images that texts may ask for; none where they ask for none."""
        return ()

    def chosen_sizes(self, segment: TextSegment) -> list[tuple[int, int] | None]:
        """Height and width of the image that each text asks for; None of one that asks for none."""
        return [None] * segment.batch_size

    def check_context(
        self, prompt_lengths: Sequence[int], max_new_tokens: int, *, num_image_tokens: Sequence[int] | None = None
    ) -> None:
        """Raises ConfigError if a prompt and max_new_tokens exceed the context.

        num_image_tokens: how many tokens of each prompt stand for images.
        """
        longest = max(prompt_lengths, default=0)
        if longest + max_new_tokens > self.context_length:
            row = list(prompt_lengths).index(longest)
            num_images = num_image_tokens[row] if num_image_tokens is not None else 0
            of_images = f" ({num_images} of them of its images)" if num_images else ""
            remedy = "Lower bundle.max_pixels, shorten" if num_images else "Shorten"
            room = self.context_length - longest
            lower = f", or lower sampling.max_new_tokens to {room}" if room > 0 else ""
            raise ConfigError(
                f"prompt {row} of the batch has {longest} tokens{of_images}; with max_new_tokens = {max_new_tokens} "
                f"that is more than the context of {self.context_length}. {remedy} or drop the prompt{lower}."
            )

    def forced(self, written: Tensor, logits: Tensor) -> Tensor | None:
        """The next word of rows where the model's format leaves no choice: int64 [R], -1 where it is drawn; None where
        all always are, as in most models. Replay does not train such words, and their log-prob is 0.

        written: int64 [R, t], what each row has so far. logits: [R, V] of the next word.
        """
        del written, logits
        return None

    def prompt_keys(self, conditions: Conditions) -> list[Hashable]:
        """A key of each sample's prompt: those with equal keys read the same, and are computed once. Images count by
        their patches."""
        prompts = require_condition(conditions, "prompt", PromptCondition).to("cpu").unpack("tokens")
        keys: list[Hashable] = [tuple(prompt.tolist()) for prompt in prompts]
        images = conditions.get("images")
        if not isinstance(images, ImagePatchCondition):
            return keys
        patches = [each.float().cpu().numpy().tobytes() for each in images.unpack("patches")]
        places = [()] * len(keys) if images.places is None else images.places
        return list(zip(keys, images.grids, places, patches, strict=True))

    def positions(self, conditions: Conditions, lengths: Sequence[int]) -> list[Tensor]:
        """Where the first `lengths` tokens of each sample (prompt and completion) stand: int64 [n] a sample, or [3, n]
        (time, row, column) of models with three-axis rotary embeddings. On the device of the prompt."""
        device = self.bundle.device
        return [torch.arange(length, device=device) for length in lengths]

    def as_read(self, conditions: Conditions, completions: Sequence[Tensor]) -> list[Tensor]:
        """Tokens of completions as the model's forward takes them: where the model itself wrote one that stands for
        media, it is a word like any other."""
        del conditions
        return list(completions)

    def as_written(self, tokens: Tensor) -> Tensor:
        """Tokens that were just drawn as the model's forward takes them."""
        return tokens

    def with_empty(self, conditions: Conditions) -> Conditions:
        """Conditions of samples and, after them, of as many empty prompts, which guidance leads away from. Raises
        ConfigError if the model takes no guidance."""
        del conditions
        raise self.unguided()

    def unguided(self) -> ConfigError:
        """The error for guidance that the model does not take."""
        return ConfigError(
            f"{type(self).__name__} draws tokens without guidance. Set sampling.guidance_scale: 1, or take a model "
            "that draws images by tokens (Janus)."
        )

    def model_inputs(self, conditions: Conditions) -> dict[str, Tensor]:
        """What the model's forward takes besides tokens and positions wherever the prompts are part of it."""
        return {}


def require_one_per_text(num_samples: int, num_texts: int) -> None:
    """Raises ConfigError unless the slot "image" has as many samples as there are texts."""
    if num_samples != num_texts:
        raise ConfigError(f"the slot 'image' has {num_samples} samples, 'text' {num_texts}")
