"""Ranges of numbers, declared once where an argument is: `decay: Annotated[float, Bounds(ge=0, lt=1)]`.

`@bounded` lets the constructor enforce what its annotations say, `Literal`s too, and `trainer check` reads the same
annotations from the source, without importing the class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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
    """True if infinity is a value, as in "no limit"."""

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
    """Class decorator: the constructor refuses arguments outside the bounds and the literals of its annotations.

    section: how messages call the place, such as "optimizer". Applies to the class's own `__init__`, so a dataclass
    that inherits fields needs it too. Raises ConfigError with the name, the value and what it must be.
    """

    def decorate(cls: ClassT) -> ClassT:
        constructor: Callable[..., None] = vars(cls)["__init__"]
        signature = inspect.signature(constructor)

        @functools.cache
        def declared() -> dict[str, Callable[[object], str | None]]:
            # Asked for at the first call: names of a module may stand below the class. A dataclass inherits fields of
            # other modules, whose names its own module does not have.
            hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else constructor, include_extras=True)
            return {name: problem for name, hint in hints.items() if (problem := _problem_of(hint)) is not None}

        @functools.wraps(constructor)
        def checked(*args: Any, **kwargs: Any) -> None:  # Any: the constructor's own arguments
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return constructor(*args, **kwargs)  # which says so in its own words
            for name, problem in declared().items():
                if name in given and (wanted := problem(given[name])) is not None:
                    raise ConfigError(f"{section}.{name} = {_shown(given[name])} must {wanted}")
            return constructor(*args, **kwargs)

        setattr(cls, "__init__", checked)  # noqa: B010 (a plain assignment to __init__ is refused by type checkers)
        return cls

    return decorate


def _problem_of(hint: Any) -> Callable[[object], str | None] | None:  # Any: what get_type_hints gives
    """What tells whether a value fits the bounds or literals of an annotation, in words that follow "must"; None for an
    annotation that has neither."""
    bounds = next(_bounds_in(hint), None)
    if bounds is not None:
        return functools.partial(_outside, bounds, ", or null" if NoneType in get_args(hint) else "")
    choices = _choices(hint)
    return None if choices is None else functools.partial(_not_among, choices)


def _outside(bounds: Bounds, alternative: str, value: object) -> str | None:
    wanted = bounds.problem(value)
    return None if wanted is None else f"{'lie' if wanted.startswith('in ') else 'be'} {wanted}{alternative}"


def _not_among(choices: tuple[object, ...], value: object) -> str | None:
    if value in choices:
        return None
    return f"be one of {', '.join('null' if choice is None else str(choice) for choice in choices)}"


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _bounds_in(hint: Any) -> Iterator[Bounds]:  # Any: what get_type_hints gives
    """Those of an annotation, `Annotated[...] | None` included."""
    if get_origin(hint) is Annotated:
        yield from (item for item in hint.__metadata__ if isinstance(item, Bounds))
    else:
        for inner in get_args(hint):
            if get_origin(inner) is Annotated:
                yield from _bounds_in(inner)


def _choices(hint: Any) -> tuple[object, ...] | None:  # Any: what get_type_hints gives
    """The values of `Literal[...]` and of `Literal[...] | None`; None for any other annotation."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [option for option in options if get_origin(option) is Literal]
    if len(literals) != 1 or any(option not in (literals[0], NoneType) for option in options):
        return None
    return (*get_args(literals[0]), *((None,) if NoneType in options else ()))


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
