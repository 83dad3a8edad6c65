"""A tiny comparison as a user would make it, and made again."""

import json

import pytest
from PIL import Image
from small import SMALL

from unirl.app.main import main

pytestmark = pytest.mark.matrix
RECIPES = ["worlds/shapes/nft"]
CHANGES = [word for word in SMALL if not word.startswith(("num_rollouts", "batch_size", "save."))]


def test_a_recipe_is_trained_and_then_only_read(tmp_path, own_process, capsys):
    words = ["compare", *RECIPES, *CHANGES, "batch_size=2", "cpu_s=2", "seeds=0", "--output", str(tmp_path)]
    status, done = main(words), capsys.readouterr()
    assert status == 0, done.err
    assert "1 runs of 2 CPU s of training, 0 of them finished" in done.err
    document = json.loads((tmp_path / "comparison.json").read_text())
    for recipe in document["recipes"]:
        (run,) = recipe["runs"]
        seconds, samples, values = zip(*run["curve"], strict=True)
        assert run["status"] == "complete" and seconds[-1] == run["train_cpu_s"] > 2
        assert len(seconds) > 2 and list(seconds) == sorted(seconds) and seconds[0] == samples[0] == 0
        assert samples[-1] == 8 * run["num_rollouts"] == recipe["num_samples"]
        assert all(0 <= value <= 1 for value in values)
        assert f"| {recipe['recipe']} | {recipe['algorithm']} | {values[0]:.3f} | {values[-1]:.3f} |" in done.out
    assert [recipe["algorithm"] for recipe in document["recipes"]] == ["DiffusionNFT"]
    assert Image.open(tmp_path / "comparison.png").width > 1000
    assert main(words) == 0
    said = capsys.readouterr()
    assert "1 runs of 2 CPU s of training, 1 of them finished" in said.err and "starts" not in said.err
    assert said.out == done.out
    assert json.loads((tmp_path / "comparison.json").read_text()) == document
