"""An engine whose model is split over processes gives what its first one says: what is asked of the others."""

import multiprocessing
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from unirl.rollout.engine.child.messages import BeginWeights, FinishWeights, ReceiveWeights, Start
from unirl.rollout.engine.served_latents.host import LatentsHost
from unirl.rollout.engine.served_latents.ranks import failures, of_all_ranks
from unirl.rollout.engine.sglang_diffusion import worker_ext
from unirl.types.errors import WeightSyncError
from unirl.types.weights import weight_spec


def rank_of_two(rank, port, found):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    found.put((rank, of_all_ranks({"error": None if rank == 0 else "no such file"}, group)))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_rank_learns_what_each_has():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=rank_of_two, args=(rank, port, found)) for rank in range(2)]
    for each in ranks:
        each.start()
    answers = dict(found.get(timeout=120) for _ in ranks)
    for each in ranks:
        each.join(120)
    assert answers[0] == answers[1] == [{"error": None}, {"error": "no such file"}]


def test_one_rank_asks_nobody():
    assert of_all_ranks("own", SimpleNamespace(world_size=1, cpu_group=None)) == ["own"]


def test_errors_name_their_rank_where_there_are_several():
    assert failures([None, None]) is None and failures([None]) is None
    assert failures(["no room"]) == "no room"
    assert failures([None, "no such file", "late"]) == "rank 1 of 3: no such file; rank 2 of 3: late"


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((True, "Updated 3 layers"), (True, "Updated 3 layers")),
        ((False, "no such file"), (False, "rank 1 of 2: no such file")),
        ((True, "Updated 2 layers"), (False, "ranks say different things: Updated 3 layers | Updated 2 layers")),
    ],
)
def test_sglang_took_weights_where_all_its_ranks_did(monkeypatch, second, expected):
    monkeypatch.setattr(worker_ext, "_of_all_ranks", lambda own: [own, second])
    assert worker_ext.load_on_all(lambda worker: (True, "Updated 3 layers"), None) == expected


def test_checksums_of_sglangs_ranks_stand_one_behind_the_other(monkeypatch):
    monkeypatch.setattr(worker_ext, "_of_all_ranks", lambda own: [own, {"transformer": "b"}])
    assert worker_ext.describe(lambda worker, module_names: {"transformer": "a"}, None) == {"transformer": "a b"}


class SplitHost(LatentsHost):
    """Two ranks, of which the second may keep its weights."""

    engine = "Split"
    second_takes = True

    def __init__(self, folder: Any) -> None:
        start = Start(model="", engine_args={}, policy_version=0, scratch_dir=str(folder))
        super().__init__(start, "torch.float32", {"a": (2,)})
        self._ranks = ["", ""]

    def _load(self, paths):
        self._ranks = [paths[0], paths[0] if self.second_takes else self._ranks[1]]
        return 2

    def _checksums(self):
        return list(self._ranks)

    def denoise(self, call):
        raise NotImplementedError

    def _act_with(self, adapter):
        raise NotImplementedError

    def _sleep(self, level):
        raise NotImplementedError

    def _wake_up(self):
        raise NotImplementedError


def test_a_push_that_one_rank_did_not_take_is_refused(tmp_path):
    host = SplitHost(tmp_path)

    def push(version, value):
        tensor = torch.full((2,), value)
        path = str(tmp_path / f"{version}.safetensors")
        save_file({"a": tensor}, path)
        specs = [weight_spec("a", tensor)]
        host.answer(BeginWeights(version, specs))
        host.answer(ReceiveWeights(version, path, specs))
        return host.answer(FinishWeights(version))

    push(1, 1.0)
    assert push(2, 2.0).num_bound == 2
    host.second_takes = False
    with pytest.raises(
        WeightSyncError, match="other tensors were sent as last time; Split's weights say the contrary on"
    ):
        push(3, 3.0)
