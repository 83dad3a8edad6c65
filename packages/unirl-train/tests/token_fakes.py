"""A causal language model of a few hundred numbers and its pipeline: what the token algorithms are tested on.

Legend: B samples, N tokens, L positions of a prompt and its completion, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from advantaged import with_advantages
from diffusion_fakes import RecordingBackend, UnexportedBundle
from torch import Tensor, nn

from unirl.algorithms.ar_cispo import ARCISPO
from unirl.algorithms.ar_dppo import ARDPPO
from unirl.algorithms.ar_dro import ARDRO
from unirl.algorithms.ar_drpo import ARDRPO
from unirl.algorithms.ar_gmpo import ARGMPO
from unirl.algorithms.ar_grpo import ARGRPO
from unirl.algorithms.ar_ppo import ARPPO
from unirl.algorithms.ar_sapo import ARSAPO
from unirl.algorithms.ar_vespo import ARVESPO
from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.critic import TokenCritic
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.balance import balanced_order
from unirl.trainer.text import count_tokens
from unirl.types.conditions import Condition, PromptCondition
from unirl.types.errors import ConfigError
from unirl.types.media import Primitive, Texts
from unirl.types.noise import noise_key
from unirl.types.protocols.models import Conditions
from unirl.types.protocols.training import PolicyStore
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

VOCABULARY = 7
WIDTH = 6
STOP = 0


class MixingBlock(nn.Module):
    """Stands for a transformer block: the mean of what came before, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_LD: Tensor) -> Tensor:
        """[L, D] to the same shape; causal."""
        before = x_LD.cumsum(0) / torch.arange(1, len(x_LD) + 1)[:, None]
        return x_LD + self.outer(torch.tanh(self.inner(torch.cat([x_LD, before], dim=1))))


class TinyLM(nn.Module):
    """Embedding, one block, and a projection to the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = MixingBlock()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, samples: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Logits [L, vocabulary] and hidden states [L, D] of each sequence of tokens."""
        hidden = [self.block(self.embedding(tokens)) for tokens in samples]
        return [(self.head(each), each) for each in hidden]


