"""What runs inside SGLang Diffusion's own processes: it loads `register` by the entry point group of its plugins.

Requests of others pass untouched. A request of ours (`GIVEN` in its extra fields) brings encoded prompts and keys of
its noise; it skips SGLang's text encoders and decoder. Hooks fail without a word where SGLang has moved, so the
trainer's side proves their effect on every answer.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections import Counter
from typing import Any

import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from unirl.rollout.engine.served_latents.ranks import failures, of_all_ranks
from unirl.rollout.engine.served_latents.tokens import as_tokens
from unirl.sde.noise import step_noise
from unirl.types.weights import tensor_checksum

GIVEN = "unirl"
"""Key of `Req.extra`, whose value is a dict of `noise_keys`, `noise_seed`, `noise_shape`, `token_side` and
`distilled_guidance`."""
DESCRIBE = "unirl:describe"
"""Module name that makes SGLang's request for checksums answer what it runs instead."""

CHECKSUM = "unirl:checksum"
"""Module name that makes it answer one checksum per rank of the transformer, in a tenth of the time of SGLang's own."""

_ROOT = "sglang.multimodal_gen.runtime"
_STAGES = f"{_ROOT}.pipelines_core.stages"
_LEVELS = 1000.0
"""What a transformer is given for a guidance of 1, as for a noise level of 1."""


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
        (f"{worker}.get_weights_checksum", describe),
        (f"{worker}.update_weights_from_disk", load_on_all),
        (f"{worker}.update_weights_from_tensor", load_on_all),
        (f"{post_training}.weights_updater.load_weights_into_model", load_all),
    ):
        plugins.HookRegistry.register(target, hook, plugins.HookType.AROUND)


# Any, below: SGLang's own objects.


def keyed_noise(draw: Any, controller: Any, batch: Any, model_output: Tensor) -> Tensor:
    """The noise of this step by the keys of the request, as the trainer draws it."""
    given = batch.extra.get(GIVEN)
    if given is None:
        return draw(controller, batch, model_output)
    step = len(controller.local_log_prob_sum)
    noise = step_noise(given["noise_keys"], step, given["noise_seed"], given["noise_shape"])
    if given["token_side"]:
        noise = as_tokens(noise, given["token_side"])
    # The whole batch's buffer stays where the controller takes log-probs from.
    buffer = controller._get_or_create_rollout_noise_buffer(
        controller.latents_shape, model_output.device, model_output.dtype
    )
    buffer.copy_(noise.reshape(controller.latents_shape))
    return controller.shard_for_sp(batch, buffer)


def keep_given_text(encode: Any, stage: Any, batch: Any, server_args: Any) -> Any:
    """The request as it came, whose prompts are encoded already."""
    return encode(stage, batch, server_args) if GIVEN not in batch.extra else batch


def keep_given_guidance(prepare: Any, stage: Any, batch: Any, server_args: Any) -> Any:
    """What the steps share, with the guidance that the request asks of a distilled transformer as its input; SGLang
    would take that of its configuration."""
    context = prepare(stage, batch, server_args)
    scale = batch.extra.get(GIVEN, {}).get("distilled_guidance")
    if scale is not None and context.guidance is not None:
        context.guidance = context.guidance.new_full(context.guidance.shape, _LEVELS * scale)
    return context


def leave_undecoded(decode: Any, stage: Any, batch: Any, server_args: Any) -> Any:
    """The trajectory alone; the trainer decodes."""
    if GIVEN not in batch.extra:
        return decode(stage, batch, server_args)
    batches: Any = importlib.import_module(f"{_ROOT}.pipelines_core.schedule_batch")

    return batches.OutputBatch(rollout_trajectory_data=batch.rollout_trajectory_data, metrics=batch.metrics)


def describe(checksums: Any, worker: Any, module_names: list[str] | None = None) -> dict[str, str]:
    """What `DESCRIBE` or `CHECKSUM` asks for; otherwise SGLang's checksums, of each rank one behind the other."""
    if module_names == [CHECKSUM]:
        return {CHECKSUM: " ".join(_of_all_ranks(_checksum(worker.pipeline.get_module("transformer"))))}
    if module_names != [DESCRIBE]:
        found = _of_all_ranks(checksums(worker, module_names=module_names))
        return {name: " ".join(rank[name] for rank in found) for name in found[0]}
    transformer = worker.pipeline.get_module("transformer")
    parameters = dict(transformer.named_parameters())
    sizes: Counter[str] = Counter()
    for tensor in parameters.values():
        sizes[str(tensor.dtype)] += tensor.numel()
    found = {
        "pipeline": _path(worker.pipeline),
        "transformer": _path(transformer),
        "dtype": sizes.most_common(1)[0][0],
        "num_parameters": sum(_of_all_ranks(len(parameters))),
    }
    return {DESCRIBE: json.dumps(found)}


def _checksum(transformer: Any) -> str:
    """Of all parameters of this rank, where they are offloaded too."""
    offload: Any = importlib.import_module(f"{_ROOT}.managers.memory_managers.layerwise_offload")
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(offload.iter_materialized_weights(transformer), key=lambda item: item[0]):
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{name} {tensor_checksum(own)}\n".encode())
    return digest.hexdigest()


def load_on_all(update: Any, worker: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """What updating said on every rank; SGLang gives what its first one says."""
    if not gc.get_freeze_count():
        gc.freeze()  # SGLang collects garbage in every update, half a second of looking at what was imported
    said = _of_all_ranks(update(worker, *args, **kwargs))
    error = failures([None if success else message for success, message in said])
    messages = [message for _, message in said]
    if error is None and len(set(messages)) > 1:
        error = f"ranks say different things: {' | '.join(messages)}"
    return (True, messages[0]) if error is None else (False, error)


def load_all(load: Any, weights_iter: Any, model_params: dict[str, Any], module_name: str | None = None) -> None:
    """Load weights; raise ValueError before any is changed where a parameter would keep its old value, of which SGLang
    itself says nothing."""
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
