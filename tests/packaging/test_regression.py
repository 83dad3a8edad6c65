"""`scripts/regression`: which figures are kept, and what is said of those that left their bounds."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def regression() -> Any:
    loader = importlib.machinery.SourceFileLoader("regression", str(ROOT / "scripts/regression"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_figures_that_leave_their_bounds_are_named(regression):
    lines = "\n".join(
        json.dumps(line) for line in [{"step": 0, "eval/x": 0.25}, {"step": 1, "eval/x": 0.5, "text": "nan"}]
    )
    found = regression.first_and_last(lines)
    assert found["eval/x first"] == 0.25 and found["eval/x last"] == 0.5 and "text last" not in found
    report = regression.flattened({"training": [{"ratio": 1.0}, {"ratio": 2.5}], "device": "cpu", "none": None})
    assert report == {"training/0/ratio": 1.0, "training/1/ratio": 2.5}
    bounds = {
        "eval/x last": {"value": 0.52, "within": 0.05, "why": ""},
        "eval/x first": {"value": 0.3, "within": 0.01, "why": ""},
        "eval/y last": {"value": 0.3, "within": 0.01, "why": ""},
        "nan": {"value": 0.3, "within": 0.01, "why": ""},
    }
    near, far, absent, undefined = regression.compared(bounds, {**found, "nan": float("nan")})
    assert near.endswith(" ok") and "eval/x last: kept 0.52" in near
    assert far == "eval/x first: kept 0.3 within 0.01, found 0.25 OUTSIDE"
    assert absent.endswith("there is no such figure") and undefined.endswith("OUTSIDE")


def test_every_kept_figure_has_a_distance_and_its_reason():
    kept = json.loads((ROOT / "scripts/regression.json").read_text())
    figures = [
        bound for kind in ("runs", "benches") for entry in kept[kind].values() for bound in entry["figures"].values()
    ]
    assert len(figures) >= 8
    assert all(0 < bound["within"] and len(bound["why"]) > 10 for bound in figures)
