"""Hooks inside SGLang Diffusion's own processes, which load `register` through the plugin entry point.

Requests of other clients are not changed. Our requests (`GIVEN` in their extra fields) bring encoded prompts and noise
keys, and skip SGLang's text encoders and decoder. Hooks fail silently if SGLang's code has moved, so the trainer's side
verifies their effect on every answer.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from unirl.rollout.engine.served_latents.folder import SECOND_EXPERT, TRANSFORMER
from unirl.rollout.engine.served_latents.ranks import failures, of_all_ranks
from unirl.rollout.engine.served_latents.tokens import as_tokens
from unirl.sde.noise import step_noise
from unirl.types.weights import tensor_checksum

GIVEN = "unirl"
"""Key of `Req.extra`; its value is a dict with `noise_keys`, `noise_seed`, `noise_shape`, `token_side` and
`distilled_guidance`."""
DESCRIBE = "unirl:describe"
"""Module name for which SGLang's checksum request answers with a description of the pipeline instead."""

CHECKSUM = "unirl:checksum"
"""Module name for which it answers with one checksum of the transformer per rank, in a tenth of the time of SGLang's
own."""

_ROOT = "sglang.multimodal_gen.runtime"
_STAGES = f"{_ROOT}.pipelines_core.stages"
_REGISTRY = "sglang.multimodal_gen.registry"
_HUNYUAN_VIDEO = "HunyuanVideoPipeline"
IMAGE_LATENT = "image_latent"
"""Field of a request with the latents of given frames and their mask."""
_ENCODED = (
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_embeds",
    "neg_pooled_embeds",
    "prompt_attention_mask",
    "negative_attention_mask",
    "image_embeds",
)
"""Fields of a request that its encoded prompts are in. SGLang moves initial latents to its device, but these not."""
_TEXT_REFINER = "txt_in"
"""SGLang's name of HunyuanVideo's text refiner."""
_LEVELS = 1000.0
"""Scale of a transformer's guidance and noise-level inputs: 1 is passed as 1000."""


def register() -> None:
    """Register the hooks; SGLang applies them before it loads a model."""
    plugins: Any = importlib.import_module(f"{_ROOT}.platforms.plugins")

    post_training = f"{_ROOT}.post_training"
    worker = f"{post_training}.gpu_worker_post_training_mixin.GPUWorkerPostTrainingMixin"
    for target, hook in (
        (f"{post_training}.flow_rollout_controller.FlowRolloutController._rollout_variance_noise", keyed_noise),
        (f"{_STAGES}.text_encoding.TextEncodingStage.forward", keep_given_text),
        (f"{_ROOT}.pipelines.stable_diffusion_3.SD3ConditioningStage.forward", keep_given_text),
        (f"{_STAGES}.denoising.DenoisingStage._prepare_denoising_loop", keep_given_guidance),
        (f"{_STAGES}.decoding.DecodingStage.forward", leave_undecoded),
        (f"{_ROOT}.models.dits.hunyuanvideo.HunyuanVideoTransformer3DModel.forward", read_texts_alone),
        (f"{_ROOT}.layers.elementwise.MulAdd.forward_native", add_per_sample),
        (f"{_REGISTRY}._discover_and_register_pipelines", with_adapters),
        (f"{_ROOT}.pipelines_core.lora.pipeline.LoRAPipeline.convert_to_lora_layers", adapt_text_refiner),
        (f"{worker}.get_weights_checksum", describe),
        (f"{worker}.update_weights_from_disk", load_on_all),
        (f"{worker}.update_weights_from_tensor", load_on_all),
        (f"{post_training}.weights_updater.load_weights_into_model", load_all),
        (f"{post_training}.weights_updater._get_weights_iter", own_tensors),
    ):
        plugins.HookRegistry.register(target, hook, plugins.HookType.AROUND)


# Any, below: SGLang's own objects.


