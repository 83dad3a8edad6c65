"""Stages, what trains and the reward on separate devices of two nodes give the numbers of one worker."""

import functools
import json

import pytest
import stopping
from small import SMALL_STAGES, push_to_copies
from stopping import comparable

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve


def pushed(*overrides):
    """The recipe of the phrases world with a few samples, whose engines have copies of the models in float32."""
    register_resolvers()
    recipe = resolve(
        compose("worlds/phrases/both", [*SMALL_STAGES, "eval=null", "save.best_metric=reward", *overrides])
    )
    push_to_copies(recipe)
    return recipe


SERVED = {"writer": {"served": True, "samples_per_call": 4}, "painter": {"served": True, "samples_per_call": 2}}
"""Calls of as many texts and images as a forward of one worker has."""


def ahead(recipe, folder):
    """The same with samples one version old, in a given order: texts are corrected, images need it not."""
    order = folder / "order.jsonl"
    order.write_text("".join(json.dumps({"request": n, "version": max(0, n - 1)}) + "\n" for n in range(4)))
    correction = "unirl.algorithms.rollout_correction.RolloutCorrection"
    recipe["policies"]["writer"]["algorithm"]["rollout_correction"] = {"_target_": correction}
    return recipe | {
        "num_rollouts": 4,
        "schedule": {"kind": "async", "max_staleness": 1, "replay": str(order)},
    }


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("served", "is_ahead"),
    [
        pytest.param({}, False, id="even", marks=pytest.mark.nightly),
        pytest.param(SERVED, False, id="served", marks=pytest.mark.nightly),
        pytest.param(SERVED, True, id="served, ahead"),
    ],
)
def test_writer_painter_and_reward_on_three_pools_of_two_nodes_train_as_on_one_worker(tmp_path, served, is_ahead):
    # As many images in a forward on one worker and on two: the painter's pool lies on both nodes.
    alike = ("media_interval=0", "policies.painter.engine.forward_batch_size=4")
    scheduled = functools.partial(ahead, folder=tmp_path) if is_ahead else lambda recipe: recipe
    _, together = stopping.run(scheduled(pushed(*alike)), tmp_path / "together")
    pools = {"train": "0", "writer": "1", "painter": "2-3", "judge": "4-5"}
    recipe = pushed(*alike) | {"runtime": "ray", "num_devices": 6}
    recipe["pools"] = {name: {"devices": devices, **served.get(name, {})} for name, devices in pools.items()}
    recipe["stages"]["text"]["pool"], recipe["stages"]["image"]["pool"] = "writer", "painter"
    recipe["reward"]["pool"] = "judge"
    recipe["cluster"]["num_nodes"] = 2
    apart = stopping.run_on_nodes(scheduled(recipe), tmp_path / "apart")
    own = {step: comparable(metrics) for step, metrics in together.items()}
    # A gap is measured by a replay, whose rows are other than a rollout's: products may take other kernels.
    of_machine = ("sync/seconds", "utilisation", "sync/logprob_gap_max", "sync/logprob_gap_mean")
    of_machine += (
        "schedule/requests_waiting",
        "schedule/concurrency",
        "schedule/wall_s",
        "idle_s",
        "schedule/push_wait_s",
    )
    for step, metrics in own.items():
        found = apart[step]
        assert set(found) == set(metrics)
        assert found["writer/sync/logprob_gap_max"] < 1e-4 and found["painter/sync/logprob_gap_max"] < 1e-6
        different = {
            name: (value, found[name])
            for name, value in metrics.items()
            if found[name] != value and not name.endswith(of_machine)
        }
        assert not different
    if is_ahead:
        assert [own[step]["schedule/lag/oldest"] for step in sorted(own) if step] == [0, 1, 1, 1]
