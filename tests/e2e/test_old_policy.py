"""Rollouts under a named policy: a separate copy of the model with that policy's values samples the same."""

from typing import Any

import torch

from unirl.config.runs import run_of
from unirl.data.data_source import PromptRow
from unirl.distributed.worker import WorkerContext
from unirl.trainer.build.worker import build_components
from unirl.trainer.request import build_request
from unirl.types.sampling import DiffusionSamplingParams


def test_a_separate_engine_with_the_old_policy_samples_what_the_trainside_engine_samples_under_it(recipe, tmp_path):
    """A serving engine needs the name `stack.rollout_policy()` and the values `backend.policies.values(name)`."""
    resolved = recipe("worlds/shapes/nft", "algorithm.decay.start=0.5")
    # Any: components by section.
    made: list[Any] = [build_components(run_of(resolved), str(tmp_path), WorkerContext(0, 1, "cpu")) for _ in range(2)]
    own, apart = made
    stack, backend, engine = own["stack"], own["backend"], own["engine"]
    stack.prepare()
    params = DiffusionSamplingParams(**{k: v for k, v in resolved["sampling"].items() if k != "_target_"}).resolved(0)
    plan = engine.plan(params)
    rows = [PromptRow(prompt, prompt) for prompt in ("a red circle", "a blue square")]
    options = {"sigmas": plan.sigmas, "latent_shape": plan.latent_shape, "rollout_id": 0}
    req = build_request(rows, params, **options)
    name = stack.rollout_policy()
    assert name == "old"
    fresh = engine.generate(req, policy=name)
    advantages = torch.randn(req.batch_size, generator=torch.Generator().manual_seed(0))
    stack.train(fresh.with_values("image", advantages=advantages), progress=0.0)

    with torch.no_grad():
        for key, value in backend.policies.values(name).items():
            apart["backend"].parameters[key].copy_(value)
    separate = apart["engine"].generate(req).root_track().segment.clean_latents
    under_old = engine.generate(req, policy=name).root_track().segment.clean_latents
    current = engine.generate(req).root_track().segment.clean_latents
    assert torch.equal(separate, under_old)
    # The old policy lies between the start and the trained one: it is neither.
    assert not torch.equal(under_old, current)
    assert not torch.equal(under_old, fresh.root_track().segment.clean_latents)
