"""A diffusion model of a few numbers, its pipeline, engine and scorer: what algorithms and trainer are tested on.

Legend: B samples, R rows, S stochastic steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from advantaged import with_advantages
from torch import Tensor, nn
from train_fakes import whole

from unirl.algorithms.alignprop import AlignProp
from unirl.algorithms.awm import AWM
from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.diffusion_dpo import DiffusionDPO
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.dmd2 import DMD2
from unirl.algorithms.dmd2_reward import DMD2WithReward
from unirl.algorithms.draft import DRaFT
from unirl.algorithms.drtune import DRTune
from unirl.algorithms.omni_nft import OmniNFT
from unirl.algorithms.refl import ReFL
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.data.data_source import PromptRow
from unirl.sde import loop
from unirl.sde.kernels import FlowSDEStrategy, SDEStrategy
from unirl.sde.noise import initial_noise, keyed_normal, step_noise
from unirl.sde.schedule import SigmaSchedule
from unirl.sde.shared_steps import sample_shared
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import LoraConfig, OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.request import build_request
from unirl.types.conditions import Condition, TextEmbedCondition
from unirl.types.media import ImageLists, Images, Primitive, Texts, Videos
from unirl.types.noise import noise_key
from unirl.types.protocols.models import Conditions
from unirl.types.protocols.training import PolicyStore
from unirl.types.reward import RewardRequest
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment
from unirl.types.training import StepStats

SHAPE = (3, 2, 2)


# Velocity fields --------------------------------------------------------------------------------------------------


class AffineField(nn.Module):
    """v = scale x + shift: two parameters, every derivative by hand."""

    def __init__(self, scale: float = 0.7, shift: float = 0.1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]))
        self.shift = nn.Parameter(torch.tensor([shift]))

    def forward(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, text_R: Tensor) -> Tensor:
        """[R, ...] to the same shape."""
        return self.scale * x_R + self.shift


class StepField(nn.Module):
    """v = x + shift[step]: a parameter a step, so a gradient says which steps were trained."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(num_steps))

    def forward(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, text_R: Tensor) -> Tensor:
        """[R, ...] to the same shape."""
        return x_R + self.shift[step_R].reshape(-1, *(1,) * (x_R.ndim - 1))


class FieldBlock(nn.Module):
    """Stands for a transformer block: two linear layers on the features of one latent element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., 4] to [..., 1]."""
        return self.outer(torch.tanh(self.inner(features)))


class TinyField(nn.Module):
    """A network of 38 parameters on (x, sigma, text, x text), element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.block = FieldBlock()

    def forward(self, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, text_R: Tensor) -> Tensor:
        """[R, ...] to the same shape."""
        tail = (1,) * (x_R.ndim - 1)
        sigma, text = (value.reshape(-1, *tail).expand_as(x_R) for value in (sigma_R, text_R))
        features = torch.stack([x_R, sigma, text, x_R * text], dim=-1)
        return self.gain * x_R + self.block(features).squeeze(-1)


class UnexportedBundle:
    """What a bundle must have and no test of algorithms asks for."""

    def export_lora(
        self,
        folder: str,
        lora_state: Mapping[str, Mapping[str, Tensor]],
        *,
        rank: int,
        alpha: float,
        target_modules: Sequence[str],
    ) -> None:
        """Nothing here exports."""

    def export_merged(self, folder: str, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Nothing here exports."""


