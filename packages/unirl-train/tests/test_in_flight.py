"""What is in flight in a checkpoint: a resumed run goes on with it, as if the run had not ended."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_async_trainer import WAIT_S, Cut, CutEngine, Made, training
from test_requests_at_once import CutServed, Served, at_random

from unirl.train.backend.manifest import MANIFEST, read_manifest, write_manifest
from unirl.train.checkpoint.sample_files import IN_FLIGHT
from unirl.trainer.loops.order import REQUESTS, read_order
from unirl.types.errors import CheckpointError
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp


def stopped_after(own: Made, num: int) -> None:
    """Let the engine get ahead during rollout `num`, and stop then."""

    def then(count: int) -> None:
        slots, changed = own.trainer._slots, own.trainer._threads.changed
        if count == num:
            with changed:
                assert changed.wait_for(lambda: slots.num_waiting > slots.per_rollout, WAIT_S)
            own.stop.set()

    own.part("stack").then = then


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("groups_per_request", [None, 2])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, served: bool, groups_per_request: int | None
):
    made: Any = Served if served else Made
    free = made(tmp_path / "free", 2, groups_per_request, num_rollouts=6)
    if served:
        free.each_call(at_random(1))
    free.trainer.run()
    per_rollout = 1 if groups_per_request is None else 2
    path = tmp_path / "free" / REQUESTS
    order = read_order(path, num_requests=6 * per_rollout, per_rollout=per_rollout, max_staleness=2)
    options: Any = {"num_rollouts": 6, "order": order, "keeps_in_flight": True}
    own = made(tmp_path / "own", 2, groups_per_request, **options)
    own.part("stack").then = lambda count: own.stop.set() if count == 3 else None
    own.trainer.run()
    in_flight = files(tmp_path / "own" / "checkpoints" / "step-000003" / IN_FLIGHT)
    assert in_flight and files(tmp_path / "own" / IN_FLIGHT) == in_flight and own.runtime.num_held() == 0

    again = made(tmp_path / "own", 2, groups_per_request, **options)
    asked: list[str] = []
    if served:
        again.each_call(lambda member, req: asked.extend(dict.fromkeys(req.group_ids)))
    else:
        generate = again.part("engine").generate
        again.part("engine").generate = distributed(Dispatch.DP_SCATTER, Collect.HOLD)(
            lambda req, policy=None: (asked.extend(dict.fromkeys(req.group_ids)), generate(req, policy))[1]
        )
    again.trainer.run(resume="auto")
    assert own.groups + again.groups == free.groups
    later = {step: training(values) for step, values in free.notes.logged.items() if step > 3}
    assert {step: training(values) for step, values in again.notes.logged.items()} == later
    assert all(torch.equal(value, again.weights()[name]) for name, value in free.weights().items())
    lags = [free.notes.logged[step]["schedule/lag/oldest"] for step in range(4, 7)]
    assert [again.notes.logged[step]["schedule/lag/oldest"] for step in range(4, 7)] == lags and max(lags) > 0
    begun = [request for request, own in order.items() if own.version < 3 and request >= 3 * per_rollout]
    if not served:
        assert begun and len(asked) == 4 * 3 - len(begun) * 4 // per_rollout
    else:
        assert len(asked) < 12
    assert again.runtime.num_held() == 0


@pytest.mark.parametrize("seed", range(4))
def test_however_often_a_run_is_stopped_every_prompt_is_trained_on_once_and_is_young_enough(tmp_path: Path, seed: int):
    trained: list[str] = []
    for num in range(1, 9):
        own = Served(tmp_path / "own", 2, 1, num_rollouts=8, window=2, keeps_in_flight=True, save_interval=2)
        own.each_call(at_random(10 * seed + num, deadly=0.1))
        own.part("stack").then = lambda count, own=own: own.stop.set()
        own.trainer.run(resume=None if num == 1 else "auto")
        trained += [group for groups in own.groups for group in groups]
        assert all(0 <= lag <= 2 for steps in own.part("stack").lags for lag in steps)
        assert own.runtime.num_held() == 0
        own.runtime.close()  # ends threads that replace members
    assert sorted(trained) == sorted(f"prompt:p{number}" for number in range(32))


def test_what_a_push_cut_short_goes_on_in_the_run_that_resumes(tmp_path: Path):
    own = Cut(tmp_path, 1, cuts_calls=True, keeps_in_flight=True)
    own.part("engine").waits = {2: 1}
    own.part("stack").then = lambda count: own.stop.set() if count == 2 else None
    own.trainer.run()
    again = Cut(tmp_path, 1, cuts_calls=True, keeps_in_flight=True)
    again.part("engine").waits = {}
    again.trainer.run(resume="auto")
    assert again.part("engine").continued == [[False, True] * 6]
    assert own.groups + again.groups == [[f"prompt:p{4 * r + i}" for i in range(4)] for r in range(4)]
    logged = again.notes.logged[3]
    assert (logged["schedule/samples_resumed"], logged["schedule/version_span/max"]) == (12.0, 1.0)
    assert (logged["schedule/lag/oldest"], logged["schedule/lag/newest"]) == (1.0, 0.0)


@pytest.mark.parametrize("deadly", [0.0, 0.2])
def test_calls_that_a_push_cut_short_go_on_in_the_run_that_resumes(tmp_path: Path, deadly: float):
    own = CutServed(tmp_path, 1, cuts_calls=True, keeps_in_flight=True)
    own.each_call(at_random(0, deadly))
    own.part("stack").then = lambda count: own.stop.set() if count == 1 else None
    own.trainer.run()
    again = CutServed(tmp_path, 1, cuts_calls=True, keeps_in_flight=True)
    for member in again.members:
        member.drawer.waits = {}
    calls: list[tuple[int, int]] = []
    again.each_call(lambda member, req: calls.append((req.number, req.batch_size)))
    again.trainer.run(resume="auto")
    continued = [each for member in again.members for each in member.drawer.continued]
    assert continued and all(each == [False, True, False] for each in continued)
    assert sum(number == 1 for number, _ in calls) >= len(continued)
    assert sorted(group for groups in own.groups + again.groups for group in groups) == sorted(
        f"prompt:p{i}" for i in range(16)
    )
    lines = [line for line in again.lines(tmp_path) if line["request"] == 1 and line.get("resumed")]
    assert lines and lines[-1]["resumed"] == [1]
    for run in (own, again):
        run.runtime.close()


def test_prompts_that_replaced_others_are_neither_lost_nor_come_again(tmp_path: Path):
    fails: Any = {"fails": lambda group: group.rpartition("prompt:")[2] in ("p1", "p6", "p9")}
    own = Made(tmp_path, 2, num_rollouts=5, keeps_in_flight=True, **fails)
    stopped_after(own, 1)
    own.trainer.run()
    again = Made(tmp_path, 2, num_rollouts=5, keeps_in_flight=True, **fails)
    again.trainer.run(resume="auto")
    bare = [group.rpartition("prompt:")[2] for groups in own.groups + again.groups for group in groups]
    assert len(bare) == len(set(bare)) == 20 and not {"p1", "p6", "p9"} & set(bare)
    assert again.notes.logged[5]["reward/dropped_groups"] == 3


class OddEngine(CutEngine):
    """Samples with something that no file holds."""

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        resp = super().generate(req, policy, begun)
        resp.tracks["image"].metadata = [{"odd": {1, 2}} for _ in req.sample_ids]
        return resp


class Odd(Made):
    """A run whose samples cannot be written."""

    engine_class = OddEngine


def test_what_no_file_holds_is_made_again_and_a_warning_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    own = Odd(tmp_path, 2, num_rollouts=4, keeps_in_flight=True)
    own.part("engine").waits = {}
    stopped_after(own, 1)
    with caplog.at_level(logging.WARNING):
        own.trainer.run()
    assert "request 1 is not in the checkpoint and would be made again" in caplog.text
    assert "metadata[0]['odd'] holds a builtins.set" in caplog.text
    assert files(tmp_path / IN_FLIGHT) == []
    again = Odd(tmp_path, 2, num_rollouts=4, keeps_in_flight=True)
    again.part("engine").waits = {}
    again.trainer.run(resume="auto")
    assert own.groups + again.groups == [[f"prompt:p{4 * r + i}" for i in range(4)] for r in range(4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups_per_request": 1}, r"they have \[2\] prompts each, and requests of this run have 1"),
        ({"max_staleness": 0}, "this run has 2 in flight at most"),
    ],
)
def test_a_run_that_cannot_go_on_with_them_makes_them_again_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], message: str
):
    own = Made(tmp_path, 2, 2, num_rollouts=4, keeps_in_flight=True)
    stopped_after(own, 1)
    own.trainer.run()
    given: Any = {"max_staleness": 2, "groups_per_request": 2, **options}
    again = Made(tmp_path, num_rollouts=4, keeps_in_flight=True, **given)
    with caplog.at_level(logging.WARNING):
        again.trainer.run(resume="auto")
    assert caplog.text.count("requests in flight of the checkpoint are made again") == 1
    assert re.search(message, caplog.text)
    assert own.groups + again.groups == [[f"prompt:p{4 * r + i}" for i in range(4)] for r in range(4)]


@pytest.mark.parametrize("max_staleness", [None, 2])
def test_a_run_that_does_not_take_them_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_staleness: int | None
):
    own = Made(tmp_path, 2, num_rollouts=4, keeps_in_flight=True)
    stopped_after(own, 1)
    own.trainer.run()
    again = Made(tmp_path, max_staleness, num_rollouts=4)
    with caplog.at_level(logging.WARNING):
        again.trainer.run(resume="auto")
    assert "requests in flight of the checkpoint are made again: this run does not take them" in caplog.text
    assert own.groups + again.groups == [[f"prompt:p{4 * r + i}" for i in range(4)] for r in range(4)]


def test_a_checkpoint_that_lacks_them_is_refused_with_the_way_on(tmp_path: Path):
    own = Made(tmp_path, 2, num_rollouts=4, keeps_in_flight=True)
    stopped_after(own, 1)
    own.trainer.run()
    made_again = Made(tmp_path, 2, num_rollouts=4)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    shutil.rmtree(checkpoint / IN_FLIGHT)
    facts, problem = read_manifest(checkpoint)
    assert problem is None
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, facts)
    with pytest.raises(CheckpointError, match="lacks samples in flight .*or resume with save.in_flight=false"):
        Made(tmp_path, 2, num_rollouts=4, keeps_in_flight=True).trainer.run(resume="auto")
    made_again.trainer.run(resume="auto")
    assert own.groups + made_again.groups == [[f"prompt:p{4 * r + i}" for i in range(4)] for r in range(4)]


def test_files_go_when_no_checkpoint_that_is_written_needs_them(tmp_path: Path):
    own = Made(tmp_path, 2, num_rollouts=6, keeps_in_flight=True, save_interval=1)
    seen: list[set[str]] = []
    own.part("stack").then = lambda count: seen.append({name[:11] for name in files(tmp_path / IN_FLIGHT)})
    own.trainer.run()
    assert max(map(len, seen)) <= 2 and any(seen)
