"""Families whose tokens or experts are spread over ranks: samples, log-probs, losses, gradients, a step, checkpoints
and pushed weights are those of one process, in every topology."""

from __future__ import annotations

import fcntl
import importlib
import math
import os
import shutil
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_steps import kit
from topology_steps import (
    CASES,
    CUT_TEXTS,
    EXPERT_TEXTS,
    NUM_EXPERTS,
    SHARED_TEXTS,
    TEXTS,
    doubles_of,
    expert_images,
    folder_of,
    one_sided,
    pipeline_of,
    resumed,
    shared_doubles_of,
    step_of,
    steps_of_rank,
    text_doubles_of,
)

from unirl.rollout.engine.checkpoint import checkpoint_shapes
from unirl.train.configs import LoraConfig, TrainTopology

pytestmark = pytest.mark.slow

ranks_of_train: Any = importlib.import_module("ranks")
tested: Any = importlib.import_module("tested_backend")
divides_layers = pytest.mark.skipif(
    tested.backend_class().__name__ == "VeOmniBackend",
    reason="VeOmni's plan divides no layers, and topology.tp is refused",
)
SPREAD = sorted(name for name, family in kit.families().items() if family.bundle.token_plan is not None)
FIRST = ["qwen_image", "sd3", "wan21_t2v"]
"""Joint attention with masked texts and without, and attention to a text that stays whole."""
USUAL = {
    *((name, "sp2") for name in (*FIRST, "qwen3")),
    *((name, "ring2") for name in ("qwen_image", "qwen3")),
    *(("qwen3_moe", case) for case in ("ep2", "dp2-ep2")),
    *(("qwen3", case) for case in ("tp2", "dp2-tp2")),
}


FOUR_HEADS = ["sd3", "sd3_controlnet", "qwen3_moe", "qwen3", "qwen2"]
"""Those whose tiny model can be spread over four ranks."""


def names_of(case: str, names: list[str]) -> list[str]:
    """Those that the case is for."""
    topology = CASES[case].topology
    if topology.tp > 1:
        return [name for name in names if name in CUT_TEXTS]
    if topology.ep > 1:
        return [name for name in names if name in EXPERT_TEXTS and (topology.sp == 1 or name in SHARED_TEXTS)]
    return [name for name in names if name in (*SPREAD, *SHARED_TEXTS) and (topology.sp == 2 or name in FOUR_HEADS)]


MANY = ("ring2", "sp2-recomputed", "dp2-sp2", "hsdp2-sp2", "ring2-recomputed")
"""Cases that every family with tokens to spread takes besides the plain one, each minutes for all of them."""
THOROUGH = {*FIRST, "hunyuan_video15", *SHARED_TEXTS} - {"qwen2", "qwen2_5_vl"}
"""Families that take them in every run: those of each kind of attention. Others do nightly, as do the two whose layers
are those of qwen3 and qwen3_vl with biases and without norms of queries and keys."""


def needs_of(case: str) -> tuple[pytest.MarkDecorator, ...]:
    """What the tested backend needs for it."""
    return (divides_layers,) if CASES[case].topology.tp > 1 else ()


def marks_of(name: str, case: str, *, is_usual: bool) -> tuple[pytest.MarkDecorator, ...]:
    """All but the usual rows are left to the matrix."""
    if is_usual:
        return ()
    return (pytest.mark.matrix, *((pytest.mark.nightly,) if case in MANY and name not in THOROUGH else ()))


def rows(cases: list[str]) -> list[Any]:
    """Every family with every case."""
    return [
        pytest.param(
            name,
            case,
            id=f"{name}-{case}",
            marks=(*marks_of(name, case, is_usual=(name, case) in USUAL), *needs_of(case)),
        )
        for case in cases
        for name in names_of(case, [*SPREAD, *TEXTS])
    ]