class FieldBundle(UnexportedBundle):
    """A velocity field as the only component of a model bundle."""

    def __init__(self, model: nn.Module | None = None, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = model if model is not None else TinyField()
        is_network = isinstance(self.model, TinyField)
        self.block_class_names: tuple[str, ...] = ("FieldBlock" if is_network else type(self.model).__name__,)
        self.lora_target_modules: tuple[str, ...] = ("inner", "outer")

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The field."""
        return {"transformer": self.model}


# Pipeline ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats:
    """Transitions under the present weights."""

    logp_R: Tensor
    mean: Tensor
    std_R: Tensor
    q_R: Tensor | None
    gain_R: Tensor


class FieldPipeline:
    """Implements unirl.types.protocols.models.DiffusionPipeline over unirl.sde. A prompt becomes one number.

    seen_x: latents that `velocity` was asked at, in order of the calls. media: as if two channels were a video and the
    third its sound.
    """

    def __init__(
        self, model: nn.Module, strategy: SDEStrategy | None = None, shape: tuple[int, ...] = SHAPE, shift: float = 3.0
    ) -> None:
        self.model = model
        self.strategy = strategy if strategy is not None else FlowSDEStrategy()
        self.shape = shape
        self.shift = shift
        self.seen_x: list[Tensor] = []
        self.media = {"video": slice(0, 2), "audio": slice(2, 3)}

    @property
    def strategy_name(self) -> str:
        """Name of the kernel."""
        return self.strategy.name

    def latent_shape(self, params: DiffusionSamplingParams) -> tuple[int, ...]:
        """Always the same."""
        return self.shape

    def media_slices(self, params: DiffusionSamplingParams) -> dict[str, slice]:
        """Always the same."""
        return self.media

    def sigmas(self, params: DiffusionSamplingParams) -> Tensor:
        """The shifted linear schedule."""
        return SigmaSchedule(convention="linear", shift=self.shift).sigmas(params.num_inference_steps)

    def encode(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> dict[str, Condition]:
        """One number per prompt."""
        texts = primitives["text"]
        assert isinstance(texts, Texts)
        return {"text": TextEmbedCondition(embeds=keyed_normal(texts.texts, 0, (1, 1)))}

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
        """Trajectories with everything that replay needs."""
        trajectory = sample_shared(
            lambda rows: self._bound({name: item.select(rows) for name, item in conditions.items()}),
            initial_latents,
            sigmas,
            [(0, 1)] if params.branching is None else params.branching.stages,
            strategy=self.strategy,
            eta=params.eta,
            sde_indices=params.resolve_sde_indices(0),
            step_noise=lambda step, rows: step_noise([noise_keys[row] for row in rows], step, params.seed, self.shape),
            keep=params.keep_latents,
            own_steps=own_steps,
        )
        return LatentSegment(
            latents=trajectory.latents,
            sigmas=sigmas,
            indices=trajectory.indices,
            sde_indices=trajectory.sde_indices,
            sde_logp=trajectory.sde_logp,
            own_steps=None if own_steps is None else torch.tensor(list(own_steps)),
            params=params,
        )

    def decode(self, latents: Tensor, params: DiffusionSamplingParams) -> Images:
        """Latents squashed to pixels."""
        return Images(pixels=latents.sigmoid())

    def encode_media(self, media: Images | Videos) -> Tensor:
        """The inverse of `decode`."""
        assert isinstance(media, Images)
        return media.pixels.logit(eps=1e-6)

    def replay(
        self,
        conditions: Conditions,
        segment: LatentSegment,
        sample_R: Tensor,
        step_R: Tensor,
        params: DiffusionSamplingParams,
    ) -> Stats:
        """Stored transitions in one forward."""
        x_R, next_R, sigma_R, sigma_next_R = segment.transitions(sample_R, step_R)
        sigma_max = float(segment.sigmas[1])
        own = {name: item.select(sample_R) for name, item in conditions.items()}
        options: dict[str, Any] = {"eta": params.eta, "sigma_max": sigma_max}
        out = loop.replay(
            self._bound(own), x_R, next_R, sigma_R, sigma_next_R, step_R, strategy=self.strategy, **options
        )
        nothing = torch.zeros(len(sigma_R), 1)
        unit = self.strategy.transition(nothing, nothing + 1, sigma_R, sigma_next_R, **options)
        return Stats(out.logp_R, out.mean, out.std_R, unit.q_R, unit.mean[:, 0])

    def step_std(self, segment: LatentSegment) -> Tensor:
        """Deviations of the stochastic steps."""
        assert segment.params is not None
        return self.strategy.step_std(segment.sigmas, segment.sde_indices, eta=segment.params.eta)

    def step_gain(self, segment: LatentSegment) -> Tensor:
        """What a velocity of 1 adds to the mean of the stochastic steps."""
        assert segment.params is not None
        return self.strategy.step_gain(segment.sigmas, segment.sde_indices, eta=segment.params.eta)

    def velocity(
        self, conditions: Conditions, x_R: Tensor, sigma_R: Tensor, step_R: Tensor, params: DiffusionSamplingParams
    ) -> Tensor:
        """The field at R rows."""
        self.seen_x.append(x_R.detach().clone())
        return self._bound(conditions)(x_R, sigma_R, step_R)

    def cut_tokens(self, texts: Sequence[str], params: DiffusionSamplingParams) -> list[int]:
        """None: any text is read whole."""
        return [0] * len(texts)

    def encode_texts(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> Conditions:
        """There are no text encoders."""
        return {}

    encoders_rest = False

    def visiting_encoders(self) -> AbstractContextManager[None]:
        """There are none to visit."""
        return nullcontext()

    def drop_text_encoders(self) -> None:
        """There are none."""

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Without gradients."""
        with torch.no_grad():
            yield

    def _bound(self, conditions: Conditions) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition)
        return lambda x, sigma, step: self.model(x, sigma, step, text.embeds[:, 0, 0])


