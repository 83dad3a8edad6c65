"""A velocity field of two numbers, a named copy of it, and requests, to test engines with."""

from contextlib import contextmanager
from typing import Any

import torch

from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.sde import loop
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import step_noise
from unirl.sde.schedule import linear_sigmas
from unirl.sde.unfinished import Unfinished, Walk
from unirl.types.conditions import TextEmbedCondition
from unirl.types.media import Images, Texts
from unirl.types.noise import noise_keys
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment, SegmentStatus, UnfinishedSteps

SHAPE = (2, 3, 3)
PARAMS = DiffusionSamplingParams(num_inference_steps=4, eta=0.7, guidance_scale=1.0, sde_indices=[0, 2], seed=3)


class LinearPipeline:
    """Stands for a diffusion model: velocity a x + b, conditions that echo the prompt's length."""

    strategy_name = "flow"

    def __init__(self):
        self.a, self.b = 0.5, 0.1
        self.batch_sizes = []
        self.encoded = []
        self.has_encoders = True

    def latent_shape(self, params):
        return SHAPE

    def sigmas(self, params):
        return linear_sigmas(params.num_inference_steps)

    def encode(self, primitives, params):
        self.encoded.append(primitives["text"].texts)
        lengths = [float(len(text)) for text in primitives["text"].texts]
        return {"text": TextEmbedCondition(embeds=torch.tensor(lengths).view(-1, 1, 1))}

    def diffuse(
        self,
        conditions,
        initial_latents,
        sigmas,
        params,
        *,
        noise_keys,
        start_keys=None,
        own_steps=None,
        begun=None,
        is_ending=lambda: False,
    ):
        self.start_keys = start_keys
        self.batch_sizes.append(len(initial_latents))
        at, x, left = 0, initial_latents, None
        if begun is not None:
            (at,) = set(begun.reached.tolist())
            x = begun.unfinished.state[:, 0] if at else x
            left = Unfinished(at, begun.unfinished.state, begun.latents, begun.sde_logp)
        walk, found = Walk(left, is_ending), None
        if not walk.is_over:
            found = loop.sample(
                lambda x, sigma, step: self.a * x + self.b,
                x,
                sigmas,
                strategy=FlowSDEStrategy(),
                eta=params.eta,
                sde_indices=[step for step in params.sde_indices or [] if step >= at],
                step_noise=lambda step: step_noise(noise_keys, step, params.seed, SHAPE),
                own_steps=own_steps,
                on_step=walk,
                start=at,
            )
        found, unfinished = walk.whole(
            found,
            x,
            at,
            keep="transitions",
            sde_indices=params.sde_indices or [],
            num_steps=params.num_inference_steps,
            solver=None,
            storage_dtype=torch.float32,
        )
        ended: dict[str, Any] = {}
        if unfinished is not None:
            reached = torch.full((len(x),), unfinished.reached)
            ended["unfinished"] = UnfinishedSteps(reached=reached, state=unfinished.state)
            ended["status"] = torch.full((len(x),), SegmentStatus.ABORTED)
        return LatentSegment(
            **ended,
            latents=found.latents,
            sigmas=sigmas,
            indices=found.indices,
            sde_indices=found.sde_indices,
            sde_logp=found.sde_logp,
            own_steps=None if own_steps is None else torch.tensor(own_steps),
        )

    def decode(self, latents, params):
        return Images(pixels=latents.sigmoid())

    def encode_texts(self, primitives, params):
        return self.encode(primitives, params)

    def cut_tokens(self, texts, params):
        """A token per letter, of which five are read."""
        return [max(0, len(text) - 5) for text in texts]

    encoders_rest = False

    @contextmanager
    def visiting_encoders(self):
        yield

    def drop_text_encoders(self):
        self.has_encoders = False

    @contextmanager
    def evaluating(self):
        with torch.no_grad():
            yield


class Copies:
    """Stands for a backend that keeps a second set of weights called "old"."""

    policy_version = 7

    def __init__(self, pipeline):
        self.pipeline = pipeline

    @contextmanager
    def using_policy(self, name):
        assert name == "old"
        kept, self.pipeline.a = self.pipeline.a, -1.0
        yield
        self.pipeline.a = kept


def request(num=4, params=PARAMS, same_noise=False):
    groups = [f"g{i // 2}" for i in range(num)]
    ids = [f"s{i}" for i in range(num)]
    return RolloutReq(
        sample_ids=ids,
        group_ids=groups,
        primitives={"text": Texts(texts=["cat"] * num)},
        sampling_params=params,
        sigmas=linear_sigmas(params.num_inference_steps),
        init_noise_group_ids=noise_keys(5, ids, groups, same_noise=same_noise),
        init_noise_latent_shape=list(SHAPE),
        rollout_id=5,
    )


def engine(**changes):
    pipeline: Any = changes.pop("pipeline", None) or LinearPipeline()
    policies: Any = Copies(pipeline)
    options: dict[str, Any] = {"forward_batch_size": 2, **changes}
    return TrainsideRolloutEngine(pipeline, policies, **options)