class Runs:
    """What one process and ranks found, run once for all families. out: of all processes of a test session, which share
    what ranks found. ids: of the tests of the session."""

    def __init__(self, folders: Path, out: Path, ids: set[str]) -> None:
        self.folders, self.out, self._ids = folders, out, ids
        self.of = cache(self._of)
        self.one = cache(self._one)

    def _one(self, name: str, lora: LoraConfig | None) -> dict[str, Any]:
        checkpoints = self.folders / ("one" if lora is None else "one-lora") / name
        return step_of(name, self.folders, TrainTopology(), checkpoints, lora=lora)

    def _of(self, case: str) -> list[dict[str, Any]]:
        names = [
            name
            for name in names_of(case, [*SPREAD, *TEXTS])
            if name in (*FIRST, "qwen3", "qwen3_moe", "hunyuan_image3") or self._ids & {name, f"{name}-{case}"}
        ]
        for name in names:
            pipeline_of(name, self.folders)  # written before the ranks read it
        folder, num_ranks = self.out / case, CASES[case].world_size
        folder.mkdir(exist_ok=True)
        job = partial(steps_of_rank, names, case, self.folders, folder)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # while another process's ranks run, which take all cores
            if not (folder / "outcome").exists():
                (folder / "outcome").write_text("another process's ranks did not end")
                try:
                    self._run(job, folder, num_ranks)
                except AssertionError as failed:
                    (folder / "outcome").write_text(str(failed))
                else:
                    (folder / "outcome").write_text("")
            failure = (folder / "outcome").read_text()
        assert not failure, failure
        return ranks_of_train.saved_results(folder, num_ranks)

    @staticmethod
    def _run(job: Any, folder: Path, num_ranks: int) -> None:
        """Once more if a library aborts a rank, which is said."""
        try:
            ranks_of_train.results_of_ranks(job, folder, num_ranks)
        except ranks_of_train.RankAborted as aborted:
            warnings.warn(f"the ranks of {folder.name} run again: {aborted}", stacklevel=1)
            for left in folder.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
                elif left.name not in ("lock", "outcome"):
                    left.unlink()
            ranks_of_train.results_of_ranks(job, folder, num_ranks)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    ids = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items if item.path == request.path}
    of_session = tmp_path_factory.getbasetemp()
    out = (of_session.parent if "PYTEST_XDIST_WORKER" in os.environ else of_session) / "topologies"
    out.mkdir(exist_ok=True)
    return Runs(folders, out, ids)


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


def beginning(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key.startswith(prefix)}


@pytest.mark.parametrize(("name", "case"), rows(list(CASES)))
def test_ranks_of_a_topology_are_as_one_process(name: str, case: str, runs: Runs) -> None:
    topology, lora = CASES[case].topology, CASES[case].lora
    has_shards = CASES[case].world_size > topology.sp * topology.tp
    one = runs.one(name, lora)
    ranks = [rank["float32"][name] for rank in runs.of(case)]
    for rank in ranks:
        # float32 sums of the same terms in another order.
        for key in ("samples", "logp"):
            assert_close({key: rank[key]}, {key: one[key]}, 1e-5)
        assert_close(rank["gradients"], one["gradients"], 1e-5)
        assert rank["state"].keys() == one["state"].keys()
        for kind in ("exp_avg", "exp_avg_sq"):
            assert_close(of_kind(rank["state"], kind), of_kind(one["state"], kind), 1e-5)
        for prefix in ("parameters/", "ema/"):
            assert_close(beginning(rank["state"], prefix), beginning(one["state"], prefix), 1e-5)
        assert_close(rank["weights"], one["weights"], 1e-5)
        assert rank["metrics"].keys() == one["metrics"].keys()
        for key, value in one["metrics"].items():
            if key in ("routing/busiest_expert", "routing/aux_loss") and has_shards:
                continue  # means of micro-batches, which differ in size
            assert rank["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        # A rollout of four rows and a replay of twelve: some units in the last place where products take other
        # kernels. Texts are sampled token by token and replayed at once.
        assert rank["metrics"]["policy/first_ratio_max_abs_dev"] <= (3e-6 if name in TEXTS else 1e-6)
        assert torch.equal(rank["samples"], ranks[0]["samples"])
        assert all(torch.equal(value, ranks[0]["state"][key]) for key, value in rank["state"].items())
        assert rank["bytes"] > 0
        assert rank["copied"]
        parts = len(ranks) // topology.dp_replicate
        assert {key: parts * kept for key, kept in rank["kept"].items()} == one["kept"]
        # FSDP gathers this rank's experts, or its part of a layer, alone.
        parts_of = {True: topology.ep, False: topology.tp}
        assert {key: parts_of[".experts" in key] * num for key, num in rank["gathered"].items()} == one["gathered"]
    loaded = resumed(name, runs.folders, runs.out / case / name, lora=lora)
    assert all(torch.equal(value, loaded[key]) for key, value in ranks[0]["state"].items() if key != "counters")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=needs_of(case))
        for case, name in (("ep2", "qwen3_moe"), ("dp2-ep2", "qwen3_moe"), ("tp2", "qwen3"), ("dp2-tp2", "qwen3"))
    ],
)
def test_divided_weights_are_pushed_by_the_names_of_the_checkpoint(case: str, name: str, runs: Runs) -> None:
    expected = checkpoint_shapes(folder_of(name, runs.folders))
    ranks = [rank["float32"][name] for rank in runs.of(case)]
    for rank in ranks:
        assert {key: tuple(value.shape) for key, value in rank["weights"].items()} == expected
        whole = {key: torch.full_like(value, math.nan) for key, value in rank["weights"].items()}
        for key, start, rows in (shard for each in ranks for shard in each["shards"]):
            whole[key][start : start + len(rows)] = rows
        assert all(torch.equal(value, whole[key]) for key, value in rank["weights"].items())


