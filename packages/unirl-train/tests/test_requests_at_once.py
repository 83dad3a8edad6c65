"""Several requests at once in a served pool: members are kept busy, and versions, bits and prompts are as promised."""

import itertools
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_fakes import FieldBundle
from served_fakes import LocalMember, LocalStore
from test_async_trainer import WAIT_S, CopyEngine, CutEngine, Made, training

from unirl.distributed.groups import WorkerGroups
from unirl.distributed.pools.cutting import Ask
from unirl.distributed.pools.served import ServedPool
from unirl.distributed.runtime import LocalRuntime
from unirl.distributed.weight_sync.served_syncs import PushedPool, ServedSyncs
from unirl.distributed.worker import Worker, WorkerContext
from unirl.trainer.loops.order import REQUESTS, read_order
from unirl.types.errors import CheckpointError, ConfigError, WorkerError
from unirl.types.rollout import RolloutReq


class Sampler(LocalMember):
    """A member whose calls the test may stop in the middle, and that must be left alone while it is pushed to."""

    then: Any = staticmethod(lambda member, req: None)
    is_busy = False
    engine_class: Any = CopyEngine

    def _made(self) -> Worker:
        return Worker(lambda context: {"engine": self.engine_class(FieldBundle().model)}, WorkerContext(0, 1, "cpu"))

    def call(self, message: Ask | str) -> Any:
        if isinstance(message, str) or message.method != "generate":
            return super().call(message)
        assert not self.is_busy
        self.is_busy = True
        try:
            self.then(self, message.args[0])
            return super().call(message)
        finally:
            self.is_busy = False


class MemberSync:
    """Copies the trained weights to the members that it knows."""

    def __init__(self, made: Any) -> None:
        self.made, self.engines = made, []
        self.policies: list[str | None] = []

    def connect_elsewhere(self, engines: Any, shares_device: bool, *policy: str, keeps_former: bool = False) -> None:
        self.engines = list(engines.actors)

    def prepare(self) -> None:
        """Nothing to wait for."""

    def push(self, policy: Any = None) -> dict[str, float]:
        self.policies.append(policy)
        for member in self.engines:
            assert not member.is_busy
            engine = member.worker.component("engine")
            engine.pipeline.model.load_state_dict(self.made.model.state_dict())
            engine.version = self.made.part("backend").policy_version
        return {"sync/changed_tensors": 1.0}


class Served(Made):
    """A run whose engines are three members of a served pool; a call is one prompt."""

    member_class: Any = Sampler

    def started(self, build: Any) -> Any:
        self.members = [self.member_class(number) for number in range(3)]
        pool = ServedPool("painters", self.members.__getitem__, 3, LocalStore(), num_devices=3, rows_per_call=1)
        self.main = LocalRuntime(build)
        self.sync = MemberSync(self)
        led = {"sync": ServedSyncs(self.sync, [PushedPool(pool, "engine")])}
        return WorkerGroups(self.main, {"engine": pool}, led=led, pools={"train": self.main, "painters": pool})

    def sampling_parts(self, model: Any, backend: Any) -> dict[str, Any]:
        self.model = model
        return {}

    def part(self, name: str) -> Any:
        return self.main.component(name)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())

    def each_call(self, then: Any) -> None:
        """then(member, request) before each call of a member."""
        for member in self.members:
            member.then = then

    def lines(self, folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / REQUESTS).read_text().splitlines()]


def assert_same(one: Made, other: Made) -> None:
    assert one.groups == other.groups
    assert {k: training(v) for k, v in one.notes.logged.items()} == {
        k: training(v) for k, v in other.notes.logged.items()
    }
    assert all(torch.equal(value, other.weights()[name]) for name, value in one.weights().items())


def at_random(seed: int, deadly: float = 0.0) -> Any:
    """Calls that take up to 30 ms, some of which end the member. Member 0 lives: where none has the present weights,
    one gets newer ones."""
    draw = random.Random(seed)

    def then(member: Any, req: RolloutReq) -> None:
        time.sleep(0.03 * draw.random())
        if draw.random() < deadly and member.number:
            member.die()

    return then


@pytest.mark.parametrize("groups_per_request", [None, 2])
def test_without_staleness_a_run_has_the_bits_of_the_synchronous_one(tmp_path: Path, groups_per_request: int | None):
    sync = Served(tmp_path / "sync", None, evaluation={"interval": 2})
    own = Served(tmp_path / "async", 0, groups_per_request, evaluation={"interval": 2})
    own.each_call(at_random(0))
    sync.trainer.run()
    own.trainer.run()
    assert_same(own, sync)
    assert own.sync.policies == sync.sync.policies
    assert own.runtime.num_held() == 0 and "calls" not in (tmp_path / "async" / REQUESTS).read_text()


