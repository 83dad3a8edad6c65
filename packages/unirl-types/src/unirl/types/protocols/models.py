"""What a model offers: its modules, and a pipeline that samples from them and replays what was sampled.

Legend: B samples, R rows (a row is one (sample, step) pair), S stochastic steps, T steps, N tokens of all samples,
D width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from unirl.types.actions import ActionSegment, DrawnChunks, Observations
from unirl.types.conditions import Bridge, Condition, Conversation
from unirl.types.kept_texts import KeptTexts
from unirl.types.media import Images, Primitive, Texts, Videos
from unirl.types.messages import Message
from unirl.types.sampling import ActionSamplingParams, ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import LatentSegment, TextSegment
from unirl.types.weights import PublishedParts

Conditions = Mapping[str, Condition]


class TransitionStats(Protocol):
    """Log-prob and Gaussian of some transitions under the current weights."""

    @property
    def logp_R(self) -> Tensor:
        """[R] float32, with gradients."""
        ...

    @property
    def mean(self) -> Tensor:
        """[R, ...] float32 means of the transitions, with gradients."""
        ...

    @property
    def std_R(self) -> Tensor:
        """[R] float32 standard deviations that the kernel drew with."""
        ...

    @property
    def q_R(self) -> Tensor | None:
        """[R] float32 diffusion coefficient, std / sqrt(-dt), or None for a kernel that has none."""
        ...

    @property
    def gain_R(self) -> Tensor:
        """[R] float32 derivative of the mean by the velocity; without gradients."""
        ...


class DiffusionPipeline(Protocol):
    """A diffusion model that can sample a trajectory and replay rows of it."""

    @property
    def strategy_name(self) -> str:
        """Name of the kernel of the stochastic steps."""
        ...

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Shape of ONE latent. Raises ConfigError if the geometry does not divide."""
        ...

    def sigmas(self, params: DiffusionSamplingParams) -> Tensor:
        """[T+1] float32 noise levels of the model's own schedule."""
        ...

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples."""
        ...

    def diffuse(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        *,
        noise_keys: Sequence[str],
        start_keys: Sequence[str] | None = None,
        own_steps: Sequence[int] | None = None,
    ) -> LatentSegment:
        """Sample B trajectories from `initial_latents` [B, ...]. `noise_keys` [B] seed the per-step noise.

        start_keys: equal ids mark samples with equal initial latents and conditions, whose common steps may be shared.
        own_steps: B of the stochastic steps, the only one of each sample; None where samples have all of them.
        """
        ...

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images | Videos:
        """Media of clean latents [B, ...] that were sampled with `params`."""
        ...

    def encode_media(self, media: Images | Videos) -> Tensor:
        """Clean latents [B, ...] of media, the inverse of `decode`, without gradient."""
        ...

    def replay(
        self,
        conditions: Conditions,
        segment: LatentSegment,
        sample_R: Tensor,
        step_R: Tensor,
        params: DiffusionSamplingParams,
    ) -> TransitionStats:
        """Log-probs of stored transitions under the current weights, one forward over all R rows, with gradients."""
        ...

    def step_std(self, segment: LatentSegment) -> Tensor:
        """[S] float32 on the CPU: standard deviation of the noise of each stochastic step of a sampled segment."""
        ...

    def step_gain(self, segment: LatentSegment) -> Tensor:
        """[S] float32 on the CPU: derivative of the mean by the velocity at each stochastic step of a segment."""
        ...

    def velocity(
        self, conditions: Conditions, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, params: DiffusionSamplingParams
    ) -> Tensor:
        """Velocity at R rows; `conditions` has one row per row. Guidance as in `params`."""
        ...

    def encode_texts(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> Conditions:
        """Those of the conditions that text encoders make, and remember them."""
        ...

    def cut_tokens(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[int]:
        """Tokens of each text that the model does not read, because the text is too long for every encoder."""
        ...

    @property
    def encoders_rest(self) -> bool:
        """True if text encoders rest in host memory and are on the device only while prompts are encoded."""
        ...

    def visiting_encoders(self) -> AbstractContextManager[None]:
        """Text encoders that rest leave the device at its end, not after each call of `encode_texts`."""
        ...

    def drop_text_encoders(self) -> None:
        """Free the text encoders; prompts that were encoded before still encode."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        ...


