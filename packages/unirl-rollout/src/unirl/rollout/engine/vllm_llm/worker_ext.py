"""Methods inside vLLM's workers, one per device: vLLM adds this class to them by `worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unirl.types.bucket_files import MappedBuckets

_MAPPED = MappedBuckets()


class WeightSyncExtension:
    """Methods of a vLLM worker, called by `collective_rpc`. Arguments and results are plain values, because a worker
    may be a separate process."""

    model_runner: Any  # Any: vLLM's; the worker that this is mixed into has it
    reload_weights: Any  # Any: as model_runner
    device: torch.device

    def unirl_reload(self, paths: list[str]) -> tuple[int, list[str]]:
        """Load the tensors of these files into the model by vLLM's layerwise reload.

        Returns how many parameters took values, and the names of those that did not: vLLM keeps their old values and
        only prints a warning.
        """
        model = self.model_runner.get_model()
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        bound: set[str] = set()
        load_weights = model.load_weights

        def recording(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded = load_weights(weights)
            bound.update(loaded)
            return loaded

        model.load_weights = recording
        try:
            self.reload_weights(weights_iterator=_tensors(paths))
        finally:
            del model.load_weights
            _MAPPED.forget_removed()
        if self.device.type == "cpu":
            _pack_experts(model)
        return len(bound & names), sorted(names - bound)

    def unirl_adapter(self, adapter_id: int) -> tuple[int, list[str]]:
        """Number of layers of an active adapter that act on the model, counting each part of a fused one, and the names
        of those that match no module, which vLLM drops silently."""
        # vLLM has no public API for this.
        manager = self.model_runner.lora_manager._adapter_manager
        loras = manager.get_adapter(adapter_id).loras
        acting = {name: weights for name, weights in loras.items() if name in manager.modules}
        num_acting = sum(
            sum(part is not None for part in weights.lora_a) if isinstance(weights.lora_a, list) else 1
            for weights in acting.values()
        )
        return num_acting, sorted(set(loras) - set(acting))


def _pack_experts(model: nn.Module) -> None:
    """Lay out the experts as vLLM's kernel for a CPU reads them. vLLM 0.32 does that once, when it starts, and leaves
    those of a reload as they are in the checkpoint."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _tensors(paths: list[str]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        yield from _MAPPED.tensors(path).items()
