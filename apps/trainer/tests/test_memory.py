"""What recipes take of a GPU: each fits what its header names, the arithmetic, and what is not known."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.app.environment import register_resolvers
from unirl.app.main import main
from unirl.app.memory import GB, PRODUCTS, ROOM, peak, phases
from unirl.config.catalog import available
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.errors import ConfigError

OTHERS = (
    "worlds/",
    "llm/",
    "vlm/",
    "vla/",
    "pe/",
    "bagel/think",
    "hunyuan_image3/think",
    "hunyuan_image3/vllm",
    "sft/",
    "janus/",
)
REAL = [name for name in available() if not name.startswith(OTHERS)]
"""Recipes of images and videos alone, of real size."""
NUMBERS = {"eight": 8, "sixteen": 16, "thirty-two": 32}


def found(name, *overrides):
    register_resolvers()
    return phases(run_of(resolve(compose(name, list(overrides)))))


def by_name(name, *overrides):
    return {phase.name: phase.parts for phase in found(name, *overrides)}


@pytest.mark.parametrize("name", REAL)
def test_a_recipe_fits_the_gpus_that_its_header_names(recipes, name):
    named = re.search(r"(\S+) GPUs of (\d+) GB", available()[name])
    assert named is not None, f"{name} does not say its GPUs"
    run = run_of(recipes[name])
    assert run.num_devices == NUMBERS[named[1].lower()]
    most = peak(phases(run))
    assert most.num_bytes <= ROOM * float(named[2]) * GB, f"{most.name}: {most.num_bytes / GB:.0f} GB, {most.parts}"


def test_the_numbers_of_the_guide_to_stable_diffusion_follow():
    """docs/guides/sd35.md has the arithmetic, and the position table, which is sharded here, as whole."""
    of = by_name("sd3/nft")
    assert of["train"]["text encoders"] == pytest.approx(11.16e9, rel=0.01)
    assert of["train"]["reward models"] == pytest.approx(3.94e9, rel=0.01)
    assert of["train"]["model"] + of["train"]["LoRA with Adam"] == pytest.approx(0.66e9, rel=0.1)
    assert of["rollout"]["activations"] == pytest.approx(2.1e9, rel=0.03)
    assert of["decode"]["decoder"] == pytest.approx(6.6e9, rel=0.03)
    assert sum(of["train"][name] for name in ("media", "conditions", "trajectories")) == pytest.approx(1.4e9, rel=0.03)
    assert of["train"]["activations"] == pytest.approx(32.4e9, rel=0.01)
    assert sum(of["train"].values()) == pytest.approx(50.8e9, rel=0.015)


@pytest.mark.matrix
@pytest.mark.nightly
def test_a_rehearsal_counts_what_is_estimated():
    words = ["flux2_klein/grpo", "+backend.fsdp.activation_offload=true"]
    command = [str(Path(sys.executable).parent / "trainer"), "rehearse", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rehearsed = {name: float(size) for name, size in re.findall(r"^  (\w+) +([\d.]+) GB per device", done.stdout, re.M)}
    estimated = found(*words)
    assert peak(estimated).num_bytes / GB == pytest.approx(max(rehearsed.values()), rel=0.1)
    assert sum(by_name(*words)["train"].values()) / GB == pytest.approx(rehearsed["train"], rel=0.1)


def test_the_model_that_scores_videos_is_counted():
    of_videos, of_images = by_name("wan21/t2v_mixgrpo"), by_name("sd3/nft")
    assert of_videos["train"]["reward models"] == of_images["train"]["reward models"] > 0


def test_what_is_not_images_alone_has_no_estimate():
    with pytest.raises(ConfigError, match="for images and videos alone, this recipe has several stages"):
        found("bagel/think_flowgrpo")


def test_no_more_is_counted_than_there_is():
    """Three steps of one sample are three rows, whatever a forward may take; four samples are not decoded as eight."""
    most = by_name("sd3/grpo")["train"]["activations"]
    one = by_name("sd3/grpo", "stack.micro_batch_size=1")["train"]["activations"]
    assert one == pytest.approx(most * 3 / 12)
    few = ("num_devices=1", "batch_size=1", "sampling.samples_per_prompt=4")
    whole, four = (by_name("sd3/nft", *more)["decode"]["decoder"] for more in ((), few))
    assert four == pytest.approx(whole * 4 / 8)


def test_what_a_setting_saves():
    name = "sd3/nft"
    whole = by_name(name)
    dropped = by_name(name, "engine.drop_text_encoders=true")
    assert whole["train"]["text encoders"] > 0 == dropped["train"]["text encoders"]
    fewer = by_name(name, "algorithm.rows_per_forward=6")
    assert fewer["train"]["activations"] == whole["train"]["activations"] / 2
    checkpointed = by_name(name, "+backend.fsdp.activation_checkpointing=true")
    # One block of 24 keeps everything, the others what goes into them.
    ratio = checkpointed["train"]["activations"] / whole["train"]["activations"]
    assert ratio == pytest.approx((24 + 27) / (24 * 27))
    selective = by_name(name, "+backend.fsdp.activation_checkpointing=selective")
    ratio = selective["train"]["activations"] / whole["train"]["activations"]
    assert ratio == pytest.approx(PRODUCTS + 1 / 24)
    offloaded = by_name(name, "+backend.fsdp.activation_offload=true")
    assert offloaded["train"]["activations"] == pytest.approx(whole["train"]["activations"] * 3 / 24)
    one = by_name(name, "pipeline.decode_batch_size=1")
    assert one["decode"]["decoder"] == pytest.approx(whole["decode"]["decoder"] / 8)
    tiles = by_name(name, "+bundle.vae_tile_pixels=128")
    assert tiles["decode"]["decoder"] < 0.2 * whole["decode"]["decoder"]
    video = ("hunyuan_video15/i2v_nft", "sampling.num_frames=33")
    spans = by_name(*video, "+bundle.vae_tile_frames=9")
    assert spans["decode"]["decoder"] < 0.35 * by_name(*video)["decode"]["decoder"]
    bits = by_name(name, "+engine.media_bits=8")
    assert bits["train"]["media"] == whole["train"]["media"] / 4
    unseen = by_name(name, "+engine.decode=false")
    assert unseen["train"]["media"] == unseen["decode"]["decoder"] == 0
    half = by_name(name, "num_devices=4")
    assert half["train"]["model"] == 2 * whole["train"]["model"]


def test_text_encoders_that_rest_count_while_prompts_are_encoded_alone():
    name = "hunyuan_video/t2v_grpo"
    resting = by_name(name)
    staying = by_name(name, "~bundle.rest_text_encoders")
    assert resting["encode"]["text encoders"] == staying["train"]["text encoders"] == pytest.approx(16.3e9, rel=0.01)
    assert "encode" not in staying
    assert not any(resting[phase]["text encoders"] for phase in ("start", "rollout", "decode", "train"))


def test_no_recipe_computes_text_encoders_on_the_cpu(recipes):
    """A prompt of 512 tokens takes a UMT5-XXL about 5.8 TFLOP."""
    for name in REAL:
        assert run_of(recipes[name]).policy.bundle.get("text_encoder_device") is None, name


def test_all_weights_take_sixteen_bytes_and_four_per_copy_sharded():
    of = by_name("sd3/refl")["train"]
    assert of["trained weights"] + of["gradients and Adam"] + of["copies"] == pytest.approx(2.47e9 * 20 / 8)


def test_smaller_states_of_the_optimizer_and_parameters_in_half_precision_are_counted():
    whole = by_name("sd3/refl")["train"]
    codes = by_name("sd3/refl", "+backend.optimizer.states=8bit")["train"]
    saved = whole["gradients and Adam"] - codes["gradients and Adam"]
    assert saved == pytest.approx(2.47e9 * (6 - 8 / 256) / 8)
    hosted = by_name("sd3/refl", "+backend.optimizer.offload=true")["train"]
    assert whole["gradients and Adam"] - hosted["gradients and Adam"] == pytest.approx(2.47e9 * 8 / 8)
    half = by_name("sd3/refl", "+backend.optimizer.states=bf16", "backend.fsdp.master_dtype=bf16")["train"]
    assert half["trained weights"] + half["gradients and Adam"] == pytest.approx(2.47e9 * 8 / 8)


def test_a_checkpoint_without_known_sizes_is_named():
    with pytest.raises(
        ConfigError, match=r"the sizes of bundle.pretrained_model = mine/own are not known.*Qwen/Qwen-Im"
    ):
        found("sd3/nft", "bundle.pretrained_model=mine/own")


def test_check_shows_every_phase_and_marks_the_largest(capsys):
    assert main(["check", "sd3/nft", "--memory"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines() if " GB per device: " in line]
    assert [line[0] for line in lines] == ["start", "rollout", "decode", "train"]
    assert shown.count("<- most") == 1 and max(lines, key=lambda line: float(line[1]))[-2:] == ["<-", "most"]
    assert main(["check", "worlds/shapes/nft", "--memory"]) == 0
    assert "no estimate of memory: the sizes of bundle.pretrained_model" in capsys.readouterr().out


def test_ranks_that_share_samples_halve_activations_and_keep_the_shards():
    topology = "+backend.topology._target_=unirl.train.configs.TrainTopology"
    alone, shared = by_name("wan21/t2v_mixgrpo"), by_name("wan21/t2v_mixgrpo", topology, "+backend.topology.sp=2")
    assert shared["train"]["model"] == alone["train"]["model"]
    assert shared["train"]["activations"] == pytest.approx(alone["train"]["activations"] / 2, rel=1e-3)
    assert shared["rollout"]["media"] == 2 * alone["rollout"]["media"]
