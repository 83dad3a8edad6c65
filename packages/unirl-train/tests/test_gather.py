"""Samples of held values become a new held value, and futures, without a driver in between."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_fakes import InProcess, build_pairs, build_source, check_pairs, grown, names, numbered

from unirl.distributed.held import Held
from unirl.distributed.runtime import LocalRuntime
from unirl.trainer.track_advantages import trained_tokens
from unirl.types.errors import ConfigError, ContractError
from unirl.types.rollout import RolloutResp, RolloutTrack
from unirl.types.segments import TextSegment


def test_trained_tokens_are_counted_sample_by_sample_over_the_workers():
    tokens = [torch.zeros(length, dtype=torch.int64) for length in (3, 0, 2, 4)]
    masks = [torch.tensor(mask, dtype=torch.bool) for mask in ([1, 0, 1], [], [0, 0], [1, 1, 1, 1])]
    text = RolloutTrack(sample_ids=names("a", 4), segment=TextSegment.pack(tokens=tokens, loss_mask=masks))
    held = InProcess(build_source, 2).hold(RolloutResp(tracks={"text": text, "image": text.fork("text", "image", 1)}))
    assert trained_tokens(held, "text").tolist() == [2, 0, 0, 4]
    assert trained_tokens(held, "image").tolist() == [1, 1, 1, 1]


def joined(sources: list[tuple[Held, list[int]]]) -> RolloutResp:
    """What the driver would make of the values."""
    return RolloutResp.concat([held.fetch().select(rows) for held, rows in sources if rows])


@pytest.mark.parametrize(("neighbours", "pairs"), [(True, [[0, 1], [2, 3]]), (False, [[0, 2], [1, 3]])])
def test_workers_at_one_place_get_the_same_shard(neighbours: bool, pairs: list[list[int]]) -> None:
    check_pairs(InProcess(functools.partial(build_pairs, neighbours=neighbours), 4), pairs)


@st.composite
def gathers(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, list[int]]]]:
    """(workers that gather, (workers, samples, wanted rows) of each source); 0 workers: those that gather."""
    target = draw(st.integers(1, 4))
    sources = []
    for _ in range(draw(st.integers(1, 3))):
        workers = draw(st.sampled_from([0, 1, 2, 3]))
        size = (workers or target) * draw(st.integers(1, 4))
        sources.append((workers, size, draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))))
    surplus = sum(len(rows) for _, _, rows in sources) % target
    for _, _, rows in reversed(sources):
        while surplus and rows:
            rows.pop()
            surplus -= 1
    return target, sources


@given(gathers())
def test_gathering_equals_holding_what_the_driver_selects(case) -> None:
    num_workers, described = case
    target = InProcess(build_source, num_workers)
    sources = []
    for number, (workers, size, rows) in enumerate(described):
        runtime = InProcess(build_source, workers) if workers else target
        held = runtime.hold(grown(names("abc"[number], size), offset=100.0 * number))
        sources.append((held, rows))
    if not any(rows for _, rows in sources):
        with pytest.raises(ContractError, match="needs at least one"):
            target.gather(sources)
        return
    expected = target.hold(joined(sources))
    found = target.gather(sources)
    for ours, theirs in zip(found.map(lambda share: share), expected.map(lambda share: share), strict=True):
        assert ours.equals(theirs)
    assert found.meta.equals(expected.meta)
    found.release()
    expected.release()
    assert target.num_held() == sum(held.runtime is target for held, _ in sources)


def test_one_process_gathers_what_it_holds_and_what_another_holds() -> None:
    with LocalRuntime(build_source) as here, LocalRuntime(build_source) as there:
        mine, theirs = here.hold(grown(names("a", 4))), there.hold(grown(names("b", 3)))
        found = here.gather([(mine, [3, 0]), (theirs, [2])])
        assert found.meta.root_track().sample_ids == ["a3", "a0", "b2"]
        assert found.fetch().equals(joined([(mine, [3, 0]), (theirs, [2])]))
        found.attach("text", advantages=torch.zeros(3))
        assert mine.fetch().tracks["text"].advantages is None


def test_what_cannot_be_gathered_is_refused_with_the_values() -> None:
    runtime = InProcess(build_source, 2)
    held = runtime.hold(grown(names("a", 4)))
    with pytest.raises(ContractError, match="row 4 of held value 0, which has 4 samples"):
        runtime.gather([(held, [0, 4])])
    with pytest.raises(ContractError, match=r"samples \['a1'\] are chosen more than once"):
        runtime.gather([(held, [0, 1]), (held, [1, 2])])
    with pytest.raises(ContractError, match="3 samples, which do not divide over 2 devices"):
        runtime.gather([(held, [0, 1, 2])])
    with pytest.raises(ContractError, match="disagree|different keys|present in"):
        runtime.gather([(held, [0]), (runtime.hold(RolloutResp(tracks={"text": numbered(["x", "y"])})), [1])])
    assert runtime.num_held() == 2
    held.release()
    with pytest.raises(ContractError, match="released before it was used"):
        runtime.gather([(held, [0, 1])])


# Futures -------------------------------------------------------------------------------------------------------------


def test_a_local_future_computes_once_when_it_is_asked() -> None:
    with LocalRuntime(build_source) as runtime:
        source = runtime.role("source")
        future = source.submit.count_on_zero()
        assert source.zero_calls() == [0]
        assert [future.result(), future.result()] == [1, 1]
        assert source.zero_calls() == [1]
        held = source.submit.make(numbered(["1", "2"]), 2.0).result()
        assert held.meta.tracks["image"].rewards.tolist() == [2.0, 4.0]


def test_a_future_raises_what_the_call_raises_each_time() -> None:
    with LocalRuntime(build_source) as runtime:
        future = runtime.role("source").submit.refuse(0, "config")
        for _ in range(2):
            with pytest.raises(ConfigError, match="a is 1; set a=2"):
                future.result()
        with pytest.raises(AttributeError, match="Source.private is not marked"):
            runtime.role("source").submit.private()


def test_a_closed_runtime_fails_its_futures() -> None:
    with LocalRuntime(build_source) as runtime:
        early, late = (runtime.role("source").submit.first_rank() for _ in range(2))
        assert early.result() == 0
    assert early.result() == 0
    with pytest.raises(ContractError, match="this runtime is closed"):
        late.result()
