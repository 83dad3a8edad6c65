"""Ranges of numbers, declared once where an argument is: `decay: Annotated[float, Bounds(ge=0, lt=1)]`.

`@bounded` lets the constructor enforce what its annotations say, and `trainer check` reads the same annotations from
the source, without importing the class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from unirl.types.errors import ConfigError

ClassT = TypeVar("ClassT", bound=type)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Greater than, at least, less than, at most; not a number is never within them.

    Of a list or mapping of numbers they hold for each. None passes: whether it is allowed says the type.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    allow_inf: bool = False
    """Whether infinity is a value, as in "no limit"."""

    def problem(self, value: object) -> str | None:
        """What the value must be where it is outside, as in "must be {above 0}"; None where it is within."""
        numbers = [number for number in _numbers(value) if not self._holds(number)]
        if not numbers:
            return None
        is_finite = all(number - number == 0 for number in numbers)
        return str(self) if is_finite or self.allow_inf else " and ".join(filter(None, ("finite", str(self))))

    def _holds(self, number: float) -> bool:
        if number != number or (abs(number) == math.inf and not self.allow_inf):
            return False
        return (
            (self.gt is None or number > self.gt)
            and (self.ge is None or number >= self.ge)
            and (self.lt is None or number < self.lt)
            and (self.le is None or number <= self.le)
        )

    def __str__(self) -> str:
        low = None if self.gt is None and self.ge is None else self.gt if self.ge is None else self.ge
        high = None if self.lt is None and self.le is None else self.lt if self.le is None else self.le
        if low is not None and high is not None:
            return f"in {'(' if self.ge is None else '['}{low:g}, {high:g}{')' if self.le is None else ']'}"
        if low is not None:
            return f"{'above' if self.ge is None else 'at least'} {low:g}"
        return "" if high is None else f"{'below' if self.le is None else 'at most'} {high:g}"


Positive = Annotated[float, Bounds(gt=0)]
PositiveOrInf = Annotated[float, Bounds(gt=0, allow_inf=True)]
NonNegative = Annotated[float, Bounds(ge=0)]
NonNegativeOrInf = Annotated[float, Bounds(ge=0, allow_inf=True)]
PositiveInt = Annotated[int, Bounds(ge=1)]
NonNegativeInt = Annotated[int, Bounds(ge=0)]
UnitInterval = Annotated[float, Bounds(ge=0, le=1)]
OpenUnitInterval = Annotated[float, Bounds(gt=0, lt=1)]
PositiveFraction = Annotated[float, Bounds(gt=0, le=1)]
Seed = Annotated[int, Bounds(ge=0, le=0x7FFFFFFFFFFFFFFF)]  # what torch's generators take


def bounded(section: str) -> Callable[[ClassT], ClassT]:
    """Class decorator: the constructor refuses arguments outside the bounds that its annotations declare.

    section: how messages call the place, such as "optimizer". Applies to the class's own `__init__`, so a dataclass
    that inherits fields needs it too. Raises ConfigError with the name, the value and the bounds.
    """

    def decorate(cls: ClassT) -> ClassT:
        constructor: Callable[..., None] = vars(cls)["__init__"]
        signature = inspect.signature(constructor)

        @functools.cache
        def declared() -> dict[str, tuple[Bounds, bool]]:
            # Asked for at the first call: names of a module may stand below the class. A dataclass inherits fields of
            # other modules, whose names its own module does not have.
            hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else constructor, include_extras=True)
            return {name: found for name, hint in hints.items() if (found := _declared(hint)) is not None}

        @functools.wraps(constructor)
        def checked(*args: Any, **kwargs: Any) -> None:  # Any: the constructor's own arguments
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return constructor(*args, **kwargs)  # which says so in its own words
            for name, (bounds, is_optional) in declared().items():
                wanted = bounds.problem(given.get(name))
                if wanted is not None:
                    alternative = ", or null" if is_optional else ""
                    verb = "lie" if wanted.startswith("in ") else "be"
                    raise ConfigError(f"{section}.{name} = {given[name]} must {verb} {wanted}{alternative}")
            return constructor(*args, **kwargs)

        setattr(cls, "__init__", checked)  # noqa: B010 (a plain assignment to __init__ is refused by type checkers)
        return cls

    return decorate


def _declared(hint: Any) -> tuple[Bounds, bool] | None:  # Any: what get_type_hints gives
    """The bounds inside an annotation, `Annotated[...] | None` included, and whether None is allowed."""
    found = list(_bounds_in(hint))
    return (found[0], type(None) in get_args(hint)) if found else None


def _bounds_in(hint: Any) -> Iterator[Bounds]:  # Any: what get_type_hints gives
    if get_origin(hint) is Annotated:
        yield from (item for item in hint.__metadata__ if isinstance(item, Bounds))
    else:
        for inner in get_args(hint):
            if get_origin(inner) is Annotated:
                yield from _bounds_in(inner)


def _numbers(value: object) -> Iterator[float]:
    """The numbers of a number, a list or a mapping's values; values of other types are the type's affair."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _numbers(item)