class JointPipeline(DiffusionPipeline, Protocol):
    """A diffusion pipeline of latents that hold several media, such as a video and its sound."""

    def media_slices(self, params: DiffusionSamplingParams) -> Mapping[str, slice]:
        """Where each medium lies along dimension 1 of latents [B, ...], by its name."""
        ...


class ResumingDiffusionPipeline(DiffusionPipeline, Protocol):
    """A diffusion pipeline that can end denoising early, and go on with other weights."""

    def diffuse(
        self,
        conditions: Conditions,
        initial_latents: Tensor,
        sigmas: Tensor,
        params: DiffusionSamplingParams,
        *,
        noise_keys: Sequence[str],
        start_keys: Sequence[str] | None = None,
        own_steps: Sequence[int] | None = None,
        begun: LatentSegment | None = None,
        is_ending: Callable[[], bool] = ...,
    ) -> LatentSegment:
        """See `DiffusionPipeline.diffuse`.

        begun: what an earlier call left of the same samples, all unfinished at one step, on the device of
            `initial_latents`; they go on there, with the noise that they would have had. None: nothing was begun.
        is_ending: asked before the first and after each step; once it is true, what there is is returned: all samples
            ABORTED and `unfinished`.
        """
        ...


class TextCodec(Protocol):
    """Between what a user writes and the tokens that a model reads. Needs no weights.

    Every engine takes its prompts from `encode` and its texts from `decode`, so that tokens go in and tokens come out:
    text is never tokenised a second time, which would not always give the same tokens.
    """

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        ...

    @property
    def media_tokens(self) -> frozenset[int]:
        """Tokens that stand for media, and mean none where the model itself writes them."""
        ...

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """Tokens that end a sample: the model's end-of-sequence ids and those of `params`, sorted."""
        ...

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples: "prompt" is a PromptCondition, "images" an ImagePatchCondition where there are any.

        A prompt holds what the model goes on from, chat template and expanded image placeholders included. An engine
        that expands placeholders itself sends the images, and must find the same tokens.
        Raises ConfigError if a prompt and params.max_new_tokens exceed the context, naming the prompt.
        """
        ...

    def decode(self, segment: TextSegment) -> Texts:
        """The text of each sample, without special tokens; of several turns, all of it."""
        ...


class ConversationCodec(TextCodec, Protocol):
    """A codec of several turns. What the model wrote stays the tokens that it wrote; only what follows is tokenised."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token with its id."""
        ...

    def offer_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:  # Any: JSON
        """From now on prompts name these tools, given as OpenAI's `tools`. Raises ConfigError if it cannot."""
        ...

    def set_system_prompt(self, text: str) -> None:
        """From now on prompts stand under this message of the system. Raises ConfigError if it cannot, or the recipe
        has another one."""
        ...

    @property
    def reads_images_in_turns(self) -> bool:
        """True if messages between the model's turns may show images."""
        ...

    def bridge(self, messages: Sequence[Message]) -> Bridge:
        """What stands from the end of the model's turn, whose last token is its end-of-sequence token, to the begin of
        its next turn, with these messages in between. Raises ConfigError for images if it reads none there, DataError
        for an image that cannot be read."""
        ...

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without special tokens."""
        ...


class DemonstrationCodec(TextCodec, Protocol):
    """A codec of conversations that are trained on as they are."""

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """Tokens and images of a whole conversation, as a rollout of it would have them. Raises ConfigError for images
        if the model reads none there, DataError for an image that cannot be read."""
        ...


class TokenStats(Protocol):
    """Every token of a segment under the current weights, in the segment's own order and packing.

    Masked tokens are scored too: the caller's mask decides what counts.
    """

    @property
    def logp_N(self) -> Tensor:
        """[N] float32, nats, under softmax(logits / temperature), with gradients."""
        ...

    @property
    def entropy_N(self) -> Tensor:
        """[N] float32, nats, entropy of that softmax, with gradients."""
        ...

    @property
    def collision_N(self) -> Tensor:
        """[N] float32 in (0, 1]: sum over words of its squared probabilities, without gradients."""
        ...

    @property
    def hidden_N(self) -> Tensor:
        """[N, D] last hidden states that predicted each token (of the position before it), with gradients.

        What a value head reads: V(prompt and tokens so far) before the token is chosen. Dtype of the model.
        """
        ...


class AutoregressivePipeline(TextCodec, Protocol):
    """A language or vision-language model that can sample completions and replay them.

    An engine elsewhere generates instead of `generate` and returns tokens and log-probs alone; the segment it builds
    from them, with the conditions of `encode`, is all that `replay` needs. The gap between its log-probs and those of a
    replay at the same weights is what rollout correction works on.

    A reference policy is the same pipeline inside `PolicyStore.reference_policy()` (adapter off, or a frozen copy), an
    old policy inside `using_policy(name)`, both under `torch.no_grad()`.
    """

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token with its id."""
        ...

    def generate(
        self,
        conditions: Conditions,
        params: ARSamplingParams,
        *,
        noise_keys: Sequence[str],
        any_rank: Callable[[bool], bool] | None = None,
    ) -> TextSegment:
        """One completion for each of B prompts, with the log-probs of its tokens (none where greedy).

        noise_keys [B] seed each sample's draws together with params.seed: a sample draws the same numbers alone, in any
        batch and at any place in it.
        any_rank: whether its argument is true on any rank. Where the weights are sharded each decoding step gathers
        them, so all ranks must take equally many steps: those that are done go on until none is left. None: one rank.
        """
        ...

    def replay(self, conditions: Conditions, segment: TextSegment, params: ARSamplingParams) -> TokenStats:
        """Every token of B samples under the current weights, with gradients unless they are switched off.

        One forward of the model a call, whatever the lengths, so ranks with equally many micro-batches gather sharded
        weights equally often. Samples lie packed end to end without padding and attend to themselves alone.
        Log-probs are of the temperature of `params`, the one that was sampled with.
        Raises ConfigError for parameters whose rollout was not drawn from the whole softmax: temperature 0, top_p below
        1 or top_k above 0.
        """
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        ...


