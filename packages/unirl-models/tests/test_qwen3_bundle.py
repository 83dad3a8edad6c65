"""The Qwen3 folder: what is refused before weights are read, and that exports load in their libraries."""

import json
import shutil
from typing import Any

import peft
import pytest
import torch
import transformers

from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.types.errors import CheckpointError, ConfigError, ContractError

from .tiny_text import qwen3, save_text_model

TOKENS = torch.arange(12).reshape(2, 6)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture
def copy(qwen3_folder, tmp_path):
    return shutil.copytree(qwen3_folder, tmp_path / "copy")


def test_a_bundle_names_what_training_wraps_and_adapts(qwen3_folder):
    bundle = Qwen3Bundle(str(qwen3_folder), dtype="bf16")
    (module,) = bundle.trainable_modules().values()
    assert next(module.parameters()).dtype == torch.bfloat16
    names = {type(child).__name__ for child in module.modules()}
    assert set(bundle.block_class_names) <= names
    assert all(
        any(name.endswith(target) for name, _ in module.named_modules()) for target in bundle.lora_target_modules
    )
    assert bundle.context_length == 512 and bundle.vocabulary_size == 272
    assert bundle.eos_token_ids == (bundle.tokenizer.eos_token_id,)


def test_missing_folders_files_and_other_models_are_named(copy, tmp_path):
    with pytest.raises(CheckpointError, match="is not there"):
        Qwen3Bundle(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Qwen3Bundle(str(tmp_path))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ConfigError, match="of type 'llama'; this bundle loads qwen3"):
        Qwen3Bundle(str(copy))
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        Qwen3Bundle(str(copy))


def test_weights_that_do_not_fit_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(CheckpointError, match=r"does not hold all weights.*layers\.2"):
        Qwen3Bundle(str(copy))


def test_a_tokenizer_of_more_words_than_the_model_is_refused(tmp_path):
    folder = save_text_model(qwen3(vocab_size=250, eos_token_id=1, pad_token_id=0), tmp_path)
    with pytest.raises(CheckpointError, match="tokenizer and model disagree, the tokenizer's largest id is 265.*250"):
        Qwen3Bundle(str(folder))


def test_a_lora_export_loads_in_peft(qwen3_folder, tmp_path):
    bundle = Qwen3Bundle(str(qwen3_folder))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(bundle.lora_target_modules))
    adapted: Any = peft.inject_adapter_in_model(config, bundle.model)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
    state = peft.get_peft_model_state_dict(adapted)
    targets = bundle.lora_target_modules
    bundle.export_lora(str(tmp_path), {"model": state}, rank=3, alpha=5.0, target_modules=targets)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32)
    before = logits(plain)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(logits(loaded), logits(adapted), rtol=0, atol=1e-5)
    assert float((logits(adapted) - before).abs().max()) > 0.1
    with pytest.raises(ContractError, match="LoRA weights of rank 4 expected"):
        bundle.export_lora(str(tmp_path), {"model": state}, rank=4, alpha=5.0, target_modules=targets)
    with pytest.raises(ContractError, match="trains one component, 'model'"):
        bundle.export_lora(str(tmp_path), {"text": state}, rank=3, alpha=5.0, target_modules=targets)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_merged_export_is_a_whole_model_folder(is_tied, tmp_path):
    folder = save_text_model(qwen3(tie_word_embeddings=is_tied), tmp_path / "base")
    bundle = Qwen3Bundle(str(folder))
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.mul_(1.1)
    state = {name: parameter.detach().half() for name, parameter in bundle.model.named_parameters()}
    bundle.export_merged(str(tmp_path / "out"), {"model": state})
    again = Qwen3Bundle(str(tmp_path / "out"))
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.copy_(parameter.half())
    torch.testing.assert_close(logits(again.model), logits(bundle.model), rtol=0, atol=1e-5)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float16
    assert again.tokenizer.get_vocab() == bundle.tokenizer.get_vocab()
    assert again.tokenizer.chat_template == bundle.tokenizer.chat_template
    del state["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing.*model\.norm\.weight"):
        bundle.export_merged(str(tmp_path / "other"), {"model": state})
    with pytest.raises(ConfigError, match="is the checkpoint that was loaded"):
        bundle.export_merged(str(folder), {"model": state})


def test_scoring_survives_saving_and_loading_the_state(qwen3_folder):
    bundle = Qwen3Bundle(str(qwen3_folder))
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32)
    assert list(bundle.model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(bundle.model.state_dict(), strict=True)
    torch.testing.assert_close(logits(bundle.model), logits(plain), rtol=0, atol=1e-6)
