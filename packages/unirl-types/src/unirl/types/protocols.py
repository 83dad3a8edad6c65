"""What one package needs of another. Implementations live in the packages; recipes join them.

Legend: B samples, R rows (a row is one (sample, step) pair), S stochastic steps, T steps, N tokens of all samples,
D width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unirl.types.conditions import Condition
from unirl.types.media import Images, Primitive, Texts, Videos
from unirl.types.reward import RewardRequest, RewardResponse
from unirl.types.roles import MeshPlace
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import LatentSegment, TextSegment
from unirl.types.training import OFFLOADABLE, Offloadable, OptimizerConfig, StepStats
from unirl.types.weights import AdapterConfig, UpdateTally, WeightBucket, WeightReceipt, WeightSpec

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


class DiffusionPipeline(Protocol):
    """A diffusion model that can sample a trajectory and replay rows of it."""

    @property
    def strategy_name(self) -> str:
        """Name of the kernel of the stochastic steps."""
        ...

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Shape of ONE latent. Raises ConfigError where the geometry does not divide."""
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
    ) -> LatentSegment:
        """Sample B trajectories from `initial_latents` [B, ...]. `noise_keys` [B] seed the per-step noise.

        start_keys: equal ids mark samples with equal initial latents and conditions, whose common steps may be shared.
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

    def velocity(
        self, conditions: Conditions, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, params: DiffusionSamplingParams
    ) -> Tensor:
        """Velocity at R rows; `conditions` has one row a row. Guidance as in `params`."""
        ...

    def encode_texts(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> Conditions:
        """Those of the conditions that text encoders make, and remember them."""
        ...

    def cut_tokens(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[int]:
        """Tokens of each text that the model does not read, because the text is too long for every encoder."""
        ...

    @property
    def encoders_rest(self) -> bool:
        """Whether text encoders rest in host memory and are on the device only while prompts are encoded."""
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


class TextCodec(Protocol):
    """Between what a user writes and the tokens that a model reads. Needs no weights.

    Every engine takes its prompts from `encode` and its texts from `decode`, so that tokens go in and tokens come out:
    text is never tokenised a second time, which would not always give the same tokens.
    """

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        ...

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """Tokens that end a sample: the model's end-of-sequence ids and those of `params`, sorted."""
        ...

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """Conditions of B samples: "prompt" is a PromptCondition, "images" an ImagePatchCondition where there are any.

        A prompt holds what the model goes on from, chat template and expanded image placeholders included. An engine
        that expands placeholders itself sends the images, and must find the same tokens.
        Raises ConfigError where a prompt and params.max_new_tokens exceed the context, naming the prompt.
        """
        ...

    def decode(self, segment: TextSegment) -> Texts:
        """The text of each sample, without special tokens; of several turns, all of it."""
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


class ThoughtPipeline(AutoregressivePipeline, Protocol):
    """The texts of a model that draws after them, which may choose the size of the image."""

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Heights and widths in pixels of the images that texts may ask for; none where they ask for none."""
        ...

    def chosen_sizes(self, segment: TextSegment) -> list[tuple[int, int] | None]:
        """Height and width of the image that each text asks for; None of one that asks for none."""
        ...


class PolicyStore(Protocol):
    """Named copies of the trainable parameters, and ways to run the model with them for a while."""

    @property
    def policy_version(self) -> int:
        """Grows with every change of the trained weights."""
        ...

    def keep_policy(self, name: str) -> None:
        """Keep a copy of the current trainable parameters under `name`."""
        ...

    def update_policy(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current."""
        ...

    def using_policy(self, name: str) -> AbstractContextManager[None]:
        """Inside, the model computes with the copy's values. Never touches requires_grad."""
        ...

    def reference_policy(self) -> AbstractContextManager[None]:
        """Inside, the model computes as before training (adapter disabled, or a frozen copy)."""
        ...


class ShardedPolicyStore(PolicyStore, Protocol):
    """A policy store whose model may be spread over ranks that must run it equally often."""

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank that shares the model's shards; `value` itself where it is not sharded.

        A collective where it is: every rank calls it equally often.
        """
        ...


class ModuleStore(PolicyStore, Protocol):
    """A policy store that also trains modules of an algorithm's own."""

    def add_module(
        self, name: str, module: nn.Module, optimizer: OptimizerConfig, *, max_grad_norm: float = float("inf")
    ) -> None:
        """Train `module`, in place, beside the policy from now on. Every rank calls it, before a state is loaded."""
        ...


