"""The asynchronous loop on a field of a few numbers: what overlaps, who waits for whom, what a failure leaves."""

import copy
import dataclasses
import functools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_fakes import BrightnessReward, FieldBundle, FieldEngine, FieldPipeline, no_failure, sampling
from test_trainer import NO_ALARMS, Notes

from unirl.algorithms.advantages import AdvantageConfig
from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.algorithms.rollout_correction import RolloutCorrection
from unirl.data.data_source import MultimodalRLDataSource
from unirl.distributed.runtime import LocalRuntime
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.checkpoint.sample_files import IN_FLIGHT
from unirl.train.configs import OptimizerConfig
from unirl.train.stack import TrainStack
from unirl.trainer.base import Trainer
from unirl.trainer.build.assembly import assemble
from unirl.trainer.clock import PhaseClock
from unirl.trainer.diffusion import DiffusionModality
from unirl.trainer.evaluation import EvaluationConfig, Evaluator
from unirl.trainer.guardrails import GuardrailConfig, Guardrails
from unirl.trainer.loops import part_threads
from unirl.trainer.loops.asynchronous import AsyncTrainer
from unirl.trainer.loops.in_flight import InFlight
from unirl.trainer.loops.order import REQUESTS, OrderLog, read_order
from unirl.trainer.roles import SyncRole
from unirl.trainer.settings import TrainerSettings
from unirl.types.errors import ConfigError, RewardError, WorkerError
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.segments import LatentSegment

WAIT_S = 60


class CopyEngine(FieldEngine):
    """Samples with a copy of the model. The test may stop it in the middle of a request."""

    def __init__(self, model: Any) -> None:
        super().__init__(FieldPipeline(copy.deepcopy(model)))
        self.then: Any = lambda rollout_id: None
        self.version = 0
        self.prompts: list[str] = []
        self.is_busy = False

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None) -> RolloutResp:
        """One request at a time."""
        assert not self.is_busy
        self.is_busy = True
        self.then(req.rollout_id)
        resp = super().generate(req)
        self.is_busy = False
        versions = torch.full((req.batch_size,), self.version)
        return RolloutResp(tracks={"image": resp.tracks["image"].replace(policy_versions=versions)})


class CutEngine(CopyEngine):
    """Requests that begin with the version in `waits` last until they are cut short, which leaves every second sample
    unfinished."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.cut, self.waits = threading.Event(), {1: 0}
        self.continued: list[list[bool]] = []

    @distributed(Dispatch.DP_SCATTER, Collect.HOLD)
    def generate(self, req: RolloutReq, policy: str | None = None, begun: RolloutResp | None = None) -> RolloutResp:
        """As CopyEngine, with samples of `begun` where it finished them."""
        number = req.rollout_id if req.number is None else req.number
        waits = begun is None and self.waits.get(number) == self.version
        self.cut.clear()
        assert not waits or self.cut.wait(WAIT_S), "nothing cut it short"
        track = super().generate(req, policy).tracks["image"]
        if begun is not None:
            former = begun.tracks["image"]
            assert former.sample_ids == track.sample_ids and former.is_unfinished is not None
            self.continued.append(former.is_unfinished.tolist())
            segment, old, new = track.segment, former.policy_versions, track.policy_versions
            assert isinstance(segment, LatentSegment) and old is not None and new is not None
            versions = torch.stack([old, *[new] * (segment.num_steps - 1)], dim=1)
            track = track.replace(segment=segment.replace(versions=versions), policy_versions=old, last_versions=new)
        if waits:
            track = track.replace(is_unfinished=torch.arange(track.batch_size) % 2 == 1)
        return RolloutResp(tracks={"image": track})

    @distributed(Dispatch.BROADCAST, Collect.FIRST, is_control=True)
    def abort(self) -> None:
        """End the present request."""
        self.cut.set()


class CopySync:
    """Copies the trained weights, never during a request."""

    def __init__(self, model: Any, backend: FSDPBackend, engine: CopyEngine) -> None:
        self.model, self.backend, self.engine = model, backend, engine
        self.policies: list[str | None] = []

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def prepare(self) -> None:
        """Nothing to wait for."""

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def push(self, policy: str | None = None) -> dict[str, float]:
        """The present weights, or a named copy's."""
        assert not self.engine.is_busy
        self.policies.append(policy)
        self.engine.pipeline.model.load_state_dict(self.model.state_dict())
        self.engine.version = self.backend.policy_version
        return {"sync/changed_tensors": 1.0}


