"""Writes a trained policy for use outside: adapters alone, or the whole model with them merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from unirl.train.backend.policies import CURRENT_POLICY
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.protocols.models import ModelBundle
from unirl.types.protocols.training import TrainBackend
from unirl.types.roles import Collect, Dispatch, distributed
from unirl.types.storage import open_to_umask
from unirl.types.weights import LostUpdate, UpdateTally


class Exporter:
    """Reads the weights of a backend and lets the bundle write them. Rank 0 writes; every rank calls every method."""

    def __init__(self, backend: TrainBackend, bundle: ModelBundle) -> None:
        self._backend = backend
        self._bundle = bundle

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def export_lora(self, folder: str, policy: str = CURRENT_POLICY) -> None:
        """Write a policy's adapters where the model's usual pipeline loads them.

        Raises ConfigError without LoRA and ContractError for an unknown policy.
        """
        if self._backend.lora_scale is None:
            raise ConfigError("export_lora needs backend.lora; full fine-tuning is exported by export_merged")
        source = self._backend.weight_source
        state, adapter = source.adapter_state(policy), source.adapter_config()
        self._on_rank_zero(
            folder,
            lambda: self._bundle.export_lora(
                folder, state, rank=adapter.rank, alpha=adapter.alpha, target_modules=adapter.target_modules
            ),
        )

    @distributed(Dispatch.BROADCAST, Collect.FIRST)
    def export_merged(
        self, folder: str, policy: str = CURRENT_POLICY, *, in_float32: bool = False
    ) -> LostUpdate | None:
        """Write the components with a policy's weights, LoRA merged, by save_pretrained. As `export_lora`.

        in_float32: instead of the dtype of the loaded model. Returns what rounding took of the adapters' updates; None
        where all weights were trained: they are written in `fsdp.master_dtype`, as they were trained.
        """
        tally = UpdateTally()
        state = self._backend.weight_source.merged_state(policy, in_float32=in_float32, tally=tally)
        self._on_rank_zero(folder, lambda: self._bundle.export_merged(folder, state))
        return tally.result()

    def _on_rank_zero(self, folder: str, write: Callable[[], None]) -> None:
        """Rank 0 writes, the others wait for it and fail with it."""
        num_written = torch.zeros(1, device=self._backend.device)
        try:
            if not dist.is_initialized() or dist.get_rank() == 0:
                write()
                open_to_umask(Path(folder))
                num_written.fill_(1)
        finally:
            num_written = self._backend.collectives.all_reduce_sum(num_written, "all")
        if not bool(num_written):
            raise CheckpointError("rank 0 could not write the export; its own error says why")
