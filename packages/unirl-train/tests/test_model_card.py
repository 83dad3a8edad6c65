"""What the model card of an export says."""

import json

from unirl.trainer.model_card import write_model_card
from unirl.types.weights import LostUpdate

RECIPE = {
    "recipe": "diffusion/mine",
    "seed": 7,
    "num_rollouts": 40,
    "run_dir": "runs/mine/1",
    "trackers": {"wandb": {"project": "secret"}},
    "bundle": {"_target_": "b.Bundle", "pretrained_model": "org/base"},
    "backend": {"lora": {"_target_": "l.Lora", "rank": 4, "alpha": 8}},
    "algorithm": {"_target_": "a.NFT"},
    "data": {"path": "prompts.csv"},
    "eval": {"prompts": "held.txt", "policy": "ema"},
    "reward": {
        "_target_": "r.Service",
        "weights": {"pick": 0.5},
        "scorers": {"pick": {"_target_": "p.Pick"}, "off": None},
    },
}
STATE = {
    "next_rollout": 20,
    "num_samples": 3840,
    "data": {"fingerprint": "abc123"},
    "evaluations": {
        "0": {"overall": {"reward": 0.25}, "num_samples": 64},
        "10": {"overall": {"reward": 0.5, "pick/x": 1.0}, "num_samples": 64},
        "30": {"overall": {"reward": 0.9}, "num_samples": 64},
    },
}


def card(folder, recipe=RECIPE, state=STATE, *, merged=False, copy="default", of_blocks=False):
    write_model_card(folder, recipe, state, folder, published=recipe, merged=merged, copy=copy, of_blocks=of_blocks)
    return (folder / "README.md").read_text()


def test_the_card_of_a_lora_names_base_recipe_data_figures_and_versions(tmp_path):
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    (tmp_path / "summary.json").write_text(json.dumps({"versions": {"torch": "1.2.3"}}))
    text = card(tmp_path)
    front = "library_name: diffusers\nbase_model: org/base\ntags:\n- unirl\n- reinforcement-learning\n- lora"
    assert text.startswith(
        f"---\n{front}\n---\n\n# diffusion/mine, rollout 20\n\nA LoRA (rank 4, alpha 8) of `org/base`"
    )
    assert 'DiffusionPipeline.from_pretrained("org/base")\npipe.load_lora_weights(".")' in text
    assert "| reward | pick (p.Pick), weight 0.5 |" in text and "content abc123" in text
    assert "| mean | after 0 rollouts | after 10 rollouts |" in text, "the newest figures up to the checkpoint"
    assert "| reward | 0.2500 | 0.5000 |\n| pick/x | - | 1.0000 |" in text
    assert "By the copy `ema` of the policy, 64 samples on `held.txt`, one run with seed 7." in text
    assert "Of the training: torch 1.2.3." in text
    recipe = json.loads(text.split("```json\n")[1].split("\n```")[0])
    assert recipe == {name: value for name, value in RECIPE.items() if name not in ("run_dir", "trackers")}


def test_the_card_of_a_lora_on_a_packaged_model_names_its_world(tmp_path):
    (tmp_path / "shapes" / "checkpoint").mkdir(parents=True)
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    text = card(tmp_path, {**RECIPE, "bundle": {"pretrained_model": str(tmp_path / "shapes" / "checkpoint")}})
    assert "A LoRA (rank 4, alpha 8) of `shapes/checkpoint`, trained" in text
    assert 'DiffusionPipeline.from_pretrained("PATH/TO/shapes/checkpoint")' in text


def test_the_card_of_a_model_without_a_base_names_its_class_and_no_base(tmp_path):
    recipe = {**RECIPE, "bundle": {"_target_": "my_model.MyBundle", "pretrained_model": None}, "backend": {}}
    text = card(tmp_path, recipe, merged=True)
    assert text.startswith("---\ntags:\n- unirl\n- reinforcement-learning\n---\n")
    assert "All weights of `my_model.MyBundle`, which began without a base model, trained with" in text
    assert "None" not in text.split("## ")[0] and "base_model" not in text and "licence" not in text


