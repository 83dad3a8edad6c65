from pathlib import Path

from unirl.app.main import main

HERE = Path(__file__).parent


def test_the_recipe_has_no_mistakes(monkeypatch):
    monkeypatch.chdir(HERE)
    assert main(["check", "my_recipe.yaml"]) == 0
