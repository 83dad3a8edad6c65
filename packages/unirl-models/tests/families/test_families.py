"""Every family against its own stock pipeline, on the same files: float32, one thread, tiny random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.types.errors import ConfigError

from ..contract import CHECKS, Case, guidance_one_is_no_guidance
from .kit import Family, Loaded, Published, families, load, ours, pixels, relative, scheduler_of, stock_of

NAMES = sorted(families())


@pytest.fixture(scope="session")
def loaded_families() -> dict[str, Loaded]:
    """Filled as tests ask; every folder is written and read once a process."""
    return {}


@pytest.fixture
def loaded(name: str, loaded_families: dict[str, Loaded], tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Read-only: tests that change weights load their own."""
    if name not in loaded_families:
        loaded_families[name] = load(name, tmp_path_factory.mktemp("families") / name)
    return loaded_families[name]


def _variants() -> list[Any]:
    """Each family at two sizes, with and without guidance."""
    cases = []
    for name in NAMES:
        family = families()[name]
        for size, changes in (("first", {}), ("other", family.other_size)):
            cases.append(pytest.param(name, changes, id=f"{name}-{size}"))
            if family.unguided is not None:
                cases.append(pytest.param(name, {**changes, **family.unguided}, id=f"{name}-{size}-unguided"))
    return cases


