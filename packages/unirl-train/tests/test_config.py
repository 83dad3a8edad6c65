"""Signatures read from source, objects built from sections, and the messages of both."""

import inspect
import sys

import pytest

from unirl.config import instantiate
from unirl.config.annotations import mismatch
from unirl.config.former import modernised
from unirl.config.instantiation import instantiate_at
from unirl.config.runs import part_of
from unirl.config.schema import Component
from unirl.config.signatures import read_target
from unirl.config.suggestions import did_you_mean
from unirl.types.errors import ConfigError

SHAPES = """
from __future__ import annotations
import argparse
import abc
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal
from unirl.types.bounds import Bounds, Positive
from some_models.kinds import COLOUR, Kind, Mode

raise_if_imported = 1 / 0

@dataclass(frozen=True)
class Options:
    rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    names: list[str] = field(default_factory=list)
    hidden: int = field(init=False, default=0)
    limit: ClassVar[int] = 3

@dataclass(frozen=True)
class MoreOptions(Options):
    mode: Mode = "fast"
    speed: Positive | None = None
    shares: Annotated[list[float], Bounds(ge=0, le=1)] = ()

class Base(abc.ABC):
    flag = True
    def __init__(self, model, *, size: int, kind: Kind | None = None, options: Options | None = None) -> None: ...

class Model(Base):
    name: ClassVar[str] = "model"
    colour: ClassVar[str] = COLOUR

class Mixing(Base):
    pass

class Mixed(Mixing, Model):
    pass

class Overriding(Base):
    flag = False

class Diamond(Mixing, Overriding):
    pass

class Loose(argparse.Namespace):
    pass

class Forwarding(Base):
    def __init__(self, model, *, depth: int = 1, **options):
        self.depth = depth
        super().__init__(model, kind=None, **options)

class ForwardingAgain(Forwarding):
    def __init__(self, *, width: int = 1, **options):
        super().__init__(**options)

class Wrapping:
    renamed_keywords = {"breadth": "width", "is_slow": ("kind", {True: "slow"}), "gone": None}
    def __init__(self, *, width: int = 1, **options):
        self.inner = Forwarding(None, **options)

class Keeping(Base):
    def __init__(self, function, **kwargs):
        super().__init__(None, size=3)
        self.kwargs = kwargs

def build(path: str, count: int = 1): ...

def score(images, prompts, metadata, /, target: float, power: float = 1.0): ...

@Model
def decorated(images, prompts, metadata, from_the_decorator): ...
"""
KINDS = 'from typing import Literal\nCOLOUR = "red"\nMode = Literal["fast", "slow"]\nclass Kind: ...\n'