def test_the_card_says_what_rounding_took(tmp_path):
    write_model_card(
        tmp_path, RECIPE, STATE, tmp_path, published=RECIPE, merged=True, lost=LostUpdate("bfloat16", 0.25, 0.5)
    )
    text = (tmp_path / "README.md").read_text()
    assert "## Rounding\n\nRounding to bfloat16 took 25.00% of the update's norm; 50.00% of the weights" in text
    assert "## Rounding" not in card(tmp_path, merged=True)


def test_the_card_of_a_merged_export_loads_the_folder_and_names_a_local_base_by_its_last_part(tmp_path):
    base = tmp_path / "sd3"
    base.mkdir()
    (tmp_path / "model_index.json").touch()
    recipe = {**RECIPE, "bundle": {"pretrained_model": str(base)}}
    text = card(tmp_path, recipe, {**STATE, "evaluations": {}}, merged=True, copy="ema")
    assert "The whole model, with a LoRA (rank 4, alpha 8) merged into the weights of `sd3`" in text
    assert "base_model" not in text.split("---")[1]
    assert 'DiffusionPipeline.from_pretrained(".")' in text and "the copy `ema` of the policy" in text
    assert "no held-out evaluation before this checkpoint" in text
    assert "Of the export (the run had not ended): python 3." in text


def test_the_card_of_a_pipeline_of_blocks_loads_its_components(tmp_path):
    (tmp_path / "modular_model_index.json").touch()
    text = card(tmp_path, merged=True, of_blocks=True)
    assert 'pipe = ModularPipeline.from_pretrained(".")\npipe.load_components()  # this folder' in text
    assert "library_name: diffusers" in text
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    text = card(tmp_path, of_blocks=True)
    assert 'ModularPipeline.from_pretrained("org/base")\npipe.load_components()\npipe.load_lora_weights(".")' in text


def test_the_card_of_a_language_model_names_its_class(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    text = card(tmp_path, {**RECIPE, "backend": {}}, merged=True)
    assert "library_name: transformers" in text and "Qwen3ForCausalLM.from_pretrained" in text
    assert "All weights of `org/base`" in text
    (tmp_path / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}')
    assert "library_name: peft" in card(tmp_path)


def test_the_card_of_a_single_model_loads_it_by_the_library_that_wrote_its_configuration(tmp_path):
    for number, (config, expected) in enumerate(
        (
            ({"_class_name": "UNet2DModel"}, "from diffusers import UNet2DModel"),
            ({"model_type": "qwen3"}, "from transformers import AutoModel"),
            ({"width": 3}, None),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        text = card(folder, merged=True)
        assert ("## Load" in text) == (expected is not None) and (expected or "# ") in text


def test_the_card_of_a_bagel_loads_it_by_its_bundle(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"task_type": null, "target_modules": ["q_proj_moe_gen"]}')
    text = card(tmp_path)
    assert "library_name: peft" in text and 'PeftModel.from_pretrained(bundle.bagel, ".")' in text
    (tmp_path / "ema.safetensors").touch()
    text = card(tmp_path, merged=True)
    assert 'BagelBundle(".")' in text and "library_name" not in text


def test_the_card_of_a_hunyuan_image3_loads_it_by_its_bundle(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"task_type": null, "target_modules": ["qkv_proj", "o_proj"]}')
    text = card(tmp_path)
    assert "import HunyuanImage3Bundle" in text and 'PeftModel.from_pretrained(bundle.decoder, ".")' in text
    (tmp_path / "generation_config.json").write_text('{"sequence_template": "instruct"}')
    text = card(tmp_path, merged=True)
    assert 'HunyuanImage3Bundle(".")' in text and "library_name" not in text
