"""Pushes only the policy's LoRA adapter: some megabytes instead of the model."""

from __future__ import annotations

from typing import ClassVar

from unirl.distributed.weight_sync.base import WeightSync
from unirl.types.errors import WeightSyncError
from unirl.types.protocols.engines import PushTarget
from unirl.types.weights import WeightBucket, WeightReceipt, rounded, weight_specs


class LoraWeightSync(WeightSync):
    """Replaces the engine's adapter by the current one; base weights are not sent. Options: see `WeightSync`."""

    sends_adapters: ClassVar[bool] = True

    def _gather(self, policy: str | None) -> None:
        self._source.adapter_weights(policy)

    def _send(self, engine: PushTarget, version: int, policy: str | None) -> WeightReceipt:
        tensors = {
            name: self._placed(rounded(tensor, self._dtype), engine)
            for name, tensor in self._source.adapter_weights(policy).items()
        }
        config = self._source.adapter_config()
        specs = tuple(weight_specs(tensors))
        self._note_sent(specs)
        receipt = engine.load_adapter(WeightBucket(version, tensors, specs), config, policy)
        # Each adapted layer has an A and a B.
        num_acting = len(tensors) // 2 if receipt.num_bound is None else receipt.num_bound
        if (receipt.num_tensors, 2 * num_acting) != (len(tensors), len(tensors)):
            raise WeightSyncError(
                f"an adapter of {len(tensors)} tensors was sent; the engine took {receipt.num_tensors}, which act on "
                f"{num_acting} layers"
            )
        return receipt