# Roles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What the driver pins."""

    sigmas: Tensor
    latent_shape: tuple[int, ...]


class FieldEngine:
    """Samples with the pipeline that trains. `events` is shared with the other fakes: what was called, in order."""

    def __init__(
        self, pipeline: FieldPipeline, policies: PolicyStore | None = None, events: list[Any] | None = None
    ) -> None:
        self.pipeline = pipeline
        self.policies = policies
        self.events = events if events is not None else []
        self.requests: list[RolloutReq] = []
        self.is_ahead = False

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def plan(self, params: DiffusionSamplingParams) -> Plan:
        """Sigmas and latent shape."""
        return Plan(self.pipeline.sigmas(params), self.pipeline.shape)

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def encodes_ahead(self) -> bool:
        """As it was told."""
        return self.is_ahead

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def encode_ahead(self, primitives: Mapping[str, Primitive], params: DiffusionSamplingParams) -> None:
        """Only noted."""
        texts, images = primitives["text"], primitives.get("image")
        assert isinstance(texts, Texts)
        shown = [len(pictures) for pictures in images.images] if isinstance(images, ImageLists) else None
        self.events.append(("encode_ahead", texts.texts, shown, params.num_inference_steps))

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def drop_text_encoders(self) -> None:
        """Only noted."""
        self.events.append("drop_text_encoders")

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """Sample every row under a policy."""
        self.events.append("evaluate" if req.rollout_id < 0 else f"generate:{policy}")
        self.requests.append(req)
        params = req.sampling_params
        assert isinstance(params, DiffusionSamplingParams) and req.sigmas is not None
        assert req.init_noise_latent_shape is not None
        start = initial_noise(req.init_noise_group_ids, params.seed, req.init_noise_latent_shape)
        keys = [noise_key(req.rollout_id, name) for name in req.sample_ids]
        inside = nullcontext() if policy is None or self.policies is None else self.policies.using_policy(policy)
        with self.pipeline.evaluating(), inside:
            conditions = self.pipeline.encode(req.primitives, params)
            own = req.own_steps or None
            segment = self.pipeline.diffuse(conditions, start, req.sigmas, params, noise_keys=keys, own_steps=own)
        decoded = self.pipeline.decode(segment.clean_latents, params)
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
        return RolloutResp(tracks={"image": track})


def no_failure(group: str) -> bool:
    """Every group can be scored."""
    return False