def test_a_member_that_is_done_with_a_request_begins_the_next(tmp_path: Path):
    own = Served(tmp_path, 1, num_rollouts=3)
    is_ahead = threading.Event()

    def then(member: Any, req: RolloutReq) -> None:
        if req.number == 0 and req.sample_ids[0].startswith("prompt:p0:"):
            assert is_ahead.wait(WAIT_S), "no member began the second request while the first one was unfinished"
        if req.number == 1:
            is_ahead.set()

    own.each_call(then)
    own.trainer.run()
    assert [group for groups in own.groups for group in groups] == [f"prompt:p{n}" for n in range(12)]


def test_one_request_at_once_waits_for_its_slowest_call(tmp_path: Path):
    own = Served(tmp_path, 2, 2, num_rollouts=4, requests_at_once=1)
    present: list[int] = []

    def then(member: Any, req: RolloutReq) -> None:
        present.append(req.number or 0)
        time.sleep(0.01)
        assert len(set(present)) == 1
        present.remove(req.number or 0)

    own.each_call(then)
    own.trainer.run()
    assert len(own.groups) == 4 and own.runtime.num_held() == 0


def two_versions(own: Served) -> None:
    """Let all members hold a call of request 1 until rollout 0 is trained on and the push waits for them: the last call
    begins after the push."""
    is_trained, is_asked = threading.Event(), threading.Event()
    num_begun = itertools.count(1)
    made = own.trainer.collector.made

    def in_order(req: RolloutReq, *begun: Any) -> Any:
        # Calls of request 1 on all members would keep those of request 0 waiting, which are to be trained on first.
        if req.number == 1:
            assert is_asked.wait(WAIT_S)
        return made(req, *begun)

    def then(member: Any, req: RolloutReq) -> None:
        if req.number == 0 and next(num_begun) == 4:
            is_asked.set()
        if req.number == 1 and member.worker.component("engine").version == 0:
            assert is_trained.wait(WAIT_S)
            deadline = time.monotonic() + WAIT_S
            while not own.trainer._threads._held_up and time.monotonic() < deadline:
                time.sleep(0.005)

    own.part("stack").then = lambda num: is_trained.set()
    own.trainer.collector.made = in_order
    own.each_call(then)


@pytest.mark.parametrize("interval", [1, 4])
def test_calls_of_a_request_begin_before_and_after_a_push_and_the_order_is_repeated(tmp_path: Path, interval: int):
    own = Served(tmp_path / "own", 1, num_rollouts=4, evaluation={"interval": 1})
    two_versions(own)
    own.trainer.run()
    (mixed,) = [line for line in own.lines(tmp_path / "own") if "calls" in line and line["request"] == 1]
    assert sorted(mixed["calls"]["painters"]) == [0, 0, 0, 1] and mixed["version"] == 0
    lags = own.part("stack").lags[1]
    assert sorted(set(lags)) == [0, 1] and 4 * lags.count(0) == len(lags), "every sample has the version of its call"
    assert own.notes.logged[2]["schedule/lag/oldest"] == 1 and own.notes.logged[2]["schedule/lag/newest"] == 0

    order = read_order(tmp_path / "own" / REQUESTS, num_requests=4, per_rollout=1, max_staleness=1)
    again = Served(
        tmp_path / "again", 1, num_rollouts=4, evaluation={"interval": interval}, order=order, requests_at_once=1
    )
    again.each_call(at_random(1))
    again.trainer.run()
    assert all(torch.equal(value, own.weights()[name]) for name, value in again.weights().items())
    assert again.part("stack").lags == own.part("stack").lags
    if interval == 1:
        assert_same(again, own)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_speed_and_whoever_dies_samples_are_young_enough_and_the_order_is_repeated(
    tmp_path: Path, seed: int
):
    sync = Served(tmp_path / "sync", None, num_rollouts=6)
    sync.trainer.run()
    own = Served(tmp_path / "own", 2, 2, num_rollouts=6, evaluation={"interval": 2})
    own.each_call(at_random(seed, deadly=0.1))
    own.trainer.run()
    assert own.groups == sync.groups and own.runtime.num_held() == 0
    assert all(0 <= lag <= 2 for lags in own.part("stack").lags for lag in lags)
    for step, lags in enumerate(own.part("stack").lags, 1):
        assert own.notes.logged[step]["schedule/lag/newest"] == min(lags)
        assert own.notes.logged[step]["schedule/lag/oldest"] == max(lags)
    order = read_order(tmp_path / "own" / REQUESTS, num_requests=12, per_rollout=2, max_staleness=2)
    again = Served(tmp_path / "again", 2, 2, num_rollouts=6, evaluation={"interval": 2}, order=order)
    again.each_call(at_random(seed + 100, deadly=0.05 * (seed % 2)))
    again.trainer.run()
    assert_same(again, own)


