"""`trainer scale`: what is asked of a running run."""

import json

import pytest

from unirl.app.main import main

CONFIG = """
recipe: mine
pools:
  train: {devices: "0"}
  rollout: {devices: 1-3, served: true, members: 1}
"""


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_sizes_are_left_for_the_run(run_dir, capsys):
    assert main(["scale", str(run_dir), "rollout=2"]) == 0
    assert "asked for rollout=2 from the next rollout on" in capsys.readouterr().out
    assert json.loads((run_dir / "scale.json").read_text()) == {"rollout": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train=2"], "train=2: train is no served pool of this run, nor one of kind env; there are rollout"),
        (["rollout=0"], "rollout=0: a pool has at least one member, so it cannot be scaled to 0."),
        (["rollout="], "rollout=: a pool has at least one member, so it cannot be scaled to nothing."),
        ([], "scale takes pools and their sizes, such as rollout=2."),
    ],
)
def test_what_cannot_be_has_its_message(run_dir, capsys, words, message):
    assert main(["scale", str(run_dir), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (run_dir / "scale.json").exists()


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert main(["scale", str(tmp_path / "none"), "rollout=2"]) == 2
    assert "none has no config.yaml" in capsys.readouterr().err