class TrainBackend(ShardedPolicyStore, ModuleStore, Protocol):
    """Owns what trains: parameters, optimizer, schedule, named policies, and how they are spread over devices.

    The stack computes losses and gradients; the checkpointer saves and restores. Every rank calls every method that is
    not a property, in the same order: collectives inside.
    """

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    @property
    def mesh_place(self) -> MeshPlace:
        """Where this rank stands; calls are cut for it accordingly."""
        ...

    @property
    def dp_rank(self) -> int:
        """Which of `dp_size` shards of a batch this rank trains on, as `mesh_place` says."""
        ...

    @property
    def dp_size(self) -> int:
        """Number of shards that a batch is cut into; gradients are averaged over them."""
        ...

    @property
    def computes_in_float32(self) -> bool:
        """Whether forwards of what trains are in float32 throughout, autocast aside."""
        ...

    @property
    def lora_scale(self) -> float | None:
        """alpha / rank of the adapters, which no tensor records; None for full fine-tuning."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Trainable parameters by "component.name"; DTensors where sharded."""
        ...

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the kept copies."""
        ...

    @property
    def weight_source(self) -> WeightSource:
        """Weights of the policies for engines and exports."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch: gradients are summed over devices after the last one only."""
        ...

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Clip gradients to a global L2 norm, then step. A non-finite norm drops the gradients and changes nothing."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over the data-parallel ranks; the tensor itself on one."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Maximum over the data-parallel ranks; the tensor itself on one."""
        ...

    def offload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Move these parts of what trains to host memory. Training needs both back."""
        ...

    def onload(self, parts: Sequence[Offloadable] = OFFLOADABLE) -> None:
        """Undo `offload`."""
        ...

    @property
    def counters(self) -> dict[str, int]:
        """Steps taken and skipped, averages, policy version."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All that training changes, by flat name. Tensors share memory with the backend; DTensors where sharded."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state: one that was loaded into place, or a copy. Raises CheckpointError where names differ."""
        ...

    def architecture(self) -> dict[str, list[object]]:
        """Parameter name -> [shape, dtype, whether it trains], of all parameters, frozen ones included."""
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


@runtime_checkable
class RoutesRows(Protocol):
    """A bundle whose velocity sends each row to one of several components that train."""

    def follow_ranks(self, any_rank: Callable[[bool], bool]) -> None:
        """Called once where the components are spread over ranks, which gather their shards together: from now on run a
        component where any rank has rows for it, by asking `ShardedPolicyStore.any_rank`."""
        ...


ChunkListener = Callable[[RolloutResp], None]
"""Called with samples that are ready."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates responses. `unirl.rollout.engine.base.BaseRolloutEngine` has defaults, and says what an engine can."""

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One sample for every row of the request, in its order.

        policy: name of a kept copy of the weights to sample from; None is the policy that trains.
        """
        ...

    def check_prompts(self, req: RolloutReq) -> None:
        """Raise ConfigError where a prompt cannot be sampled from. Generates nothing."""
        ...

    def announce_to(self, listener: ChunkListener) -> None:
        """From now on call `listener` with each chunk of a response as soon as it is made, in the order of the request.

        Raises ConfigError in an engine that makes whole responses only.
        """
        ...

    def abort(self) -> None:
        """End the `generate` that runs in another thread: it returns what it has, unfinished samples ABORTED.

        Raises ConfigError in an engine that always finishes.
        """
        ...

    def sleep(self) -> None:
        """Give device memory back until `wake_up`."""
        ...

    def wake_up(self) -> None:
        """Be ready to generate again, or to be pushed the weights that `sleep` dropped."""
        ...

    def shutdown(self) -> None:
        """Stop for good and release everything. Safe to call twice."""
        ...


@runtime_checkable
class TextRolloutEngine(RolloutEngine, Protocol):
    """Generates completions: a track with a TextSegment, the conditions that replay takes, and texts."""


@runtime_checkable
class DiffusionRolloutEngine(RolloutEngine, Protocol):
    """Generates images or videos: a track with a LatentSegment, the conditions that replay takes, and media."""

    def plan(self, params: DiffusionSamplingParams) -> DiffusionPlan:
        """Sigmas, latent shape and kernel for these parameters, which the driver pins on requests."""
        ...

    def encodes_ahead(self) -> bool:
        """Whether the driver gives it every prompt of the run by `encode_ahead` before the first rollout."""
        ...

    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Take some prompts of the run, with what they show, and what they will be sampled with."""
        ...

    def drop_text_encoders(self) -> None:
        """Called after the last `encode_ahead`."""
        ...