def test_an_order_with_other_calls_is_refused(tmp_path: Path):
    path = tmp_path / REQUESTS
    lines: list[dict[str, Any]] = [{"request": 0, "version": 0, "calls": {"painters": [0, 0]}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    order = read_order(path, num_requests=1, per_rollout=1, max_staleness=1)
    own = Served(tmp_path / "own", 1, num_rollouts=1, order=order)
    with pytest.raises(ConfigError, match=r"2 calls of request 0 to the pool painters, and this run 4\. Set devices"):
        own.trainer.run()
    lines[0]["calls"] = {"painters": [0, 0, 0, 1]}
    path.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ConfigError, match="at version 0 with calls at 0 to 1, where this run allows 0 to 0"):
        read_order(path, num_requests=1, per_rollout=1, max_staleness=1)


def test_a_stop_ends_requests_whose_calls_have_not_begun(tmp_path: Path):
    own = Served(tmp_path, 3, 2, num_rollouts=8)
    calls = itertools.count()
    own.each_call(lambda member, req: time.sleep(0.02) if next(calls) > 4 else None)
    own.part("stack").then = lambda num: own.stop.set() if num == 2 else None
    assert own.trainer.run()["is_complete"] is False
    assert own.runtime.num_held() == 0 and not any(member.is_busy for member in own.members)
    again = Served(tmp_path, 3, 2, num_rollouts=8)
    again.trainer.run(resume="auto")
    whole = Served(tmp_path / "whole", None, num_rollouts=8)
    whole.trainer.run()
    assert own.groups + again.groups == whole.groups and len(own.groups) == 2


def test_what_a_call_raises_ends_the_run_and_all_its_threads(tmp_path: Path):
    own = Served(tmp_path, 2, 1, num_rollouts=6)

    def then(member: Any, req: RolloutReq) -> None:
        if req.number == 9:
            raise WorkerError(member.name, "it does not want to")

    own.each_call(then)
    with pytest.raises(WorkerError, match="does not want to"):
        own.trainer.run()
    assert not [thread for thread in threading.enumerate() if "_repeat" in thread.name]
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == bool(own.groups)


def test_a_slow_request_is_overtaken_and_the_order_is_repeated(tmp_path: Path):
    own = Served(tmp_path / "own", 3, 1, num_rollouts=4, window=3)
    held = threading.Event()

    def then(member: Any, req: RolloutReq) -> None:
        if req.number == 1:
            assert held.wait(WAIT_S)

    own.each_call(then)
    own.part("stack").then = lambda num: held.set()
    own.trainer.run()
    first = own.groups[0]
    assert len(first) == 4 and "prompt:p1" not in first, "which of the others ended first is left to the machine"
    trained = [group for groups in own.groups for group in groups]
    assert sorted(trained) == sorted(f"prompt:p{n}" for n in range(16))
    assert "prompt:p1" in own.groups[1] + own.groups[2], "its call ends before the push that follows"
    assert own.notes.logged[1]["schedule/requests_overtaken"] >= 1
    assert all(0 <= lag <= 3 for lags in own.part("stack").lags for lag in lags) and own.runtime.num_held() == 0
    assert any(line.get("trained") == 0 and line["request"] >= 4 for line in own.lines(tmp_path / "own"))

    order = read_order(tmp_path / "own" / REQUESTS, num_requests=16, per_rollout=4, max_staleness=3)
    again = Served(tmp_path / "again", 3, 1, num_rollouts=4, window=3, order=order)
    again.each_call(at_random(1))
    again.trainer.run()
    assert_same(again, own)


@pytest.mark.parametrize("too_old", ["drop", "correct"])
def test_a_request_that_is_scored_too_late_is_dropped_or_corrected_and_no_prompt_is_lost(tmp_path: Path, too_old: str):
    own = Served(tmp_path, 1, 1, num_rollouts=5, window=3, too_old=too_old)
    held = threading.Event()
    made, asked = own.trainer.collector.made, []

    def late(req: RolloutReq, *begun: Any) -> Any:
        resp = made(req, *begun)
        asked.append(req.number)
        if req.number == 1 and asked.count(1) == 1:
            assert held.wait(WAIT_S)  # its calls are over, so that no push waits for it
        return resp

    own.trainer.collector.made = late
    own.part("stack").then = lambda num: held.set() if num == 3 else None
    own.trainer.run()
    trained = [group for groups in own.groups for group in groups]
    assert sorted(trained) == sorted(f"prompt:p{n}" for n in range(20)) and own.runtime.num_held() == 0
    assert all("prompt:p1" not in groups for groups in own.groups[:3])
    oldest = max(lag for lags in own.part("stack").lags for lag in lags)
    metrics = own.notes.logged[5]
    if too_old == "drop":
        assert oldest <= 1 and asked.count(1) == 2 and metrics["schedule/too_old/dropped"] == 1
    else:
        assert oldest >= 3 and asked.count(1) == 1 and metrics["schedule/too_old/dropped"] == 0
        assert sum(each["schedule/too_old/corrected"] for each in own.notes.logged.values()) == 1


def test_a_run_that_is_resumed_asks_for_what_was_overtaken_and_not_for_what_was_trained_on(tmp_path: Path):
    own = Served(tmp_path / "own", 3, 1, num_rollouts=4, window=3)
    stopped = threading.Event()

    def then(member: Any, req: RolloutReq) -> None:
        if req.number == 1:
            assert stopped.wait(WAIT_S)

    def trained(num: int) -> None:
        own.stop.set()
        stopped.set()

    own.each_call(then)
    own.part("stack").then = trained
    assert own.trainer.run()["is_complete"] is False
    begun = [group for groups in own.groups for group in groups]
    assert len(begun) == 4 and "prompt:p1" not in begun
    with pytest.raises(CheckpointError, match=r"requests overtook others \(schedule.window\)"):
        Served(tmp_path / "own", None, num_rollouts=4).trainer.run(resume="auto")
    with pytest.raises(CheckpointError, match=r"requests of 1 prompts ahead of older ones, and this run has 2"):
        Served(tmp_path / "own", 3, 2, num_rollouts=4).trainer.run(resume="auto")
    again = Served(tmp_path / "own", 3, 1, num_rollouts=4, window=3)
    again.trainer.run(resume="auto")
    assert sorted([*begun, *(group for groups in again.groups for group in groups)]) == sorted(
        f"prompt:p{n}" for n in range(16)
    )


def test_an_order_with_uneven_rollouts_is_refused(tmp_path: Path):
    path = tmp_path / REQUESTS
    lines = [{"request": n, "version": 0, "trained": trained} for n, trained in enumerate([0, 0, 0, 1])]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        ConfigError, match="trains on 3 of the requests of this run with rollout 0, where this run takes 2"
    ):
        read_order(path, num_requests=4, per_rollout=2, max_staleness=1)


