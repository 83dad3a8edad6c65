"""Every transition of the receiving side of a weight push."""

import pytest
import torch

from unirl.rollout.engine.push import CompletePush, PushReceiver, refuse
from unirl.types.deltas import element_delta
from unirl.types.errors import WeightSyncError
from unirl.types.weights import WeightBucket, weight_spec

WEIGHTS = {"a.weight": torch.zeros(2, 3), "b.weight": torch.ones(3)}


def bucket(tensors, version=4):
    return WeightBucket(version, tensors, tuple(weight_spec(name, tensor) for name, tensor in tensors.items()))


def part(name, version=4):
    return bucket({name: WEIGHTS[name]}, version)


@pytest.fixture
def receiver():
    return PushReceiver({name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}, "torch.float32", 2)


@pytest.fixture
def announced(receiver):
    receiver.announce(4, bucket(WEIGHTS).specs)
    return receiver


def receive(receiver, *parts):
    for each in parts:
        with receiver.receiving(each):
            pass


def load(receiver, version=4):
    receiver.announce(version, bucket(WEIGHTS).specs)
    receive(receiver, bucket(WEIGHTS, version))
    with receiver.loading(receiver.finish(version).policy_version):
        pass


def test_a_whole_push_becomes_the_new_version_only_when_it_is_loaded(announced):
    receive(announced, part("b.weight"), part("a.weight"))
    assert announced.finish(4) == CompletePush(policy_version=4, num_tensors=2, num_bytes=36)
    with announced.loading(4):
        assert announced.policy_version == 2
    assert announced.policy_version == 4
    announced.require_usable()


def test_a_push_that_is_taken_bucket_by_bucket_leaves_no_policy_until_it_ends(announced):
    for each in (part("b.weight"), part("a.weight")):
        with announced.taking(4, each.specs, each.num_bytes):
            pass
        with pytest.raises(WeightSyncError, match="the push of version 4, loaded bucket by bucket, did not end"):
            announced.require_usable()
    assert announced.finish(4) == CompletePush(policy_version=4, num_tensors=2, num_bytes=36)
    with announced.loading(4):
        pass
    announced.require_usable()


def test_a_bucket_that_is_taken_must_be_announced_and_come_once(announced):
    own, other = part("a.weight"), part("a.weight", version=5)
    with pytest.raises(WeightSyncError, match="version 4 was announced, the bucket is of version 5"):
        with announced.taking(5, other.specs, 0):
            raise AssertionError
    announced.require_usable()  # nothing was loaded
    with announced.taking(4, own.specs, own.num_bytes):
        pass
    with pytest.raises(WeightSyncError, match="twice: a.weight"):
        with announced.taking(4, own.specs, 0):
            raise AssertionError
    with pytest.raises(WeightSyncError, match="missing: b.weight"):
        announced.finish(4)


def test_nothing_is_received_or_finished_before_it_is_announced(receiver):
    with pytest.raises(WeightSyncError, match="no push is under way"):
        receive(receiver, part("a.weight"))
    with pytest.raises(WeightSyncError, match="no push is under way"):
        receiver.finish(4)


