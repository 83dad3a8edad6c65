"""Schedules on the packaged recipes: without staleness they have the bits of a synchronous run."""

import pytest
import stopping
from small import SMALL, SMALL_REDRAW, SMALL_STAGES, push_to_copies

from unirl.app.environment import register_resolvers
from unirl.config.recipes import compose, resolve

SMALL_TEXT = [
    "batch_size=4",
    "sampling.samples_per_prompt=4",
    "stack.micro_batch_size=8",
    "engine.forward_batch_size=8",
    "num_rollouts=3",
    "eval.num_samples=8",
    "eval.batch_size=8",
    "samples.per_evaluation=4",
    "guardrails.action=off",
]
MACHINE = ("sync/seconds", "schedule/", "/utilisation")


def run(run_dir, name, words, has_copies):
    """Step -> metrics that do not measure the machine."""
    register_resolvers()
    recipe = resolve(compose(name, words))
    if has_copies:
        push_to_copies(recipe)
    _, records = stopping.run(recipe, run_dir)
    return {
        step: {
            key: value for key, value in stopping.comparable(own).items() if not any(part in key for part in MACHINE)
        }
        for step, own in records.items()
    }


ONE_UPDATE = {
    "worlds/shapes/replica": ["stack.num_updates_per_batch=1"],
    "worlds/arithmetic/grpo": ["stack.num_updates_per_batch=1"],
    "worlds/phrases/both": [
        "policies.writer.stack.num_updates_per_batch=1",
        "policies.painter.stack.num_updates_per_batch=1",
    ],
}


@pytest.mark.parametrize(
    ("name", "words", "has_copies"),
    [
        ("worlds/shapes/replica", [*SMALL, "num_rollouts=3"], False),
        ("worlds/arithmetic/grpo", ["parts/engine=text_replica_cpu", *SMALL_TEXT], False),
        ("worlds/phrases/both", SMALL_STAGES, True),
    ],
    ids=["images", "texts", "two-stages"],
)
def test_a_pipelined_run_trains_as_one_that_waits_for_all_requests(tmp_path, name, words, has_copies):
    words = [*words, *ONE_UPDATE[name], "schedule.groups_per_request=1"]
    whole = ["schedule.kind=async", "schedule.max_staleness=0"]
    expected = run(tmp_path / "whole", name, [*words, *whole], has_copies)
    found = run(tmp_path / "parts", name, [*words, "schedule.kind=pipelined"], has_copies)
    assert found.keys() == expected.keys() and len(found) >= 2
    for step, metrics in expected.items():
        assert found[step].keys() == metrics.keys()
        for key, value in metrics.items():
            # Sums of the same terms: the same bits, but for texts, whose number of tokens is known only in the end.
            close = value if name == "worlds/shapes/replica" else pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True)
            assert found[step][key] == close, (step, key)


@pytest.mark.parametrize(
    ("name", "words", "has_copies"),
    [
        ("worlds/shapes/replica", [*SMALL, "num_rollouts=3"], False),
        ("worlds/arithmetic/grpo", ["parts/engine=text_replica_cpu", *SMALL_TEXT], False),
        ("worlds/phrases/both", SMALL_STAGES, True),
        ("worlds/phrases/redraw", SMALL_REDRAW, True),
    ],
    ids=["images", "texts", "two-stages", "three-stages"],
)
def test_without_staleness_a_run_has_the_bits_of_the_synchronous_one(tmp_path, name, words, has_copies):
    sync = run(tmp_path / "sync", name, words, has_copies)
    ahead = ["schedule.kind=async", "schedule.max_staleness=0"]
    assert run(tmp_path / "async", name, [*words, *ahead], has_copies) == sync and len(sync) >= 2
