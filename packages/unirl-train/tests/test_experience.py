"""Experience replay: what is kept, what comes with a later rollout, and that a resumed run continues it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import InProcess
from train_fakes import TinyBundle

from unirl.algorithms.replay_buffer import ReplayBuffer
from unirl.distributed.worker import WorkerContext
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import OptimizerConfig
from unirl.train.experience_files import EXPERIENCE, ExperienceFiles
from unirl.trainer.collector import ScoredRollout
from unirl.trainer.experience import Experience
from unirl.types.errors import CheckpointError
from unirl.types.media import Texts
from unirl.types.roles import Collect, Dispatch, MeshPlace, distributed
from unirl.types.rollout import RolloutResp, RolloutTrack

PER_GROUP = 4


class Stack:
    @distributed(Dispatch.RANK_ZERO, Collect.FIRST)
    def samples_per_unit(self) -> int:
        return 1


class Kept:
    """Experience on two workers in `folder`."""

    def __init__(self, folder: Path, num_workers: int = 2, **options: Any) -> None:
        self.folder = folder

        def build(context: WorkerContext) -> dict[str, object]:
            place = MeshPlace(dp_rank=context.rank, dp_size=num_workers)
            return {"stack": Stack(), "experience": ExperienceFiles(folder / EXPERIENCE, folder / "checkpoints", place)}

        self.runtime = InProcess(build, num_workers)
        buffer: dict[str, Any] = {"capacity": 4, "order": "uniform", **options.pop("buffer", {})}
        own = {"groups_per_rollout": 2, **options}
        self.experience = Experience(self.runtime, ReplayBuffer(**buffer), **own)

    def train(self, rollout_id: int, advantages: Any = None, version: int | None = None) -> tuple[list[Any], Any]:
        """[(sample id, advantage)] of each worker in the order in which it trains on them, and the metrics."""
        held = self.runtime.hold(rollout(rollout_id, advantages))
        scored = ScoredRollout(rollout_id, 0.0, held, held.meta.batch_size, {})
        mixed, metrics = self.experience.mixed(scored, rollout_id if version is None else version)
        resp = mixed.resp.fetch()
        assert resp.batch_size == sum(meta.batch_size for meta in mixed.resp.metas)
        found = mixed.resp.map(_ids)
        mixed.resp.release()
        self.experience.finished(rollout_id)
        return found, metrics

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / EXPERIENCE).glob("*"))


def _ids(resp: RolloutResp) -> list[tuple[str, float]]:
    track = resp.root_track()
    return list(zip(track.sample_ids, track.known_advantages.tolist(), strict=True))


def rollout(rollout_id: int, advantages: Any = None) -> RolloutResp:
    """Two groups, whose ids come again in every rollout. The advantage of a sample says where it comes from."""
    count = 2 * PER_GROUP
    values = [100.0 * rollout_id + place for place in range(count)] if advantages is None else advantages
    track = RolloutTrack(
        sample_ids=[f"s{place}" for place in range(count)],
        parent_ids=[f"g{place // PER_GROUP}" for place in range(count)],
        decoded=Texts(texts=["big"] * count),
        rewards=torch.zeros(count),
        advantages=torch.tensor(values),
    )
    return RolloutResp(tracks={"image": track})


def test_kept_groups_come_behind_fresh_ones_with_their_advantages_and_other_ids(tmp_path):
    kept = Kept(tmp_path)
    first, metrics = kept.train(0)
    assert [len(own) for own in first] == [4, 4] and metrics["schedule/experience/groups"] == 0
    second, metrics = kept.train(1)
    assert [len(own) for own in second] == [8, 8] and metrics["schedule/experience/groups"] == 2
    for own in second:
        names, advantages = zip(*own, strict=True)
        assert [name.startswith("again-1:rollout-000000:s") for name in names] == [False] * 4 + [True] * 4
        assert all(value >= 100 for value in advantages[:4]) and all(value < 100 for value in advantages[4:])
    assert sorted(value for own in second for _, value in own[4:]) == list(range(8)), "both groups, whole"
    assert metrics["schedule/lag/replayed_mean"] == metrics["schedule/lag/replayed_oldest"] == 1
    assert kept.runtime.num_held() == 0


def test_a_group_that_an_older_policy_made_counts_as_old(tmp_path):
    kept = Kept(tmp_path, buffer={"max_staleness": 2})
    kept.train(3, version=1)
    _, metrics = kept.train(4, version=2)
    assert metrics["schedule/experience/groups"] == 0, "it would be three versions old"
    _, metrics = kept.train(5, version=2)
    assert "schedule/lag/replayed_mean" not in metrics
    kept = Kept(tmp_path / "younger", buffer={"max_staleness": 3})
    kept.train(3, version=1)
    assert kept.train(4, version=2)[1]["schedule/lag/replayed_oldest"] == 3


def test_files_are_those_of_the_groups_that_may_be_drawn(tmp_path):
    kept = Kept(tmp_path)
    for number in range(6):
        kept.train(number)
    assert kept.files == [f"rollout-00000{number}-0000{shard}.safetensors" for number in (4, 5) for shard in (0, 1)]
    assert b"big" not in (tmp_path / EXPERIENCE / kept.files[0]).read_bytes(), "media train nothing"


def test_the_best_samples_of_groups_that_differ_are_kept(tmp_path):
    kept = Kept(tmp_path, best_of=2)
    kept.train(0, [0.0, 1.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    kept.train(1, [5.0, 4.0, -9.0, 0.0, 1.0, 3.0, 2.0, -6.0])
    found, metrics = kept.train(2)
    assert metrics["schedule/experience/kept_groups"] == 3 and metrics["schedule/experience/groups"] == 2
    replayed = [value for own in found for name, value in own if name.startswith("again")]
    assert len(replayed) == 4 and set(replayed) <= {1.0, 2.0, 5.0, 4.0, 3.0}


def test_as_many_groups_come_as_divide_over_devices_and_updates(tmp_path):
    kept = Kept(tmp_path, groups_per_rollout=3, num_updates=4)
    kept.train(0)
    kept.train(1)
    assert kept.train(2)[1]["schedule/experience/groups"] == 2, "12 samples do not divide over 2 devices * 4 updates"


def checkpointer(folder: Path) -> Checkpointer:
    backend = FSDPBackend(TinyBundle(), optimizer=OptimizerConfig(learning_rate=1e-2))
    return Checkpointer(backend, str(folder / "checkpoints"), samples=folder)


def save(kept: Kept, step: int) -> Any:
    state = json.loads(json.dumps(kept.experience.state_dict()))
    checkpointer(kept.folder).save(step, {}, None, {EXPERIENCE: kept.experience.names})
    return state


def test_a_resumed_run_draws_what_an_undisturbed_one_draws(tmp_path):
    kept = Kept(tmp_path)
    for number in range(3):
        kept.train(number)
    state = save(kept, 3)
    expected = [kept.train(number) for number in (3, 4)]
    resumed = Kept(tmp_path)
    resumed.experience.load_state_dict(state, 3)
    assert resumed.files == [f"rollout-00000{number}-0000{shard}.safetensors" for number in (1, 2) for shard in (0, 1)]
    assert [resumed.train(number) for number in (3, 4)] == expected
    other = Kept(tmp_path, num_workers=4)
    other.experience.load_state_dict(state, 3)
    found, _ = other.train(3)
    assert sorted(sum(found, [])) == sorted(sum(expected[0][0], [])), "the same samples over other devices"


def test_a_rollout_that_fails_leaves_the_state_before_it(tmp_path):
    kept = Kept(tmp_path)
    kept.train(0)
    kept.train(1)
    before = json.dumps(kept.experience.state_dict())
    held = kept.runtime.hold(rollout(2))
    kept.experience.mixed(ScoredRollout(2, 0.0, held, 8, {}), 2)
    assert json.dumps(kept.experience.state_dict()) == before
    assert "rollout-000000-00000.safetensors" in kept.files, "its checkpoint needs them"


def test_a_checkpoint_without_its_samples_is_refused(tmp_path):
    kept = Kept(tmp_path)
    kept.train(0)
    state = save(kept, 1)
    shutil.rmtree(tmp_path / "checkpoints" / "step-000001" / EXPERIENCE)
    with pytest.raises(CheckpointError, match=r"step 1 .* lacks samples that it has kept \(rollout-000000\)"):
        Kept(tmp_path).experience.load_state_dict(state, 1)
