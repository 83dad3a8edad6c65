from pathlib import Path

import pytest

from unirl.app.conformance.cases import ENGINES, Engine
from unirl.app.conformance.matrix import measure, problems
from unirl.app.main import main

HERE = Path(__file__).parent


def test_the_engine_does_what_engines_promise(monkeypatch):
    """Steps, noise, log-probs and pushes on the small SD3, as `trainer conformance` measures them."""
    mine = Engine("replica", {"_target_": "my_engine.MyEngine", "forward_batch_size": 16})
    monkeypatch.setitem(ENGINES["latents"], "mine", mine)
    table = measure(["sd3"], ["mine"])
    cells = table["cells"]["sd3"]["mine"]
    assert not problems(table)
    assert cells["learns: flow_grpo"] and cells["step subsets"] and cells["initial latents"]
    assert cells["full push"] == cells["adapter push"] == pytest.approx(0, abs=1e-6)
    assert cells["log-prob gap"] == pytest.approx(0, abs=1e-6)


def test_the_recipe_has_no_mistakes(monkeypatch):
    monkeypatch.chdir(HERE)
    assert main(["check", "my_engine.yaml"]) == 0
