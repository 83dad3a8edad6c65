"""Ranges of numbers, declared where a dataclass has the field: `shift: Annotated[float, Bounds(gt=0)]`.

The same idea as `unirl.types.bounds`, which this package cannot see: recipe checks read both by the name `Bounds`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Greater than, at least, less than, at most; infinity and not a number are never within them."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def holds(self, number: float) -> bool:
        """True if the number is finite and within."""
        return (
            math.isfinite(number)
            and (self.gt is None or number > self.gt)
            and (self.ge is None or number >= self.ge)
            and (self.lt is None or number < self.lt)
            and (self.le is None or number <= self.le)
        )

    def __str__(self) -> str:
        words = (("above", self.gt), ("at least", self.ge), ("below", self.lt), ("at most", self.le))
        return " and ".join(["finite", *(f"{word} {limit:g}" for word, limit in words if limit is not None)])


def check_bounds(made: object) -> None:
    """Raises ValueError for a field of a dataclass whose number, or one of whose numbers, is not within its bounds."""
    for name, hint in get_type_hints(type(made), include_extras=True).items():
        value = getattr(made, name, None) if (bounds := _declared(hint)) is not None else None
        numbers = value if isinstance(value, (tuple, list)) else [] if value is None else [value]
        if bounds is not None and not all(bounds.holds(number) for number in numbers):
            raise ValueError(f"{name} = {value} must be {bounds}.")


def _declared(hint: Any) -> Bounds | None:  # Any: what get_type_hints gives
    for part in (hint, *get_args(hint)):  # an optional field has them inside its union
        if get_origin(part) is Annotated:
            return next((item for item in part.__metadata__ if isinstance(item, Bounds)), None)
    return None