def keyed_noise(draw: Any, controller: Any, batch: Any, model_output: Tensor) -> Tensor:
    """The noise of this step from the request's keys, as the trainer draws it."""
    given = batch.extra.get(GIVEN)
    if given is None:
        return draw(controller, batch, model_output)
    step = len(controller.local_log_prob_sum)
    noise = step_noise(given["noise_keys"], step, given["noise_seed"], given["noise_shape"])
    if given["token_side"]:
        noise = as_tokens(noise, given["token_side"])
    # The controller reads log-probs from the buffer of the whole batch, so it is filled in place.
    buffer = controller._get_or_create_rollout_noise_buffer(
        controller.latents_shape, model_output.device, model_output.dtype
    )
    buffer.copy_(noise.reshape(controller.latents_shape))
    return controller.shard_for_sp(batch, buffer)


def keep_given_text(encode: Any, stage: Any, batch: Any, server_args: Any) -> Any:
    """Return our requests with their encoded prompts and their noise levels on the device that samples."""
    if GIVEN not in batch.extra:
        return encode(stage, batch, server_args)
    device = importlib.import_module(f"{_ROOT}.distributed").get_local_torch_device()
    for field in _ENCODED:
        given: Any = getattr(batch, field, None)
        if given is not None:
            setattr(batch, field, [tensor.to(device) for tensor in given])
    if batch.image_latent is not None:
        batch.image_latent = batch.image_latent.to(device)
    batch.timesteps = batch.timesteps.to(device)
    for name in ("timesteps", "sigmas"):
        setattr(batch.scheduler, name, getattr(batch.scheduler, name).to(device))
    return batch


def keep_given_guidance(prepare: Any, stage: Any, batch: Any, server_args: Any) -> Any:
    """Inputs shared by all steps, with the request's distilled guidance. SGLang would use that of its configuration, of
    HunyuanVideo 6 instead of 6000 (`_build_guidance` in its runtime/pipelines_core/stages/denoising.py)."""
    context = prepare(stage, batch, server_args)
    scale = batch.extra.get(GIVEN, {}).get("distilled_guidance")
    if scale is not None and context.guidance is not None:
        context.guidance = context.guidance.new_full(context.guidance.shape, _LEVELS * scale)
    return context


