"""Two steps of each kind of algorithm on a tiny model, and what must hold of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from family_steps import SAMPLES_PER_PROMPT, clean_latents, request_of
from torch import Tensor, nn

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.diffusion_nft import DiffusionNFT
from unirl.algorithms.drtune import DRTune
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.sde.windows import MixGRPOWindow
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.types.media import Videos
from unirl.types.reward import RewardRequest
from unirl.types.rollout import RolloutResp


class Brightness:
    """A reward that every decoder reaches: the mean of the red channel."""

    def score_with_gradient(self, request: RewardRequest) -> Tensor:
        """[B]."""
        media = request.generated.get("video")
        pixels = media.frames if isinstance(media, Videos) else request.pixels
        return pixels[:, 0].reshape(len(request.sample_ids), -1).mean(dim=1)


def flow_grpo(pipeline: Any, backend: FSDPBackend) -> Any:
    """With the anchor replayed."""
    return DiffusionGRPO(pipeline, backend, clip_range=1e-2, old_logp_source="replay")


def nft(pipeline: Any, backend: FSDPBackend) -> Any:
    """With the published weights of the two branches."""
    return DiffusionNFT(pipeline, backend, num_timesteps=2)


def drtune(pipeline: Any, backend: FSDPBackend) -> Any:
    """Through two steps."""
    algorithm = DRTune(pipeline, backend, num_gradient_steps=2, early_stop=1)
    algorithm.use_reward(Brightness())
    return algorithm


WINDOW = {"scheduler": MixGRPOWindow(num_steps=4, window_size=2)}
DETERMINISTIC = {"eta": 0.0}
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "flow_grpo": (flow_grpo, {}),
    "mix_grpo": (flow_grpo, WINDOW),
    "nft": (nft, DETERMINISTIC),
    "drtune": (drtune, DETERMINISTIC | {"keep_latents": "all"}),
}


def take_two_steps(family: Any, pipeline: Any, frozen: Sequence[nn.Module], method: str, **sampling: Any) -> None:
    """The loss is finite, what trains moves and nothing else does, the first ratio is 1, and sampling afterwards runs
    on the moved weights.

    family: says how it samples and what a request brings besides its texts, as `kit.Family` does. sampling: what is
        sampled otherwise.
    """
    make, changes = ALGORITHMS[method]
    params = family.sampling(num_inference_steps=4, samples_per_prompt=SAMPLES_PER_PROMPT, **changes | sampling)
    backend = FSDPBackend(pipeline.bundle, optimizer=OptimizerConfig(learning_rate=1e-2), device="cpu")
    engine = TrainsideRolloutEngine(pipeline, backend, forward_batch_size=4)
    stack = TrainStack(backend, {"image": make(pipeline, backend)}, micro_batch_size=4, max_grad_norm=1.0)
    stack.prepare()
    modules: dict[str, nn.Module] = pipeline.bundle.trainable_modules()
    before = {f"{key}.{n}": p.detach().clone() for key, m in modules.items() for n, p in m.named_parameters()}
    fixed = [tensor.clone() for module in frozen for tensor in module.state_dict().values()]
    latents = []
    for rollout_id in range(2):
        resp = engine.generate(request_of(family, engine, params, rollout_id))
        track = resp.root_track()
        latents.append(clean_latents(resp))
        advantages = torch.tensor([1.0, -1.0] * 2)
        result = stack.train(RolloutResp(tracks={"image": track.replace(advantages=advantages)}), progress=0.0)
        numbers = {key: float(value) for key, value in result.metrics.items() if isinstance(value, (int, float))}
        assert all(value == value and abs(value) != float("inf") for value in numbers.values()), numbers
        if method.endswith("grpo"):
            assert numbers["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    moved = {f"{key}.{n}": p.detach() for key, m in modules.items() for n, p in m.named_parameters()}
    assert any(not torch.equal(moved[key], value) for key, value in before.items())
    still = [tensor for module in frozen for tensor in module.state_dict().values()]
    assert all(torch.equal(now, then) for now, then in zip(still, fixed, strict=True))
    after = clean_latents(engine.generate(request_of(family, engine, params, 0)))
    assert not torch.equal(after, latents[0])
