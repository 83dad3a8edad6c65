"""`trainer rehearse`: a step at true size on a device that computes nothing."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unirl.worlds.shapes
from unirl.app.command_line import Command
from unirl.app.recipe import composed
from unirl.app.rehearsal import command
from unirl.app.rehearsal.branching import branching_of
from unirl.app.rehearsal.command import WORLDS, for_devices
from unirl.app.rehearsal.engines import with_engines
from unirl.app.rehearsal.rehearse import Rehearsed, _shortened
from unirl.app.rehearsal.report import limit_of, verdict
from unirl.app.rehearsal.share import Work, share_of
from unirl.app.rehearsal.texts import FirstTokens, keys_of_groups
from unirl.config.catalog import available
from unirl.data.datasets import read_rows
from unirl.data.pairs import read_pairs
from unirl.data.targets import read_targets
from unirl.rehearsal.ledger import Peak
from unirl.types.devices import PRETEND
from unirl.types.errors import ConfigError
from unirl.types.messages import brings_conversation
from unirl.types.rollout import RolloutResp, RolloutTrack

from .rehearsing import checked, peaks_of, rehearse, tflop, tflop_of, trainer


def test_a_recipe_is_rehearsed_as_one_rank_of_its_world() -> None:
    done = rehearse(
        "worlds/shapes/flowgrpo",
        "runtime=ray",
        "num_devices=4",
        "device=cuda",
        "sampling.samples_per_prompt=8",
        "batch_size=8",
        "stack.micro_batch_size=2",
        "stack.num_updates_per_batch=2",
        "--fits",
        "0.001GB",
    )
    assert done.returncode == 1, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "rank 0 of 4, " in first
    assert "of 16 samples made" in first
    assert set(peaks_of(done.stdout)) >= {"start", "rollout", "reward", "train", "eval"}
    assert any(line.startswith("  does not fit 1 MB: counted") for line in rest)
    assert any(re.match(r"    activations [\d.]+ MB: .*rows_per_forward", line) for line in rest)


def test_a_model_whose_configurations_are_not_known_is_named(tmp_path: Path) -> None:
    run = checked("sd3/grpo", "bundle.pretrained_model=someone/something")
    with pytest.raises(ConfigError, match="someone/something: the configurations of this model are not known"):
        share_of(run, tmp_path)


@pytest.mark.parametrize(
    ("num_updates", "num_trained"),
    [(1, 4), (2, 8), (4, 8), (8, 4), (16, 2)],  # of 16 samples, two in a backward, two updates rehearsed
)
def test_a_rehearsed_update_holds_no_more_samples_than_the_runs(
    tmp_path: Path, num_updates: int, num_trained: int
) -> None:
    geometry = ("batch_size=4", "sampling.samples_per_prompt=4", "stack.micro_batch_size=2")
    run = checked("worlds/shapes/flowgrpo", *geometry, f"stack.num_updates_per_batch={num_updates}")
    share = share_of(run, tmp_path)
    (work,) = share.works.values()
    assert work.num_trained == num_trained


SELECTIONS = {
    "all": ("worlds/shapes/flowgrpo", (), 384),
    "best_and_worst": ("worlds/shapes/flowgrpo", ("+selection.best_of=6", "stack.num_updates_per_batch=4"), 96),
    "best_of_n": ("worlds/shapes/raft", (), 48),
    "of_rewards": ("worlds/arithmetic/rft", (), 512),
}
"""Recipe, changes, and the samples of a rollout that are trained on: 24, 16 and 16 per prompt."""


@pytest.mark.parametrize(("recipe", "words", "num_kept"), SELECTIONS.values(), ids=SELECTIONS)
def test_what_selection_leaves_is_trained_on(
    recipe: str, words: tuple[str, ...], num_kept: int, tmp_path: Path
) -> None:
    share = share_of(checked(recipe, *words), tmp_path)
    assert share.root.num_kept == num_kept
    assert share.root.num_trained <= num_kept
    assert any("drop_zero_variance" in note for note in share.notes) == (recipe == "worlds/arithmetic/rft")


@pytest.mark.parametrize(("more", "replayed"), [((), 192), (("schedule.experience.groups_per_rollout=6",), 96)])
def test_groups_of_earlier_rollouts_are_trained_on_too(tmp_path: Path, more: tuple[str, ...], replayed: int) -> None:
    work = share_of(checked("worlds/shapes/nft_replay", *more), tmp_path).root
    assert (work.num_kept, work.num_replayed) == (192, replayed)


def test_a_scorer_with_gradients_and_no_model_runs_in_a_rehearsal(tmp_path: Path) -> None:
    share = share_of(checked("worlds/shapes/srpo"), tmp_path / "known")
    scorers = share.run.resolved["reward"]["scorers"]
    assert scorers["gradient"]["_target_"].endswith(".ShapesGradientScorer")
    assert scorers["gradient"]["device"] == PRETEND
    assert scorers["shapes"]["_target_"].endswith(".DrawnScorer")
    assert share.notes[0].startswith("scores other than of gradient are drawn")
    other = share_of(checked("worlds/shapes/srpo", "data.path=nowhere.jsonl"), tmp_path / "other")
    assert other.run.resolved["reward"]["scorers"]["gradient"]["_target_"].endswith(".DrawnScorer")


def test_scorers_with_clip_compute_at_their_true_size(tmp_path: Path) -> None:
    share = share_of(checked("sd3/refl"), tmp_path)
    drawn = share.run.resolved["reward"]["scorers"]["hpsv2"]
    assert drawn["_target_"].endswith(".DrawnScorer")
    assert drawn["scorer"]["device"] == PRETEND
    config = json.loads((Path(drawn["scorer"]["model"]) / "config.json").read_text())
    assert config["vision_config"]["num_hidden_layers"] == 32
    assert share.notes[0] == "scores are drawn, whatever hpsv2 computes"


def test_of_scorers_without_known_models_the_bytes_are_counted(tmp_path: Path) -> None:
    share = share_of(checked("sd3/mixgrpo_four"), tmp_path)
    scorers = share.run.resolved["reward"]["scorers"]
    assert {name for name, scorer in scorers.items() if "scorer" in scorer} == {"pickscore", "hpsv2", "clip"}
    assert scorers["image_reward"]["num_bytes"] > 1e9
    assert "image_reward computes nothing" in share.notes[0]


@pytest.mark.nightly
def test_a_scorer_computes_as_much_as_its_layers_say() -> None:
    num_samples = 8
    image = (
        32 * 257 * 2 * (4 * 1280**2 + 2 * 1280 * 5120) + 32 * 4 * 257**2 * 1280
    )  # layers of ViT-H/14: products, attention
    text = 24 * 77 * 2 * 12 * 1024**2 + 24 * 4 * 77**2 * 1024
    geometry = (
        "sampling.height=64",
        "sampling.width=64",
        "sampling.num_inference_steps=4",
        "algorithm.num_last_steps=2",
    )
    found = tflop("sd3/refl", "eval=null", *geometry)["reward"]
    assert found == pytest.approx(num_samples * (image + text) / 1e12, rel=0.02)


def test_a_rollout_counts_as_the_mean_of_the_places_where_groups_part() -> None:
    found = branching_of(checked("worlds/shapes/flowgrpo_fast", "num_rollouts=400"))
    assert found is not None
    scheduler = checked("worlds/shapes/flowgrpo_fast").resolved["sampling"]["scheduler"]
    assert (scheduler["max_step"], scheduler["window_size"]) == (4, 2)  # places 0, 1 and 2
    assert found.share == pytest.approx(0.5, abs=0.05)
    assert found.earliest != found.latest
    assert branching_of(checked("worlds/shapes/flowgrpo")) is None
    fixed = ("sampling.scheduler.stride=0", "sampling.scheduler.init=1")
    assert branching_of(checked("worlds/shapes/flowgrpo_fast", *fixed)) is None


@pytest.mark.nightly
def test_steps_that_a_group_walks_together_are_made_once() -> None:
    words = ("worlds/shapes/flowgrpo_fast", "eval=null", "batch_size=4", "stack.micro_batch_size=8")
    mean = tflop(*words)["rollout"]
    places = [
        tflop(*words, "sampling.scheduler.stride=0", f"sampling.scheduler.init={place}")["rollout"] for place in (0, 2)
    ]
    assert places[0] > 1.3 * places[1]
    share = branching_of(checked(*words))
    assert share is not None
    assert mean == pytest.approx(places[0] + share.share * (places[1] - places[0]), rel=0.01)


def test_an_evaluation_of_conversations_asks_prompts_alone(tmp_path: Path) -> None:
    run = share_of(checked("sft/qwen3_4b"), tmp_path).run  # of which only the data come with the trainer
    asked, given = (read_rows(run.resolved[section][key]) for section, key in (("eval", "prompts"), ("data", "path")))
    assert all(map(brings_conversation, (row.metadata for row in given)))
    assert not any(map(brings_conversation, (row.metadata for row in asked)))


def test_a_policy_that_acts_plays_with_the_model_that_trains(tmp_path: Path) -> None:
    run = share_of(checked("vla/tabletop_push_flow"), tmp_path / "acting").run
    assert run.resolved["engine"]["_target_"].endswith(".EpisodesEngine")
    assert "Gymnasium" in run.resolved["engine"]["environment"]["_target_"]
    built = share_of(checked("vla/cartpole"), tmp_path / "built").run  # from its section
    assert "pretrained_model" not in built.resolved["bundle"]


@pytest.mark.parametrize(
    ("num_rows", "kept"),
    [((0, 2, 0), (2, 2, 2)), ((1, 3, 4), (1, 2, 2)), ((2, 4, 1), (2, 4, 1))],  # of 2 texts, 4 images, 4 of those again
)
def test_what_is_trained_on_grows_from_what_is_kept(num_rows: tuple[int, ...], kept: tuple[int, ...]) -> None:
    texts = RolloutTrack(sample_ids=["a", "b"])
    images = texts.fork("text", "image", 2)
    resp = RolloutResp(tracks={"text": texts, "image": images, "redraw": images.fork("image", "redraw", 1)})
    _shortened(resp, dict(zip(resp.tracks, num_rows, strict=True)))
    assert tuple(track.batch_size for track in RolloutResp(tracks=resp.tracks).tracks.values()) == kept


@pytest.mark.nightly
def test_samples_that_are_left_out_take_no_time_in_training() -> None:
    words = ["worlds/shapes/flowgrpo", "batch_size=4", "sampling.samples_per_prompt=8", "eval=null"]
    flops = []
    for more in ([], ["+selection.best_of=4"]):
        done = rehearse(*words, "stack.num_updates_per_batch=1", "stack.micro_batch_size=8", *more)
        assert done.returncode == 0, done.stderr
        flops.append(tflop_of(done.stdout))
    assert flops[1]["rollout"] == flops[0]["rollout"]
    assert flops[1]["train"] == pytest.approx(flops[0]["train"] / 2, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["worlds/shapes/awm", "worlds/edits/nft"])
def test_training_of_several_updates_is_counted_to_the_operation(recipe: str) -> None:
    """The first has anchors, the second a stream that nothing reads after the last block."""
    done = trainer("bench", recipe, "--warmup", "0", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    counted = rehearse(recipe, "device=cpu", "eval=null")
    assert counted.returncode == 0, counted.stderr
    assert tflop_of(counted.stdout)["train"] == pytest.approx(
        json.loads(done.stdout)["phases"]["train"]["flops"] / 1e12, rel=0.005
    )


@pytest.mark.nightly
def test_a_random_depth_is_rehearsed_at_its_deepest_and_counted_by_its_mean() -> None:
    words = ["worlds/shapes/alignprop", "eval=null", "batch_size=8", "stack.micro_batch_size=8"]
    peaks, flops = [], []
    full = "algorithm.truncation=full"
    for more in ([], [full], [full, "sampling.num_inference_steps=3"]):
        done = rehearse(*words, *more)
        assert done.returncode == 0, done.stderr
        peaks.append(peaks_of(done.stdout)["train"])
        flops.append(tflop_of(done.stdout)["train"])
    assert peaks[0] == peaks[1]
    of_step = (flops[1] - flops[2]) / 3
    assert flops[0] == pytest.approx(flops[1] - 2.5 * of_step, rel=0.01)  # 1 .. 6 of 6 steps, and one decoded image


@pytest.mark.nightly
def test_steps_of_an_unrolled_sampler_that_are_counted_take_what_those_that_run_do() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rehearsed_steps.py"))],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    num_run = {name: each.pop("num_run") for name, each in found.items()}
    gathered = {name: each["collectives"].pop("allgather") for name, each in found.items()}
    assert found["alike"] == found["all"]
    # In each of two micro-batches of six steps two are counted.
    assert (num_run["alike"], num_run["all"]) == (8, 12)
    # Which blocks FSDP fetches ahead depends on the forwards that ran before.
    assert gathered["alike"] == pytest.approx(gathered["all"], rel=0.06)


def test_the_reward_of_long_texts_keeps_its_buffer(tmp_path: Path) -> None:
    run = share_of(checked("worlds/arithmetic/dapo"), tmp_path).run
    assert run.resolved["reward"]["overlong_buffer_len"] == 4


def test_a_teacher_is_rehearsed() -> None:
    teacher = str(Path(unirl.worlds.shapes.__file__).parent / "checkpoint")
    done = rehearse("worlds/shapes/distill", f"policies.teacher.bundle.pretrained_model={teacher}", "eval=null")
    assert done.returncode == 0, done.stderr


BROKEN = """
from unirl.models.sd3.pipeline import SD3Pipeline