class ImageTokenPipeline(AutoregressivePipeline, Protocol):
    """A model whose samples are images that it draws token by token. `decode` gives the numbers of the tokens."""

    @property
    def sample_length(self) -> int:
        """Tokens of each image."""
        ...

    def images(self, segment: TextSegment) -> Images:
        """The image of each sample. A collective where the weights are sharded, as `generate`."""
        ...


class ResumingPipeline(AutoregressivePipeline, Protocol):
    """An autoregressive pipeline that can end completions early, and continue them with other weights."""

    def generate(
        self,
        conditions: Conditions,
        params: ARSamplingParams,
        *,
        noise_keys: Sequence[str],
        any_rank: Callable[[bool], bool] | None = None,
        num_begun: Sequence[int] | None = None,
        is_ending: Callable[[], bool] = ...,
        kept: KeptTexts | None = None,
    ) -> TextSegment:
        """See `AutoregressivePipeline.generate`.

        num_begun [B]: tokens of each completion that its prompt ends with; None: none. They count in max_new_tokens,
        and the segment has those that follow.
        is_ending: asked before each token; once it is true, what there is is returned, unfinished samples ABORTED.
        kept: takes the keys and values of those. Samples that it holds go on from there, with the present weights, and
            without a prefill. None: all are read anew.
        """
        ...


