"""The same recipe in one process, on one Ray worker and on two gives the same samples, rewards and gradients."""

import functools
import threading

import pytest
import torch
from probe import build_with_probe

from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.wiring import make_trainer
from unirl.types.media import Images

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def pixels_of(resp):
    decoded = resp.tracks["image"].decoded
    assert isinstance(decoded, Images)
    return decoded.pixels


def one_step(recipe, runtime, run_dir):
    """Samples, rewards, metrics and gradients of the first rollout."""
    with runtime:
        trainer = make_trainer({**recipe, "eval": None}, runtime, run_dir, [], threading.Event())
        runtime.role("stack").prepare()
        req = trainer.request(0, recipe["batch_size"])
        with runtime.role("engine").generate(req, policy=runtime.role("stack").rollout_policy()) as resp:
            pixels = torch.cat(resp.map(pixels_of))
            rewards = runtime.role("reward").score_media(resp, req).rewards
        again = make_trainer({**recipe, "eval": None}, runtime, run_dir, [], threading.Event())
        metrics = again.step(0)
        return pixels, rewards, metrics, runtime.role("probe").gradients()


@pytest.mark.parametrize(("name", "numbers"), [("sd3_shapes_flowgrpo", (1, 2)), ("sd3_shapes_online_dpo", (2,))])
def test_local_and_ray_workers_agree(name, numbers, recipe, ray_of_two_cores, tmp_path):
    from unirl.distributed.group.ray_runtime import RayRuntime

    small = recipe(name, "stack.num_updates_per_batch=2")
    builder = functools.partial(build_with_probe, small, str(tmp_path))
    expected = one_step(small, LocalRuntime(builder), tmp_path)
    for num_devices in numbers:
        got = one_step(small, RayRuntime(builder, num_devices=num_devices), tmp_path)
        assert torch.equal(got[0], expected[0]), "samples"
        assert torch.equal(got[1], expected[1]), "rewards"
        assert got[2]["reward/mean"] == expected[2]["reward/mean"]
        # The first update's gradients; later ones start from weights that Adam has made differ by rounding.
        ours, theirs = got[3][0], expected[3][0]
        assert ours.keys() == theirs.keys()
        scale = torch.sqrt(sum(gradient.square().sum() for gradient in theirs.values()))
        error = torch.sqrt(sum((ours[key] - theirs[key]).square().sum() for key in theirs))
        assert float(error / scale) < 1e-5