class Broken(SD3Pipeline):
    def encode(self, primitives, params):
        raise ValueError("needs values")
"""


def test_code_that_cannot_be_rehearsed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_family.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = rehearse("worlds/shapes/flowgrpo", "device=cuda", "pipeline._target_=broken_family.Broken")
    assert done.returncode == 2
    assert re.search(r"ConfigError: cannot be rehearsed: rollout/\S+\.py:\d+: ValueError: needs values", done.stderr)


@pytest.mark.nightly
def test_texts_are_made_at_full_length() -> None:
    """More tokens at once than a rehearsal keeps numbers of."""
    words = ("sampling.max_new_tokens=240", "batch_size=40", "engine.forward_batch_size=320")
    done = rehearse("worlds/arithmetic/grpo", "device=cuda", *words)
    assert done.returncode == 0, done.stderr
    assert "every text of text has 240 tokens" in done.stdout
    rollout, train = (peaks_of(done.stdout)[phase] for phase in ("rollout", "train"))
    # Of 320 completions: two layers with two heads of keys and values of width 32 in float32.
    cached = 320 * 240 * 2 * 2 * 2 * 32 * 4
    assert rollout > cached
    assert train > rollout


def test_prompts_whose_images_have_no_values_are_told_apart_by_their_groups() -> None:
    adapter: Any = SimpleNamespace(prompt_keys=lambda conditions: ["a question", "a question", "a question", "other"])
    keys = keys_of_groups(adapter, 2)({})
    assert keys[0] == keys[1] != keys[2] != keys[3]


def test_a_decoder_and_its_cache_go_with_the_rollout() -> None:
    """Without a collection: what stayed would count in the phases after it."""

    class Kept:
        rows = torch.arange(3)

        def step(self, tokens: torch.Tensor, is_alive: torch.Tensor) -> torch.Tensor:
            return tokens * is_alive

    decoder: Any = Kept()
    repeats: Any = None  # nothing is repeated
    gone = weakref.ref(decoder)
    gc.disable()
    try:
        with FirstTokens(repeats, num_tokens=3) as tokens:
            assert tokens.of(decoder).step(torch.ones(3), torch.zeros(3)).tolist() == [1.0] * 3
        assert decoder.step(torch.ones(3), torch.zeros(3)).tolist() == [0.0] * 3
        del decoder, tokens
        assert gone() is None
    finally:
        gc.enable()


TEXTS = ("worlds/arithmetic/grpo", "device=cuda", "batch_size=8", "sampling.max_new_tokens=200", "eval=null")
TOPOLOGY = "backend.topology"


@pytest.fixture(scope="module")
def one_rank_of_texts() -> str:
    """The output of a rehearsal on one device."""
    done = rehearse(*TEXTS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("split", "collective", "least", "most"),
    [
        ("sp", "alltoall", 0.475, 0.525),
        ("tp", "allreduce", 0.5, 0.8),  # each rank has the hidden states of all tokens
    ],
    ids=["tokens", "layers"],
)
def test_ranks_that_share_texts_each_compute_a_half(
    split: str, collective: str, least: float, most: float, one_rank_of_texts: str
) -> None:
    topology = [f"+{TOPOLOGY}._target_=unirl.train.configs.TrainTopology", f"+{TOPOLOGY}.{split}=2"]
    done = rehearse(*TEXTS, "runtime=ray", "num_devices=2", *topology)
    assert done.returncode == 0, done.stderr
    flops, peaks = ([read(text)["train"] for text in (one_rank_of_texts, done.stdout)] for read in (tflop_of, peaks_of))
    assert flops[1] == pytest.approx(flops[0] / 2, rel=0.01)
    assert least < peaks[1] / peaks[0] < most
    sent = rf"collectives in train.* {collective} ([\d.]+) MB"
    assert re.search(sent, done.stdout) and not re.search(sent, one_rank_of_texts)


@pytest.mark.nightly
def test_a_model_that_only_writes_makes_texts_of_full_length_too() -> None:
    done = rehearse("worlds/phrases/both", "policies.writer.trains=false", "batch_size=2", "device=cuda")
    assert done.returncode == 0, done.stderr
    assert "every text of text has 12 tokens" in done.stdout
    assert "text: 16 of 16 samples made, 0 trained on, image: " in done.stdout


SAMPLED = {name: Peak(100, {"activations": 70, "optimizer": 30}) for name in ("rollout", "reward", "eval", "train")}


@pytest.mark.parametrize(
    ("recipe", "held", "phases_with_it", "has_activations"),
    [
        ("sd3/sglang", 2 * 10**9, ["rollout", "reward", "eval"], True),  # sleeps in training
        ("llm/qwen3_4b_dapo_grpo", 48 * 10**9, ["rollout", "reward", "eval"], False),
        ("pe/pe_sglang_full_pickscore", 26 * 10**9, ["rollout", "reward", "eval"], True),
        ("sd3/replica_separate", 2 * 10**9, ["engine"], False),
        ("hunyuan_image3/vllm_omni", 250 * 10**6, ["engine"], False),  # each of eight devices has a part
    ],
)
def test_engines_with_separate_weights_are_counted_by_formulas(
    recipe: str, held: int, phases_with_it: list[str], has_activations: bool, tmp_path: Path
) -> None:
    run = checked(recipe)
    share = share_of(run, tmp_path)
    found = with_engines(SAMPLED, run, share, dict.fromkeys(run.all_policies, 10**9), 80e9)
    assert {phase: peak.parts["engine"] for phase, peak in found.items() if "engine" in peak.parts} == dict.fromkeys(
        phases_with_it, held
    )
    assert all(("activations" in found[phase].parts) == has_activations for phase in ("rollout", "eval"))
    assert found["train"] == SAMPLED["train"]
    if "engine" in found:
        assert found["engine"].parts["activations"] == 70
        assert found["rollout"].num_bytes == 30


def test_of_several_stages_each_track_has_its_own_work(tmp_path: Path) -> None:
    works = share_of(checked("pe/pe_trainside_pickscore"), tmp_path).works
    # One prompt of a rank: four texts, eight images of each.
    assert works == {"text": Work(4, 4, 4, 2), "image": Work(32, 32, 32, 4)}


def test_preferences_get_pairs_of_images_and_evaluations_prompts_alone(tmp_path: Path) -> None:
    run = share_of(checked("sd3/dpo"), tmp_path).run
    (row, *_) = read_pairs(run.data.get("path"), size=(512, 512))
    assert len(row.metadata["images"]) == 2
    assert run.evaluation is not None
    assert not any(row.metadata for row in read_rows(run.evaluation.get("prompts")))


def test_targets_are_images_or_videos_of_the_size_of_the_recipe(tmp_path: Path) -> None:
    for name in ("sft/sd35_lora", "sft/wan21_lora"):
        run = share_of(checked(name), tmp_path / name).run
        height, width = run.sampling.get("height"), run.sampling.get("width")
        path, num_frames = run.data.get("path"), run.sampling.get("num_frames", 1)
        (row, *_) = read_targets(path, size=(height, width), num_frames=num_frames)
        assert len(row.metadata["images"]) == 1


def test_ranks_that_share_samples_each_rehearse_those_of_their_group(tmp_path: Path) -> None:
    words = ["runtime=ray", "num_devices=4", "device=cuda"]
    topology = ["+backend.topology._target_=unirl.train.configs.TrainTopology", "+backend.topology.sp=2"]
    found = []
    for number, more in enumerate(([], topology)):
        run = checked("worlds/shapes/flowgrpo", *words, *more)
        found.append(share_of(run, tmp_path / str(number)))
    alone, shared = found
    assert shared.num_ranks == alone.num_ranks == 4
    assert shared.root.num_samples == 2 * alone.root.num_samples


def rehearsed(**parts: int) -> Rehearsed:
    """One phase with these parts."""
    return Rehearsed(
        recipe="some",
        num_ranks=1,
        works={"image": Work(num_samples=1, num_kept=1, num_made=1, num_trained=1)},
        peaks={"train": Peak(sum(parts.values()), parts)},
        host_bytes=0,
        operators={},
        collectives={},
        times={},
        reads={},
        cpu_s=0.0,
        notes=(),
    )


def test_only_what_is_counted_decides_whether_it_fits() -> None:
    found = rehearsed(activations=60 * 10**9, optimizer=18 * 10**9)
    assert verdict(found, 80e9) == (
        True,
        ["  fits 80.00 GB: counted 78.00 GB in train, about 83.40 GB on a real device, which may be too much"],
    )
    assert verdict(found, 90e9)[1][0].endswith("on a real device")
    fits, said = verdict(found, 40e9)
    assert not fits
    assert said[1].startswith("    activations 60.00 GB: ")
    assert said[2] == (
        "    optimizer 18.00 GB: backend.optimizer.offload=true, backend.optimizer.states=8bit, more devices, or "
        "parts/train=lora"
    )


@pytest.mark.parametrize("text", ["80", "80MB", "much"])
def test_a_limit_is_a_size_in_gigabytes(text: str) -> None:
    with pytest.raises(ConfigError, match="80GB"):
        limit_of(text)


def test_rehearsals_at_a_time_are_for_all_recipes() -> None:
    for words in (["sd3/grpo", "--jobs", "2"], ["--all", "--jobs", "0"]):
        done = rehearse(*words)
        assert done.returncode == 2
        assert "rehearsals at a time" in done.stderr


@pytest.mark.nightly
def test_a_recipe_of_each_family_and_of_each_algorithm_fits_the_devices_of_its_header() -> None:
    families, algorithms = set[str](), set[object]()
    failed: dict[str, str] = {}
    for name in available():
        if name.startswith(WORLDS):
            continue
        family = name.split("/", maxsplit=1)[0]
        policies = for_devices(composed(Command("rehearse", name, ()))).policies.values()
        own = {part.node["_target_"] for policy in policies for part in policy.algorithms.values()}
        if family in families and own <= algorithms:
            continue
        families.add(family)
        algorithms |= own
        done = rehearse(name, "--fits", "80GB")
        if done.returncode:
            failed[name] = f"{done.stdout[-500:]}{done.stderr[-500:]}"
    assert not failed
    assert len(families) > 20
    assert len(algorithms) > 30


@pytest.mark.nightly
def test_reports_come_in_the_order_of_the_recipes() -> None:
    report = partial(command._Report, is_well=True)
    names = ["b", "a", "c"]
    assert list(command._reports(report, names, 2)) == [report(name) for name in names]
