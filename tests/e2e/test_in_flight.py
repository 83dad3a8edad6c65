"""Asynchronous runs that are stopped and resumed go on with what was in flight."""

import json
import math
import shutil

import pytest
import stopping
from small import SMALL, SMALL_STAGES
from test_schedules import MACHINE, SMALL_TEXT

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve
from unirl.trainer.loops.order import REQUESTS
from unirl.types.segments import LatentSegment
from unirl.types.storage import load_rollout

AHEAD = ["schedule.kind=async", "schedule.max_staleness=2", "save.interval=1", "save.keep_last=9"]
PARTIAL = [
    *("parts/engine=text_replica_cpu", *SMALL_TEXT, "num_rollouts=4", "stack.num_updates_per_batch=1"),
    *("engine.forward_batch_size=1", "parts/correction=truncated", "schedule.on_push=retract", *AHEAD),
]

STAGES = [
    *("parts/engine@policies.writer=text_replica_cpu", "policies.writer.engine.forward_batch_size=1", *SMALL_STAGES),
    "policies.painter.engine._target_=unirl.rollout.engine.replica.engine.ReplicaRolloutEngine",
    "policies.painter.engine.dtype=fp32",
    "policies.painter.sync={_target_:unirl.distributed.weight_sync.full.FullWeightSync,dtype:fp32}",
    "policies.writer.algorithm.rollout_correction._target_=unirl.algorithms.rollout_correction.RolloutCorrection",
    *("policies.writer.sampling.samples_per_prompt=8", "policies.painter.sampling.samples_per_prompt=1"),
    *("eval=null", "save.best_metric=reward", "media_interval=0", "schedule.on_push=retract", *AHEAD),
]
"""A writer and a painter with copies of their models, which a push cuts short; both learn."""


def run(run_dir, name, words, **how):
    """Step -> metrics that do not measure the machine."""
    register_resolvers()
    _, records = stopping.run(resolve(compose(name, words)), run_dir, **how)
    return {
        step: {
            key: value for key, value in stopping.comparable(own).items() if not any(part in key for part in MACHINE)
        }
        for step, own in records.items()
    }


SERVED_STAGES = [
    *STAGES,
    *("runtime=ray", "num_devices=4", "cluster.cpus_per_device=.4", "stages.text.pool=writers"),
    *("stages.image.pool=painters", "reward.pool=judge"),
]
"""The writer, the painter and the reward on separate devices."""
POOLS = {
    "even": "writers:{devices:1},painters:{devices:2}",
    "served": "writers:{devices:1,served:true,samples_per_call:8},painters:{devices:2,served:true,samples_per_call:8}",
    "mixed": "writers:{devices:1,served:true,samples_per_call:8},painters:{devices:2}",
}


def killed_after(run_dir, step):
    """What is left of a run that was killed after it saved this step."""
    left = run_dir.with_name(f"{run_dir.name}-killed")
    shutil.copytree(run_dir, left, dirs_exist_ok=True)
    for path in (left / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (left / "summary.json").unlink()
    state = json.loads((left / "checkpoints" / f"step-{step:06d}" / "driver_state.json").read_text())
    return left, state["in_flight"]["requests"]


def killed_with(run_dir, is_begun, steps):
    """`killed_after` the first of some steps at which a request in flight was begun, and that request."""
    for step in steps:
        left, requests = killed_after(run_dir, step)
        if begun := [each for each in requests if is_begun(each)]:
            return left, begun[0], step
    raise AssertionError(f"no push cut anything short before the steps {list(steps)}")


def is_begun(request):
    """True if the engine had made a part of it."""
    return request["stage"] == "begun"


def has_calls(request):
    """True if members of a pool had made some of its calls, or parts of them."""
    return request["stage"] == "asked" and any(leg["calls"] for legs in request["pools"].values() for leg in legs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("worlds/shapes/replica", [*SMALL, "num_rollouts=5", "parts/correction=truncated_steps"]),
        ("worlds/arithmetic/grpo", ["parts/engine=text_replica_cpu", *SMALL_TEXT, "parts/correction=truncated"]),
    ],
    ids=["images", "texts"],
)
def test_a_run_that_was_killed_has_the_bits_of_one_that_was_not(tmp_path, name, words):
    words = [*words, *AHEAD, "schedule.groups_per_request=1", "num_rollouts=5"]
    whole = run(tmp_path / "whole", name, words)
    left, requests = killed_after(tmp_path / "whole", 2)
    assert requests and {each["version"] for each in requests} <= {0, 1}
    again = [*words, "resume=auto", f"schedule.replay={tmp_path / 'whole' / REQUESTS}"]
    found = run(left, name, again)
    for metrics in (found[3], whole[3]):
        metrics.pop("sync/changed_tensors", None)  # the engine is new, and takes all
    assert found == {step: metrics for step, metrics in whole.items() if step > 2}


def test_episodes_that_were_cut_short_go_on_in_the_run_that_resumes(tmp_path):
    whole = run(tmp_path / "whole", "worlds/tools/grpo", PARTIAL)
    left, begun, step = killed_with(tmp_path / "whole", is_begun, (2, 1, 3))
    found = run(left, "worlds/tools/grpo", [*PARTIAL, "resume=auto"])
    assert found.keys() == set(range(step + 1, 5)) and whole.keys() > found.keys()
    lines = [json.loads(line) for line in (left / REQUESTS).read_text().splitlines()]
    assert [line["resumed"] for line in lines if line["request"] == begun["number"] and line.get("resumed")]
    assert not any("rollout/begun_again" in key for key in found[step + 1])