class LMBundle(UnexportedBundle):
    """The language model as the only component of a bundle."""

    block_class_names: tuple[str, ...] = ("MixingBlock",)
    lora_target_modules: tuple[str, ...] = ("inner", "outer")

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = TinyLM()

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The model."""
        return {"transformer": self.model}


@dataclass(frozen=True)
class Stats:
    """Tokens under the present weights."""

    logp_N: Tensor
    entropy_N: Tensor
    collision_N: Tensor
    hidden_N: Tensor


class LMPipeline:
    """Implements unirl.types.protocols.models.AutoregressivePipeline. A text is a string of digits, a token each."""

    context_length = 64
    media_tokens = frozenset()

    def __init__(self, model: TinyLM) -> None:
        self.model = model
        self.num_replays = 0

    @property
    def vocabulary(self) -> dict[str, int]:
        """The digits."""
        return {str(token): token for token in range(VOCABULARY)}

    def stop_token_ids(self, params: ARSamplingParams) -> tuple[int, ...]:
        """One, and those asked for."""
        return tuple(sorted({STOP, *params.stop_token_ids}))

    def encode(self, primitives: Mapping[str, Primitive], params: ARSamplingParams) -> dict[str, Condition]:
        """A token a digit."""
        texts = primitives["text"]
        assert isinstance(texts, Texts)
        return {"prompt": PromptCondition.pack(tokens=[torch.tensor([int(digit) for digit in t]) for t in texts.texts])}

    def decode(self, segment: TextSegment) -> Texts:
        """A digit a token, without the stop token."""
        return Texts(
            texts=["".join(str(t) for t in tokens.tolist() if t != STOP) for tokens in segment.unpack("tokens")]
        )

    def generate(
        self,
        conditions: Conditions,
        params: ARSamplingParams,
        *,
        noise_keys: Sequence[str],
        any_rank: Callable[[bool], bool] | None = None,
    ) -> TextSegment:
        """Sample by sample; a key's characters seed its draws."""
        prompt = conditions["prompt"]
        assert isinstance(prompt, PromptCondition)
        samples, logps, status = [], [], []
        for key, start in zip(noise_keys, prompt.unpack("tokens"), strict=True):
            generator = torch.Generator().manual_seed(params.seed + sum(map(ord, key)) * 31 + len(key))
            tokens, own = start, []
            for _ in range(params.max_new_tokens):
                logits = self.model([tokens])[0][0][-1]
                if params.is_greedy:
                    token, logp = logits.argmax(), torch.zeros(())
                else:
                    scaled = (logits / params.temperature).log_softmax(0)
                    token = torch.multinomial(scaled.exp(), 1, generator=generator)[0]
                    logp = scaled[token]
                tokens, own = torch.cat([tokens, token[None]]), [*own, logp]
                if int(token) == STOP:
                    break
            samples.append(tokens[len(start) :])
            logps.append(torch.stack(own))
            status.append(SegmentStatus.COMPLETED if int(tokens[-1]) == STOP else SegmentStatus.TRUNCATED)
        return TextSegment.pack(
            tokens=samples, log_probs=None if params.is_greedy else logps, status=torch.tensor(status), params=params
        )

    def replay(self, conditions: Conditions, segment: TextSegment, params: ARSamplingParams) -> Stats:
        """All tokens in one call of the model."""
        self.num_replays += 1
        prompt = conditions["prompt"]
        assert isinstance(prompt, PromptCondition)
        starts, ends = prompt.unpack("tokens"), segment.unpack("tokens")
        found = self.model([torch.cat(pair) for pair in zip(starts, ends, strict=True)])
        logits, hidden = (
            torch.cat([each[which][len(a) - 1 : -1] for each, a in zip(found, starts, strict=True)]) for which in (0, 1)
        )
        scaled = (logits / params.temperature).log_softmax(1)
        logp = scaled.gather(1, segment.tokens[:, None]).squeeze(1)
        return Stats(logp, -(scaled.exp() * scaled).sum(1), scaled.detach().exp().square().sum(1), hidden)

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Without gradients."""
        with torch.no_grad():
            yield


def sampling(**changes: Any) -> ARSamplingParams:
    """Three samples per prompt of at most six tokens."""
    options: dict[str, Any] = {"temperature": 0.8, "samples_per_prompt": 3, "max_new_tokens": 6}
    return ARSamplingParams(**{**options, **changes})


def response(num_prompts: int = 4, *, masked: bool = True, params: ARSamplingParams | None = None) -> RolloutResp:
    """Completions of the untrained model, three per prompt. masked: a third of the tokens is not trained on, nor is any
    of the last sample."""
    params = params if params is not None else sampling()
    pipeline = LMPipeline(LMBundle().model)
    repeats = params.samples_per_prompt
    prompts = [["3", "12", "456", "1", "22"][i % 5] for i in range(num_prompts) for _ in range(repeats)]
    conditions = pipeline.encode({"text": Texts(texts=prompts)}, params)
    ids = [f"prompt:{i}:sample:{j}" for i in range(num_prompts) for j in range(repeats)]
    with pipeline.evaluating():
        segment = pipeline.generate(conditions, params, noise_keys=ids)
    if masked:
        mask = torch.rand(segment.tokens.numel(), generator=torch.Generator().manual_seed(1)) < 0.67
        mask[int(segment.cu_seqlens[-2]) :] = False
        segment = segment.replace(loss_mask=mask)
    track = RolloutTrack(
        sample_ids=ids,
        parent_ids=[name.rsplit(":sample", 1)[0] for name in ids],
        conditions=conditions,
        segment=segment,
        decoded=pipeline.decode(segment),
        policy_versions=torch.zeros(len(ids), dtype=torch.long),
    )
    return RolloutResp(tracks={"text": track})


@dataclass
class Setup:
    """A language model under training."""

    backend: RecordingBackend
    pipeline: LMPipeline
    algorithm: Any  # Any: whichever the test asked for
    stack: TrainStack


def setup(
    kind: type[StageAlgorithm],
    *,
    lr: float = 1e-2,
    micro: int = 100,
    updates: int = 1,
    keep_reference: bool = False,
    displaced: float = 0.0,
    critic_seed: int | None = None,
    critic_lr: float = 1e-2,
    **options: Any,
) -> Setup:
    """Backend, pipeline, algorithm and stack on the untrained model, prepared.

    displaced: how far the model is moved from the one that `response` sampled from. critic_seed: makes a critic with a
    last layer that is not zero.
    """
    bundle = LMBundle()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.add_(displaced * torch.randn(parameter.shape, generator=generator))
    backend = RecordingBackend(bundle, optimizer=OptimizerConfig(learning_rate=lr), keep_reference=keep_reference)
    if critic_seed is not None:
        critic = TokenCritic(WIDTH, width=4, seed=critic_seed)
        torch.manual_seed(critic_seed)
        nn.init.normal_(critic.value.weight)
        options.update(critic=critic, critic_optimizer=OptimizerConfig(learning_rate=critic_lr))
    pipeline = LMPipeline(bundle.model)
    algorithm = kind(pipeline, backend, **options)  # ty: ignore[too-many-positional-arguments]
    stack = TrainStack(
        backend, algorithm, micro_batch_size=micro, num_updates_per_batch=updates, max_grad_norm=1e9, track="text"
    )
    stack.prepare()
    return Setup(backend, pipeline, algorithm, stack)


# Roles ------------------------------------------------------------------------------------------------------------


class LMEngine:
    """Samples with the pipeline that trains."""

    def __init__(self, pipeline: LMPipeline, policies: PolicyStore) -> None:
        self.pipeline = pipeline
        self.policies = policies
        self.requests: list[RolloutReq] = []
        self.longest = 100

    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def check_prompts(self, req: RolloutReq) -> None:
        """Refuses what is longer than `longest`."""
        texts = req.primitives["text"]
        assert isinstance(texts, Texts)
        for row, text in enumerate(texts.texts):
            if len(text) > self.longest:
                raise ConfigError(f"prompt {row} of the batch has {len(text)} tokens")

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One completion a row."""
        self.requests.append(req)
        params = req.sampling_params
        assert isinstance(params, ARSamplingParams)
        with self.pipeline.evaluating():
            conditions = self.pipeline.encode(req.primitives, params)
            keys = [noise_key(req.rollout_id, name) for name in req.sample_ids]
            segment = self.pipeline.generate(conditions, params, noise_keys=keys)
        decoded = self.pipeline.decode(segment)
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=decoded)
        track.policy_versions = torch.full((req.batch_size,), self.policies.policy_version, dtype=torch.long)
        return RolloutResp(tracks={"text": track})


