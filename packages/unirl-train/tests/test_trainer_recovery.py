"""What a run may be continued by."""

import pytest

from unirl.trainer.resuming import (
    MAX_SHOWN,
    changed_settings,
    check_same_algorithm,
    described,
    digests_of,
    refuse_changes,
)
from unirl.types.errors import CheckpointError


def test_another_algorithm_does_not_continue_a_run():
    saved = {"algorithm": {"_target_": "a.First", "beta": 1.0}}
    check_same_algorithm(saved, {"algorithm": {"_target_": "a.First", "beta": 2.0}})
    check_same_algorithm({}, {})
    with pytest.raises(CheckpointError, match=r"saved by algorithm a\.First, this recipe has a\.Second"):
        check_same_algorithm(saved, {"algorithm": {"_target_": "a.Second"}})


SAVED = {
    "seed": 1,
    "reward": {"scorers": {"a": {"_target_": "x.A"}}, "weights": {"a": 1.0}, "is_async": False},
    "data": {"_target_": "x.Data", "path": "here/prompts.txt", "shuffle": True},
    "sampling": {"num_inference_steps": 8},
    "optimizer": {"learning_rate": 1e-4},
}


@pytest.mark.parametrize(
    ("section", "value", "changes"),
    [
        ("seed", 2, {"seed": [1, 2]}),
        ("advantages", {"_target_": "x.Statistics"}, {"advantages._target_": [None, "x.Statistics"]}),
        ("sampling", {"num_inference_steps": 4}, {"sampling.num_inference_steps": [8, 4]}),
        ("data", {**SAVED["data"], "shuffle": False}, {"data.shuffle": [True, False]}),
        ("data", {**SAVED["data"], "path": "/elsewhere/prompts.txt"}, {}),
        ("reward", {**SAVED["reward"], "is_async": True}, {}),
        (
            "reward",
            {"scorers": {"b": {"_target_": "x.B"}}, "weights": {"a": 1.0}},
            {"reward.scorers.a._target_": ["x.A", None], "reward.scorers.b._target_": [None, "x.B"]},
        ),
        ("optimizer", {"learning_rate": 1e-5}, {}),
        ("eval", None, {}),
    ],
)
def test_what_is_sampled_and_how_it_is_judged_may_not_change_silently(section, value, changes):
    own = {**SAVED, section: value}
    found = changed_settings(SAVED, own)
    assert {key: pair for key, pair in found.items() if key != "reward.is_async"} == changes
    refuse_changes(found, {**own, "resume_changes": "allow"})
    if changes:
        key, (before, now) = next(iter(changes.items()))
        with pytest.raises(CheckpointError, match="set resume_changes=allow") as caught:
            refuse_changes(found, own)
        assert described({key: [before, now]})[0] in str(caught.value)


def test_of_many_changes_the_first_are_shown():
    lines = described({f"sampling.x{i}": [i, None] for i in range(MAX_SHOWN + 3)})
    assert lines[0] == "sampling.x0: 0 -> null" and lines[-1] == "and 3 more" and len(lines) == MAX_SHOWN + 1


def with_key(value):
    """A recipe whose reward has a key, and as it is shown."""
    shown = "${oc.env:KEY}"
    return tuple({**SAVED, "reward": {"scorers": {"a": {"_target_": "x.A", "key": key}}}} for key in (value, shown))


def test_a_value_that_is_not_shown_is_compared_by_its_digest():
    saved, shown = with_key("secret")
    digests = digests_of(saved, shown)
    assert list(digests) == ["reward.scorers.a.key"] and "secret" not in str(digests)
    same, other = digests_of(*with_key("secret")), digests_of(*with_key("another"))
    assert changed_settings(shown, shown, digests, same) == {}
    changes = changed_settings(shown, shown, digests, other)
    assert described(changes) == ['reward.scorers.a.key: "${oc.env:KEY}" -> "${oc.env:KEY}, with another value"']
    for written in ((saved, shown, None, digests), (shown, saved, digests, None)):  # in one of the recipes as it is
        assert changed_settings(*written) == {}
    assert list(changed_settings(with_key("another")[0], shown, None, digests)) == ["reward.scorers.a.key"]