def test_denoising_that_was_cut_short_goes_on_at_its_step_in_the_run_that_resumes(tmp_path):
    words = [*SMALL, "parts/correction=truncated_steps", "schedule.on_push=retract", *AHEAD, "eval=null"]
    words += ["save.best_metric=reward", "algorithm.step_fraction=.05", "sampling.num_inference_steps=32"]
    words += ["num_rollouts=4", "stack.num_updates_per_batch=1", "sampling.samples_per_prompt=8"]
    whole = run(tmp_path / "whole", "worlds/shapes/replica", words)
    left, begun, _ = killed_with(tmp_path / "whole", is_begun, (1, 2, 3))
    state = max((left / "checkpoints").glob("step-*")) / "in_flight"
    resp, _ = load_rollout(next(state.glob(f"*request-{begun['number']:06d}-*")))
    segment = resp.root_track().segment
    assert isinstance(segment, LatentSegment) and segment.unfinished is not None
    reached = segment.reached.tolist()
    assert max(reached) > 0 and min(reached) < segment.num_steps and resp.root_track().decoded is None
    found = run(left, "worlds/shapes/replica", [*words, "resume=auto"])
    assert max(found) == max(whole) == 4 and all(math.isfinite(own["reward/mean"]) for own in found.values())
    lines = [json.loads(line) for line in (left / REQUESTS).read_text().splitlines()]
    assert [line["version"] for line in lines if line["request"] == begun["number"] and line.get("resumed")]


def test_what_a_push_left_of_several_stages_goes_on_in_the_run_that_resumes(tmp_path):
    words = [*STAGES, "num_rollouts=3", "policies.painter.engine.forward_batch_size=1"]
    whole = run(tmp_path / "whole", "worlds/phrases/both", words)
    left, begun, step = killed_with(tmp_path / "whole", is_begun, (1, 2))
    state = left / "checkpoints" / f"step-{step:06d}" / "in_flight"
    resp, _ = load_rollout(next(state.glob(f"*request-{begun['number']:06d}-*")))
    assert "text" in resp.tracks and not (resp.has_all_of("text") and resp.has_all_of("image"))
    found = run(left, "worlds/phrases/both", [*words, "resume=auto"])
    assert set(found) | set(whole) == {1, 2, 3} and max(found) == 3
    assert all(math.isfinite(own["image/reward/mean"]) for own in found.values())
    lines = [json.loads(line) for line in (left / REQUESTS).read_text().splitlines()]
    assert {line["request"] for line in lines} == {0, 1, 2}
    assert [line["version"] for line in lines if line["request"] == begun["number"] and line.get("resumed")]
    for folder in (tmp_path / "whole", left):  # each prompt was asked for once, and is trained on
        state = json.loads((folder / "checkpoints" / "step-000003" / "driver_state.json").read_text())
        assert (state["data"]["position"], state["num_samples"]) == (6, 6 * 8) and not state["in_flight"]["requests"]


@pytest.mark.matrix
@pytest.mark.usefixtures("ray_of_two_cores")
def test_calls_of_a_served_pool_go_on_in_the_run_that_resumes(tmp_path):
    pools = "pools={train:{devices:0},rollout:{devices:0-1,served:true,samples_per_call:4},reward:{devices:1}}"
    words = [*PARTIAL, "schedule.kind=hybrid", "runtime=ray", "num_devices=2", f"+{pools}"]
    whole = run(tmp_path / "whole", "worlds/tools/grpo", words)
    left, begun, step = killed_with(tmp_path / "whole", has_calls, (2, 1, 3))
    ((leg, calls),) = [(leg, leg["calls"]) for leg in begun["pools"]["rollout"]]
    name = f"step-{step:06d}-request-{begun['number']:06d}-rollout-0"
    folder = left / "checkpoints" / f"step-{step:06d}" / "in_flight"
    assert sorted(path.name for path in folder.glob(f"{name}-*")) == [f"{name}-{c:05d}.safetensors" for c in calls]
    found = run(left, "worlds/tools/grpo", [*words, "resume=auto"])
    assert found.keys() == set(range(step + 1, 5)) and whole.keys() > found.keys()
    versions = begun["began"]["versions"]["rollout"]
    last = [json.loads(line) for line in (left / REQUESTS).read_text().splitlines()]
    (line,) = [line for line in last if line["request"] == begun["number"]][-1:]
    kept = line.get("calls", {"rollout": [line["version"]] * len(leg["bounds"])})["rollout"]
    assert [kept[call] for call in calls] == [versions[call][0] for call in calls]


@pytest.mark.matrix
@pytest.mark.usefixtures("ray_of_two_cores")
@pytest.mark.parametrize(
    "pools",
    [pytest.param(own, id=name, marks=() if name == "mixed" else pytest.mark.nightly) for name, own in POOLS.items()],
)
def test_what_a_push_left_in_separate_pools_goes_on_there_and_in_the_run_that_resumes(tmp_path, pools):
    words = [*SERVED_STAGES, f"+pools={{train:{{devices:0}},{pools},judge:{{devices:3}}}}", "num_rollouts=4"]
    words += ["policies.painter.sampling.num_inference_steps=32"]  # images take longer than training: pushes cut them
    run(tmp_path / "whole", "worlds/phrases/both", words)
    lines = [json.loads(line) for line in (tmp_path / "whole" / REQUESTS).read_text().splitlines()]
    assert any(line.get("resumed") for line in lines)
    left, requests = killed_after(tmp_path / "whole", 2)
    assert requests
    found = run(left, "worlds/phrases/both", [*words, "resume=auto"])
    assert found.keys() == {3, 4}
    for folder in (tmp_path / "whole", left):
        state = json.loads((folder / "checkpoints" / "step-000004" / "driver_state.json").read_text())
        assert (state["data"]["position"], state["num_samples"]) == (8, 8 * 8) and not state["in_flight"]["requests"]