class Seen(TrainStack):
    """Remembers the groups and versions that it trains on. The test may stop it in the middle of an update."""

    then: Any = None

    @distributed(Dispatch.DP_SCATTER, Collect.FIRST)
    def train(self, resp: RolloutResp, *, progress: float) -> Any:
        """Note, then train."""
        track = resp.tracks["image"]
        assert track.policy_versions is not None
        steps = [self._backend.policy_version - version for version in track.policy_versions.tolist()]
        groups = vars(self).setdefault("groups", [])
        groups.append(list(dict.fromkeys(track.group_ids)))
        vars(self).setdefault("lags", []).append(steps)
        if self.then is not None:
            self.then(len(groups))
        return super().train(resp, progress=progress)


class Made:
    """A run of the asynchronous loop, or of the synchronous one with `max_staleness` None."""

    engine_class: Any = CopyEngine

    def __init__(
        self,
        folder: Path,
        max_staleness: int | None,
        groups_per_request: int | None = None,
        *,
        fails: Any = no_failure,
        evaluation: dict[str, Any] | None = None,
        num_prompts: int = 40,
        order: Any = None,
        window: int = 1,
        too_old: Any = "wait",
        requests_at_once: int | None = None,
        cuts_calls: bool = False,
        keeps_in_flight: bool = False,
        guardrails: GuardrailConfig = NO_ALARMS,
        **settings: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prompts = folder / "prompts.jsonl"
        rows = [{"prompt": f"prompt {i}", "prompt_id": f"p{i}"} for i in range(num_prompts)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.events: list[Any] = []
        self.notes, self.stop = Notes(self.events), threading.Event()

        def build(context: Any) -> dict[str, Any]:
            torch.manual_seed(0)
            bundle = FieldBundle()
            backend = FSDPBackend(bundle, optimizer=OptimizerConfig(learning_rate=1e-2))
            correction = RolloutCorrection(upper=1.5) if max_staleness else None
            algorithm = DiffusionGRPO(FieldPipeline(bundle.model), backend, rollout_correction=correction)
            return {
                "backend": backend,
                **self.sampling_parts(bundle.model, backend),
                "stack": Seen(backend, algorithm, micro_batch_size=4),
                "reward": BrightnessReward(fails, self.events),
                "checkpointer": Checkpointer(backend, str(folder / "checkpoints"), keep_last=3, samples=folder),
            }

        self.runtime: Any = self.started(build)
        folders = {"folder": folder / IN_FLIGHT, "checkpoints": folder / "checkpoints"}
        data = MultimodalRLDataSource(str(prompts), shuffle=False)
        options: dict[str, Any] = {"prompts": str(prompts), "num_samples": 4, "batch_size": 4, **(evaluation or {})}
        config = EvaluationConfig(**options)
        loop: Any = Trainer
        if max_staleness is not None:
            loop = functools.partial(
                AsyncTrainer,
                max_staleness=max_staleness,
                groups_per_request=groups_per_request,
                window=window,
                too_old=too_old,
                requests_at_once=requests_at_once,
                cuts_calls=cuts_calls,
                log=OrderLog(folder / REQUESTS),
                order=order,
                in_flight=functools.partial(InFlight, runtime=self.runtime, **folders) if keeps_in_flight else None,
            )
        defaults: dict[str, Any] = {"recipe": "fake", "seed": 3, "batch_size": 4, "num_rollouts": 4}
        self.trainer: Any = assemble(
            self.runtime,
            TrainerSettings(**{**defaults, **settings}),
            modality=DiffusionModality(),
            data=data,
            sampling=sampling(),
            advantages=AdvantageConfig(),
            evaluator=None if evaluation is None else Evaluator(config, data.rows, sampling()),
            guardrails=functools.partial(Guardrails, guardrails, scorers=["bright"]),
            trackers=[self.notes],
            run_dir=folder,
            config={"recipe": "fake"},
            stop=self.stop,
            clock=PhaseClock(),
            sync=self.runtime.role("sync", SyncRole),
            loop=loop,
            collects_ahead=max_staleness is not None,
            takes_older=bool(max_staleness),
        )

    def sampling_parts(self, model: Any, backend: FSDPBackend) -> dict[str, Any]:
        """What samples, and what pushes to it."""
        engine = self.engine_class(model)
        return {"engine": engine, "sync": CopySync(model, backend, engine)}

    def started(self, build: Any) -> Any:
        """The workers."""
        return LocalRuntime(build)

    def part(self, name: str) -> Any:
        """A component itself."""
        return self.runtime.component(name)

    @property
    def groups(self) -> list[list[str]]:
        """Groups that were trained on, by rollout."""
        return vars(self.part("stack")).get("groups", [])

    def weights(self) -> dict[str, torch.Tensor]:
        """Trained weights."""
        return dict(self.part("sync").model.state_dict())


def training(metrics: dict[str, float]) -> dict[str, float]:
    machine = ("timing_s/", "perf/", "schedule/")
    return {name: value for name, value in metrics.items() if not name.startswith(machine)}


@pytest.mark.parametrize("groups_per_request", [None, 4])
def test_without_staleness_a_run_has_the_bits_of_the_synchronous_one(tmp_path: Path, groups_per_request: int | None):
    sync = Made(tmp_path / "sync", None, evaluation={"interval": 2})
    own = Made(tmp_path / "async", 0, groups_per_request, evaluation={"interval": 2})
    sync.trainer.run()
    own.trainer.run()
    assert sync.groups == own.groups and len(own.groups) == 4
    assert {k: training(v) for k, v in own.notes.logged.items()} == {
        k: training(v) for k, v in sync.notes.logged.items()
    }
    assert all(torch.equal(value, own.weights()[name]) for name, value in sync.weights().items())
    assert own.part("sync").policies == sync.part("sync").policies
    assert all(own.notes.logged[step]["schedule/lag/oldest"] == 0 for step in range(1, 5))
    assert own.runtime.num_held() == sync.runtime.num_held() == 0


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("groups_per_request", [None, 1, 2])
def test_samples_are_as_old_as_allowed_and_prompts_are_those_of_a_synchronous_run(
    tmp_path: Path, max_staleness: int, groups_per_request: int | None
):
    sync = Made(tmp_path / "sync", None, num_rollouts=7)
    own = Made(tmp_path / "async", max_staleness, groups_per_request, num_rollouts=7)
    stack, slots = own.part("stack"), own.trainer._slots

    def until_the_engine_is_ahead(num_rollouts: int) -> None:
        with own.trainer._threads.changed:  # the learner is slow, so the engine gets as far ahead as it may
            left = (7 - num_rollouts + 1) * slots.per_rollout
            full = min(slots.capacity, left)
            assert own.trainer._threads.changed.wait_for(lambda: slots.num_waiting == full, WAIT_S)

    stack.then = until_the_engine_is_ahead
    sync.trainer.run()
    own.trainer.run()
    assert own.groups == sync.groups
    lags = [max(steps) for steps in stack.lags]
    assert lags == [min(step, max_staleness) for step in range(7)]  # one optimizer step per rollout
    logged = [own.notes.logged[step]["schedule/lag/oldest"] for step in range(1, 8)]
    assert logged == lags and own.runtime.num_held() == 0


def test_prompts_that_come_twice_in_a_rollout_are_two_groups_also_where_two_requests_bring_them(tmp_path: Path):
    sync = Made(tmp_path / "sync", None, num_prompts=3)
    own = Made(tmp_path / "async", 1, 1, num_prompts=3)
    sync.trainer.run()
    own.trainer.run()
    assert own.groups == sync.groups
    assert own.groups[0] == ["prompt:p0", "prompt:p1", "prompt:p2", "prompt:p0#1"]


def test_engine_reward_and_learner_work_at_the_same_time(tmp_path: Path):
    """Each waits in the middle of its work until the other two are in the middle of theirs."""
    own = Made(tmp_path, 2, num_rollouts=6)
    meeting = threading.Barrier(3, timeout=WAIT_S)
    met: list[str] = []

    def meet(name: str) -> None:
        if name not in met:
            meeting.wait()
            met.append(name)

    own.part("engine").then = lambda rollout_id: meet("engine") if rollout_id == 2 else None
    own.part("stack").then = lambda num: meet("learner") if num == 1 else None
    reward, calls = own.part("reward"), []
    plain = reward.score_track

    def score_track(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        if len(calls) == 2:
            meet("reward")
        return plain(*args, **kwargs)

    reward.score_track = score_track
    own.trainer.run()
    assert sorted(met) == ["engine", "learner", "reward"]
    assert max(own.notes.logged[step]["schedule/concurrency"] for step in range(1, 7)) > 1


def test_an_evaluation_of_another_policy_is_not_what_the_next_rollout_is_sampled_from(tmp_path: Path):
    own = Made(tmp_path, 2, 2, num_rollouts=5, evaluation={"interval": 1, "policy": "ema"})
    pushed, engine = own.part("sync").policies, own.part("engine")
    during: list[Any] = []
    engine.then = lambda rollout_id: during.append((rollout_id < 0, pushed[-1] if pushed else "nothing"))
    own.trainer.run()
    assert {policy for is_evaluation, policy in during if is_evaluation} == {"ema"}
    assert {policy for is_evaluation, policy in during if not is_evaluation} == {None}


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_repeated_order_gives_the_same_metrics_and_weights_at_any_speed(tmp_path: Path, is_slow: bool):
    sizes = {"max_staleness": 2, "num_requests": 12, "per_rollout": 2}
    versions = [0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 4, 5]  # ages 0, 1, 1 to 2, 1 to 2, 1, 0 to 1 of six rollouts
    longer = [*versions, 5, 5]
    path = tmp_path / REQUESTS
    path.write_text("".join(json.dumps({"request": n, "version": v}) + "\n" for n, v in enumerate(longer)))
    own = Made(tmp_path / "own", 2, 2, num_rollouts=6, order=read_order(path, **sizes), evaluation={"interval": 2})
    if is_slow:
        own.part("engine").then = lambda rollout_id: time.sleep(0.05)
    own.trainer.run()
    found = read_order(tmp_path / "own" / REQUESTS, **sizes)
    assert [begun.version for begun in found.values()] == versions
    again = Made(
        tmp_path / "again",
        2,
        2,
        num_rollouts=6,
        order=read_order(tmp_path / "own" / REQUESTS, **sizes),
        evaluation={"interval": 2},
    )
    again.part("stack").then = lambda num: time.sleep(0.05)
    again.trainer.run()
    assert {k: training(v) for k, v in own.notes.logged.items()} == {
        k: training(v) for k, v in again.notes.logged.items()
    }
    assert all(torch.equal(value, again.weights()[name]) for name, value in own.weights().items())
    assert [own.notes.logged[step]["schedule/lag/oldest"] for step in range(1, 7)] == [0, 1, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ([0, 0, 1], r"has no request 3 of 4\. Set num_rollouts"),
        ([0, 0, 2, 2], r"begins request 2, of rollout 1, at version 2, where this run allows 0 to 1"),
        ([0, 1, 0, 1], r"begins request 1, of rollout 0, at version 1, where this run allows 0 to 0"),
    ],
)
def test_an_order_that_the_slots_do_not_allow_is_refused(tmp_path: Path, versions: list[int], message: str):
    path = tmp_path / REQUESTS
    path.write_text("".join(json.dumps({"request": n, "version": v}) + "\n" for n, v in enumerate(versions)))
    with pytest.raises(ConfigError, match=message):
        read_order(path, num_requests=4, per_rollout=2, max_staleness=1)
    with pytest.raises(ConfigError, match=r"cannot be read \(FileNotFoundError"):
        read_order(tmp_path / "none", num_requests=4, per_rollout=2, max_staleness=1)
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"cannot be read \(TypeError"):
        read_order(path, num_requests=4, per_rollout=2, max_staleness=1)


def test_what_is_stuck_is_named_with_its_stack(tmp_path: Path, monkeypatch: Any, caplog: Any):
    monkeypatch.setattr(part_threads, "STUCK_S", 0.1)
    own = Made(tmp_path, 1, num_rollouts=2)
    own.part("engine").then = lambda rollout_id: time.sleep(0.5) if rollout_id == 0 else None
    own.trainer.run()
    found = [record.getMessage() for record in caplog.records if "training has waited" in record.getMessage()]
    assert 2 <= len(found) <= 3, "after 0.1, 0.2 and 0.4 seconds of 0.5"
    assert found[0].startswith("training has waited for the requests of the oldest rollout for 0 s. engine: in request")
    assert "time.sleep(0.5)" in found[0] and "reward: waits for a call" in found[0]


def test_a_part_that_waits_nearly_always_is_an_alarm_that_stops_no_run(tmp_path: Path):
    others: dict[str, Any] = {
        "grad_norm_factor": 1e9,
        "reward_drop": 1e9,
        "logp_gap_factor": 1e9,
    }  # how old samples are depends on speed
    watching = GuardrailConfig(action="stop", patience=1, warmup=3, window=3, **others)
    own = Made(tmp_path, 1, num_rollouts=6, guardrails=watching)
    own.part("engine").then = lambda rollout_id: time.sleep(1.0)
    assert own.trainer.run()["is_complete"]
    assert own.notes.alerts == [("idle_part", 3)]
    assert [own.notes.logged[step]["alarm/idle_part"] for step in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    busy = Made(tmp_path / "busy", 1, num_rollouts=4, guardrails=dataclasses.replace(watching, idle_share=1.0))
    busy.part("engine").then = own.part("engine").then
    busy.trainer.run()
    assert busy.notes.alerts == []


def test_what_an_engine_raises_ends_the_run_and_what_is_finished_is_saved(tmp_path: Path):
    own = Made(tmp_path, 2, num_rollouts=6)

    def fail(rollout_id: int) -> None:
        if rollout_id == 3:
            raise WorkerError("fake", "it died")

    own.part("engine").then = fail
    with pytest.raises(WorkerError, match="it died"):
        own.trainer.run()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == [f"step-{len(own.groups):06d}"]
    assert not [thread for thread in threading.enumerate() if "_repeat" in thread.name]

    again = Made(tmp_path, 2, num_rollouts=6)
    again.trainer.run(resume="auto")
    expected = Made(tmp_path / "whole", None, num_rollouts=6)
    expected.trainer.run()
    assert own.groups + again.groups == expected.groups  # no prompt was lost, none was trained on twice


def test_groups_that_cannot_be_scored_are_replaced_while_others_train(tmp_path: Path):
    own = Made(tmp_path, 2, num_rollouts=4, fails=lambda group: group in ("prompt:p1", "prompt:p6"))
    own.trainer.run()
    trained = [group for groups in own.groups for group in groups]
    assert len(trained) == len(set(trained)) == 16 and not {"prompt:p1", "prompt:p6"} & set(trained)
    assert sum(group.startswith("refill") for group in trained) == 2
    assert own.notes.logged[4]["reward/dropped_groups"] == 2 and own.runtime.num_held() == 0
    lost = Made(tmp_path / "lost", 2, num_rollouts=4, fails=lambda group: ":p6" in group or "refill" in group)
    with pytest.raises(RewardError, match="still could not be scored"):
        lost.trainer.run()


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_a_stop_ends_with_the_rollout_and_the_run_goes_on_with_the_next_prompts(tmp_path: Path, max_staleness: int):
    own = Made(tmp_path, max_staleness, 2, num_rollouts=6)
    own.part("stack").then = lambda num: own.stop.set() if num == 2 else None
    assert own.trainer.run()["is_complete"] is False
    assert len(own.groups) == 2 and own.runtime.num_held() == 0
    again = Made(tmp_path, max_staleness, 2, num_rollouts=6)
    again.trainer.run(resume="auto")
    whole = Made(tmp_path / "whole", None, num_rollouts=6)
    whole.trainer.run()
    assert own.groups + again.groups == whole.groups


class Cut(Made):
    """A run whose pushes cut short what the engine generates."""

    engine_class = CutEngine


def test_a_push_cuts_a_request_short_and_it_goes_on_with_the_new_weights(tmp_path: Path):
    own = Cut(tmp_path, 1, cuts_calls=True)
    own.trainer.run()
    assert own.part("engine").continued == [[False, True] * 6]
    first, second, *_ = own.groups
    assert [group.removeprefix("prompt:") for group in (*first, *second)] == [f"p{i}" for i in range(8)]
    lines = [json.loads(line) for line in (tmp_path / REQUESTS).read_text().splitlines()]
    assert [line["resumed"] for line in lines if line["request"] == 1 and "resumed" in line] == [[1]]
    logged = own.notes.logged[2]
    assert (logged["schedule/lag/oldest"], logged["schedule/lag/newest"]) == (1.0, 0.0)
    assert (logged["schedule/samples_resumed"], logged["schedule/version_span/max"]) == (12.0, 1.0)
    assert own.notes.logged[1]["schedule/samples_resumed"] == 0.0
    assert own.runtime.num_held() == 0
    with pytest.raises(ConfigError, match="cut calls short .*such as request 1, .* on_push: finish"):
        read_order(tmp_path / REQUESTS, num_requests=4, per_rollout=1, max_staleness=1)


def test_what_was_cut_short_is_asked_for_again_where_the_run_is_stopped(tmp_path: Path):
    own = Cut(tmp_path, 1, cuts_calls=True)
    own.part("engine").waits = {2: 1}
    own.part("stack").then = lambda count: own.stop.set() if count == 2 else None
    own.trainer.run()
    resumed = Cut(tmp_path, 1, cuts_calls=True)
    resumed.part("engine").waits = {}
    resumed.trainer.run(resume="auto")
    groups = [group for rollout in (*own.groups, *resumed.groups) for group in rollout]
    assert groups == [f"prompt:p{i}" for i in range(16)]