def test_an_older_version_is_refused_and_the_same_one_is_taken_again(receiver):
    load(receiver)
    load(receiver)
    with pytest.raises(WeightSyncError, match="version 3 of the policy is older than the engine's version 4"):
        receiver.announce(3, bucket(WEIGHTS).specs)


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ({"a.weight": torch.zeros(2, 3)}, r"missing: b.weight \[3\]"),
        ({**WEIGHTS, "c.weight": torch.ones(1)}, r"unknown: c.weight \[1\]"),
        ({**WEIGHTS, "b.weight": torch.ones(4)}, r"shape: b.weight is \[4\], expected \[3\]"),
        ({**WEIGHTS, "b.weight": torch.ones(3).half()}, "dtype: b.weight is torch.float16, expected torch.float32"),
    ],
)
def test_an_announcement_that_is_not_the_checkpoint_opens_no_push(receiver, tensors, line):
    with pytest.raises(WeightSyncError, match=rf"the weights do not fit the engine's model \(1\):\s+{line}"):
        receiver.announce(4, bucket(tensors).specs)
    with pytest.raises(WeightSyncError, match="no push is under way"):
        receiver.finish(4)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (bucket({"c.weight": torch.ones(1)}), r"not what was announced \(1\):\s+unknown: c.weight"),
        (bucket({"a.weight": torch.zeros(3, 2)}), r"shape: a.weight is \[3, 2\], expected \[2, 3\]"),
        (WeightBucket(4, {"a.weight": torch.ones(2, 3)}, part("a.weight").specs), "arrived changed"),
        (part("a.weight", version=3), "version 4 was announced, the bucket is of version 3"),
    ],
)
def test_a_wrong_bucket_does_not_count_and_the_right_one_may_follow(announced, wrong, text):
    with pytest.raises(WeightSyncError, match=text):
        receive(announced, wrong)
    receive(announced, part("a.weight"), part("b.weight"))
    assert announced.finish(4).num_tensors == 2


def test_a_tensor_that_comes_twice_is_refused(announced):
    receive(announced, part("a.weight"))
    with pytest.raises(WeightSyncError, match="twice: a.weight"):
        receive(announced, part("a.weight"))


def test_a_bucket_that_could_not_be_kept_has_not_arrived(announced):
    with pytest.raises(OSError, match="disk is full"), announced.receiving(bucket(WEIGHTS)):
        raise OSError("disk is full")
    with pytest.raises(WeightSyncError, match=r"did not arrive \(2\):\s+missing: a.weight"):
        announced.finish(4)


@pytest.mark.parametrize(
    ("parts", "version", "text"),
    [
        (["a.weight"], 4, "missing: b.weight"),
        (["a.weight", "b.weight"], 5, "version 4 was announced, 5 is finished"),
    ],
)
def test_a_push_that_cannot_be_finished_is_dropped(announced, parts, version, text):
    receive(announced, *map(part, parts))
    with pytest.raises(WeightSyncError, match=text):
        announced.finish(version)
    with pytest.raises(WeightSyncError, match="no push is under way"):
        receive(announced, part("b.weight"))
    announced.require_usable()
    assert announced.policy_version == 2


def test_a_new_announcement_drops_what_arrived_before_even_where_it_is_refused(announced):
    receive(announced, part("a.weight"))
    announced.announce(4, bucket(WEIGHTS).specs)
    with pytest.raises(WeightSyncError, match=r"did not arrive \(2\)"):
        announced.finish(4)
    announced.announce(4, bucket(WEIGHTS).specs)
    with pytest.raises(WeightSyncError, match="older"):
        announced.announce(1, bucket(WEIGHTS).specs)
    with pytest.raises(WeightSyncError, match="no push is under way"):
        receive(announced, part("a.weight"))


def test_weights_whose_loading_failed_are_refused_until_a_push_succeeds(receiver):
    with pytest.raises(RuntimeError, match="out of memory"), receiver.loading(4):
        raise RuntimeError("out of memory")
    assert receiver.policy_version == 2
    with pytest.raises(WeightSyncError, match="loading the weights of version 4 did not end well.*push them again"):
        receiver.require_usable()
    load(receiver)
    receiver.require_usable()


def test_weights_that_were_freed_are_refused_until_a_push_succeeds(receiver):
    receiver.invalidate("its weights were freed by sleep")
    with pytest.raises(WeightSyncError, match="cannot generate: its weights were freed by sleep"):
        receiver.require_usable()
    load(receiver)
    receiver.require_usable()