class ThoughtPipeline(AutoregressivePipeline, Protocol):
    """The texts of a model that draws after them, which may choose the size of the image."""

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths in pixels of the images that texts may ask for; none where they ask for none."""
        ...

    def chosen_sizes(self, segment: TextSegment) -> list[tuple[int, int] | None]:
        """Height and width of the image that each text asks for; None of one that asks for none."""
        ...


class ActionStats(Protocol):
    """Some decisions of episodes under the current weights. n decisions, L terms each (`unirl.types.actions`)."""

    @property
    def logp_NL(self) -> Tensor:
        """[n, L] float32, nats, over the executed moves alone, with gradients; 0 for terms that do not count."""
        ...

    @property
    def entropy_NL(self) -> Tensor | None:
        """[n, L] float32, nats, of the distributions that tokens or steps of learned noise were drawn from; None of a
        flow whose noise is given."""
        ...

    @property
    def features_NW(self) -> Tensor:
        """[n, W] what the policy made of the observations, with gradients; what a value head reads."""
        ...


class ActionPipeline(Protocol):
    """A policy that draws chunks of moves from observations, and replays them."""

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """H moves of a chunk, D numbers of a move."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """C, H and W of the images that it sees; None if it sees none."""
        ...

    @property
    def state_size(self) -> int | None:
        """Numbers of the states that it reads; None if it reads none."""
        ...

    def encode_prompts(self, texts: Sequence[str]) -> Tensor | None:
        """[n, P] int64 on the CPU, the tokens of each text, -1 after its end, P the same for all texts; None of a
        policy that reads none. Raises ConfigError for a text that is too long.
        """
        ...

    def draw(self, seen: Observations, params: ActionSamplingParams, *, noise_keys: Sequence[str]) -> DrawnChunks:
        """A chunk for each of n observations. noise_keys [n] seed the draws together with params.seed."""
        ...

    def log_probs(self, densities: Tensor, num_moves: Tensor) -> Tensor:
        """[n, L] from the densities of drawn chunks: what `replay` gives, of the moves [n] that were executed."""
        ...

    def segment_fields(self, params: ActionSamplingParams) -> dict[str, object]:
        """Shared fields of a segment that replay needs besides the chunks: a flow's sigmas and stochastic steps."""
        ...

    def replay(self, segment: ActionSegment, decision_N: Tensor, params: ActionSamplingParams) -> ActionStats:
        """Some decisions, int64 [n], under the current weights, with gradients unless they are switched off: one
        forward over all rows, a row a decision (bins) or a decision and flow step.

        Raises ConfigError for parameters that draw from no distribution.
        """
        ...

    def features(self, seen: Observations) -> Tensor:
        """[n, W], see `ActionStats.features_NW`."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients."""
        ...


class ImitatingPipeline(ActionPipeline, Protocol):
    """A policy that acts, and learns moves that it is shown."""

    def given(self, moves: Tensor, params: ActionSamplingParams) -> DrawnChunks:
        """Chunks [n, H, D] that were shown, as `draw` would give them, without densities."""
        ...

    def imitation_loss(
        self, segment: ActionSegment, decision_N: Tensor, *, noise_keys: Sequence[str], seed: int
    ) -> Tensor:
        """[n] float32 with gradients, the mean over the numbers of executed moves: of a flow the squared error of its
        velocity at a random level, of bins the cross entropy in nats. noise_keys [n] seed the draws together with seed.
        """
        ...


class ModelBundle(Protocol):
    """The bare modules of a model and what training needs to know of them."""

    @property
    def block_class_names(self) -> tuple[str, ...]:
        """Class names of the blocks that are sharded, checkpointed and compiled one by one."""
        ...

    @property
    def lora_target_modules(self) -> tuple[str, ...]:
        """Module name suffixes that LoRA adapts when a recipe names none."""
        ...

    def trainable_modules(self) -> dict[str, nn.Module]:
        """Component name -> module that trains. More than one where the model has several experts."""
        ...

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """Write LoRA weights where the model's usual pipeline loads them. `lora_state`: component -> peft state."""
        ...

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the components with merged weights by `save_pretrained`. `state`: component -> full state."""
        ...


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which a rank reads the part that it keeps."""

    def read(self, box: tuple[slice, ...]) -> Tensor:
        """The values in `box`, a slice with start and stop per dimension, in the dtype that the model is loaded in.

        They may lie in the mapped file: copy them, and let go of them, before the next are read.
        """
        ...


