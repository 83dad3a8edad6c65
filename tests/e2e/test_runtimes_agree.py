"""The same recipe in one process, on one Ray worker and on two gives the same samples, rewards and gradients.

So does scoring while the engine generates instead of afterwards, bit for bit.
"""

import functools
import threading

import pytest
import torch
from probe import RecipeOf, build_all, build_with_probe

from unirl.config.runs import run_of
from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.build.assembly import make_evaluator, make_trainer
from unirl.trainer.build.worker import build_components
from unirl.types.media import Images

pytestmark = pytest.mark.slow

# 16 samples in chunks of 3 for a scorer that takes 4: no chunk is a batch.
CHUNKS = ["engine.forward_batch_size=3", "reward.scorers.shapes.batch_size=4", "stack.num_updates_per_batch=1"]
SHARED = {
    "flowgrpo": ("worlds/shapes/flowgrpo", "stack.num_updates_per_batch=2"),
    "online_dpo": ("worlds/shapes/online_dpo", "stack.num_updates_per_batch=2"),
    "scored_later": ("worlds/shapes/nft", *CHUNKS),
    "scored_meanwhile": ("worlds/shapes/nft", *CHUNKS, "+reward.is_async=true"),
}
"""Words of the recipes that tests run on two workers."""
COMPARED = ("reward/", "advantage/", "policy/", "train/", "group/", "eval/")
KEEPS_UP = ("reward/async/", "reward/shapes/utilisation")


@pytest.fixture(scope="module")
def on_two_workers(recipe, ray_of_two_cores, tmp_path_factory, request):
    """on_two_workers(recipe) -> a runtime of two Ray workers with the components of one of `SHARED`.

    All tests of this session share one pair.
    """
    from unirl.distributed.group.ray_runtime import RayRuntime

    is_matrix = any(item.path == request.path and item.get_closest_marker("matrix") for item in request.session.items)
    recipes = {name: recipe(*words) for name, words in SHARED.items() if is_matrix or name == "flowgrpo"}
    builder = functools.partial(build_all, recipes, str(tmp_path_factory.mktemp("workers")))
    with RayRuntime(builder, num_devices=2, start_timeout_s=600) as workers:
        yield lambda name: RecipeOf(workers, name)


def pixels_of(resp):
    decoded = resp.tracks["image"].decoded
    assert isinstance(decoded, Images)
    return decoded.pixels


def one_step(recipe, runtime, run_dir):
    """Samples, rewards, metrics and gradients of the first rollout."""
    with runtime:
        trainer = make_trainer(run_of({**recipe, "eval": None}), runtime, run_dir, [], threading.Event())
        runtime.role("stack").prepare()
        req = trainer.collector.request(0, recipe["batch_size"])
        with runtime.role("engine").generate(req, policy=runtime.role("stack").rollout_policy()) as resp:
            pixels = torch.cat(resp.map(pixels_of))
            runtime.role("reward").score_track(resp, "image", is_training=False)
            resp.refresh()
            rewards = resp.meta.track("image").rewards
        again = make_trainer(run_of({**recipe, "eval": None}), runtime, run_dir, [], threading.Event())
        metrics = again.step(0)
        return pixels, rewards, metrics, runtime.role("probe").gradients()


def assert_alike(got, expected):
    assert torch.equal(got[0], expected[0]), "samples"
    assert torch.equal(got[1], expected[1]), "rewards"
    assert got[2]["reward/mean"] == expected[2]["reward/mean"]
    assert_gradients_alike(got, expected)


def assert_gradients_alike(got, expected):
    # The first update's gradients; later ones start from weights that Adam has made differ by rounding.
    ours, theirs = got[3][0], expected[3][0]
    assert ours.keys() == theirs.keys()
    scale = torch.sqrt(sum(gradient.square().sum() for gradient in theirs.values()))
    error = torch.sqrt(sum((ours[key] - theirs[key]).square().sum() for key in theirs))
    assert float(error / scale) < 1e-5


