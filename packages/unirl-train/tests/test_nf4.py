"""Frozen weights in 4 bits under LoRA: values of the paper, gradients of a layer with them, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_fakes import TinyBundle, make_backend

from unirl.train.checkpoint.checkpointer import Checkpointer
from unirl.train.configs import FSDPConfig, LoraConfig
from unirl.train.export import Exporter
from unirl.train.nf4 import BLOCK, NF4Linear, normal_values
from unirl.types.errors import CheckpointError, ConfigError

PUBLISHED = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""Table of the paper (appendix E)."""
WIDTH = 64
LORA = LoraConfig(rank=2, alpha=4.0, base="nf4")


def layer(outputs: int = 96, inputs: int = 128, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def test_the_values_are_those_of_the_paper() -> None:
    torch.testing.assert_close(normal_values(), torch.tensor(PUBLISHED), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_each_weight_is_the_nearest_value_times_the_largest_of_its_block(bias: bool) -> None:
    whole = layer(bias=bias)
    found = NF4Linear(whole).weight_in(torch.float32)
    blocks = whole.weight.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - torch.tensor(PUBLISHED)).abs().argmin(-1)
    torch.testing.assert_close(found, (torch.tensor(PUBLISHED)[nearest] * scale).view_as(found), rtol=0, atol=1e-6)


def test_the_values_are_those_of_torchao() -> None:
    reference = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    theirs = reference.NF4Tensor.from_tensor(layer().weight.detach(), BLOCK, 2)
    # It quantises the scales of blocks too, to one part in 127 of the largest.
    torch.testing.assert_close(
        NF4Linear(layer()).weight_in(torch.float32), theirs.get_original_weight(), rtol=0.02, atol=1e-3
    )


def test_it_takes_the_bytes_that_it_says() -> None:
    found = NF4Linear(layer())
    assert found.codes.nbytes + found.scale.nbytes == 0.5625 * 96 * 128
    assert list(found.state_dict()) == ["bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_a_layer_with_these_weights(dtype: torch.dtype) -> None:
    codes = NF4Linear(layer().to(dtype))
    plain = layer().to(dtype)
    plain.weight.data = codes.weight_in(dtype)
    inputs = torch.randn(3, 5, 128, dtype=dtype, generator=torch.Generator().manual_seed(1))
    found = []
    for one in (codes, plain):
        x = inputs.clone().requires_grad_()
        out = one(x)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0])
    is_exact = dtype == torch.float32  # products of bfloat16 are summed in another order
    torch.testing.assert_close(
        found[0][1], found[1][1], rtol=1e-5 if is_exact else 0.02, atol=1e-5 if is_exact else 0.05
    )


def test_within_autocast_it_computes_in_its_dtype() -> None:
    codes, x = NF4Linear(layer()), torch.randn(3, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = codes(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


# In a backend ----------------------------------------------------------------------------------------------------


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def trained(steps: int = 2, **options: Any) -> tuple[Any, TinyBundle]:
    bundle = TinyBundle(width=WIDTH)
    options.setdefault("lora", LORA)
    backend = make_backend(bundle, **options)
    for step in range(steps):
        backend.zero_grad()
        x, y = rows(step)
        (bundle.model(x).float() - y).square().mean().backward()
        backend.optimizer_step(1.0)
    return backend, bundle


@pytest.mark.parametrize(
    "fsdp", [FSDPConfig(), FSDPConfig(param_dtype="bf16"), FSDPConfig(activation_checkpointing="selective")]
)
def test_adapters_train_on_a_base_of_codes(fsdp: FSDPConfig) -> None:
    backend, bundle = trained(fsdp=fsdp)
    try:
        linear = {name for name, module in bundle.model.named_modules() if isinstance(module, NF4Linear)}
        assert linear == {f"blocks.{n}.{name}.base_layer" for n in (0, 1) for name in ("to_q", "to_out")}
        x, _ = rows(7)
        out = bundle.model(x)  # as in a replay
        with torch.no_grad():
            assert torch.equal(bundle.model(x), out.detach())  # as in a rollout
            with backend.reference_policy():
                assert not torch.equal(bundle.model(x), out.detach())
    finally:
        backend.close()


def test_a_step_is_that_of_a_model_with_the_same_weights_in_float32() -> None:
    backend, bundle = trained(steps=0)
    whole = TinyBundle(width=WIDTH)
    for name, module in bundle.model.named_modules():
        if isinstance(module, NF4Linear):
            whole.model.get_submodule(name.removesuffix(".base_layer")).weight.data = module.weight_in(torch.float32)
    other = make_backend(whole, lora=LoraConfig(rank=2, alpha=4.0))
    other.load_state_dict(backend.state_dict())
    for one, model in ((backend, bundle.model), (other, whole.model)):
        x, y = rows(0)
        (model(x) - y).square().mean().backward()
        one.optimizer_step(1.0)
    for name, parameter in backend.parameters.items():
        torch.testing.assert_close(parameter, other.parameters[name], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_resumes_and_that_of_a_whole_base_does_not(tmp_path: Path) -> None:
    backend, _ = trained()
    Checkpointer(backend, str(tmp_path)).save(2, {})
    again, _ = trained(steps=1)
    Checkpointer(again, str(tmp_path)).load()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in backend.state_dict().items())
    whole, _ = trained(lora=LoraConfig(rank=2, alpha=4.0))
    with pytest.raises(CheckpointError, match=r"to_q\.base_layer\.weight"):
        Checkpointer(whole, str(tmp_path)).load()


def test_adapters_are_exported_and_whole_weights_are_refused(tmp_path: Path) -> None:
    backend, bundle = trained()
    Exporter(backend, bundle).export_lora(str(tmp_path / "lora"))
    assert (tmp_path / "lora" / "transformer.safetensors").is_file()
    for read in (
        lambda: Exporter(backend, bundle).export_merged(str(tmp_path / "merged")),
        lambda: list(backend.weight_source.weights()),
        lambda: list(backend.weight_source.shards()),
        backend.weight_source.weight_shapes,
        backend.weight_source.shard_rows,
    ):
        with pytest.raises(ConfigError, match="lora.base = 'nf4' keeps frozen weights as codes"):
            read()


def test_blocks_that_cannot_be_quantised_are_named() -> None:
    with pytest.raises(ConfigError, match="no linear layer whose inputs divide by 64"):
        make_backend(TinyBundle(), lora=LORA)
    with pytest.raises(ConfigError, match="lora.base = 'int3' must be one of nf4, null"):
        LoraConfig(rank=2, alpha=4.0, base="int3")  # ty: ignore[invalid-argument-type]
