"""Families whose tokens are spread over ranks: samples, log-probs, losses, gradients, a step, checkpoints and pushed
weights are those of one process, in every topology."""

from __future__ import annotations

import importlib
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_steps import kit
from topology_steps import CASES, doubles_of, resumed, step_of, steps_of_rank

from unirl.train.configs import TrainTopology

pytestmark = pytest.mark.slow

ranks_of_train: Any = importlib.import_module("ranks")
SPREAD = sorted(name for name, family in kit.families().items() if family.bundle.token_plan is not None)
FIRST = ["qwen_image", "sd3", "wan21_t2v"]
"""Joint attention with masked texts and without, and attention to a text that stays whole."""
USUAL = {(name, "sp2") for name in FIRST}


FOUR_HEADS = ["sd3", "sd3_controlnet"]
"""Those whose tiny model can be spread over four ranks."""


def names_of(case: str, names: list[str]) -> list[str]:
    return [name for name in names if CASES[case].topology.sp == 2 or name in FOUR_HEADS]


def rows(cases: list[str]) -> list[Any]:
    """Every family with every case; all but the usual ones are left to the matrix."""
    return [
        pytest.param(name, case, id=f"{name}-{case}", marks=() if (name, case) in USUAL else pytest.mark.matrix)
        for case in cases
        for name in names_of(case, SPREAD)
    ]


class Runs:
    """What one process and ranks found, run once for all families."""

    def __init__(self, folders: Path, out: Path, names: list[str]) -> None:
        self.folders, self.out, self._names = folders, out, names
        self.of = cache(self._of)
        self.one = cache(lambda name: step_of(name, folders, TrainTopology(), out / "one" / name))

    def _of(self, case: str) -> list[dict[str, Any]]:
        for name in self._names:
            kit.ours(name, self.folders / name)  # written before the ranks read it
        (self.out / case).mkdir()
        job = partial(steps_of_rank, names_of(case, self._names), case, self.folders, self.out / case)
        return ranks_of_train.results_of_ranks(job, self.out / case, CASES[case].world_size)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    ids = [item.name.partition("[")[2] for item in request.session.items if item.path == request.path]
    names = [name for name in SPREAD if name in FIRST or any(each.startswith((f"{name}-", f"{name}]")) for each in ids)]
    return Runs(folders, tmp_path_factory.mktemp("topologies"), names)


def assert_close(found: dict[str, torch.Tensor], one: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor by its norm, and the smallest by a tenth of that of all: rounding alone is left of some (biases of
    keys)."""
    assert found.keys() == one.keys()
    floor = math.sqrt(sum(float(value.double().norm()) ** 2 for value in one.values())) / 10
    for key, expected in one.items():
        difference = float((found[key] - expected).double().norm())
        assert difference <= tolerance * max(float(expected.double().norm()), floor), (key, difference)


def of_kind(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key.startswith("optimizer/") and key.endswith(kind)}


@pytest.mark.parametrize(("name", "case"), rows(list(CASES)))
def test_ranks_of_a_topology_are_as_one_process(name: str, case: str, runs: Runs) -> None:
    one = runs.one(name)
    ranks = [rank["float32"][name] for rank in runs.of(case)]
    for rank in ranks:
        # float32 sums of the same terms in another order.
        for key in ("latents", "logp"):
            assert_close({key: rank[key]}, {key: one[key]}, 1e-5)
        assert_close(rank["gradients"], one["gradients"], 1e-5)
        assert rank["state"].keys() == one["state"].keys()
        for kind in ("exp_avg", "exp_avg_sq"):
            assert_close(of_kind(rank["state"], kind), of_kind(one["state"], kind), 1e-5)
        assert_close(rank["weights"], one["weights"], 1e-5)
        assert rank["metrics"].keys() == one["metrics"].keys()
        for key, value in one["metrics"].items():
            assert rank["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        # A rollout of four rows and a replay of twelve: one unit in the last place where products take other kernels.
        assert rank["metrics"]["policy/first_ratio_max_abs_dev"] <= 2e-7
        assert torch.equal(rank["latents"], ranks[0]["latents"])
        assert all(torch.equal(value, ranks[0]["state"][key]) for key, value in rank["state"].items())
        assert rank["bytes"] > 0
    loaded = resumed(name, runs.folders, runs.out / case / name)
    assert all(torch.equal(value, loaded[key]) for key, value in ranks[0]["state"].items() if key != "counters")


def test_what_must_not_be_is_refused_on_all_ranks(runs: Runs) -> None:
    for rank in runs.of("sp2"):
        assert "ranks that share samples (topology.sp = 2) hold different latents of the track image" in rank["differ"]
        assert (
            "topology.sp = 3 does not divide the 4 attention heads of transformer.transformer_blocks" in rank["heads"]
        )
        assert "topology.sp = 2: SD3 has no token plan. Set topology.sp: 1." in rank["plan"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.matrix) for n in SPREAD])
def test_transformers_in_float64_are_those_of_one_process(name: str, runs: Runs) -> None:
    one = doubles_of(name, runs.folders)
    for rank in runs.of("sp2"):
        assert_close(rank["float64"][name], one, 1e-10)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.matrix) for n in SPREAD])
def test_a_rank_attends_with_its_part_of_the_tokens_and_sends_the_bytes_of_the_formula(name: str, runs: Runs) -> None:
    for number, rank in enumerate(runs.of("sp2")):
        assert rank["attentions"][name]
        for lengths in rank["attentions"][name]:
            # A stream that does not divide gives the first rank one token more; there are two streams at most.
            assert 0 <= lengths[0] - lengths[1] <= 2
            assert lengths[number] <= sum(lengths) / 2 + 1
        sent, expected = rank["bytes"][name]
        assert sent == expected


def test_a_bundle_says_that_its_tokens_are_spread_where_it_has_a_plan() -> None:
    for family in kit.families().values():
        assert family.bundle.spreads_tokens == (family.bundle.token_plan is not None), family.bundle