class BrightnessReward:
    """Minus the squared distance of the mean pixel from 0.8, and the mean pixel itself as a component.

    fails: groups that cannot be scored.
    """

    def __init__(self, fails: Callable[[str], bool] = no_failure, events: list[Any] | None = None) -> None:
        self.fails = fails
        self.events = events if events is not None else []
        self.same: set[str] = set()
        """Groups whose samples all get one reward."""

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_track(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> dict[str, float]:
        """Scores, and writes what it found into the track."""
        if is_training:
            self.events.append("score")
        own = resp.tracks[track]
        if isinstance(own.decoded, Videos):
            bright = torch.stack([frames.mean() for frames in own.decoded.unpack("frames")])
        else:
            assert isinstance(own.decoded, Images)
            bright = own.decoded.pixels.mean(dim=(1, 2, 3))
        bright = torch.where(torch.tensor([group in self.same for group in own.group_ids]), 0.5, bright)
        failed = [self.fails(group) for group in own.group_ids]
        resp.tracks[track] = own.replace(
            rewards=torch.where(torch.tensor(failed), torch.nan, -(bright - 0.8).square()),
            component_rewards={"bright": bright},
            reward_errors=["the scorer said no" if each else None for each in failed],
        )
        return {}


# Assembly ---------------------------------------------------------------------------------------------------------


class RecordingBackend(FSDPBackend):
    """The real backend, which also remembers the whole gradients that every step was given."""

    gradients: list[dict[str, Tensor]]

    def optimizer_step(self, max_grad_norm: float) -> StepStats:
        """Copy the gradients, then step."""
        found = {name: whole(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self.gradients = [*vars(self).get("gradients", []), found]
        return super().optimizer_step(max_grad_norm)


def sampling(**changes: Any) -> DiffusionSamplingParams:
    """Three samples per prompt, four steps, the first three stochastic."""
    options: dict[str, Any] = {
        "samples_per_prompt": 3,
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
        "eta": 0.7,
        "sde_indices": [0, 1, 2],
        "autocast_precision": "fp32",
    }
    return DiffusionSamplingParams(**{**options, **changes})


def prompt_rows(count: int) -> list[PromptRow]:
    """Rows with a category in turn."""
    return [PromptRow(f"prompt {i}", f"p{i}", {"category": ["even", "odd"][i % 2]}) for i in range(count)]


def rollout(
    pipeline: FieldPipeline, params: DiffusionSamplingParams | None = None, *, num_prompts: int = 2, rollout_id: int = 0
) -> RolloutResp:
    """A response of `num_prompts` groups."""
    params = params if params is not None else sampling()
    req = build_request(
        prompt_rows(num_prompts),
        params,
        sigmas=pipeline.sigmas(params),
        latent_shape=pipeline.shape,
        rollout_id=rollout_id,
    )
    return FieldEngine(pipeline).generate(req)


KEPT: dict[str, Any] = {"eta": 0.0, "sde_indices": None, "keep_latents": "all"}
"""What the reward-gradient methods need of sampling."""
PIXEL_WEIGHTS = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def pixel_reward(pixels: Tensor) -> Tensor:
    """A curved reward of pixels [B, 3, 2, 2], in their precision."""
    weights = PIXEL_WEIGHTS.to(pixels)
    along = (pixels * weights).flatten(1).sum(1)
    return along - along.square() / 3


class PixelReward(nn.Module):
    """`pixel_reward` times a parameter that would take gradients if it were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.requests: list[RewardRequest] = []

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        self.requests.append(request)
        return self.gain * pixel_reward(request.pixels)


def some_advantages(count: int, seed: int = 3) -> Tensor:
    """Advantages [count] of both signs."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@dataclass
class Setup:
    """A field under training."""

    backend: RecordingBackend
    pipeline: FieldPipeline
    algorithm: Any  # Any: DiffusionGRPO or DiffusionNFT, as the test asked for
    stack: TrainStack

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters by name, live."""
        return {name: parameter.detach() for name, parameter in self.backend.parameters.items()}


def setup(
    kind: type[StageAlgorithm],
    *,
    model: nn.Module | None = None,
    strategy: SDEStrategy | None = None,
    shape: tuple[int, ...] = SHAPE,
    lora: LoraConfig | None = None,
    lr: float = 1e-2,
    micro: int = 100,
    updates: int = 1,
    max_grad_norm: float = 1e9,
    keep_reference: bool = False,
    backend_options: dict[str, Any] | None = None,
    **options: Any,
) -> Setup:
    """Backend, pipeline, algorithm and stack on a fresh field, prepared."""
    bundle = FieldBundle(model)
    torch.manual_seed(7)
    optimizer = OptimizerConfig(learning_rate=lr)
    backend = RecordingBackend(
        bundle, optimizer=optimizer, lora=lora, keep_reference=keep_reference, **(backend_options or {})
    )
    pipeline = FieldPipeline(bundle.model, strategy, shape)
    algorithm = kind(pipeline, backend, **options)  # ty: ignore[too-many-positional-arguments]
    stack = TrainStack(
        backend, algorithm, micro_batch_size=micro, num_updates_per_batch=updates, max_grad_norm=max_grad_norm
    )
    stack.prepare()
    return Setup(backend, pipeline, algorithm, stack)


@torch.no_grad()
def displace(backend: FSDPBackend, amount: float, seed: int = 11) -> None:
    """Move every trainable parameter away from where it started."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in backend.parameters.values():
        parameter.add_(amount * torch.randn(parameter.shape, generator=generator))


# Two processes ----------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kind": DiffusionGRPO, "clip_range": 0.2, "kl_coef": 0.1, "keep_reference": True, "rows_per_forward": 4},
    "m2po": {"kind": DiffusionGRPO, "rollout_correction": RolloutCorrection(m2_threshold=1e-6), "rows_per_forward": 4},
    "nft": {"kind": DiffusionNFT, "kl_coef": 0.1, "keep_reference": True, "rows_per_forward": 3},
    "omni_nft": {
        "kind": OmniNFT,
        "media_weights": {"audio": 0.5},
        "kl_coef": 0.1,
        "keep_reference": True,
        "rows_per_forward": 3,
    },
    "awm": {"kind": AWM, "kl_coef": 0.1, "keep_reference": True, "rows_per_forward": 3},
    "dpo": {"kind": DiffusionDPO, "beta": 5.0, "kl_coef": 0.1, "keep_reference": True, "rows_per_forward": 4},
    "dmd2": {
        "kind": DMD2,
        "fake_optimizer": OptimizerConfig(learning_rate=1e-2),
        "num_timesteps": 2,
        "keep_reference": True,
        "rows_per_forward": 3,
    },
    "dmd2_reward": {
        "kind": DMD2WithReward,
        "fake_optimizer": OptimizerConfig(learning_rate=1e-2),
        "surrogate_optimizer": OptimizerConfig(learning_rate=1e-2),
        "samples_per_group": 2,
        "num_timesteps": 2,
        "keep_reference": True,
        "rows_per_forward": 4,
    },
    "drtune": {"kind": DRTune, "num_gradient_steps": 2, "kl_coef": 0.1, "keep_reference": True},
    "refl": {"kind": ReFL, "num_last_steps": 2, "scale": 1.0, "pretrain_coef": 0.1},
    "draft": {"kind": DRaFT, "num_last_steps": 2, "is_checkpointed": True},
    "draft_lv": {"kind": DRaFT, "num_noisings": 3},
    "alignprop": {"kind": AlignProp, "kl_coef": 0.1, "keep_reference": True},
}


def trained(case: str) -> dict[str, Any]:
    """Gradients and metrics of two updates on this rank's shard of twelve samples (eight pairs); micro-batches are
    ragged."""
    made = setup(**CASES[case], micro=2, updates=2)
    params, num_prompts = sampling(), 4
    if made.algorithm.requires_reward_gradient:
        made.algorithm.use_reward(PixelReward())
        params = sampling(**KEPT)
    if made.algorithm.trains_copies:
        params = sampling(**KEPT)
    if made.algorithm.samples_per_unit == 2:
        params, num_prompts = dataclasses.replace(params, samples_per_prompt=2), 8
    resp = rollout(FieldPipeline(FieldBundle().model), params, num_prompts=num_prompts)
    advantages = some_advantages(resp.batch_size)
    if made.algorithm.takes_media_advantages:
        routed = {"video": advantages, "audio": some_advantages(resp.batch_size, seed=4)}
        resp = resp.with_values(resp.root_name(), media_advantages=routed)
    shard = resp.batch_size // made.backend.dp_size
    start = shard * made.backend.dp_rank
    # Two rollouts: after the first, the old policy and the reference are other weights than the trained ones.
    for _ in range(2):
        result = made.stack.train(
            with_advantages(resp.slice(start, start + shard), advantages[start : start + shard].clone()), progress=0.0
        )
    return {"gradients": made.backend.gradients, "metrics": result.metrics}


def trained_in_parts(lengths: Sequence[int] | None) -> dict[str, Any]:
    """Gradients and metrics of one update on this rank's shard of twelve samples, in parts of these lengths; None: as
    a whole."""
    made = setup(DiffusionGRPO, clip_range=0.2, kl_coef=0.1, keep_reference=True, micro=2)
    resp, dp_size = rollout(FieldPipeline(FieldBundle().model), sampling(), num_prompts=4), made.backend.dp_size
    shard = resp.batch_size // dp_size
    start = shard * made.backend.dp_rank
    own = with_advantages(
        resp.slice(start, start + shard), some_advantages(resp.batch_size)[start : start + shard].clone()
    )
    if lengths is None:
        metrics = made.stack.train(own, progress=0.0).metrics
        return {"gradients": made.backend.gradients, "metrics": metrics}
    ends = list(itertools.accumulate(lengths, initial=0))
    results = [
        made.stack.train_part(own.slice(first, last), progress=0.0, num_parts=len(lengths))
        for first, last in itertools.pairwise(ends)
    ]
    assert ends[-1] == shard and results[:-1] == [None] * (len(lengths) - 1) and results[-1] is not None
    return {"gradients": made.backend.gradients, "metrics": results[-1].metrics}


PARTS = {"even": [2, 2, 2], "uneven": [1, 3, 2]}
"""Lengths of the parts of six samples, a rank's share."""


def train_all() -> dict[str, Any]:
    """`trained` of every case on this rank, and one update in parts."""
    in_parts = {f"parts-{name}": trained_in_parts(lengths) for name, lengths in PARTS.items()}
    return {case: trained(case) for case in CASES} | in_parts
