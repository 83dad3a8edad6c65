"""Which Chinese pages are missing, cut short, or older than the English ones:

    uv run python docs/site/translations.py
    uv run python docs/site/translations.py mark docs/zh/PAGE ...

The translation of a page lies at the same place below `docs/zh/`. Its last line says which English text it translates:
`<!-- of 0123456789ab -->`, the start of that text's SHA-256. `mark` writes this line after you have translated or
changed a page, and mends its links: write them as the English page has them, anchors too. A translation has the
headings, blocks of code and rows of tables of its page, one by one; the site gives its headings the English anchors,
and where pages are read without the site, `mark` writes `<a id="..."></a>` before each heading that a translation links
to.
Pages that scripts write are English in both languages.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHINESE = ROOT / "docs" / "zh"
GENERATED = (
    "models/README.md",
    "reference/conformance.md",
    "reference/papers.md",
    "reference/recipes.md",
    "results/predictions.md",
    "results/rehearsals.md",
)
"""Pages below docs/ that scripts write."""
LINK = re.compile(r"(?P<head>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<target>[^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
NAME = re.compile(r'^<a id="[^"]*"></a>\n+', re.MULTILINE)
MARK = re.compile(r"\n*<!-- of (?P<hash>[0-9a-f]{12}) -->\n*\Z")


def english_pages() -> list[Path]:
    """Every page that has a translation, or should have one."""
    written = {ROOT / "docs" / name for name in GENERATED}
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [
        page
        for page in pages
        if not page.is_relative_to(CHINESE) and page.parent != ROOT / "docs" / "api" and page not in written
    ]


def translated(page: Path) -> Path:
    """Where the translation of an English page lies."""
    if page.is_relative_to(ROOT / "docs"):
        return CHINESE / page.relative_to(ROOT / "docs")
    return CHINESE / "start.md" if page == ROOT / "README.md" else CHINESE / page.relative_to(ROOT)


def original(page: Path) -> Path:
    """The English page that a translation is of."""
    return next(english for english in english_pages() if translated(english) == page)


def digest(page: Path) -> str:
    """Names the text of a page."""
    return hashlib.sha256(page.read_bytes()).hexdigest()[:12]


def without_mark(text: str) -> str:
    """The text of a page without the line that says what it translates."""
    return MARK.sub("\n", text)


def is_outdated(page: Path) -> bool:
    """True for a translation of another text than the English page has now, and for one that does not say of which."""
    mark = MARK.search(page.read_text(encoding="utf-8"))
    return mark is None or mark["hash"] != digest(original(page))


def mark(page: Path) -> None:
    """Says in a translation that it is of the English text as it stands, with links that lead from its own place.
    Names the headings that translations link to.

    Raises SystemExit for a link that the English page does not have.
    """
    english = original(page)
    right = _links(english, page)
    text = without_mark(page.read_text(encoding="utf-8")).rstrip("\n")

    def mended(link: re.Match[str]) -> str:
        target = link["target"]
        if target not in right and target not in right.values():
            raise SystemExit(f"{page.name}: {target} is no link of {english.relative_to(ROOT)}")
        return f"{link['head']}{right.get(target, target)})"

    text = outside_code(text, LINK, mended)
    page.write_text(f"{text}\n\n<!-- of {digest(english)} -->\n", encoding="utf-8")
    for other, changed in renamed().items():
        other.write_text(changed, encoding="utf-8")


def _links(english: Path, page: Path) -> dict[str, str]:
    """Target of a link of an English page -> target of the same link in its translation."""
    known = set(english_pages())
    right = {}
    for link in LINK.finditer(FENCED.sub("", english.read_text(encoding="utf-8"))):
        target, hash_, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", target) or not target:
            right[link["target"]] = link["target"]
            continue
        aim = (english.parent / target).resolve()
        to = translated(aim) if aim in known else aim
        right[link["target"]] = os.path.relpath(to, page.parent) + hash_ + anchor
    return right


def outside_code(text: str, pattern: re.Pattern[str], changed: Callable[[re.Match[str]], str]) -> str:
    """The text with every match outside fenced blocks replaced."""
    parts, end = [], 0
    for block in FENCED.finditer(text):
        parts += [pattern.sub(changed, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, pattern.sub(changed, text[end:])])


def with_names(text: str, english: Path, wanted: Collection[str]) -> str:
    """A translation with names before the headings that have one of these English anchors, and before no others."""
    slugs = iter(_slugs(english.read_text(encoding="utf-8")))

    def named(heading: re.Match[str]) -> str:
        slug = next(slugs, "")
        return f'<a id="{slug}"></a>\n\n{heading[0]}' if slug in wanted else heading[0]

    return outside_code(outside_code(text, NAME, lambda name: ""), HEADING, named)


def renamed() -> dict[Path, str]:
    """The translations whose names before headings are not those that translations link to -> their right text."""
    of = {translated(page): page for page in english_pages()}
    wanted: dict[Path, set[str]] = {page: set() for page in of}
    pages = {page: page.read_text(encoding="utf-8") for page in of if page.is_file()}
    for page, text in pages.items():
        for link in LINK.finditer(FENCED.sub("", text)):
            target, _, anchor = link["target"].partition("#")
            aim = (page.parent / target).resolve() if target else page
            if anchor and aim in wanted:
                wanted[aim].add(anchor)
    right = {page: with_names(text, of[page], wanted[page]) for page, text in pages.items()}
    return {page: text for page, text in right.items() if text != pages[page]}


def with_anchors(text: str, english: Path) -> str:
    """A translation whose headings have the anchors of the English page's, for mkdocs."""
    slugs = iter(_slugs(english.read_text(encoding="utf-8")))
    text = outside_code(text, NAME, lambda name: "")
    return outside_code(text, HEADING, lambda heading: f"{heading[0]} {{#{next(slugs, '')}}}".replace(" {#}", ""))


