"""The site builds from the pages, with every link between them, and its sources for language models."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    """Imports a script of docs/site."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    monkeypatch.syspath_prepend(ROOT / "docs" / "api")
    monkeypatch.syspath_prepend(ROOT / "docs" / "reference")
    return importlib.import_module


@pytest.mark.slow
def test_the_site_builds_and_its_links_hold(tmp_path):
    command = [sys.executable, ROOT / "docs" / "site" / "build.py", "--to", tmp_path / "site", "--languages", "en"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "<h1" in (site / "guides" / "own_reward" / "index.html").read_text()
    assert (site / "guides" / "own_reward.md").read_text().startswith("# ")
    contents = (site / "llms.txt").read_text()
    assert "(guides/own_reward.md): " in contents and contents.startswith("# UniRL\n\n> ")
    assert len((site / "llms-full.txt").read_text()) > len(contents)
    assert not [page for page in site.glob("**/*.html") if "https://fonts" in page.read_text()]
    assert not [page for page in site.glob("**/*.html") if "```" in page.read_text()], "a block that is not one"
    assert "my_rewards.py</span>" in (site / "guides" / "own_reward" / "index.html").read_text()


def test_every_message_is_in_the_index_of_errors(script):
    errors = script("errors")
    page = errors.page()
    kinds = {message.kind for message in errors.messages()}
    assert kinds == {errors.FINDINGS, *errors.KINDS}
    assert "view takes one folder of runs, or none for runs/, and no recipe. | `unirl.app.without_recipe`" in page
    assert errors._text(ast.parse('f"{name} = {1 + 1}: not a size of the model"', mode="eval").body) == (
        "{name} = {1 + 1}: not a size of the model"
    )
    assert errors._text(ast.parse('f"{a}{b}"', mode="eval").body) is None


def test_every_key_of_a_recipe_has_its_default_and_meaning(script):
    page = script("recipe_keys").page()
    assert "| `keep_last` | `PositiveInt` | `2` | Number of newest checkpoints to keep. |" in page
    assert "| `engine` | class | `null` |" in page and "A kind of `unirl.rollout.engine.base.BaseRolloutEngine`" in page


def test_a_link_between_pages_becomes_one_of_the_site(script):
    build = script("build")
    guide = ROOT / "docs" / "guides" / "own_reward.md"
    places = {ROOT / "README.md": "index.md", guide: "guides/own_reward.md"}
    text = "[start](../../README.md#models) [code](../../pyproject.toml) ![x](../images/shapes_comparison.png)\n"
    assert build._relinked(text, guide, "guides/own_reward.md", places, places, build.ENGLISH) == (
        "[start](../index.md#models) code ![x](../images/shapes_comparison.png)\n"
    )
    with pytest.raises(SystemExit, match="leads nowhere"):
        build._relinked("[x](nothing.md)", guide, "guides/own_reward.md", places, places, build.ENGLISH)


def test_a_page_that_no_table_of_contents_lists_is_named(script):
    build = script("build")
    with pytest.raises(SystemExit, match=r"lists guides/unlisted\.md"):
        build.navigation(build.ENGLISH, ["index.md", "guides/own_reward.md", "guides/unlisted.md"])


def test_a_translation_is_outdated_once_its_page_has_changed(script, tmp_path, monkeypatch):
    translations = script("translations")
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "CHINESE", tmp_path / "docs" / "zh")
    english, chinese = tmp_path / "docs" / "faq.md", tmp_path / "docs" / "zh" / "faq.md"
    chinese.parent.mkdir(parents=True)
    (tmp_path / "README.md").write_text("# UniRL\n")
    english.write_text("# Questions\n")
    chinese.write_text("# 问题\n")
    missing = "README.md has no translation {}/start.md".format("docs/zh")
    outdated = "{0}/zh/faq.md is older than {0}/faq.md".format("docs")
    assert translations.problems() == [missing, outdated]
    translations.mark(chinese)
    assert translations.problems() == [missing]
    assert translations.without_mark(chinese.read_text()) == "# 问题\n"
    english.write_text("# Questions\n\nWhy?\n")
    assert translations.problems() == [missing, outdated]
    (chinese.parent / "lost.md").write_text("# 无\n")
    assert translations.problems()[-1].endswith("zh/lost.md translates no page")
