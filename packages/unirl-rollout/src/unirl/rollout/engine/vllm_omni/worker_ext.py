"""Weight-push methods of vLLM-Omni's workers, called by `collective_rpc`. Imported only there."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from unirl.rollout.engine.child.messages import read_spec
from unirl.rollout.engine.served_latents.ranks import of_all_ranks
from unirl.types.adapters import factor_pairs, merged_weight
from unirl.types.bucket_files import MappedBuckets
from unirl.types.errors import WeightSyncError
from unirl.types.shared_buckets import BucketReader, Place
from unirl.types.weights import WeightBucket, plain_names, tensor_checksum

_EXTENSION: Any = importlib.import_module("vllm_omni.diffusion.worker.diffusion_worker").CustomPipelineWorkerExtension
_LORA: Any = importlib.import_module("vllm_omni.lora.request").LoRARequest

_MAPPED = MappedBuckets()
_TAKEN = BucketReader()

Facts = dict[str, Any]  # Any: JSON
"""Answer of a method: its findings, or `error`. An exception would end vLLM-Omni."""


class PushExtension(_EXTENSION):
    """Methods of a worker. The prefix `unirl_` keeps them from hiding methods of vLLM-Omni.

    vLLM-Omni returns only its first worker's answer, so each worker answers for all.
    """

    def unirl_on_all(self, method: str, args: list[Any]) -> list[Facts]:
        """Call one of these methods on every rank and gather the answers."""
        distributed: Any = importlib.import_module("vllm_omni.diffusion.distributed.parallel_state")
        return of_all_ranks(getattr(self, method)(*args), distributed.get_world_group())

    def unirl_describe(self) -> Facts:
        """Describe the sampling model."""
        pipeline: Any = self.model_runner.pipeline
        transformer, parameters = pipeline.transformer, self._parameters()
        sizes: Counter[str] = Counter()
        for tensor in parameters.values():
            sizes[str(tensor.dtype)] += tensor.numel()
        return {
            "transformer": f"{type(transformer).__module__}.{type(transformer).__qualname__}",
            "dtype": sizes.most_common(1)[0][0],
            "num_parameters": len(parameters),
        }

    def unirl_load_files(self, paths: list[str]) -> Facts:
        """Load all weights from safetensors files, with names as in the checkpoint; `error` as in `unirl_taken`."""
        _MAPPED.forget_removed()
        return self._load({name: tensor for path in paths for name, tensor in _MAPPED.tensors(path).items()}) or (
            self.unirl_taken()
        )

    def unirl_begin(self) -> Facts:
        """Begin a push, which no parameter has a value of."""
        self._bound: set[str] = set()
        return {}

    def unirl_take(self, place: Place, specs: list[dict[str, Any]]) -> Facts:  # Any: see WeightSpec
        """Load a bucket from memory that the next one is written to; `error` if it is not what was described."""
        try:
            bucket = WeightBucket(0, _TAKEN.tensors(place), tuple(read_spec(**spec) for spec in specs))
            bucket.verify()
        except WeightSyncError as error:
            return {"error": str(error)}
        failed = self._load(bucket.tensors)
        _TAKEN.settle()
        return failed

    def unirl_taken(self) -> Facts:
        """How many parameters took a value since `unirl_begin`; `error` if one took none: vLLM-Omni does not say."""
        _TAKEN.forget()
        own = self._parameters()
        if missing := sorted(own.keys() - self._bound):
            return {"error": f"{len(missing)} of {len(own)} parameters took no value: {', '.join(missing[:20])}"}
        return {"num_bound": len(own)}

    def _load(self, tensors: Mapping[str, Tensor]) -> Facts:
        """Load tensors with names as in the checkpoint."""
        pipeline: Any = self.model_runner.pipeline
        try:
            loaded = pipeline.load_weights((pipeline.weight_prefix + name, tensor) for name, tensor in tensors.items())
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        self._bound.update(loaded)
        return {}

    def unirl_checksum(self) -> Facts:
        """One checksum of all parameters and buffers that a push covers."""
        digest = xxhash.xxh3_128()
        for begin, module in self._modules().items():
            for name, tensor in sorted(module.state_dict().items()):
                digest.update(f"{begin}{name} {tensor_checksum(tensor)}\n".encode())
        return {"checksum": digest.hexdigest()}

    def unirl_load_adapter(self, folder: str, number: int) -> Facts:
        """Use the adapter in a folder from now on; `error` if one of its layers matches no module."""
        manager: Any = self.lora_manager
        try:
            manager.set_active_adapter(adapter_request(folder, number))
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        # vLLM-Omni refuses layers without a module; layers that it did not read are not counted.
        return {"num_layers": len(manager._registered_adapters[number].loras)}

    def unirl_merge_adapter(self, adapter: str, base: dict[str, tuple[str, str]], dtype: str) -> Facts:
        """Replace the weights of an adapter's layers by those of the checkpoint with the adapter merged into them;
        `error` if vLLM-Omni takes one of them for no parameter.

        adapter: a folder in peft's format. base: name of a layer's weight -> its file in the checkpoint, and its name
        there.
        """
        config = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = plain_names(load_file(Path(adapter) / "adapter_model.safetensors"))
        pipeline: Any = self.model_runner.pipeline
        digest, own = xxhash.xxh3_128(), getattr(torch, dtype)
        layers = factor_pairs(tensors)
        for layer, (a, b) in layers.items():
            name = f"{layer}.weight"
            file, stored = base[name]
            with safe_open(file, framework="pt") as opened:
                weight = opened.get_tensor(stored)
            a, b, weight = (tensor.to(pipeline.device) for tensor in (a, b, weight))
            merged = merged_weight(weight, a, b, rank=config["r"], alpha=config["lora_alpha"], dtype=own)
            digest.update(tensor_checksum(merged).encode())
            # Alone, since some of vLLM-Omni's loaders drop a tensor that they do not know, and say nothing.
            if not pipeline.load_weights([(pipeline.weight_prefix + name, merged)]):
                return {"error": f"{name} belongs to no parameter"}
        return {"num_layers": len(layers), "merged": digest.hexdigest()}

    def _modules(self) -> dict[str, torch.nn.Module]:
        return self.model_runner.pipeline.pushed_modules

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that a push must reach, by the names that loading returns."""
        return {
            begin + name: parameter
            for begin, module in self._modules().items()
            for name, parameter in module.named_parameters()
        }


def adapter_request(folder: str, number: int) -> Any:  # Any: vLLM-Omni's own
    """vLLM-Omni's adapter request. number: > 0, different for every push."""
    return _LORA(lora_name=Path(folder).name, lora_int_id=number, lora_path=folder)