def _slugs(text: str) -> list[str]:
    """Anchors of the headings of a page, as GitHub and mkdocs name them."""
    return [
        re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
        for heading in HEADING.finditer(FENCED.sub("", text))
    ]


def shape(page: Path) -> dict[str, list[str] | int]:
    """What a translation has in common with its page: levels of headings, blocks of code, rows of tables, links."""
    text = without_mark(page.read_text(encoding="utf-8"))
    prose = FENCED.sub("", text)
    return {
        "headings": [heading[1] for heading in HEADING.finditer(prose)],
        "blocks of code": len(FENCED.findall(text)),
        "rows of tables": sum(1 for line in prose.splitlines() if line.startswith("|")),
        "links": len(LINK.findall(prose)),
    }


def problems() -> list[str]:
    """One line per page that lacks a translation or has an old one, and per translation of nothing."""
    pages = english_pages()
    found = []
    for page in pages:
        name, translation = page.relative_to(ROOT).as_posix(), translated(page)
        if not translation.is_file():
            found.append(f"{name} has no translation {translation.relative_to(ROOT).as_posix()}")
        elif is_outdated(translation):
            found.append(f"{translation.relative_to(ROOT).as_posix()} is older than {name}")
        else:
            has, wants = shape(translation), shape(page)
            for what in wants:
                if has[what] != wants[what]:
                    place = translation.relative_to(ROOT).as_posix()
                    found.append(f"{place} has other {what} than {name}: {has[what]} instead of {wants[what]}")
    for page in renamed():
        found.append(f"{page.relative_to(ROOT).as_posix()} has other names before headings than links lead to; mark it")
    known = {translated(page) for page in pages}
    for page in sorted(CHINESE.glob("**/*.md")):
        if page not in known:
            found.append(f"{page.relative_to(ROOT).as_posix()} translates no page")
    return found


def main() -> int:
    """`mark PAGE ...` writes the marks; without arguments lists what is to be done, with status 1 if there is any."""
    if sys.argv[1:2] == ["mark"]:
        for name in sys.argv[2:]:
            mark(Path(name).resolve())
        return 0
    found = problems()
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