class FirstDigitReward:
    """1 for a completion that begins with the digit that the prompt's metadata names.

    same: group ids whose samples all get 0.
    """

    def __init__(self, same: Callable[[str], bool] = lambda group: False) -> None:
        self.same = same

    @distributed(Dispatch.DP_SCATTER, Collect.ALL)
    def score_track(self, resp: RolloutResp, track: str, *, is_training: bool = True) -> dict[str, float]:
        """Scores, and writes what it found into the track."""
        own = resp.tracks[track]
        assert isinstance(own.decoded, Texts)
        wanted = [str((row or {})["answer"]) for row in own.metadata]
        right = [float(text.startswith(answer)) for text, answer in zip(own.decoded.texts, wanted, strict=True)]
        right = [0.0 if self.same(group) else value for value, group in zip(right, own.group_ids, strict=True)]
        resp.tracks[track] = own.replace(
            rewards=torch.tensor(right),
            component_rewards={"match": torch.tensor(right)},
            reward_errors=[None] * len(right),
        )
        return {}


# Two processes ----------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kind": ARGRPO, "kl_coef": 0.1, "keep_reference": True, "entropy_coef": 0.01},
    "gspo": {"kind": ARGRPO, "importance_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {"kind": ARGRPO, "loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 6, "mask_truncated": True},
    "corrected": {"kind": ARGRPO, "rollout_correction": RolloutCorrection(mode="mask", upper=1.05), "displaced": 0.1},
    "m2po": {"kind": ARGRPO, "rollout_correction": RolloutCorrection(upper=None, m2_threshold=2e-2), "displaced": 0.1},
    "cispo": {"kind": ARCISPO, "ratio_max": 1.2},
    "sapo": {"kind": ARSAPO, "temperature_negative": 2.0},
    "gmpo": {"kind": ARGMPO, "loss_agg_mode": "seq-mean-token-mean"},
    "vespo": {"kind": ARVESPO},
    "dro": {"kind": ARDRO, "beta": 0.3},
    "dppo": {"kind": ARDPPO, "threshold": 0.05},
    "drpo": {"kind": ARDRPO, "old_logp_source": "rollout"},
    "ppo": {"kind": ARPPO, "critic_seed": 5, "kl_coef": 0.1, "keep_reference": True, "kl_in_reward": True},
}


BALANCED = "dr_grpo"


def advantages_of(count: int) -> Tensor:
    """Advantages [count] of both signs."""
    return torch.randn(count, generator=torch.Generator().manual_seed(3))


def trained(case: str, micro: int = 2, *, is_balanced: bool = False) -> dict[str, Any]:
    """Gradients and metrics of two rollouts of two updates on this rank's shard of twelve samples, the last of which
    trains no token. is_balanced: samples are dealt to the ranks by their tokens."""
    made = setup(**CASES[case], micro=micro, updates=2)
    resp = response()
    advantages = advantages_of(resp.batch_size)
    if is_balanced:
        order = balanced_order(count_tokens(resp, "text"), made.backend.dp_size, 2)
        resp, advantages = resp.select(order), advantages[order]
    shard = resp.batch_size // made.backend.dp_size
    own = slice(shard * made.backend.dp_rank, shard * (made.backend.dp_rank + 1))
    for _ in range(2):
        result = made.stack.train(
            with_advantages(resp.slice(own.start, own.stop), advantages[own].clone()), progress=0.0
        )
    return {"gradients": made.backend.gradients, "metrics": result.metrics}


def train_all() -> dict[str, Any]:
    """`trained` of every case on this rank, and of one with samples that moved."""
    return {case: trained(case, micro=1) for case in CASES} | {"balanced": trained(BALANCED, is_balanced=True)}