def test_what_must_not_be_is_refused_on_all_ranks(runs: Runs) -> None:
    for rank in runs.of("sp2"):
        assert "ranks that share samples (topology.sp = 2) hold different latents of the track image" in rank["differ"]
        assert (
            "topology.sp = 3 does not divide the 4 attention heads of transformer.transformer_blocks" in rank["heads"]
        )
        assert "topology.sp = 2: SD3 has no token plan. Set topology.sp: 1." in rank["plan"]
        assert "(topology.sp = 2) hold different tokens of the track text" in rank["texts_differ"]


SHARED = [
    pytest.param(name, case, marks=marks_of(name, case, is_usual=name in (*FIRST, "qwen3")))
    for case in ("sp2", "ring2")
    for name in [*SPREAD, *SHARED_TEXTS]
]


@pytest.mark.parametrize(("name", "case"), SHARED)
def test_transformers_in_float64_are_those_of_one_process(name: str, case: str, runs: Runs) -> None:
    one = (shared_doubles_of if name in TEXTS else doubles_of)(name, runs.folders)
    for rank in runs.of(case):
        assert_close(rank["float64"][name], one, 1e-10)


@pytest.mark.parametrize(("name", "case"), SHARED)
def test_a_rank_attends_with_its_part_of_the_tokens_and_sends_the_bytes_of_the_formula(
    name: str, case: str, runs: Runs
) -> None:
    for number, rank in enumerate(runs.of(case)):
        assert rank["attentions"][name]
        for lengths in rank["attentions"][name]:
            # A stream that does not divide gives the first rank one token more; there are two streams at most.
            assert 0 <= lengths[0] - lengths[1] <= 2
            assert lengths[number] <= sum(lengths) / 2 + 1
        sent, expected = rank["bytes"][name]
        assert sent == expected


CUT = [pytest.param(name, marks=() if name in ("qwen3", "qwen3_tied") else pytest.mark.matrix) for name in CUT_TEXTS]


@divides_layers
@pytest.mark.parametrize("name", CUT)
def test_cut_layers_in_float64_are_those_of_one_process(name: str, runs: Runs) -> None:
    one = shared_doubles_of(name, runs.folders)
    for rank in runs.of("tp2"):
        assert_close(rank["float64"][name], one, 1e-10)


