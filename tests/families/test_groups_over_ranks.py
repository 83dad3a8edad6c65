"""OTB compares the answers of one prompt: ranks that get whole groups, or share them, give the numbers of one."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from topology_steps import backend_of, pipeline_of
from torch import Tensor

from unirl.algorithms.ar_otb import AROTB
from unirl.rollout.engine.trainside.text import TrainsideTextEngine
from unirl.train.configs import TrainTopology
from unirl.train.stack import TrainStack
from unirl.trainer.balance import balanced_order
from unirl.types.media import Texts
from unirl.types.rollout import RolloutReq, RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

pytestmark = pytest.mark.slow

ranks_of_train: Any = importlib.import_module("ranks")
tested: Any = importlib.import_module("tested_backend")
GROUP, NUM_UPDATES = 2, 2
PROMPTS = ["1+1=", "a longer prompt", "b", "2*3="]
TOPOLOGIES = {"dp": TrainTopology(), "sp": TrainTopology(sp=2), "tp": TrainTopology(tp=2)}
if tested.backend_class().__name__ == "VeOmniBackend":
    del TOPOLOGIES["tp"]  # its plan divides no layers


def updates(folder: Path, topology: TrainTopology) -> dict[str, Any]:
    """Two updates on this rank's groups: what they measure, the gradients of the last one, and this rank's samples."""
    pipeline, backend = backend_of("qwen3", folder, topology)
    groups = [name for name in "abcd" for _ in range(GROUP)]
    request = RolloutReq(
        sample_ids=[f"s{place}" for place in range(len(groups))],
        group_ids=groups,
        primitives={"text": Texts(texts=PROMPTS).repeat_interleave(GROUP)},
        # A third of the words ends a text, so that lengths differ.
        sampling_params=ARSamplingParams(
            temperature=0.9, max_new_tokens=6, seed=2, stop_token_ids=tuple(range(0, 250, 3))
        ),
    )
    track = TrainsideTextEngine(pipeline, backend, forward_batch_size=8).generate(request).root_track()
    assert isinstance(track.segment, TextSegment)
    lengths = track.segment.lengths
    track = track.replace(advantages=torch.linspace(-1, 1, 8).roll(3))
    order = balanced_order(lengths.tolist(), backend.dp_size, NUM_UPDATES, GROUP)
    share = len(order) // backend.dp_size
    own = track.select(order[backend.dp_rank * share : (backend.dp_rank + 1) * share])
    algorithm = AROTB(pipeline, backend, samples_per_group=GROUP)
    stack = TrainStack(
        backend, {"text": algorithm}, micro_batch_size=GROUP, num_updates_per_batch=NUM_UPDATES, max_grad_norm=1.0
    )
    stack.prepare()
    result = stack.train(RolloutResp(tracks={"text": own}), progress=0.0)
    found = {
        "groups": list(own.group_ids),
        "lengths": lengths,
        "metrics": {k: v for k, v in result.metrics.items() if not k.startswith(("timing_s/", "perf/"))},
        "gradients": backend.gradients,
    }
    backend.close()
    return found


def of_rank(folder: Path) -> dict[str, dict[str, Any]]:
    """What this rank finds in every topology."""
    return {name: updates(folder, topology) for name, topology in TOPOLOGIES.items()}


@pytest.fixture(scope="module")
def one(folders: Path) -> dict[str, Any]:
    pipeline_of("qwen3", folders)  # written before the ranks read it
    return updates(folders, TrainTopology())


@pytest.fixture(scope="module")
def ranks(folders: Path, one: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_of_train.results_of_ranks(partial(of_rank, folders), tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize("name", list(TOPOLOGIES))
def test_two_ranks_give_the_numbers_of_one(name: str, one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert len(set(one["lengths"].tolist())) > 2
    found = [rank[name] for rank in ranks]
    if name == "dp":
        for rank in found:  # whole groups, each on one rank
            assert len(rank["groups"]) == 4 and all(rank["groups"].count(group) == GROUP for group in rank["groups"])
        assert {group for rank in found for group in rank["groups"]} == set("abcd")
    for rank in found:
        assert rank["metrics"].keys() == one["metrics"].keys()
        for key, value in one["metrics"].items():
            # float32 sums of the same terms in another order.
            assert rank["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        assert rank["gradients"].keys() == one["gradients"].keys()
        largest = max(float(gradient.abs().max()) for gradient in one["gradients"].values())
        for key, gradient in one["gradients"].items():
            assert isinstance(gradient, Tensor)
            torch.testing.assert_close(rank["gradients"][key], gradient, rtol=1e-4, atol=1e-5 * largest, msg=key)