@pytest.mark.parametrize(("name", "changes"), _variants())
def test_deterministic_sampling_equals_the_stock_pipeline(
    loaded: Loaded, changes: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    request = loaded.request(loaded.family.sampling(**changes))
    found = loaded.sample(request)
    expected = loaded.reference_latents(request)
    assert found.shape == expected.shape
    record_property("error", relative(found, expected))
    assert relative(found, expected) <= loaded.family.tolerance


@pytest.mark.parametrize("name", NAMES)
def test_decoded_media_equal_the_stock_pipelines(
    loaded: Loaded, record_property: Callable[[str, object], None]
) -> None:
    request = loaded.request(loaded.family.sampling())
    if not loaded.family.is_latent_batch:
        inputs = {slot: value.select([0]) for slot, value in request.inputs.items()}
        request = dataclasses.replace(request, texts=request.texts[:1], noise=request.noise[:1], inputs=inputs)
    with loaded.ours.evaluating():
        found = pixels(loaded.ours.decode(loaded.sample(request), request.params))
    expected = loaded.reference(request, loaded.ours.sigmas(request.params), output_type="pt")
    expected = expected.flatten(0, 1) if expected.ndim == 5 else expected
    assert found.shape == expected.shape
    record_property("error", relative(found, expected))
    assert relative(found, expected) <= 10 * loaded.family.tolerance


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_is_the_stock_pipelines(loaded: Loaded) -> None:
    adapter: Any = loaded.ours.adapter
    for num_steps, changes in ((4, {}), (7, loaded.family.other_size)):
        params = loaded.family.sampling(num_inference_steps=num_steps, **changes)
        loaded.stock.scheduler = scheduler_of(loaded.folder)
        request = loaded.request(params)
        loaded.family.arrange(loaded.stock, request)
        call = loaded.family.call(request)
        with torch.no_grad():
            loaded.stock(**call, num_inference_steps=num_steps, output_type="latent")
        schedule = adapter.schedule(loaded.family.schedule)
        found = schedule.sigmas(num_steps, adapter.image_seq_len(params))
        expected = loaded.family.levels(loaded.stock.scheduler).float().cpu()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_latents_survive_the_way_to_the_vae_and_back(loaded: Loaded) -> None:
    request = loaded.request(loaded.family.sampling())
    adapter: Any = loaded.ours.adapter
    if not loaded.family.encodes_media:
        with loaded.ours.evaluating(), pytest.raises(ConfigError, match="cannot encode"):
            loaded.ours.encode_media(loaded.ours.decode(request.noise, request.params))
        return
    torch.testing.assert_close(adapter.from_vae(adapter.to_vae(request.noise)), request.noise, rtol=1e-4, atol=1e-5)
    with loaded.ours.evaluating():
        media = loaded.ours.decode(request.noise, request.params)
    latents = loaded.ours.encode_media(media)
    assert latents.shape == request.noise.shape and latents.dtype == torch.float32


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_adapter_contract(loaded: Loaded, check: Callable[[Case], None]) -> None:
    bundle: Any = loaded.ours.bundle
    frozen = [module for key, module in bundle.modules.items() if key not in bundle.trainable_modules()]
    if check is guidance_one_is_no_guidance and loaded.family.unguided is None:
        pytest.skip("the family has no guidance to switch off")
    check(
        Case(
            loaded.ours,
            loaded.family.sampling(),
            [*frozen, *bundle.text.encoders.values()],
            inputs=loaded.family.inputs,
            unguided=loaded.family.unguided or {},
        )
    )


# Exports -------------------------------------------------------------------------------------------------------------


def _train(bundle: DiffusersBundle) -> None:
    """Weights that differ from the folder's, as training would leave them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in bundle.trainable_modules().values():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("name", NAMES)
def test_the_merged_export_is_a_stock_pipeline_of_the_trained_weights(
    loaded: Loaded, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    own = dataclasses.replace(loaded, ours=ours(loaded.family.name, loaded.folder))
    bundle: Any = own.ours.bundle
    _train(bundle)
    state = {key: dict(module.named_parameters()) for key, module in bundle.trainable_modules().items()}
    bundle.export_merged(str(tmp_path / "merged"), state)
    own.stock = stock_of(tmp_path / "merged")
    _compare_trained(own, loaded, record_property)


@pytest.mark.parametrize("name", NAMES)
def test_the_lora_export_loads_in_the_stock_pipeline(
    loaded: Loaded, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    own = dataclasses.replace(loaded, ours=ours(loaded.family.name, loaded.folder), stock=stock_of(loaded.folder))
    bundle: Any = own.ours.bundle
    targets = list(bundle.lora_target_modules)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=targets)
    for module in bundle.trainable_modules().values():
        inject_adapter_in_model(config, module)
    _train(bundle)
    state = {key: get_peft_model_state_dict(module) for key, module in bundle.trainable_modules().items()}
    bundle.export_lora(str(tmp_path / "lora"), state, rank=2, alpha=8, target_modules=targets)
    own.family.load_lora(own.stock, tmp_path / "lora")
    _compare_trained(own, loaded, record_property)


def _compare_trained(own: Loaded, untrained: Loaded, record_property: Callable[[str, object], None]) -> None:
    """Our trained model and the stock pipeline of what it exported agree, and differ from what they began with."""
    request = own.request(own.family.sampling())
    found = own.sample(request)
    error = relative(found, own.reference_latents(request))
    record_property("error", error)
    assert error <= own.family.tolerance
    assert relative(found, untrained.sample(request)) > 1e-4


# Published checkpoints -----------------------------------------------------------------------------------------------


def _published() -> list[Any]:
    return [
        pytest.param(family, published, id=f"{family.name}-{published.hub_id}")
        for family in families().values()
        for published in family.published
    ]


@pytest.mark.parametrize(("family", "published"), _published())
def test_the_published_size_is_built_on_the_meta_device(
    family: Family, published: Published, record_property: Callable[[str, object], None]
) -> None:
    """Parameters within 3 percent of what is published, blocks and LoRA targets found at true size."""
    total = 0
    for component, config in published.configs.items():
        model_class: Any = family.bundle.components[component].model_class
        with torch.device("meta"):
            model = model_class(**config)
        # What the published file holds: position tables that are saved count too.
        total += sum(tensor.numel() for tensor in model.state_dict().values())
        classes = {type(module).__name__ for module in model.modules()}
        assert classes & set(family.bundle.block_class_names)
        names = [key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        for target in family.bundle.lora_target_modules:
            assert any(key == target or key.endswith(f".{target}") for key in names), f"{target} matches nothing"
    record_property("hub_id", published.hub_id)
    record_property("billions", total / 1e9)
    assert total / 1e9 == pytest.approx(published.billions, rel=0.03)