def read_texts_alone(forward: Any, transformer: Any, *args: Any, **inputs: Any) -> Tensor:
    """Velocity of HunyuanVideo, which in SGLang ignores `encoder_attention_mask` and reads the padding of texts as text
    (in runtime/models/dits/hunyuanvideo.py the mask ends in `**kwargs`): in their mean, in its text refiner and in the
    attention of every block. So samples whose texts are equally long go together, without padding."""
    batch = importlib.import_module(f"{_ROOT}.managers.forward_context").get_forward_context().forward_batch
    if batch is None or GIVEN not in batch.extra:
        return forward(transformer, *args, **inputs)
    lengths = inputs["encoder_attention_mask"].sum(dim=1)
    rows_of, parts = [], []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().flatten()
        own = {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        own["encoder_hidden_states"] = own["encoder_hidden_states"][:, :length]
        rows_of.append(rows)
        parts.append(forward(transformer, **own))
    return torch.cat(parts)[torch.cat(rows_of).argsort()]


def add_per_sample(add: Any, layer: Any, a: Tensor, b: Tensor, c: Tensor, k: int = 0) -> Tensor:
    """a (k + b) + c of [B, L, D], where b [B, D] is a gate of each sample: HunyuanVideo gives it so, and SGLang's plain
    MulAdd (on a CPU; its kernels do not) takes the samples of b for tokens."""
    return add(layer, a, b.unsqueeze(1) if b.dim() == a.dim() - 1 else b, c, k)


def with_adapters(discover: Any) -> None:
    """Register SGLang's pipelines; that of HunyuanVideo, which takes no adapters (in its
    runtime/pipelines/hunyuan_pipeline.py it is no LoRAPipeline), as one that does."""
    discover()
    registered = importlib.import_module(_REGISTRY)._PIPELINE_REGISTRY
    adapted: Any = importlib.import_module(f"{_ROOT}.pipelines_core").LoRAPipeline
    own = registered[_HUNYUAN_VIDEO]
    if not issubclass(own, adapted):
        registered[_HUNYUAN_VIDEO] = type(own.__name__, (adapted, own), {"__module__": own.__module__})


def adapt_text_refiner(convert: Any, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
    """Make layers ready for adapters, those of HunyuanVideo's text refiner too, which SGLang leaves out
    (`exclude_lora_layers` in its configs/models/dits/hunyuanvideo.py) and then counts as unknown."""
    pipeline.exclude_lora_layers = [name for name in pipeline.exclude_lora_layers if name != _TEXT_REFINER]
    return convert(pipeline, *args, **kwargs)


def leave_undecoded(decode: Any, stage: Any, batch: Any, server_args: Any) -> Any:
    """Return the trajectory without decoding; the trainer decodes."""
    if GIVEN not in batch.extra:
        return decode(stage, batch, server_args)
    batches: Any = importlib.import_module(f"{_ROOT}.pipelines_core.schedule_batch")

    return batches.OutputBatch(rollout_trajectory_data=batch.rollout_trajectory_data, metrics=batch.metrics)


def describe(checksums: Any, worker: Any, module_names: list[str] | None = None) -> dict[str, str]:
    """Answer `DESCRIBE` or `CHECKSUM`; otherwise SGLang's checksums, concatenated over ranks."""
    if module_names == [CHECKSUM]:
        return {CHECKSUM: " ".join(_of_all_ranks(_checksum(_transformers(worker.pipeline))))}
    if module_names != [DESCRIBE]:
        found = _of_all_ranks(checksums(worker, module_names=module_names))
        return {name: " ".join(rank[name] for rank in found) for name in found[0]}
    transformers = _transformers(worker.pipeline)
    parameters = [parameter for each in transformers for parameter in each.parameters()]
    sizes: Counter[str] = Counter()
    for tensor in parameters:
        sizes[str(tensor.dtype)] += tensor.numel()
    found = {
        "pipeline": _path(worker.pipeline),
        "transformer": _path(transformers[0]),
        "dtype": sizes.most_common(1)[0][0],
        "num_parameters": sum(_of_all_ranks(len(parameters))),
    }
    return {DESCRIBE: json.dumps(found)}


def _transformers(pipeline: Any) -> list[Any]:
    """The model that denoises, or its two experts."""
    found = [pipeline.get_module(name) for name in (TRANSFORMER, SECOND_EXPERT)]
    return [each for each in found if each is not None]


def _checksum(transformers: list[Any]) -> str:
    """Checksum of all parameters of this rank, offloaded ones included."""
    offload: Any = importlib.import_module(f"{_ROOT}.managers.memory_managers.layerwise_offload")
    digest = xxhash.xxh3_128()
    for transformer in transformers:
        for name, tensor in sorted(offload.iter_materialized_weights(transformer), key=lambda item: item[0]):
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(f"{name} {tensor_checksum(own)}\n".encode())
    return digest.hexdigest()


def own_tensors(read: Any, weights_dir: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one component. Files of a push to two experts hold tensors of both, as "component/name"."""
    component = Path(weights_dir).name
    for name, tensor in read(weights_dir):
        owner, _, own = name.rpartition("/")
        if owner in ("", component):
            yield own, tensor


def load_on_all(update: Any, worker: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Result of an update on all ranks; SGLang itself returns only that of the first."""
    if not gc.get_freeze_count():
        gc.freeze()  # SGLang collects garbage in every update, which scans all imports for half a second
    said = _of_all_ranks(update(worker, *args, **kwargs))
    error = failures([None if success else message for success, message in said])
    messages = [message for _, message in said]
    if error is None and len(set(messages)) > 1:
        error = f"ranks say different things: {' | '.join(messages)}"
    return (True, messages[0]) if error is None else (False, error)


def load_all(load: Any, weights_iter: Any, model_params: dict[str, Any], module_name: str | None = None) -> None:
    """Load weights. Raises ValueError, before any weight changes, if a parameter would keep its old value, which SGLang
    itself does not report."""
    entries = list(weights_iter)
    missing = sorted(set(model_params) - {entry[0] for entry in entries})
    if missing:
        raise ValueError(f"{len(missing)} of {len(model_params)} parameters took no value: {', '.join(missing[:20])}")
    load(iter(entries), model_params, module_name)


def _of_all_ranks(own: Any) -> list[Any]:
    distributed: Any = importlib.import_module(f"{_ROOT}.distributed")
    return of_all_ranks(own, distributed.get_world_group())


def _path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