@pytest.fixture
def some_models(tmp_path, monkeypatch):
    """A package whose modules cannot be imported, only read."""
    for name, text in (("__init__", "from some_models.shapes import Model"), ("shapes", SHAPES), ("kinds", KINDS)):
        (tmp_path / "some_models").mkdir(exist_ok=True)
        (tmp_path / "some_models" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    read_target.cache_clear()
    return "some_models.shapes"


def test_signature_of_a_class_comes_from_its_base_without_importing(some_models):
    target = read_target(f"{some_models}.Model")
    assert {name: item.has_default for name, item in target.parameters.items()} == {
        "model": False,
        "size": False,
        "kind": True,
        "options": True,
    }
    # A constant that is imported is followed to where it stands.
    assert target.constants == {"flag": True, "name": "model", "colour": "red"}
    assert "some_models" not in sys.modules


def test_options_that_go_to_the_base_bring_its_keywords_without_those_that_are_set_there(some_models):
    target = read_target(f"{some_models}.ForwardingAgain")
    assert set(target.parameters) == {"width", "model", "depth", "size", "options"} and not target.accepts_any


def test_options_that_go_to_another_class_bring_its_keywords(some_models):
    target = read_target(f"{some_models}.Wrapping")
    assert set(target.parameters) == {"width", "depth", "size", "options"} and not target.accepts_any


def test_keywords_under_their_old_names_are_taken_with_a_message_each(some_models, caplog):
    old = {"model": {"_target_": f"{some_models}.Wrapping", "breadth": 2, "is_slow": True, "gone": 3, "depth": 4}}
    assert modernised(old) == {"model": {"_target_": f"{some_models}.Wrapping", "width": 2, "kind": "slow", "depth": 4}}
    for message in ("model.breadth is called model.width now", "model.is_slow is called", "model.gone does nothing"):
        assert message in caplog.text
    with pytest.raises(ConfigError, match="model.breadth is the old name of model.width, and both are set"):
        modernised({"model": {**old["model"], "width": 1}})


@pytest.mark.parametrize("opening", ["with anything:", "if True:", "try:"])
def test_bases_are_found_through_imports_that_stand_in_a_block(some_models, tmp_path, opening):
    end = "except ImportError:\n    raise\n" if opening == "try:" else ""
    name = opening.split()[0].strip(":") + "_block"
    source = f"{opening}\n    from some_models.kinds import Kind\n{end}class Own(Kind): ..."
    (tmp_path / "some_models" / f"{name}.py").write_text(source)
    assert read_target(f"some_models.{name}.Own").lineage == (f"some_models.{name}.Own", "some_models.kinds.Kind")


def test_options_that_the_class_keeps_may_be_any(some_models):
    target = read_target(f"{some_models}.Keeping")
    assert set(target.parameters) == {"function"} and target.accepts_any


def test_null_takes_out_an_argument_that_the_class_lacks_but_no_misspelt_one():
    node = {"_target_": "fractions.Fraction", "numerator": 3, "tools": None}
    assert instantiate(node) == 3
    with pytest.raises(ConfigError, match="has no argument 'numeratr'. Did you mean numerator"):
        instantiate({"_target_": "fractions.Fraction", "numeratr": None})
    with pytest.raises(ConfigError, match="has no argument 'tools'"):
        instantiate({**node, "tools": 1})


def test_arguments_that_the_caller_passes_by_place_are_left_out(some_models):
    target = read_target(f"{some_models}.score", 3)
    assert {name: item.has_default for name, item in target.parameters.items()} == {"target": False, "power": True}
    assert read_target(f"{some_models}.decorated", 3).accepts_any


def test_source_that_is_not_python_is_named_with_its_line(some_models, tmp_path):
    (tmp_path / "some_models" / "broken.py").write_text("a = 1\nclass Open(:\n")
    (tmp_path / "some_models" / "bytes.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "some_models" / "marked.py").write_bytes("\ufeffclass Marked: ...".encode())
    with pytest.raises(ConfigError, match=r"some_models/broken\.py:2 is not Python: invalid syntax\. Fix the file\."):
        read_target("some_models.broken.Open")
    with pytest.raises(ConfigError, match=r"some_models/bytes\.py.* is not Python"):
        read_target("some_models.bytes.Any")
    assert read_target("some_models.marked.Marked").path == "some_models.marked.Marked"


def test_signature_of_a_dataclass_leaves_out_what_init_does_not_take(some_models):
    target = read_target(f"{some_models}.MoreOptions")
    assert {name: item.has_default for name, item in target.parameters.items()} == {
        "rate": False,
        "betas": True,
        "names": True,
        "mode": True,
        "speed": True,
        "shares": True,
    }


@pytest.mark.parametrize(
    ("name", "flag", "lineage"),
    [
        ("Diamond", False, ["Diamond", "Mixing", "Overriding", "Base"]),
        ("Mixed", True, ["Mixed", "Mixing", "Model", "Base"]),
    ],
)
def test_what_a_later_base_overrides_of_a_common_one_holds_as_python_has_it(some_models, name, flag, lineage):
    target = read_target(f"{some_models}.{name}")
    assert target.constants["flag"] is flag
    assert [path.rsplit(".", 1)[-1] for path in target.lineage] == lineage


def test_functions_re_exports_and_unreadable_bases_have_signatures_too(some_models):
    assert list(read_target(f"{some_models}.build").parameters) == ["path", "count"]
    assert "size" in read_target("some_models.Model").parameters
    assert read_target("builtins.dict").accepts_any
    assert "prog" in read_target("argparse.ArgumentParser").parameters


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("some_models.shapes.Modle", "some_models.shapes has no 'Modle'. Did you mean Model?"),
        ("some_models.shape.Model", "some_models has no module 'shape'. Did you mean shapes?"),
        ("some_model.shapes.Model", "there is no module 'some_model'"),
        ("Model", "must be an import path such as package.module.Class"),
    ],
)
def test_unknown_targets_suggest_the_nearest_names(some_models, path, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        read_target(path)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("size", 3, None),
        ("size", "3", "an integer"),
        ("size", True, "an integer"),
        ("size", None, "an integer"),
        ("kind", None, None),
        ("kind", 3, "a Kind (a mapping with _target_) or null"),
        ("kind", {"_target_": "x.Y"}, None),
        ("kind", {"size": 3}, "a Kind (a mapping with _target_) or null"),
        ("rate", 1, None),
        ("rate", "fast", "a number"),
        ("betas", [1, 2], None),
        ("betas", 0.9, "a list"),
        ("names", "a", "a list"),
        ("mode", "fast", None),
        ("mode", "quick", "one of 'fast', 'slow'"),
        ("model", object(), None),
        ("speed", 1, None),
        ("speed", None, None),
        ("speed", "1", "a number or null"),
        ("speed", 0, "above 0 or null"),
        ("speed", float("nan"), "finite and above 0 or null"),
        ("shares", [0, 1], None),
        ("shares", [0.5, 1.5], "in [0, 1]"),
    ],
)
def test_values_are_judged_by_annotations_as_far_as_source_tells(some_models, name, value, expected):
    owner = "Model" if name in ("model", "size", "kind") else "MoreOptions"
    parameter = read_target(f"{some_models}.{owner}").parameters[name]
    assert mismatch(value, parameter.annotation, parameter.module) == expected