@runtime_checkable
class DefersWeights(Protocol):
    """A bundle that can leave the weights of what trains to the backend."""

    @property
    def defers_weights(self) -> bool:
        """True if it does, and the parameters of what trains are on the meta device."""
        ...

    def stored_weights(self) -> Mapping[str, Mapping[str, StoredTensor]]:
        """Component -> name in its state -> values, of every component that trains, saved buffers included.

        Called before the names and dtypes of its modules change. Raises CheckpointError, which names them, for weights
        that are missing or of another shape.
        """
        ...


@runtime_checkable
class RoutesRows(Protocol):
    """A bundle whose velocity sends each row to one of several components that train."""

    def follow_ranks(self, any_rank: Callable[[bool], bool]) -> None:
        """Called once where the components are spread over ranks, which gather their shards together: from now on run a
        component where any rank has rows for it, by asking `ShardedPolicyStore.any_rank`."""
        ...


class PartsExchange(Protocol):
    """What ranks that work on the same samples do with items of which each has a part. Every rank makes the same calls.

    Differentiable where the tensors are.
    """

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def lengths(self, length: int) -> list[int]:
        """How many of `length` items each rank has."""
        ...

    def gathered(self, part: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """The items of all ranks along `dim`, rank after rank. lengths: of each."""
        ...


class TokenExchange(PartsExchange, Protocol):
    """What ranks that work on the same samples do with their tokens: each has a part. Every rank makes the same calls.

    Differentiable where the tensors are.
    """

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of the tokens along `dim`."""
        ...

    @property
    def num_head_parts(self) -> int:
        """Ranks that exchange tokens for heads: neighbours, all of them where there is no ring."""
        ...

    @property
    def ring(self) -> TokenRing | None:
        """Ranks with the same heads of other tokens, whose keys and values go around; None without such ranks."""
        ...

    def to_heads(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """[..., H, t, D], all heads of this rank's tokens -> [..., H / P, T', D], its heads of the tokens of
        P = `num_head_parts` ranks, rank after rank: of all tokens without a ring. lengths: tokens of each of all
        ranks."""
        ...

    def to_tokens(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """The inverse of `to_heads`."""
        ...


class BlockMasks(Protocol):
    """Which keys of another rank count for this rank's queries."""

    def has_pairs(self, rank: int) -> bool:
        """False if no key of that rank counts for any query of this one."""
        ...

    def mask(self, rank: int) -> Tensor | None:
        """bool, broadcast to [B, H, t, t of that rank]: which pairs count; None for all."""
        ...


class TokenRing(Protocol):
    """What ranks do that have the same heads of other tokens. Every rank makes the same calls."""

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Tokens that each rank of the ring attends with. lengths: tokens of each of all ranks of the exchange."""
        ...

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Sequence[int],
        masks: BlockMasks | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of this rank's queries to the keys and values of all ranks; differentiable.

        query: [B, H, t, D]. key, value: [B, H', t, D], H a multiple of H'. lengths: t of each rank of the ring.
        scale: of the scores, D^-1/2 by default. A query for which no key counts gets zeros.
        """
        ...


