"""Every family against its own stock pipeline, on the same files: float32, one thread, tiny random weights."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines import ltx2
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from torch.utils.flop_counter import FlopCounterMode

from unirl.models.allocations import Allocations
from unirl.models.diffusers_pipeline.bundle import DiffusersBundle
from unirl.models.diffusers_pipeline.construction import from_configuration
from unirl.models.diffusers_pipeline.pipeline import DiffusersPipeline
from unirl.models.diffusers_pipeline.resting import Resting
from unirl.models.diffusers_pipeline.text import TextEncoders
from unirl.models.released import all_released
from unirl.models.releases.indexes import INDEXES, index_of, write_index
from unirl.sde.kernels import FlowSDEStrategy
from unirl.sde.noise import initial_noise
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.media import Primitive, Texts
from unirl.types.sampling import PostSolver

from ..contract import ALONE, CHECKS, Case, guidance_one_is_no_guidance
from .kit import (
    KEYS,
    TEXTS,
    Family,
    Loaded,
    Published,
    families,
    first_of_each,
    index_of_folder,
    load,
    ours,
    pixels,
    relative,
    scheduler_of,
    stock_of,
)

LIBRARIES: dict[str, Any] = {"diffusers": diffusers, "transformers": transformers, "ltx2": ltx2}
CONFIG_KINDS = {"scheduler": "scheduler", "audio_scheduler": "scheduler", "guider": "guider", "ocr_guider": "guider"}
PLAIN = (str, int, float, list, tuple, type(None))
FIRST = first_of_each()


def _task(name: str, *values: Any, id: str | None = None) -> Any:  # Any: what pytest.param returns
    """A case of a family's task; all but the first task of each family are left to the matrix."""
    return pytest.param(*(values or (name,)), id=id or name, marks=() if name in FIRST else pytest.mark.matrix)


TASKS = [_task(name) for name in sorted(families())]


@pytest.fixture(scope="session")
def loaded_families() -> dict[str, Loaded]:
    """Filled as tests ask; every folder is written and read once per process."""
    return {}


