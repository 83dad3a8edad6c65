"""Weights that are read in parts: where they are found, and the messages of files that do not fit."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.models import stored
from unirl.models.bagel.bundle import BagelBundle
from unirl.models.bagel.configuration import MODEL_FILE
from unirl.models.diffusers_pipeline.construction import without_weights
from unirl.models.hunyuan_image3.bundle import HunyuanImage3Bundle
from unirl.models.sd3.bundle import SD3Bundle
from unirl.models.stored import FileTensor, TensorFiles, load_weights, safetensors_files
from unirl.types.errors import CheckpointError
from unirl.types.protocols.models import StoredTensor

from .tiny_bagel import save_bagel
from .tiny_hunyuan_image3 import save_hunyuan_image3

FILE = "diffusion_pytorch_model.safetensors"


def _copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


def _rewrite(folder: Path, **changed: Tensor | None) -> None:
    """Write the transformer's file again, with some tensors changed or, where None, left out."""
    file = folder / "transformer" / FILE
    weights = load_file(file) | {name.replace("__", "."): value for name, value in changed.items()}
    save_file({name: value for name, value in weights.items() if value is not None}, file, {"format": "pt"})


def _all_of(tensor: StoredTensor, like: Tensor) -> Tensor:
    return tensor.read(tuple(slice(0, size) for size in like.shape))


def test_a_bundle_that_defers_its_weights_names_where_all_of_them_are(sd3_folder: Path, sd3_bundle: SD3Bundle) -> None:
    bundle = SD3Bundle(str(sd3_folder), dtype="bf16", defers_weights=True)
    expected = sd3_bundle.transformer.state_dict()
    assert all(parameter.is_meta for parameter in bundle.transformer.parameters())
    assert not bundle.transformer.training
    found = bundle.stored_weights()["transformer"]
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(_all_of(found[name], value), value.bfloat16())
    # What has no place in a file is made as a constructor makes it.
    buffers = dict(bundle.transformer.named_buffers())
    assert buffers.keys() == dict(sd3_bundle.transformer.named_buffers()).keys()
    assert not any(buffer.is_meta for buffer in buffers.values())


def test_files_with_an_index_are_read_as_one_is(sd3_folder: Path, sd3_bundle: SD3Bundle, tmp_path: Path) -> None:
    folder = _copy(sd3_folder, tmp_path)
    shutil.rmtree(folder / "transformer")
    sd3_bundle.transformer.save_pretrained(folder / "transformer", max_shard_size="50KB")
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    found = SD3Bundle(str(folder), defers_weights=True).stored_weights()["transformer"]
    for name, value in sd3_bundle.transformer.state_dict().items():
        assert torch.equal(_all_of(found[name], value), value)


def test_weights_that_do_not_fit_are_named_in_one_error(sd3_folder: Path, tmp_path: Path) -> None:
    folder = _copy(sd3_folder, tmp_path)
    _rewrite(folder, proj_out__bias=None, proj_out__weight=torch.zeros(2, 3), other=torch.zeros(1))
    bundle = SD3Bundle(str(folder), defers_weights=True)
    with pytest.raises(CheckpointError) as caught:
        bundle.stored_weights()
    message = str(caught.value)
    assert "does not hold all weights of SD3Transformer2DModel" in message
    assert "missing_keys ['proj_out.bias']" in message
    assert "proj_out.weight: [2, 3] in the file, [" in message
    assert "unexpected_keys ['other']" in message