class ExpertExchange(Protocol):
    """What ranks that have the experts of a model together do with rows of tokens, each of which goes to one expert.

    Experts are dealt out in order, equally many per rank. Every rank makes the same calls. Differentiable where the
    rows are.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def counted(self, rows_of_expert: Tensor) -> Tensor:
        """int64 [size, E / size]: the rows that each rank has for this rank's experts. rows_of_expert: int64 [E], those
        that this rank has for each of all experts."""
        ...

    def to_experts(self, rows: Tensor, to_each: Sequence[int], of_each: Sequence[int]) -> Tensor:
        """[sum(of_each), D], what all ranks have for this rank's experts, rank after rank.

        rows: [sum(to_each), D], what this rank has for the experts of each rank, rank after rank.
        """
        ...

    def to_tokens(self, rows: Tensor, to_each: Sequence[int], of_each: Sequence[int]) -> Tensor:
        """The way back: what experts made of the rows, to where their tokens are."""
        ...


@runtime_checkable
class SpreadsExperts(Protocol):
    """A bundle of a model whose experts can be dealt out to ranks."""

    def spread_experts(self, exchange: ExpertExchange) -> Sequence[nn.Module]:
        """Called once, before parameters are cut: from now on every forward sends each token to the ranks of its
        experts.

        Returns the modules whose parameters are stacks of experts, [E, ...]: the caller leaves each rank its part of
        the first dimension, in order. Raises ConfigError if the model has no experts, or so many ranks do not divide
        them.
        """
        ...


class LayerExchange(PartsExchange, Protocol):
    """What ranks that have the layers of a model together do with hidden states: each computes with its part of the
    layers' weights on the same samples. Every rank makes the same calls. Differentiable where the tensors are.
    """

    def entered(self, whole: Tensor) -> Tensor:
        """The tensor, which every rank has alike and computes its part with; its gradient is the sum of theirs."""
        ...

    def summed(self, part: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on every rank with the same bits."""
        ...

    def dealt(self, whole: Tensor) -> Tensor:
        """The tensor, of which each rank reads the part that it then gives to `gathered`; its gradient is the mean of
        theirs."""
        ...


class CutBlock(NamedTuple):
    """A block whose linear layers are divided among ranks. Other parameters of it are whole on every rank."""

    module: nn.Module
    rows: tuple[str, ...]
    """Paths in the block of linear layers of which each rank has some outputs: rows of the weight."""
    columns: tuple[str, ...]
    """Paths of those of which each rank has some inputs: columns of the weight."""


@runtime_checkable
class CutsLayers(Protocol):
    """A bundle of a model whose layers can be divided among ranks that compute the same samples."""

    def cut_layers(self, exchange: LayerExchange) -> Sequence[CutBlock]:
        """Called once, before parameters are cut: from now on a block computes with the parts that the parameters'
        DTensors have on this rank, and its attention and MLP give the sum over ranks.

        The caller leaves each rank an equal part of each of `rows` and `columns`, in order. Raises ConfigError if the
        model has no such layers, or so many ranks do not divide them.
        """
        ...


@runtime_checkable
class StacksWeights(Protocol):
    """A bundle whose modules hold many tensors of the published checkpoint in one."""

    def published_parts(self) -> Mapping[str, PublishedParts]:
        """By "component.name" of the stack; names of parts are those within the component. Called before the modules
        are wrapped."""
        ...


RecomputeContexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
"""`context_fn` of torch.utils.checkpoint."""


@runtime_checkable
class RecomputesBlocks(Protocol):
    """A bundle whose blocks read more than their inputs, which a recomputation in the backward must find as it was."""

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What a block is entered with in the forward, and again when it is recomputed. Called in the forward."""
        ...


@runtime_checkable
class MeasuresReplays(Protocol):
    """A pipeline of texts that measures more than tokens in a replay."""

    def replay_metrics(self) -> Mapping[str, tuple[Tensor, int]]:
        """Sum and number of terms of each, of the last replay."""
        ...


@runtime_checkable
class SpreadsTokens(Protocol):
    """A bundle whose tokens can be spread over ranks that work on the same samples."""

    def spread_tokens(self, exchange: TokenExchange) -> RecomputeContexts:
        """Called once: from now on every forward of what trains computes with this rank's part of the tokens, and gives
        the same whole result on all ranks. Returns what a block that is recomputed is entered with.

        Raises ConfigError if the model cannot be spread over so many ranks.
        """
        ...
