"""The backends of several policies as one to what saves and resumes them, in one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from unirl.train.names import below, joined
from unirl.types.errors import CheckpointError
from unirl.types.protocols.training import TrainBackend


class SavedState(Protocol):
    """What a checkpointer needs of a backend; see `unirl.types.protocols.training.TrainBackend`, which has it."""

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the kept copies."""
        ...

    @property
    def lora_scale(self) -> float | None | dict[str, float | None]:
        """alpha / rank of the adapters, by policy where there are several."""
        ...

    @property
    def counters(self) -> dict[str, int]:
        """Steps taken and skipped, averages, policy version."""
        ...

    def keep_policy(self, name: str) -> None:
        """Keep a copy of the present weights under a name."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """All that training changes, by flat name."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state."""
        ...

    def architecture(self) -> dict[str, list[object]]:
        """Parameter name -> [shape, dtype, whether it trains]."""
        ...


class SavedPolicies:
    """Implements SavedState for several policies: every name is `<policy>/<name in the policy's backend>`."""

    def __init__(self, backends: Mapping[str, TrainBackend]) -> None:
        self._backends = dict(backends)

    @property
    def policy_names(self) -> tuple[str, ...]:
        return tuple(f"{policy}/{name}" for policy, own in self._backends.items() for name in own.policy_names)

    @property
    def lora_scale(self) -> dict[str, float | None]:
        return {policy: own.lora_scale for policy, own in self._backends.items()}

    @property
    def counters(self) -> dict[str, int]:
        return joined({policy: own.counters for policy, own in self._backends.items()})

    def keep_policy(self, name: str) -> None:
        """See SavedState. Raises CheckpointError for a policy that is not there."""
        policy, _, copy = name.partition("/")
        if policy not in self._backends:
            raise CheckpointError(
                f"the checkpoint keeps a copy {copy!r} of the policy {policy!r}, here are {list(self._backends)}. "
                "Resume with the policies that it was saved with."
            )
        self._backends[policy].keep_policy(copy)

    def state_dict(self) -> dict[str, Tensor]:
        return joined({policy: own.state_dict() for policy, own in self._backends.items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for policy, own in self._backends.items():
            own.load_state_dict(below(state, f"{policy}/"))

    def architecture(self) -> dict[str, list[object]]:
        return joined({policy: own.architecture() for policy, own in self._backends.items()})
