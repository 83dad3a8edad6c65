"""Bounds: what is within, how they read, and that constructors enforce what they declare."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from unirl.types.bounds import Bounds, NonNegative, PositiveInt, PositiveOrInf, Seed, bounded
from unirl.types.errors import ConfigError


@bounded("options")
@dataclass(frozen=True)
class Options:
    """A dataclass with every kind of bounded field."""

    rate: NonNegative
    count: PositiveInt | None = None
    betas: Annotated[tuple[float, float], Bounds(ge=0, lt=1)] = (0.9, 0.99)
    weights: Annotated[Mapping[str, float], Bounds()] | None = None
    seed: Seed = 0
    mode: Literal["sum", "mean"] = "sum"
    level: Literal[0, 1] | None = None
    size: Literal["fit"] | int = "fit"


@bounded("model")
class Base:
    """A class that passes nothing on."""

    def __init__(self, limit: PositiveOrInf = 1.0, **unread: Any) -> None:
        self.limit = limit


@bounded("model")
class Child(Base):
    """A class whose base checks what it passes on."""

    def __init__(self, *, size: PositiveInt = 1, **options: Any) -> None:
        super().__init__(**options)
        self.size = size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": -1.0}, "options.rate = -1.0 must be at least 0"),
        ({"rate": math.nan}, "options.rate = nan must be finite and at least 0"),
        ({"rate": math.inf}, "options.rate = inf must be finite and at least 0"),
        ({"rate": 1.0, "count": 0}, "options.count = 0 must be at least 1, or null"),
        ({"rate": 1.0, "betas": [0.9, 1.0]}, "options.betas = [0.9, 1.0] must lie in [0, 1)"),
        ({"rate": 1.0, "weights": {"a": math.inf}}, "options.weights = {'a': inf} must be finite, or null"),
        ({"rate": 1.0, "seed": -1}, "options.seed = -1 must lie in [0, 9.22337e+18]"),
        ({"rate": 1.0, "seed": 10**400}, "must lie in [0, 9.22337e+18]"),
        ({"rate": 1.0, "mode": "max"}, "options.mode = 'max' must be one of sum, mean"),
        ({"rate": 1.0, "mode": None}, "options.mode = None must be one of sum, mean"),
        ({"rate": 1.0, "mode": ["sum"]}, "options.mode = ['sum'] must be one of sum, mean"),
        ({"rate": 1.0, "level": 2}, "options.level = 2 must be one of 0, 1, null"),
    ],
)
def test_a_constructor_refuses_what_its_annotations_do_not_allow(arguments, message):
    with pytest.raises(ConfigError) as raised:
        Options(**arguments)
    assert message in str(raised.value)


def test_what_lies_within_passes_and_the_object_is_unchanged():
    made = Options(0, count=None, weights={"a": -2.0}, seed=2**63 - 1)
    assert made == Options(rate=0) or made.seed == 2**63 - 1
    assert pickle.loads(pickle.dumps(made)) == made
    names = ["rate", "count", "betas", "weights", "seed", "mode", "level", "size"]
    assert list(inspect.signature(Options).parameters) == names
    assert Options(0, mode="mean", level=1, size=7).size == 7  # a literal or something else: the type's affair
    assert Base(math.inf).limit == math.inf


def test_every_class_of_a_family_checks_its_own_arguments():
    with pytest.raises(ConfigError, match=r"model\.size = 0 must be at least 1"):
        Child(size=0)
    with pytest.raises(ConfigError, match=r"model\.limit = nan must be above 0"):
        Child(limit=math.nan)


def test_missing_and_unknown_arguments_are_the_constructors_own_errors():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rate'"):
        Options()  # ty: ignore[missing-argument]
    with pytest.raises(TypeError, match="unexpected keyword argument 'rat'"):
        Options(**dict[str, Any](rat=1.0))


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (Bounds(gt=0), "above 0"),
        (Bounds(le=2.5), "at most 2.5"),
        (Bounds(lt=2), "below 2"),
        (Bounds(gt=0, le=1), "in (0, 1]"),
        (Bounds(), ""),
    ],
)
def test_bounds_read_as_a_person_would_write_them(bounds, text):
    assert str(bounds) == text
