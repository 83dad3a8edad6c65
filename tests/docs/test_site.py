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


@pytest.fixture
def translated(script, tmp_path, monkeypatch):
    """The script over a small repository: an English page, and its translation that is not marked yet."""
    translations = script("translations")
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "CHINESE", tmp_path / "docs" / "zh")
    (tmp_path / "docs" / "zh" / "guides").mkdir(parents=True)
    (tmp_path / "docs" / "guides").mkdir()
    (tmp_path / "README.md").write_text("# UniRL\n")
    (tmp_path / "docs" / "faq.md").write_text("# Questions\n\n[why](guides/why.md#the-reason) [start](../README.md)\n")
    (tmp_path / "docs" / "guides" / "why.md").write_text("# Why\n\n## The reason\n\n```bash\n# run\n```\n")
    (tmp_path / "docs" / "zh" / "start.md").write_text("# UniRL\n")
    (tmp_path / "docs" / "zh" / "faq.md").write_text(
        "# 问题\n\n[开始](../README.md) [原因](guides/why.md#the-reason)\n"
    )
    (tmp_path / "docs" / "zh" / "guides" / "why.md").write_text("# 为什么\n\n## 原因\n\n```bash\n# 运行\n```\n")
    translations.mark(tmp_path / "docs" / "zh" / "start.md")
    translations.mark(tmp_path / "docs" / "zh" / "guides" / "why.md")
    return translations


@pytest.mark.matrix
def test_every_page_has_a_translation_of_its_present_text(script):
    assert script("translations").problems() == []


def test_marking_a_translation_mends_its_links(translated):
    page = translated.CHINESE / "faq.md"
    assert translated.problems() == ["{0}/zh/faq.md is older than {0}/faq.md".format("docs")]
    translated.mark(page)
    assert translated.problems() == []
    text = "# 问题\n\n[开始](start.md) [原因](guides/why.md#the-reason)\n"
    assert translated.without_mark(page.read_text()) == text
    translated.mark(page)
    assert translated.without_mark(page.read_text()) == text
    page.write_text(text.replace("start.md", "other.md"))
    with pytest.raises(SystemExit, match=r"other\.md is no link of"):
        translated.mark(page)


def test_a_translation_is_outdated_once_its_page_has_changed(translated):
    page = translated.ROOT / "docs" / "guides" / "why.md"
    translated.mark(translated.CHINESE / "faq.md")
    page.write_text(page.read_text() + "\nMore.\n")
    assert translated.problems() == ["{0}/zh/guides/why.md is older than {0}/guides/why.md".format("docs")]


def test_a_translation_that_is_cut_short_or_of_nothing_is_found(translated):
    page = translated.CHINESE / "guides" / "why.md"
    page.write_text("# 为什么\n")
    translated.mark(page)
    translated.mark(translated.CHINESE / "faq.md")
    (translated.CHINESE / "lost.md").write_text("# 无\n")
    found = translated.problems()
    assert [line.split(" than ")[0].split(" has other ")[-1] for line in found[:2]] == ["headings", "blocks of code"]
    assert found[2].endswith("zh/lost.md translates no page")
    (translated.CHINESE / "start.md").unlink()
    assert "README.md has no translation {}/start.md".format("docs/zh") in translated.problems()


def test_headings_that_translations_link_to_are_named_without_the_site(translated):
    page, linking = translated.CHINESE / "guides" / "why.md", translated.CHINESE / "faq.md"
    named = '# 为什么\n\n<a id="the-reason"></a>\n\n## 原因\n\n```bash\n# 运行\n```\n'
    assert translated.without_mark(page.read_text()) == named
    linking.write_text(linking.read_text().replace("#the-reason", ""))
    assert "has other names before headings" in " ".join(translated.problems())
    translated.mark(page)
    assert translated.without_mark(page.read_text()) == named.replace('<a id="the-reason"></a>\n\n', "")


def test_headings_of_a_translation_have_the_english_anchors(translated):
    page = translated.CHINESE / "guides" / "why.md"
    assert translated.with_anchors(page.read_text(), translated.original(page)).startswith(
        "# 为什么 {#why}\n\n## 原因 {#the-reason}\n\n```bash\n# 运行\n```\n"
    )