class WeightReceiver(Protocol):
    """An engine whose policy is pushed to it. All or nothing: until `finish_weights` returns, no weight has changed.

    Every method raises WeightSyncError with the list of what is wrong, and the engine keeps the policy it has.
    """

    @property
    def policy_version(self) -> int:
        """Version of the policy that it generates with."""
        ...

    def wait_until_ready(self) -> None:
        """Return when it has loaded what it starts with. Raises ConfigError or WorkerError where it cannot."""
        ...

    def begin_weights(self, policy_version: int, specs: Sequence[WeightSpec]) -> None:
        """Announce all tensors of a push: names, shapes and dtypes (no checksums yet). Drops a push left unfinished."""
        ...

    def receive_weights(self, bucket: WeightBucket) -> None:
        """Take some of the announced tensors and compare them with their checksums; those that it keeps from an earlier
        push (`WeightBucket.kept`) too, where its class `takes_partial_pushes`."""
        ...

    def finish_weights(self, policy_version: int, policy: str | None = None) -> WeightReceipt:
        """Load what has arrived, forget what was cached for the old weights, and generate with the new version.

        policy: name of the policy that was sent, as `generate` will be asked for it; None is the one that trains.
        """
        ...

    def load_adapter(self, bucket: WeightBucket, config: AdapterConfig, policy: str | None = None) -> WeightReceipt:
        """Put a LoRA adapter in the place of the last one, all at once. Names as peft saves them, without its prefix
        "base_model.model.". policy: see `finish_weights`."""
        ...


class PushTarget(WeightReceiver, Protocol):
    """An engine with weights of its own, or several that are pushed to as one."""

    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One sample for every row of the request, in its order; of several engines, once each.

        policy: the one that was pushed last. Raises WeightSyncError for any other.
        """
        ...


class WeightSource(Protocol):
    """Weights of the policies, under the names of the model's checkpoint, whole and in host memory. Every rank calls
    every method, and in the same order: sharded weights are gathered tensor by tensor.

    policy: name of a kept copy, "ema", or None for the policy that trains. component: of a model that trains several;
    None takes all, whose names then are "component/name".
    """

    @property
    def policy_version(self) -> int:
        """Grows with every change of the trained weights."""
        ...

    @property
    def components(self) -> tuple[str, ...]:
        """What trains, by the names of `ModelBundle.trainable_modules`."""
        ...

    def weight_shapes(self, component: str | None = None) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of `weights`, without moving one."""
        ...

    def weights(self, policy: str | None = None, component: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, adapters merged; tied ones once. Raises ContractError for an unknown policy."""
        ...

    def adapter_weights(self, policy: str | None = None, component: str | None = None) -> dict[str, Tensor]:
        """The adapter's factors as peft names them. Raises ConfigError without an adapter."""
        ...

    def adapter_config(self) -> AdapterConfig:
        """Rank, alpha and targets of the adapter. Raises ConfigError without one."""
        ...

    def adapter_state(self, policy: str) -> Mapping[str, Mapping[str, Tensor]]:
        """Component -> LoRA factors of a policy ("default": the trained one) as peft names them."""
        ...

    def merged_state(
        self, policy: str, *, in_float32: bool = False, tally: UpdateTally | None = None
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Component -> all its weights under a policy, adapters merged; in their own dtype, or all in float32.

        tally: is told of every weight that an adapter was merged into.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """Scores a batch of samples."""

    name: str

    def score(self, request: RewardRequest) -> RewardResponse:
        """One finite reward a sample, or NaN with success False and an error text."""
        ...


@runtime_checkable
class ConcurrentScorer(Scorer, Protocol):
    """A scorer that several threads may ask at once: one that waits for others to compute."""

    max_concurrency: int
    """Requests that are worth having under way at one time."""


@runtime_checkable
class Closeable(Protocol):
    """Holds threads, connections or processes until it is closed."""

    def close(self) -> None:
        """Stop and release everything. Safe to call twice."""
        ...


@runtime_checkable
class DifferentiableReward(Protocol):
    """A reward with gradients, in the process that trains."""

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        """Rewards float32 [B] with gradients to the pixels of the request's images."""
        ...
