"""The base of scorers that verify samples of a world whose prompts a grammar makes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from unirl.reward.base import LocalScorer
from unirl.types.bounds import PositiveInt


class VerifierScorer(LocalScorer):
    """A reward of `strict_weight` * strict + `soft_weight` * soft, on the CPU whatever the device of the media.

    Components: strict (0 or 1) and soft (in [0, 1], 1 exactly when strict is). Needs the extra `shapes`.
    """

    def __init__(
        self,
        *,
        name: str,
        strict_weight: float = 1.0,
        soft_weight: float = 1.0,
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(
            name=name,
            batch_size=batch_size,
            component_weights={"strict": strict_weight, "soft": soft_weight},
        )

    @contextmanager
    def from_extra(self) -> Generator[None]:
        """Around the import of a verifier. Raises ImportError naming what is missing and the extra that installs it."""
        try:
            yield
        except ModuleNotFoundError as error:
            raise ImportError(
                f"scorer {self.name} needs {error.name}. Install it with: pip install 'unirl-reward[shapes]'"
            ) from error
