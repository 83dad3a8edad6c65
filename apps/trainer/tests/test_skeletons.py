"""`trainer init` writes parts that work: their tests pass and their recipes train, outside the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from unirl.app.main import USER_ERROR, main
from unirl.app.skeletons import MODULE
from unirl.app.without_recipe import KINDS

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "num_rollouts=1",
    "batch_size=2",
    "sampling.samples_per_prompt=4",
    "stack.num_updates_per_batch=1",
    "eval.before=false",
    "eval.num_samples=2",
)
OF_IMAGES = ("sampling.num_inference_steps=2", "eval.num_inference_steps=1")
OF_TEXTS = ("eval.batch_size=2", "stack.micro_batch_size=8")


def python(folder, *arguments):
    """Another process, which knows of the folder only that it works in it."""
    command = [sys.executable, "-m", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


USUAL = ("reward", "algorithm", "model", "environment")
"""Kinds that are tried in every run; the others write less, and engines take longest. They are tried nightly."""


@pytest.mark.matrix
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.nightly) for kind in KINDS]
)
def test_what_is_written_passes_its_tests_and_trains(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"sharp_{kind}"
    assert main(["init", kind, name]) == 0
    shown = capsys.readouterr().out
    folder = tmp_path / name
    for file in folder.iterdir():
        assert f"{name}/{file.name}\n" in shown
        text = file.read_text()
        assert f"my_{kind}" not in text and f"My{kind.capitalize()}" not in text
    done = python(folder, "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    own = OF_TEXTS if kind in ("environment", "tool") else OF_IMAGES
    done = python(folder, "unirl.app.main", f"{name}.yaml", *SMALL, *own, "run_dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["recipe"] == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "init takes what to write and a name:\n  uv run trainer init reward my_reward"),
        (["reward"], "init takes what to write and a name"),
        (["rewrad", "mine"], "init cannot write 'rewrad'. Did you mean reward?"),
        (["reward", "my-reward"], "'my-reward' cannot be a module's name"),
        (["reward", "Bright"], "'Bright' cannot be a module's name"),
        (["reward", "class"], "'class' cannot be a module's name"),
        (["reward", "torch"], "'torch' is the name of an installed module, which would hide yours"),
        (["reward", "mine", "--merged"], "--merged does nothing with 'init'"),
        (["reward", "mine", "--cfg", "job"], "init takes no recipe"),
    ],
)
def test_what_init_refuses(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == USER_ERROR
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_init_writes_over_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as with `python -m`, where every folder here can be imported
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert main(["init", "reward", "mine"]) == USER_ERROR
    assert "mine exists already. Choose another name" in capsys.readouterr().err
    assert main(["init", "reward", "mine", "--to", "elsewhere"]) == 0
    assert sorted(file.name for file in (tmp_path / "elsewhere").iterdir()) == [
        "mine.py",
        "mine.yaml",
        "pytest.ini",
        "test_mine.py",
    ]
    assert MODULE not in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "page"), [("model", "own_model.md"), ("engine", "own_engine.md")])
def test_the_guide_has_what_init_writes(kind, page):
    guide = (ROOT / "docs" / "guides" / page).read_text()
    (block,) = re.findall(rf"```python my_{kind}.py\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    skeletons = ROOT / "apps" / "trainer" / "src" / "unirl" / "skeletons"
    written = (skeletons / kind / f"my_{kind}.py").read_text()
    plain = [line for line in written.replace("MyModel", "My").splitlines() if line]
    assert [line for line in block.splitlines() if line and line not in plain] == []