def test_static_signatures_agree_with_the_interpreter():
    from unirl.data.data_source import MultimodalRLDataSource
    from unirl.tracking.console import ConsoleTracker
    from unirl.train.configs import LoraConfig, OptimizerConfig
    from unirl.train.stack import TrainStack

    for owner in (MultimodalRLDataSource, ConsoleTracker, LoraConfig, OptimizerConfig, TrainStack):
        real = inspect.signature(owner).parameters
        found = read_target(f"{owner.__module__}.{owner.__qualname__}").parameters
        assert list(found) == list(real)
        for name, item in real.items():
            assert found[name].has_default == (item.default is not inspect.Parameter.empty), (owner, name)


def test_instantiate_builds_nested_sections_lists_and_plain_mappings():
    built = instantiate(
        {
            "_target_": "types.SimpleNamespace",
            "when": {"_target_": "datetime.timedelta", "days": 2},
            "many": [{"_target_": "datetime.timedelta", "days": 1}, 3],
            "plain": {"a": {"_target_": "datetime.timedelta", "days": 0}},
        },
        extra=[1],
    )
    assert built.when.days == 2 and built.many[0].days == 1 and built.many[1] == 3
    assert built.plain["a"].days == 0 and built.extra == [1]


def test_instantiate_passes_dependencies_on_untouched():
    given = object()
    assert instantiate({"_target_": "types.SimpleNamespace"}, bundle=given).bundle is given


def test_partial_targets_wait_for_their_call():
    assert instantiate({"_target_": "datetime.timedelta", "_partial_": True, "days": 2})(hours=1).seconds == 3600


OPTIMIZER = "unirl.train.configs.OptimizerConfig"


@pytest.mark.parametrize(
    ("node", "dependencies", "message"),
    [
        ({"_target_": OPTIMIZER, "learning_rat": 1}, {}, "no argument 'learning_rat'. Did you mean learning_rate?"),
        ({"_target_": OPTIMIZER}, {}, "missing 1 required positional argument: 'learning_rate'"),
        ({"_target_": OPTIMIZER, "learning_rate": -1.0}, {}, "optimizer.learning_rate = -1.0 must be at least 0"),
        ({"_target_": f"{OPTIMIZER}x"}, {}, "unirl.train.configs has no 'OptimizerConfigx'. Did you mean Optimizer"),
        ({"_target_": "unirl.train.config.X"}, {}, "unirl.train has no 'config'"),
        ({"_target_": "nowhere.X"}, {}, "there is no module 'nowhere'"),
        ({"_target_": "unirl.trainer.guardrails.ALARMS"}, {}, "is a tuple, not a class"),
        ({"_target_": 3}, {}, "must be an import path"),
        ({"a": 1}, {"x": 1}, "has no _target_"),
        ({"_target_": OPTIMIZER, "learning_rate": 1.0}, {"learning_rate": 2.0}, "is set by the trainer. Remove it"),
    ],
)
def test_instantiate_says_what_is_wrong_and_the_nearest_name(node, dependencies, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        instantiate(node, **dependencies)


def test_a_refusal_names_the_place_in_the_recipe():
    with pytest.raises(ConfigError, match=r"^pipeline\.schedule: unirl\.sde\.schedule\.SigmaSchedule refuses"):
        instantiate_at("pipeline", {"schedule": {"_target_": "unirl.sde.schedule.SigmaSchedule", "shift": -1.0}})


def test_suggestions_are_empty_where_nothing_is_known():
    assert did_you_mean("x", []) == ""
    assert did_you_mean("eta", ["beta", "eta0"]) == "Did you mean eta0 or beta?"
    assert did_you_mean("zzz", ["a", "b"]) == "Known: a, b."


class Taking:
    """A component that takes what it may be given."""

    def __init__(self, pipeline, device, *, rank=0, size=1):
        self.got = {"pipeline": pipeline, "device": device, "rank": rank, "size": size}


def test_a_build_adds_the_keywords_that_the_checker_expects():
    from unirl.trainer.policy import build_part

    component = Component(
        injected=frozenset({"pipeline", "device"}),
        if_taken=frozenset({"rank", "bundle"}),
        own_keys=frozenset({"policy"}),
    )
    part = part_of({"_target_": f"{__name__}.Taking", "size": 3, "policy": "writer"}, "engine", component)
    offered = {"pipeline": 1, "device": "cpu", "rank": 2, "bundle": None}
    assert build_part(part, component, offered).got == {"pipeline": 1, "device": "cpu", "rank": 2, "size": 3}
