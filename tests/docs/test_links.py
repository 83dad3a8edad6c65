"""Links between the pages lead somewhere, and pages that other files name exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "apps/*/README.md")
    for page in sorted(ROOT.glob(pattern))
    if page.parent != ROOT / "docs" / "api"  # built from docstrings
]
CHINESE = ROOT / "docs" / "zh"
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?!https?://)(?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
NAMED = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|json|py)\b")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page):
    """Names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def english(page):
    """The page that a translation is of; any other page itself."""
    if not page.is_relative_to(CHINESE):
        return page
    return ROOT / "README.md" if page == CHINESE / "start.md" else ROOT / "docs" / page.relative_to(CHINESE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    for link in LINK.finditer(FENCED.sub("", page.read_text())):
        target = (page.parent / link["file"]).resolve() if link["file"] else page
        assert target.exists(), f"{page.name}: {link[0]}"
        # The headings of a translation have the English anchors, which docs/site/translations.py writes.
        named = english(target)
        assert link["anchor"] is None or link["anchor"] in anchors(named), f"{page.name}: {link[0]}"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md") if page in PAGES]
    pages = [page for page in pages if not page.startswith("zh/")]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []


def test_pages_that_any_file_names_exist():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    kinds = (".py", ".md", ".yaml", ".toml", ".ci/run")
    files = [ROOT / name for name in listed.stdout.split("\0") if name.endswith(kinds) and (ROOT / name).is_file()]
    named = {(path.name, found) for path in files for found in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert sorted((name, page) for name, page in named if not (ROOT / page).is_file() and page[:9] != "docs/api/") == []


def test_the_name_of_a_page_in_a_comment_is_seen():
    assert NAMED.findall("# about 32 GB, see docs/guides/sd35.md. Not https://x.org/docs/a.md") == [
        "docs/guides/sd35.md"
    ]