class CutSampler(Sampler):
    """A member whose calls are cut short."""

    engine_class = CutEngine


class CutServed(Served):
    """A run whose pushes cut calls short."""

    member_class = CutSampler


@pytest.mark.parametrize("deadly", [0.0, 0.2])
def test_calls_that_a_push_cuts_short_go_on_with_any_member_and_every_sample_is_trained_on_once(
    tmp_path: Path, deadly: float
):
    own = CutServed(tmp_path, 1, cuts_calls=True)
    own.each_call(at_random(0, deadly))
    own.trainer.run()
    continued = [each for member in own.members for each in member.drawer.continued]
    assert all(each == [False, True, False] for each in continued) and (deadly or len(continued) == 3)
    assert sorted(group for rollout in own.groups for group in rollout) == sorted(f"prompt:p{i}" for i in range(16))
    (line,) = [line for line in own.lines(tmp_path) if line["request"] == 1 and "resumed" in line]
    assert line["resumed"] == [1] and own.runtime.num_held() == 0
    assert own.notes.logged[2]["schedule/samples_resumed"] in ((3.0, 6.0, 9.0) if deadly else (9.0,))


def test_calls_begin_in_the_order_of_the_requests_also_where_a_thread_is_slow(tmp_path: Path):
    own = Served(tmp_path, 2, num_rollouts=4)
    collector, begun = own.trainer.collector, list[int]()
    made = collector.made

    def slowly(req: RolloutReq, *begun_before: Any) -> Any:
        time.sleep(0.2 if req.number in (0, 2) else 0.0)
        return made(req, *begun_before)

    collector.made = slowly
    own.each_call(lambda member, req: begun.append(req.number))
    own.trainer.run()
    assert begun == sorted(begun) and len(begun) == 16
