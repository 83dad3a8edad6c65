"""Links between the pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "apps/*/README.md")
    for page in sorted(ROOT.glob(pattern))
    if page.parent != ROOT / "docs" / "api"  # built from docstrings
]
LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?!https?://)(?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page):
    """Names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    for link in LINK.finditer(FENCED.sub("", page.read_text())):
        target = (page.parent / link["file"]).resolve() if link["file"] else page
        assert target.exists(), f"{page.name}: {link[0]}"
        assert link["anchor"] is None or link["anchor"] in anchors(target), f"{page.name}: {link[0]}"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md") if page in PAGES]
    assert [page for page in pages if page != "README.md" and f"({page})" not in index] == []