@pytest.mark.parametrize("defers", [True, False])
@pytest.mark.parametrize(
    ("component", "file", "name"),
    [
        ("transformer", FILE, "proj_out.bias"),
        ("vae", FILE, "decoder.conv_out.bias"),
        ("text_encoder", "model.safetensors", "text_projection.weight"),
    ],
)
def test_another_size_names_file_tensor_both_shapes_and_the_fix(
    component: str, file: str, name: str, defers: bool, sd3_folder: Path, tmp_path: Path
) -> None:
    path = _copy(sd3_folder, tmp_path) / component / file
    weights = load_file(path)
    own = list(weights[name].shape)
    other = [own[0] + 1, *own[1:]]
    save_file({**weights, name: torch.zeros(other)}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        SD3Bundle(str(path.parent.parent), defers_weights=defers).stored_weights()
    message = str(caught.value)
    assert message.startswith(f"{path} does not fit ")
    assert f"{name}: {other} in the file, {own} in the model" in message and "config.json" in message


def test_own_weights_are_loaded_or_refused_before_they_are_read(tmp_path: Path) -> None:
    module, file = torch.nn.Linear(2, 3), tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file"):
        load_weights(module, file)
    save_file({name: tensor.detach() + 1 for name, tensor in module.state_dict().items()}, file)
    before = module.weight.detach().clone()
    load_weights(module, file)
    assert torch.equal(module.weight, before + 1)
    with pytest.raises(CheckpointError, match=r"model.safetensors does not fit Linear: bias: \[3\] in the file, \[4\]"):
        load_weights(torch.nn.Linear(2, 4), file)
    with pytest.raises(CheckpointError, match=r"1 tensors that Linear has not: \['bias'\]"):
        load_weights(torch.nn.Linear(2, 3, bias=False), file)
    save_file({"weight": module.weight.detach()}, file)
    with pytest.raises(CheckpointError, match=r"missing_keys \['bias'\]"):
        load_weights(module, file)


def test_weights_that_nothing_reads_are_logged(
    sd3_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _copy(sd3_folder, tmp_path)
    _rewrite(folder, other=torch.zeros(1))
    with caplog.at_level(logging.WARNING):
        SD3Bundle(str(folder), defers_weights=True).stored_weights()
    assert "holds 1 tensors" in caplog.text and "'other'" in caplog.text


def test_a_folder_without_safetensors_is_read_at_once(
    sd3_folder: Path, sd3_bundle: SD3Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _copy(sd3_folder, tmp_path)
    shutil.rmtree(folder / "transformer")
    sd3_bundle.transformer.save_pretrained(folder / "transformer", safe_serialization=False)
    with caplog.at_level(logging.WARNING):
        bundle = SD3Bundle(str(folder), defers_weights=True)
    assert not bundle.defers_weights
    assert not any(parameter.is_meta for parameter in bundle.transformer.parameters())
    assert "every rank reads all of" in caplog.text and FILE in caplog.text


@pytest.mark.parametrize("content", [b"", b"no head", b"\xff" * 64])
def test_a_file_that_cannot_be_read_is_named(content: bytes, sd3_folder: Path, tmp_path: Path) -> None:
    folder = _copy(sd3_folder, tmp_path)
    (folder / "transformer" / FILE).write_bytes(content)
    bundle = SD3Bundle(str(folder), defers_weights=True)
    with pytest.raises(CheckpointError, match=rf"{FILE} cannot be read.*Fetch the folder again"):
        bundle.stored_weights()


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors.index.json").write_text('{"weight_map": {"a": "w-1.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lacks \['w-1.safetensors'\]"):
        safetensors_files(tmp_path, "w")
    (tmp_path / "w.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index.json cannot be read"):
        safetensors_files(tmp_path, "w")


def test_parts_are_those_of_the_whole_in_another_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAPPED_BYTES", 0)  # files are closed before every read
    whole = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    values = {"a": whole, "counts": torch.arange(4)}
    save_file(values, tmp_path / "w.safetensors")
    files = safetensors_files(tmp_path, "w")
    assert files is not None
    tensor_files = TensorFiles(files)
    assert tensor_files.shapes == {"a": (5, 3), "counts": (4,)}
    tensor = FileTensor(tensor_files, "a", torch.bfloat16)
    for box in ((slice(1, 4), slice(0, 3)), (slice(5, 5), slice(0, 3)), (slice(0, 5), slice(1, 2))):
        assert torch.equal(tensor.read(box), whole[box].bfloat16())
    assert torch.equal(FileTensor(tensor_files, "counts", torch.int64).read((slice(1, 3),)), torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("bundle_class", "save"), [(BagelBundle, save_bagel), (HunyuanImage3Bundle, save_hunyuan_image3)]
)
def test_a_decoder_of_a_whole_model_is_left_in_its_files(bundle_class: Any, save: Any, tmp_path: Path) -> None:
    folder = save(tmp_path)
    loaded = bundle_class(str(folder), "bf16")
    bundle = bundle_class(str(folder), "bf16", defers_weights=True)
    expected = loaded.decoder.state_dict()
    assert all(parameter.is_meta for parameter in bundle.decoder.parameters())
    assert [m.training for m in bundle.decoder.modules()] == [m.training for m in loaded.decoder.modules()]
    names = [name for name, parameter in loaded.decoder.named_parameters() if parameter.requires_grad]
    assert names == [name for name, parameter in bundle.decoder.named_parameters() if parameter.requires_grad]
    found = bundle.stored_weights()[bundle.component]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(_all_of(found[name], value), value)


def test_a_decoder_that_does_not_fit_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    file = save_bagel(tmp_path) / MODEL_FILE
    weights = load_file(file)
    del weights["language_model.lm_head.weight"]
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"language_model\.lm_head\.weight"):
        BagelBundle(str(tmp_path), defers_weights=True)


def test_a_model_without_weights_draws_no_more_than_loading_does(sd3_folder: Path) -> None:
    torch.manual_seed(0)
    SD3Transformer2DModel.from_pretrained(sd3_folder / "transformer")
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    without_weights(SD3Transformer2DModel, sd3_folder / "transformer", torch.float32, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), expected)
