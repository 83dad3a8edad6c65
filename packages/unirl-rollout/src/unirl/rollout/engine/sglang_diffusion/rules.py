"""Recipe rules of SGLang Diffusion. See `unirl.types.recipe`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from unirl.rollout.engine.served_latents.folder import CONFIG_FILE, INDEX_FILE, REPLICA, TRANSFORMER
from unirl.rollout.engine.served_latents.rules import (
    experts_switch_as_released,
    family_is_served,
    kernel_is_served,
    sampling_is_served,
)
from unirl.types.recipe import Machine, Messages, Part, Run

SD3_IS_WHOLE = (
    "SGLang's SD3 samples another image where its tokens are split. Take it out: engine.num_devices splits SD3 by "
    "tensors, and {enable_cfg_parallel: true} by the branches of guidance."
)
HUNYUAN_VIDEO_IS_WHOLE = (
    "SGLang's HunyuanVideo samples another video where its tokens are split among devices that do not divide its "
    "latent frames: shard_latents_for_sp leaves these whole (configs/pipeline_configs/base.py:646), and the "
    "transformer takes them for a part (runtime/models/dits/hunyuanvideo.py:818). Take it out: engine.num_devices "
    "splits HunyuanVideo by tensors, and {enable_cfg_parallel: true} by the branches of guidance."
)

EDITS_ALONE = (
    "SGLang 0.5.23 edits one image per forward (`assert batch_size == 1` in its QwenImageEditPipelineConfig) and takes "
    "every image that it is given to have 1024 x 1024 pixels."
)

TEXTS_ALONE = "SGLang 0.5.23 makes HunyuanVideo's videos of text alone (runtime/pipelines/hunyuan_pipeline.py)."


def token_splits(engine_args: Mapping[str, object]) -> list[str]:
    """The SGLang options among these that split the tokens of a latent over devices."""
    names = ("sp_degree", "ulysses_degree", "ring_degree", "kv_gather_degree")
    return [name for name in names if engine_args.get(name) not in (None, 1)]


def tokens_are_together(own: Part, run: Run) -> Messages:
    """The tokens of a latent are split only if SGLang's model supports it."""
    bundle, engine_args = run.policy.bundle, own.get("engine_args")
    refused = token_splits(engine_args) if isinstance(engine_args, Mapping) else []
    for name, reason in (("SD3Bundle", SD3_IS_WHOLE), ("HunyuanVideoBundle", HUNYUAN_VIDEO_IS_WHOLE)):
        if refused and name in bundle.class_names:
            yield f"{own.at}.engine_args sets {refused}. {reason}"


FIRST_FRAMES = (
    "SGLang 0.5.23 puts the first frame of Wan 2.2 TI2V-5B in its place itself, of an image that it encodes, and takes "
    "no latents of it."
)
LAST_FRAMES = "SGLang 0.5.23 has no embedding of the places of two images, which Wan's first-last-frame model reads."


def frames_are_served(own: Part, run: Run, machine: Machine) -> Messages:
    """Models of given frames whose frames SGLang takes as they are encoded."""
    del machine
    bundle = run.policy.bundle
    folder = Path(str(bundle.get("pretrained_model"))).expanduser()
    if "WanImageBundle" not in bundle.class_names or not folder.is_dir():
        return
    index, config = (_said(folder / file) for file in (INDEX_FILE, f"{TRANSFORMER}/{CONFIG_FILE}"))
    for is_it, reason in (
        (index.get("expand_timesteps"), FIRST_FRAMES),
        (config.get("pos_embed_seq_len"), LAST_FRAMES),
    ):
        if is_it:
            yield (
                f"{own.name} does not serve {bundle.at}.pretrained_model: {reason} Set {own.at}._target_: {REPLICA}, "
                "which serves every family."
            )


def _said(file: Path) -> dict[str, object]:
    """A JSON file; empty where there is none, which loading the model says."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


MACHINE_RULES = (frames_are_served,)
RULES = (
    family_is_served(
        (
            "SD3Bundle",
            "FluxBundle",
            "Flux2KleinBundle",
            "QwenImageBundle",
            "WanBundle",
            "HunyuanVideoBundle",
            "ZImageBundle",
        ),
        without=("WanAnimateBundle",),
        reasons={
            "QwenImageEditBundle": EDITS_ALONE,
            "HunyuanVideoImageBundle": TEXTS_ALONE,
        },
    ),
    kernel_is_served(("FlowSDEStrategy", "CPSSDEStrategy")),
    sampling_is_served,
    experts_switch_as_released,
    tokens_are_together,
)