@divides_layers
@pytest.mark.parametrize("name", CUT)
def test_a_rank_sums_hidden_states_of_each_layer_and_the_bytes_of_the_formula(name: str, runs: Runs) -> None:
    for rank in runs.of("tp2"):
        summed, expected = rank["bytes"][name]
        assert summed == expected > 0


@divides_layers
def test_layers_that_cannot_be_divided_are_refused_on_all_ranks(runs: Runs) -> None:
    for rank in runs.of("tp2"):
        assert "(topology.tp = 2) hold different tokens of the track text" in rank["texts_differ"]
        refused = rank["refused"]
        assert refused["divide"] == (
            "topology.tp = 4 does not divide the 2 heads of keys and values of qwen3. Set it to one of [1, 2]."
        )
        assert "topology.tp = 2: the layers of Qwen3MoeBundle cannot be divided among ranks" in refused["experts"]
        assert "topology.tp = 2 is not proven with fsdp.compile = True. Remove one of them." in refused["options"]


EXPERTS = [pytest.param(name, marks=() if name == "qwen3_moe" else pytest.mark.matrix) for name in EXPERT_TEXTS]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_in_float64_are_those_of_one_process(name: str, runs: Runs) -> None:
    one = text_doubles_of(name, runs.folders)
    for rank in runs.of("ep2"):
        # Linear attention computes in float32, whatever it is given.
        assert_close(rank["float64"][name], one, 1e-6 if name == "qwen3_5_moe" else 1e-10)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_rank_sends_the_rows_of_other_ranks_experts_and_the_bytes_of_the_formula(name: str, runs: Runs) -> None:
    for rank in runs.of("ep2"):
        sent, expected = rank["bytes"][name]
        assert sent == expected
        # Two layers, four rows of seven tokens, each to two experts: unequal parts.
        assert [sum(each) for each in rank["rows"][name]] == [4 * 7 * 2] * 2
        assert any(ours != theirs for ours, theirs in rank["rows"][name])


def test_experts_without_tokens_have_gradients_all_the_same(runs: Runs) -> None:
    one = one_sided()
    for rank in runs.of("ep2"):
        found = rank["one_sided"]
        assert found.keys() == one.keys()
        for key, value in one.items():
            # Both ranks have the same tokens: the mean of their losses is the loss of one.
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
        assert not found["down_proj"][NUM_EXPERTS // 2 :].any()


def test_images_by_spread_experts_are_those_of_one_process(runs: Runs) -> None:
    pipeline_of("hunyuan_image3", runs.folders)
    one = expert_images(runs.folders, TrainTopology())
    for rank in runs.of("ep2"):
        found = rank["images"]
        for key in ("latents", "logp"):
            assert_close({key: found[key]}, {key: one[key]}, 1e-5)
        assert any(".experts." in name for name in found["gradients"])
        assert_close(found["gradients"], one["gradients"], 1e-5)


@pytest.mark.parametrize(
    ("case", "name"), [pytest.param(*own, marks=needs_of(own[0])) for own in (("ep2", "qwen3_moe"), ("tp2", "qwen3"))]
)
def test_a_checkpoint_of_divided_weights_resumes_where_they_are_not_and_back(case: str, name: str, runs: Runs) -> None:
    for rank in runs.of(case):
        saved = rank["float32"][name]["state"]
        for loaded in rank["resharded"]:
            assert all(torch.equal(value, loaded[key]) for key, value in saved.items() if key != "counters")


def test_experts_that_cannot_be_spread_are_refused_on_all_ranks(runs: Runs) -> None:
    for rank in runs.of("ep2"):
        assert "topology.ep = 3 does not divide the 8 experts of qwen3_moe. Set it" in rank["refused"]["divide"]
        assert rank["refused"]["dense"] == "topology.ep = 3, but dense has no experts. Set topology.ep: 1."


def test_a_bundle_says_that_its_tokens_are_spread_where_it_has_a_plan() -> None:
    for family in kit.families().values():
        assert family.bundle.spreads_tokens == (family.bundle.token_plan is not None), family.bundle
