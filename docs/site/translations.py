"""Which Chinese pages are missing or older than the English ones: `uv run python docs/site/translations.py`.

The translation of a page lies at the same place below `docs/zh/`, and its last line says which English text it
translates: `<!-- of 0123456789ab -->`, the start of that text's SHA-256. After you have changed a translation, write
the new line with `uv run python docs/site/translations.py mark docs/zh/PAGE ...`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHINESE = ROOT / "docs" / "zh"
MARK = re.compile(r"\n*<!-- of (?P<hash>[0-9a-f]{12}) -->\n*\Z")


def english_pages() -> list[Path]:
    """Every page that has a translation, or should have one."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in pages if not page.is_relative_to(CHINESE) and page.parent != ROOT / "docs" / "api"]


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
    """Says in a translation that it is of the English text as it stands."""
    text = without_mark(page.read_text(encoding="utf-8")).rstrip("\n")
    page.write_text(f"{text}\n\n<!-- of {digest(original(page))} -->\n", encoding="utf-8")


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