@pytest.fixture
def loaded(name: str, loaded_families: dict[str, Loaded], tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Read-only: tests that change weights load their own."""
    if name not in loaded_families:
        loaded_families[name] = load(name, tmp_path_factory.mktemp("families") / name)
    return loaded_families[name]


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """By family, filled as tests ask: all checks of one look at the same rollout."""
    return {}


def _variants() -> list[Any]:
    """Each family at two sizes, with and without guidance."""
    cases = []
    for name, family in sorted(families().items()):
        for size, changes in (("first", {}), ("other", family.other_size)):
            cases.append(_task(name, name, changes, id=f"{name}-{size}"))
            if family.unguided is not None:
                cases.append(_task(name, name, {**changes, **family.unguided}, id=f"{name}-{size}-unguided"))
    return cases


@pytest.mark.parametrize(("name", "changes"), _variants())
def test_deterministic_sampling_equals_the_stock_pipeline(
    loaded: Loaded, changes: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    request = loaded.request(loaded.family.sampling(**changes))
    found = loaded.family.shown(loaded.sample(request))
    expected = loaded.reference_latents(request)
    assert found.shape == expected.shape
    record_property("error", relative(found, expected))
    assert relative(found, expected) <= loaded.family.tolerance


def _kernels(pipeline: DiffusersPipeline) -> dict[str, list[Any]]:  # Any: None or a name
    """By component that trains, the kernel of each attention that another could compute."""
    found = {}
    for key, model in pipeline.bundle.trainable_modules().items():
        processors: list[Any] = [getattr(each, "processor", None) for each in model.modules()]
        found[key] = [each._attention_backend for each in processors if hasattr(each, "_attention_backend")]
    return found


@pytest.mark.parametrize("name", TASKS)
def test_another_kernel_computes_the_same_attention(loaded: Loaded) -> None:
    family, request = loaded.family, loaded.request(loaded.family.sampling())
    kernels = _kernels(loaded.ours)
    assert family.bundle.takes_attention_backend == all(kernels.values()) == any(kernels.values())
    make = functools.partial(family.bundle, str(loaded.folder), **family.options)
    if not family.bundle.takes_attention_backend:
        with pytest.raises(ConfigError, match=f"_native_math changes nothing: the model of {family.bundle.family}"):
            make(attention_backend="_native_math")
        return
    expected = loaded.sample(request)
    other = dataclasses.replace(loaded, ours=family.pipeline(make(attention_backend="_native_math"), FlowSDEStrategy()))
    assert {key: set(names) for key, names in _kernels(other.ours).items()} == dict.fromkeys(kernels, {"_native_math"})
    assert relative(other.sample(request), expected) <= 1e-4
    assert torch.equal(loaded.sample(request), expected)


@pytest.mark.parametrize("name", ["flux_dev"])
def test_kernels_that_do_not_run_or_have_no_gradient_are_refused(loaded: Loaded) -> None:
    make: Any = functools.partial(loaded.family.bundle, str(loaded.folder))
    for kernel, message in (
        ("flash", r"attention_backend = flash computes no attention in torch.float32 on cpu: .*flash-attn"),
        (
            "_native_cudnn",
            r"= _native_cudnn computes no attention in torch.float32 on cpu: .* or set attention_backend",
        ),
        (
            "_flash_3",
            "bundle.attention_backend = '_flash_3' must be one of native, .*_native_math, flash, flex, xformers, null",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make(attention_backend=kernel)


@pytest.mark.parametrize(("name", "post_solver"), [("wan21_t2v", "unipc"), ("sana", "dpmpp_2m")])
def test_the_released_solver_samples_as_the_stock_pipeline_does(
    loaded: Loaded, post_solver: PostSolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's own scheduler, which cuts its timesteps to integers, is given those of its sigmas instead."""
    scheduler = scheduler_of(loaded.folder)
    cut = type(scheduler).set_timesteps

    def uncut(self: Any, *args: Any, **options: Any) -> None:  # Any: classes of diffusers
        cut(self, *args, **options)
        self.timesteps = self.sigmas[:-1] * self.config["num_train_timesteps"]

    monkeypatch.setattr(type(scheduler), "set_timesteps", uncut)
    params = loaded.family.sampling(post_solver=post_solver)
    request = loaded.request(params)
    keeps = dataclasses.replace(loaded, family=dataclasses.replace(loaded.family, keeps_scheduler=True))
    keeps.stock.scheduler = scheduler
    found, euler = loaded.sample(request), loaded.sample(loaded.request(loaded.family.sampling()))
    expected = keeps.reference_latents(request)
    # Their coefficients are float32; a step of Euler is a hundred times further off.
    assert relative(found, expected) <= 2e-5
    assert relative(euler, expected) > 1e-3


@pytest.mark.parametrize("name", TASKS)
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


def _asked(family: Family, num_samples: int) -> dict[str, Primitive]:
    """Samples of one prompt with what it brings."""
    inputs = {slot: value.repeat_interleave(num_samples) for slot, value in family.inputs(1).items()}
    return {"text": Texts(texts=TEXTS[:1] * num_samples), **inputs}


@pytest.mark.parametrize("name", TASKS)
def test_samples_of_a_prompt_are_encoded_once(loaded: Loaded) -> None:
    """Text, input images and videos: sixteen samples take the operations of one, and another rollout none."""
    bundle: Any = loaded.ours.bundle
    params, flops = loaded.family.sampling(), []
    for num_samples in (1, 16):
        own = loaded.family.pipeline(bundle, FlowSDEStrategy())  # with an empty cache
        for _ in range(2):
            with own.evaluating(), FlopCounterMode(display=False) as counter:
                conditions = own.encode(_asked(loaded.family, num_samples), params)
            flops.append(counter.get_total_flops())
            assert all(condition.batch_size == num_samples for condition in conditions.values())
    first, again, together, later = flops
    assert 0 < together == first and again == later == 0, flops


class Moves(Resting):
    """Says when weights go to the device and leave it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.seen: list[str] = []

    def bring(self, modules: Any) -> None:
        """Once per visit."""
        if not self._host:
            self.seen.append("bring")
        super().bring(modules)

    def _send_back(self) -> None:
        if self._host:
            self.seen.append("send back")
        super()._send_back()


@pytest.mark.parametrize("name", TASKS)
def test_texts_are_encoded_where_their_encoders_are(loaded: Loaded, tmp_path: Path) -> None:
    """With the rest of the model elsewhere, where nothing can be computed: the same bits arrive there."""
    family, params = loaded.family, loaded.family.sampling()
    away = family.bundle(str(loaded.folder), device="meta", text_encoder_device="cpu", **family.options)
    resting = family.bundle(str(loaded.folder), rest_text_encoders=True, **family.options)
    resting.text.resting = Moves(torch.device("cpu"))
    bundles: dict[str, Any] = {"here": loaded.ours.bundle, "away": away, "resting": resting}
    for place, bundle in bundles.items():
        pipeline = family.pipeline(bundle, FlowSDEStrategy(), embedding_cache=tmp_path / place)
        with pipeline.evaluating():
            conditions: Any = pipeline.encode_texts(_asked(family, 2), params)
        assert all(condition.embeds.is_meta == (place == "away") for condition in conditions.values())
    here, *there = (
        {file.name: file.read_bytes() for file in (tmp_path / place).rglob("*.safetensors")} for place in bundles
    )
    assert here and there == [here, here]
    assert resting.text.resting.seen == ["bring", "send back"]
    pipeline = family.pipeline(resting, FlowSDEStrategy(), embedding_cache=tmp_path / "resting")
    with pipeline.evaluating(), pipeline.visiting_encoders():
        pipeline.encode_texts(_asked(family, 2), params)
    assert resting.text.resting.seen == ["bring", "send back"]  # what is cached brings no weights to the device


@pytest.mark.parametrize(
    "name", [_task(name) for name, family in sorted(families().items()) if family.tile is not None]
)
def test_tiles_bound_the_memory_of_decoding(loaded: Loaded, record_property: Callable[[str, object], None]) -> None:
    """Counted by operator; media of one tile keep their bits."""
    family = loaded.family
    tiled = family.pipeline(family.bundle(str(loaded.folder), vae_tile_pixels=family.tile), FlowSDEStrategy())
    side = family.tiled_side
    params = family.sampling(height=side, width=side)
    latents = initial_noise(KEYS[:1], params.seed, loaded.ours.latent_shape(params))
    peaks = {}
    for name, pipeline in (("whole", loaded.ours), ("tiled", tiled)):
        with pipeline.evaluating(), Allocations() as counted:
            media = pipeline.decode(latents, params)
        assert pixels(media).shape[-2:] == (side, side) and bool(pixels(media).isfinite().all())
        peaks[name] = counted.peak_bytes
    record_property("peak_ratio", peaks["tiled"] / peaks["whole"])
    # Tiny decoders hold little more than the pixels; true ones a tenth or a quarter, see test_allocations.py.
    assert peaks["tiled"] <= 0.6 * peaks["whole"], peaks
    small = family.sampling(height=32, width=32)
    latents = initial_noise(KEYS[:1], small.seed, loaded.ours.latent_shape(small))
    with loaded.ours.evaluating(), tiled.evaluating():
        found, expected = (pixels(each.decode(latents, small)) for each in (tiled, loaded.ours))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "name", [_task(name) for name, family in sorted(families().items()) if family.bundle.decodes_at_once]
)
def test_spans_of_frames_bound_the_memory_of_decoding(loaded: Loaded) -> None:
    """Counted by operator; a video of one span keeps its bits, and a longer one those of its first frames."""
    family = loaded.family
    factor = family.bundle.frame_divisor
    span, length = 2 * factor + 1, 8 * factor + 1
    spans = family.pipeline(family.bundle(str(loaded.folder), vae_tile_frames=span), FlowSDEStrategy())
    media, peaks = {}, {}
    for num_frames in (span, length):
        params = family.sampling(num_frames=num_frames)
        latents = initial_noise(KEYS[:1], params.seed, loaded.ours.latent_shape(params))
        for name, pipeline in (("whole", loaded.ours), ("spans", spans)):
            with pipeline.evaluating(), Allocations() as counted:
                media[name] = pixels(pipeline.decode(latents, params))
            peaks[name] = counted.peak_bytes
        assert media["spans"].shape == media["whole"].shape
        if num_frames == span:
            assert torch.equal(media["spans"], media["whole"])
    assert bool(media["spans"].isfinite().all())
    assert peaks["spans"] < 0.75 * peaks["whole"], peaks


@pytest.mark.parametrize("name", TASKS)
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


@pytest.mark.parametrize("name", TASKS)
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
@pytest.mark.parametrize("name", TASKS)
def test_adapter_contract(loaded: Loaded, cases: dict[str, Case], check: Callable[[Case], None]) -> None:
    bundle: Any = loaded.ours.bundle
    family = loaded.family
    if check is guidance_one_is_no_guidance and family.unguided is None:
        pytest.skip("the family has no guidance to switch off")
    if check in ALONE and family.makes_chunks:
        pytest.skip("the family walks each sample alone and to its end, see test_anyflow.py")
    if family.name not in cases:
        frozen = [module for key, module in bundle.modules.items() if key not in bundle.trainable_modules()]
        cases[family.name] = Case(
            loaded.ours,
            family.sampling(),
            [*frozen, *bundle.text.encoders.values()],
            inputs=family.inputs,
            unguided=family.unguided or {},
            cut_frames=family.cut_frames,
            has_history=family.makes_chunks,
        )
    check(cases[family.name])


# Folders that are refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_folders_of_another_family_or_without_a_component_are_refused_before_weights(
    loaded: Loaded, tmp_path: Path
) -> None:
    family, index = loaded.family, index_of_folder(loaded.folder)
    for component in loaded.folder.iterdir():
        if component.is_dir() and component.name != "vae":
            (tmp_path / component.name).mkdir()
            for file in component.iterdir():
                empties = file.suffix == ".safetensors"  # which would not load
                target = tmp_path / component.name / file.name
                target.write_bytes(b"") if empties else target.symlink_to(file)
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(ConfigError, match="holds a StableDiffusionPipeline; this model needs a "):
        family.bundle(str(tmp_path), **family.options)
    (tmp_path / family.bundle.index_file).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="vae"):
        family.bundle(str(tmp_path), **family.options)


# Exports -------------------------------------------------------------------------------------------------------------


def _train(bundle: DiffusersBundle) -> None:
    """Weights that differ from the folder's, as training would leave them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in bundle.trainable_modules().values():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("name", TASKS)
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


@pytest.mark.parametrize("name", TASKS)
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
    found = own.family.shown(own.sample(request))
    error = relative(found, own.reference_latents(request))
    record_property("error", error)
    assert error <= own.family.tolerance
    assert relative(found, own.family.shown(untrained.sample(request))) > 1e-4


# Published checkpoints -----------------------------------------------------------------------------------------------


def _published() -> list[Any]:
    return [
        _task(family.name, family, published, id=f"{family.name}-{published.hub_id}")
        for family in families().values()
        for published in family.published
    ]


def test_every_published_checkpoint_has_its_index() -> None:
    assert set(INDEXES) == {published.hub_id for family in families().values() for published in family.published}


class Empty(torch.nn.Module):
    """A model of this configuration without weights."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    def enable_slicing(self) -> None:
        """Nothing to decode."""


class NoTexts(TextEncoders):
    """Reads no text, and nothing of its encoders."""

    def _encode(self, texts, max_sequence_length):
        raise NotImplementedError


def _released_folder(published: Published, folder: Path) -> dict[str, str]:
    """The released index and configurations next to empty files of weights. Returns the class of each component."""
    index = index_of(published.hub_id)
    write_index(index, folder)
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[1] is not None}
    for name, (library, class_name) in entries.items():
        (folder / name).mkdir()
        released: Any = getattr(LIBRARIES[library], class_name)
        config: dict[str, Any] = {}
        if library != "transformers":  # whose classes take a configuration, not its values
            defaults = inspect.signature(released.__init__).parameters.items()
            config = {key: each.default for key, each in defaults if isinstance(each.default, PLAIN)}
        prefix = f"{CONFIG_KINDS[name]}_" if name in CONFIG_KINDS else ""
        (folder / name / f"{prefix}config.json").write_text(json.dumps(config | dict(published.configs.get(name, {}))))
        (folder / name / "model.safetensors").touch()
    return {name: class_name for name, (_, class_name) in entries.items()}


@pytest.mark.parametrize(
    ("family", "published"),
    [
        pytest.param(family, published, id=f"{family.name}-{published.hub_id}")
        for family in families().values()
        for published in family.published
    ],
)
def test_the_released_folder_is_opened(family: Family, published: Published, tmp_path: Path) -> None:
    """Every component by the class that the release names, up to its weights."""
    released = _released_folder(published, tmp_path)
    loaded = {}
    base: Any = family.bundle  # Any: a class of many

    class Opened(base):
        def load(self, name, component, dtype, device, *, trains=False):
            loaded[name] = self.folder.class_of(name)
            return Empty(self.folder.config(name))

        def load_processor(self, name):
            loaded[name] = self.folder.class_of(name)

        def make_text(self, encoders, processors):
            return NoTexts({}, {})

    Opened(str(tmp_path), **family.options)
    # Guidance and the walk over the schedule are ours; nothing else of a release is left out.
    assert loaded == {name: each for name, each in released.items() if name not in CONFIG_KINDS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TASKS)
def test_models_built_from_their_configuration_are_those_that_load(loaded: Loaded, dtype: torch.dtype) -> None:
    """The same parameters and buffers, of the same shapes and dtypes, with no weights read."""
    for component, each in loaded.family.bundle.components.items():
        folder = loaded.folder / component
        if each.model_class is None or not folder.is_dir():
            continue
        keyword = "torch_dtype" if issubclass(each.model_class, ModelMixin) else "dtype"
        read = each.model_class.from_pretrained(folder, **{keyword: dtype}).eval()
        built = from_configuration(each.model_class, folder, dtype, "meta")
        assert _layout(built) == _layout(read)
        assert {tensor.device.type for tensor in built.state_dict().values()} == {"meta"}


def _layout(model: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_parameters()} | {
        name: (tensor.shape, tensor.dtype) for name, tensor in model.named_buffers()
    }


@pytest.mark.parametrize(("family", "published"), _published())
def test_the_published_size_is_built_on_the_meta_device(
    family: Family, published: Published, record_property: Callable[[str, object], None]
) -> None:
    """Parameters within 3 percent of what is published, blocks and LoRA targets found at true size."""
    total = num_blocks = 0
    for component, config in published.configs.items():
        model_class: Any = family.bundle.components[component].model_class
        with torch.device("meta"):
            model = model_class(**config)
        # What the published file holds: position tables that are saved count too.
        total += sum(tensor.numel() for tensor in model.state_dict().values())
        own = [type(module).__name__ in family.bundle.block_class_names for module in model.modules()]
        assert any(own)
        num_blocks += sum(own)
        names = [key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        for target in family.bundle.lora_target_modules:
            assert any(key == target or key.endswith(f".{target}") for key in names), f"{target} matches nothing"
    record_property("hub_id", published.hub_id)
    record_property("billions", total / 1e9)
    assert total / 1e9 == pytest.approx(published.billions, rel=0.03)
    released = all_released().get(published.hub_id)
    if released is not None:  # what memory is estimated from
        assert released.trained == pytest.approx(total / 1e9, rel=0.03)
        is_unet = "unet" in published.configs  # whose blocks are of several sizes
        assert is_unet or released.blocks * released.experts == num_blocks
