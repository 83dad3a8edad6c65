"""What a scorer states about itself: what it takes, the numbers that it gives, what it needs. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Medium = Literal["image", "video", "text", "audio"]


@dataclass(frozen=True)
class Normalisation:
    """The published way to bring a scorer's values near [0, 1]: (value + offset) / divisor."""

    divisor: float
    offset: float = 0.0
    is_default: bool = False
    """True if the scorer does it unless told otherwise."""

    def __call__(self, values: Tensor) -> Tensor:
        """Normalise raw values, in their precision."""
        return (values + self.offset) / self.divisor

    def __str__(self) -> str:
        """As a formula of x."""
        shifted = f"(x {'+' if self.offset > 0 else '-'} {abs(self.offset):g})" if self.offset else "x"
        return f"{shifted} / {self.divisor:g}"


@dataclass(frozen=True)
class ScorerCard:
    """What a scorer states about itself. The scorer's class holds its card as `card`.

    The scorers of the package write theirs in literals: `unirl.reward.catalog` reads them without importing the class.
    """

    summary: str
    """One line: what is rewarded."""
    media: tuple[Medium, ...]
    """Kinds of generated media that it scores."""
    source: str
    """Paper, model or project that defines it."""
    name: str = ""
    """In `trainer list rewards` and configurations of reward servers; a scorer of the package has one."""
    target: str = ""
    """Dotted path of the class, the `_target_` of a recipe; filled in by the class."""
    low: float = -math.inf
    high: float = math.inf
    """Bounds of its values as published, before `normalisation`; higher is better."""
    typical: str = ""
    """What its values look like where the bounds do not say it, and their unit."""
    needs: str = ""
    """What it reads besides the generated media."""
    extra: str | None = None
    """The extra of unirl-reward that it needs, if any."""
    normalisation: Normalisation | None = None
    """None: the values are used as published."""

    def __set_name__(self, owner: type, name: str) -> None:
        # Frozen for all but the class statement that the card stands in.
        object.__setattr__(self, "target", self.target or f"{owner.__module__}.{owner.__qualname__}")

    @property
    def inputs(self) -> str:
        """Media and needs in words, such as "image + prompt"."""
        return " + ".join([" or ".join(self.media), *([self.needs] if self.needs else [])])

    @property
    def scale(self) -> str:
        """Bounds, what is typical, and the normalisation with its default."""
        bounds = f"[{self.low:g}, {self.high:g}]" if math.isfinite(self.low) and math.isfinite(self.high) else ""
        shown = [part for part in (bounds, self.typical) if part]
        if self.normalisation is not None:
            state = "on" if self.normalisation.is_default else "off"
            shown.append(f"normalise: {self.normalisation}, {state} by default")
        return "; ".join(shown)
