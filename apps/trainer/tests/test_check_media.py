"""Rules about videos in data and about layers for LoRA: said before weights are read."""

import json
import struct

import pytest
from PIL import Image

from unirl.app.environment import register_resolvers
from unirl.config.check import machine_findings, run_findings
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.types.recipe import Machine


def findings(name, *overrides):
    register_resolvers()
    run = run_of(resolve(compose(name, list(overrides))))
    return list(machine_findings(run, Machine(num_cpus=8, num_gpus=8)))


def recipe_findings(name, *overrides):
    register_resolvers()
    return list(run_findings(run_of(resolve(compose(name, list(overrides))))))


def rows(folder, **num_frames):
    """A file of one row: an image, and a video of each role with so many frames."""
    Image.new("RGB", (4, 4)).save(folder / "cat.png")
    media = [{"modality": "image", "role": "condition", "uri": "cat.png"}]
    for role, count in num_frames.items():
        (folder / role).mkdir()
        for frame in range(count):
            Image.new("RGB", (4, 4)).save(folder / role / f"{frame:03}.png")
        media.append({"modality": "video", "role": role, "uri": role})
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "it dances", "prompt_id": "a", "media": media}) + "\n")
    return file


@pytest.mark.parametrize(
    ("num_frames", "message"),
    [
        ({"pose": 9}, "1 rows (a) bring no video of the role face, which bundle WanAnimateBundle follows"),
        (
            {"pose": 9, "face": 5},
            "1 videos have other numbers of frames than sampling.num_frames = 9: a (face: 5). Cut them",
        ),
        ({"pose": 9, "face": 9}, None),
    ],
)
def test_videos_that_a_model_cannot_follow_are_refused_by_name(tmp_path, num_frames, message):
    file = rows(tmp_path, **num_frames)
    found = findings("wan22/animate", f"data.path={file}", "sampling.num_frames=9")
    about = [each for each in found if each.startswith(f"data.path = {file}")]
    assert [message in each for each in about] == ([True] if message else []), found


def test_layers_for_lora_that_a_folder_does_not_have_are_refused(tmp_path):
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "transformer").mkdir()
    names = {f"blocks.0.attn.{name}.weight": {} for name in ("to_q", "to_k")}
    head = json.dumps({**names, "__metadata__": {}}).encode()
    # The head of a file of weights, and none of the weights.
    (tmp_path / "transformer" / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    at, targets = f"bundle.pretrained_model={tmp_path}", "backend.lora.target_modules"
    found = findings("wan21/t2v", at, f"{targets}=[attn.to_q,to_p]")
    message = f"backend.lora.target_modules ['to_p'] match no layer of {tmp_path}, whose layers end in to_k, to_q"
    assert any(message in each for each in found), found
    fine = findings("wan21/t2v", at, f"{targets}=[attn.to_q]")
    assert not any("target_modules" in each for each in fine), fine


@pytest.mark.parametrize(
    ("recipe", "transport", "is_refused"),
    [("ltx2/t2v_sound", "json", True), ("ltx2/t2v_sound", "binary", False), ("wan21/t2v_style", "json", False)],
)
def test_sound_is_not_sent_as_json(recipe, transport, is_refused):
    far = f"{{_target_: unirl.reward.remote.RemoteRewardBackend, required_rewards: [clap], transport: {transport}}}"
    found = recipe_findings(recipe, f"+reward.scorers.far={far}")
    message = "far.transport = json carries no sound of a video, which LTX2Bundle makes"
    said = [each for each in found if message in each]
    assert bool(said) == is_refused, found


@pytest.mark.parametrize(
    ("index", "config", "message"),
    [
        ({"expand_timesteps": True}, {}, "puts the first frame of Wan 2.2 TI2V-5B in its place itself"),
        ({}, {"pos_embed_seq_len": 514}, "has no embedding of the places of two images"),
        ({}, {"pos_embed_seq_len": None}, None),
    ],
)
def test_frames_that_sglang_does_not_take_are_named(tmp_path, index, config, message):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    words = (f"bundle.pretrained_model={tmp_path}", "parts/engine=sglang_diffusion", "parts/sync=lora")
    found = findings("wan21/i2v", *words, "+sync.canary_image_size=64", "eval.post_solver=euler")
    said = [each for each in found if each.startswith("SGLangDiffusionEngine does not serve bundle.pretrained_model")]
    assert [message in each for each in said] == ([True] if message else []), found
