"""Named copies of the trainable parameters, and running the model with one of them for a while."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from unirl.train.configs import EMAConfig
from unirl.train.ema import EMA, average_into, float_copies
from unirl.train.shards import local_part
from unirl.types.errors import ConfigError, ContractError

CURRENT_POLICY = "default"
"""The policy that trains."""
EMA_POLICY = "ema"
REFERENCE_POLICY = "reference"
_EXCHANGED_BYTES = 32 << 20
"""Largest copy of several tensors that change places."""
_RESERVED = (CURRENT_POLICY, EMA_POLICY, REFERENCE_POLICY)


class NamedPolicies:
    """Float32 copies by policy name and parameter name, sharded as the parameters are: those that are kept, the moving
    average, and the starting weights.

    after_change: called whenever parameter values changed in place (sharding drops stale gathered copies).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        after_change: Callable[[], None],
        *,
        ema: EMAConfig | None,
        keep_reference: bool,
    ) -> None:
        self._parameters = parameters
        self._after_change = after_change
        self.ema = None if ema is None else EMA(parameters, ema)
        self._reference = float_copies(parameters) if keep_reference else None
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._inside: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the kept copies, sorted."""
        return tuple(sorted(self._copies))

    def keep(self, name: str) -> None:
        """Copy the current parameters under `name`, over an earlier copy of that name."""
        if name in _RESERVED or "/" in name or not name:
            raise ContractError(f"policy name {name!r} is reserved or not a plain name")
        self.require_current(f"keep_policy({name!r})")
        if name in self._copies:
            average_into(self._copies[name], self._parameters, 0.0)
        else:
            self._copies[name] = float_copies(self._parameters)

    def update(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * current. Raises ConfigError outside [0, 1]."""
        self.require_current(f"update_policy({name!r})")
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"policy {name!r}: decay = {decay} must be in [0, 1]")
        average_into(self._kept(name), self._parameters, decay)

    def after_step(self, num_optimizer_steps: int) -> None:
        """Average the current parameters into the moving average where this step, counted from 1, is due."""
        if self.ema is not None:
            self.ema.after_step(num_optimizer_steps)

    def values(self, name: str) -> Mapping[str, Tensor]:
        """Values of any policy by parameter name: "default" is the trained one, "ema" the average and "reference"
        the starting weights.

        Raises ContractError for an unknown name, and inside another policy, where some of the values are elsewhere;
        ConfigError for a moving average or starting weights that are not kept.
        """
        self.require_current(f"policy {name!r}")
        if name == CURRENT_POLICY:
            return {key: parameter.detach() for key, parameter in self._parameters.items()}
        if name == EMA_POLICY:
            if self.ema is None:
                raise ConfigError("there is no moving average: set backend.ema")
            return self.ema.copies
        if name == REFERENCE_POLICY:
            return self._starting_weights()
        return self._kept(name)

    def _kept(self, name: str) -> dict[str, Tensor]:
        if name not in self._copies:
            raise ContractError(
                f"there is no policy {name!r}; kept: {', '.join(self.names) or 'none'}. Call keep_policy first."
            )
        return self._copies[name]

    def require_current(self, action: str) -> None:
        """Raise ContractError while the parameters hold another policy's values."""
        if self._inside is not None:
            raise ContractError(f"{action} inside the policy {self._inside!r}: leave that context first")

    def using(self, name: str) -> AbstractContextManager[None]:
        """Inside, the parameters hold the values of a policy (see `values`)."""
        return self._swapped_in(name, self.values(name))

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the parameters hold the starting weights. Raises ConfigError if they are not kept."""
        return self._swapped_in(REFERENCE_POLICY, self._starting_weights())

    def _starting_weights(self) -> dict[str, Tensor]:
        if self._reference is None:
            raise ConfigError("a reference policy of full fine-tuning needs a copy: set backend.keep_reference: true")
        return self._reference

    @contextmanager
    def _swapped_in(self, name: str, copies: Mapping[str, Tensor]) -> Generator[None]:
        """Inside, the parameters hold the values of `copies`; afterwards their own again, bit for bit.

        Whole tensors of one dtype change places, which costs nothing. Shards, into which FSDP holds views, exchange
        their values, so that no third copy of the weights is there; other dtypes are copied. Parameter objects,
        requires_grad and optimizer state are untouched. Autograd notices a graph that was recorded outside and is
        differentiated after a swap: its backward raises RuntimeError. Run the other policies' forwards first.
        """
        self.require_current(f"policy {name!r}")
        self._inside = name
        pairs = [(parameter, copies[key]) for key, parameter in self._parameters.items()]
        exchanged = [pair for pair in pairs if _can_change_places(*pair)]
        local = [(local_part(mine), local_part(copy)) for mine, copy in pairs if not _can_change_places(mine, copy)]
        alike = [pair for pair in local if _are_alike(*pair)]
        copied = [pair for pair in local if not _are_alike(*pair)]
        try:
            with torch.no_grad():
                own = [mine.clone() for mine, _ in copied]
                for mine, copy in copied:
                    mine.copy_(copy)
                _exchange_values(alike)
                _change_places(exchanged)
            self._after_change()
            try:
                yield
            finally:
                with torch.no_grad():
                    for (mine, _), value in zip(copied, own, strict=True):
                        mine.copy_(value)
                    _exchange_values(alike)
                    _change_places(exchanged)
                self._after_change()
        finally:
            self._inside = None

    def move(self, device: torch.device) -> None:
        """Move all copies."""
        kept = [*self._copies.values(), self._reference, None if self.ema is None else self.ema.copies]
        for copies in (each for each in kept if each is not None):
            copies.update({name: tensor.to(device) for name, tensor in copies.items()})


def _can_change_places(parameter: nn.Parameter, copy: Tensor) -> bool:
    return not isinstance(parameter, DTensor) and _are_alike(parameter, copy)


def _are_alike(parameter: Tensor, copy: Tensor) -> bool:
    return parameter.dtype == copy.dtype and parameter.device == copy.device


def _exchange_values(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Small tensors together, in few launches; held in addition are `_EXCHANGED_BYTES`, or the largest tensor."""
    waiting: list[tuple[Tensor, Tensor]] = []
    num_bytes = 0
    for mine, copy in pairs:
        if waiting and num_bytes + mine.nbytes > _EXCHANGED_BYTES:
            _exchange_together(waiting)
            waiting, num_bytes = [], 0
        waiting.append((mine, copy))
        num_bytes += mine.nbytes
    if waiting:
        _exchange_together(waiting)


def _exchange_together(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    mine, copies = [one for one, _ in pairs], [copy for _, copy in pairs]
    own = [one.clone() for one in mine]
    torch._foreach_copy_(mine, copies)
    torch._foreach_copy_(copies, own)


def _change_places(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, copy in pairs:
        parameter.data, copy.data = copy.data, parameter.data
        increment_version(parameter)