@pytest.mark.ray
def test_one_ray_worker_agrees_with_one_process(recipe, ray_of_two_cores, tmp_path):
    # Before `on_two_workers`, which takes both cores.
    from unirl.distributed.group.ray_runtime import RayRuntime

    small = recipe(*SHARED["flowgrpo"])
    builder = functools.partial(build_with_probe, small, str(tmp_path))
    expected = one_step(small, LocalRuntime(builder), tmp_path)
    assert_alike(one_step(small, RayRuntime(builder, num_devices=1, start_timeout_s=600), tmp_path), expected)


@pytest.mark.ray
@pytest.mark.matrix
def test_two_ray_workers_that_share_samples_agree_with_one_process(recipe, ray_of_two_cores, tmp_path):
    """Each computes with its part of the tokens of all samples; the driver deals one shard to both."""
    from unirl.distributed.group.ray_runtime import RayRuntime

    topology = ["+backend.topology._target_=unirl.train.configs.TrainTopology", "+backend.topology.sp=2"]
    alone, shared = recipe(*SHARED["flowgrpo"]), recipe(*SHARED["flowgrpo"], *topology)
    expected = one_step(alone, LocalRuntime(functools.partial(build_with_probe, alone, str(tmp_path))), tmp_path)
    workers = RayRuntime(functools.partial(build_with_probe, shared, str(tmp_path)), num_devices=2, start_timeout_s=600)
    assert workers.num_shards == 1
    got = one_step(shared, workers, tmp_path)
    # float32: attention of some heads at a time, and sums of tokens in another order.
    torch.testing.assert_close(got[0], expected[0], rtol=0.0, atol=1e-4)
    torch.testing.assert_close(got[1], expected[1], rtol=0.0, atol=1e-4)
    assert_gradients_alike(got, expected)


@pytest.mark.ray
@pytest.mark.parametrize("name", ["flowgrpo", pytest.param("online_dpo", marks=pytest.mark.matrix)])
def test_two_ray_workers_agree_with_one_process(name, recipe, on_two_workers, tmp_path):
    small = recipe(*SHARED[name])
    expected = one_step(small, LocalRuntime(functools.partial(build_with_probe, small, str(tmp_path))), tmp_path)
    assert_alike(one_step(small, on_two_workers(name), tmp_path), expected)


# Scored while the engine generates -----------------------------------------------------------------------------------


def two_rollouts(recipe, runtime, run_dir):
    """Metrics and rewards of two rollouts, and of an evaluation after them."""
    with runtime:
        trainer = make_trainer(run_of(recipe), runtime, run_dir, [], threading.Event())
        runtime.role("stack").prepare()
        metrics = [trainer.step(rollout_id) for rollout_id in range(2)]
        evaluator = make_evaluator(run_of(recipe))
        assert evaluator is not None
        metrics.append(evaluator.run(runtime).metrics())
        req = trainer.collector.request(2, recipe["batch_size"])
        with runtime.role("engine").generate(req, policy=runtime.role("stack").rollout_policy()) as resp:
            runtime.role("reward").score_track(resp, "image")
            resp.refresh()
            track = resp.meta.track("image")
    return metrics, track


def compare(recipe, runtime_of, run_dir):
    expected, expected_track = two_rollouts(recipe(*SHARED["scored_later"]), runtime_of("scored_later"), run_dir)
    got, track = two_rollouts(recipe(*SHARED["scored_meanwhile"]), runtime_of("scored_meanwhile"), run_dir)
    for ours, theirs in zip(got, expected, strict=True):
        new = {name for name in ours if name.startswith(KEEPS_UP)}
        values = {name: value for name, value in ours.items() if name.startswith(COMPARED) and name not in new}
        assert values == {name: value for name, value in theirs.items() if name.startswith(COMPARED)}
    assert torch.equal(track.rewards, expected_track.rewards) and track.sample_ids == expected_track.sample_ids
    assert 0 < got[0]["reward/shapes/utilisation"] <= 1 and got[0]["reward/async/latency_s/max"] > 0


def test_async_rewards_train_alike_in_one_process(recipe, tmp_path):
    compare(
        recipe,
        lambda name: LocalRuntime(functools.partial(build_components, run_of(recipe(*SHARED[name])), str(tmp_path))),
        tmp_path,
    )


@pytest.mark.ray
@pytest.mark.matrix
def test_async_rewards_train_alike_on_two_ray_workers(recipe, on_two_workers, tmp_path):
    compare(recipe, on_two_workers, tmp_path)