def test_an_adapter_fits_the_layers_its_rank_and_its_checksums(receiver):
    factors = {"a.lora_A.weight": torch.ones(1, 3), "a.lora_B.weight": torch.ones(2, 1)}
    receiver.check_adapter(bucket(factors), rank=1)
    with pytest.raises(WeightSyncError, match=r"lora_A.weight is \[1, 3\], expected \[2, 3\]"):
        receiver.check_adapter(bucket(factors), rank=2)
    with pytest.raises(WeightSyncError, match="version 1 of the policy is older"):
        receiver.check_adapter(bucket(factors, version=1), rank=1)
    changed = {name: 2 * tensor for name, tensor in factors.items()}
    with pytest.raises(WeightSyncError, match="arrived changed"):
        receiver.check_adapter(WeightBucket(4, changed, bucket(factors).specs), rank=1)


def test_a_long_list_is_cut_and_counted():
    refuse("nothing is wrong", [])
    with pytest.raises(WeightSyncError, match=r"^much is wrong \(23\):\n  line 0\n(.*\n)+  and 3 more$"):
        refuse("much is wrong", [f"line {i}" for i in range(23)])


# Pushes of what changed


def changed_elements(tensor, since, version=5):
    """A bucket with the elements of `b.weight` alone that differ."""
    delta = element_delta(since, tensor).data
    assert delta is not None
    return WeightBucket(version, {"b.weight": delta}, (), (weight_spec("b.weight", tensor),), base_version=4)


def test_changed_elements_count_where_they_make_the_tensor_of_the_engines_own(receiver):
    load(receiver)
    receiver.announce(5, bucket(WEIGHTS).specs)
    receive(receiver, part("a.weight", version=5))
    elements = changed_elements(torch.tensor([1.0, 2.0, 1.0]), since=WEIGHTS["b.weight"])
    for wrong, text in (
        ({**WEIGHTS, "b.weight": torch.zeros(3)}, r"does not have what was left out .*\n  changed: b.weight"),
        (
            {**WEIGHTS, "b.weight": torch.ones(1)},
            "b.weight arrived changed: .* are no delta of a tensor of 1 torch",
        ),
    ):
        with pytest.raises(WeightSyncError, match=text), receiver.receiving(elements, wrong):
            pass
    with receiver.receiving(elements, WEIGHTS):
        pass
    assert receiver.finish(5) == CompletePush(policy_version=5, num_tensors=2, num_bytes=24 + elements.num_bytes)


def left_out(name, tensor, version=5, base=4):
    return WeightBucket(version, {}, (), (weight_spec(name, tensor),), base_version=base)


def test_what_was_left_out_counts_where_the_engine_has_it(receiver):
    load(receiver)
    receiver.announce(5, bucket(WEIGHTS).specs)
    receive(receiver, part("a.weight", version=5))
    with receiver.receiving(left_out("b.weight", WEIGHTS["b.weight"]), WEIGHTS):
        pass
    assert receiver.finish(5) == CompletePush(policy_version=5, num_tensors=2, num_bytes=24)


@pytest.mark.parametrize(
    ("kept", "own", "text"),
    [
        (left_out("b.weight", torch.zeros(3)), WEIGHTS, r"does not have what was left out .*\n  changed: b.weight"),
        (left_out("c.weight", torch.ones(1)), WEIGHTS, "unknown: c.weight"),
        (
            left_out("b.weight", WEIGHTS["b.weight"], base=3),
            WEIGHTS,
            "brings what changed since version 3, but the engine has version 4; push again, and all is sent",
        ),
        (left_out("a.weight", WEIGHTS["a.weight"]), WEIGHTS, "twice: a.weight"),
        (left_out("b.weight", torch.ones(4)), WEIGHTS, r"shape: b.weight is \[4\], expected \[3\]"),
    ],
)
def test_what_was_left_out_wrongly_is_refused(receiver, kept, own, text):
    load(receiver)
    receiver.announce(5, bucket(WEIGHTS).specs)
    receive(receiver, part("a.weight", version=5))
    with pytest.raises(WeightSyncError, match=text), receiver.receiving(kept, own):
        pass
    with pytest.raises(WeightSyncError, match="missing: b.weight"):
        receiver.finish(5)
