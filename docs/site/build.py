"""Builds the documentation site, English and Chinese:

    uv run python docs/site/build.py && uv run python -m http.server -d build/site

The pages are those of `docs/`, of the packages and the apps, so that they read as well in the repository. This script
gathers them, rewrites links between them, adds the API reference, and has mkdocs build each language. The order is that
of the tables of `docs/README.md`. Beside each page lies its source as `.md`, and at the top llms.txt and llms-full.txt.
"""

from __future__ import annotations

import argparse
import importlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs" / name) for name in ("api", "site", "reference")]

import translations  # noqa: E402

api = importlib.import_module("generate")  # the script of docs/api

SETTINGS = Path(__file__).parent / "mkdocs.yml"
LINK = re.compile(r"(?P<head>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
NAMED_FENCE = re.compile(r"^(```\w+) (\S+)$", re.MULTILINE)
"""A block that is a file: ```python my_rewards.py"""
ROW = re.compile(r"^\| \[[^\]]+\]\((?P<page>[^)]+)\) \| (?P<text>.*) \|$")
OWN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "contributing/security.md",
    "docs/README.md": "contents.md",
}
"""Pages that lie elsewhere in the site than in the repository."""
BUILT = {f"reference/{name}.md": importlib.import_module(name).page for name in ("recipe_keys", "errors")}
"""English pages that no file has, after the other pages of their folder."""


@dataclass(frozen=True)
class Language:
    """One language of the site."""

    code: str
    folder: str
    """The folder of the site; "" for the first language."""
    theme: str
    tabs: dict[str, str]
    """Section of the site that no table of docs/README.md has -> its name."""
    outdated: str
    """What stands over a translation whose English page has changed. {page}: that page."""


ENGLISH = Language("en", "", "en", {"packages": "Packages", "api": "API", "contributing": "Contributing"}, "")
CHINESE = Language(
    "zh",
    "zh",
    "zh",
    {"packages": "各个包", "api": "API（英文）", "contributing": "参与贡献"},
    '本页的英文原文在翻译之后有改动，请以<a href="{page}">英文页</a>为准。',
)
LANGUAGES = (ENGLISH, CHINESE)


def sources(language: Language) -> dict[str, Path]:
    """Page of the site -> the file that it is made of. A page without a translation is not in a translated site."""
    english = {}
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("docs/api/", f"docs/{CHINESE.code}/")) and name != "AGENTS.md":
            english[OWN.get(name, name.removeprefix("docs/"))] = path
    for path in sorted(ROOT.glob("packages/*/README.md")) + sorted(ROOT.glob("apps/*/README.md")):
        english[f"packages/{path.parent.name}.md"] = path
    if language is ENGLISH:
        return english
    pages = set(translations.english_pages())
    translated = {page: translations.translated(path) for page, path in english.items() if path in pages}
    return {page: path for page, path in translated.items() if path.is_file()}


def gather(language: Language, to: Path) -> list[tuple[str, str]]:
    """Writes the pages of a language below `to`. Returns page and text of each."""
    pages = sources(language)
    places = {path: page for page, path in pages.items()}
    english = {path: page for page, path in sources(ENGLISH).items()}
    written = []
    for page, path in pages.items():
        text = translations.without_mark(path.read_text(encoding="utf-8"))
        text = _relinked(text, path, page, places, english, language)
        if language is not ENGLISH:
            text = translations.with_anchors(text, translations.original(path))
        if language is not ENGLISH and translations.is_outdated(path):
            notice = language.outdated.format(page=_to_english(page, page))
            text = re.sub(r"\A(# .*\n)", rf'\1\n!!! warning ""\n    {notice}\n', text)
        written.append((page, text))
    if language is ENGLISH:
        written += [(f"api/{name}.md", api.page(name, folder)) for name, folder in api.PACKAGES.items()]
        written += [(page, make()) for page, make in BUILT.items()]
    for page, text in written:
        (to / page).parent.mkdir(parents=True, exist_ok=True)
        (to / page).write_text(NAMED_FENCE.sub(r'\1 title="\2"', text), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "images", to / "images")
    shutil.copy(SETTINGS.with_name("wide.css"), to)
    return written


def _relinked(text: str, path: Path, page: str, places: dict[Path, str], english: dict[Path, str], language: Language):
    """The text of a page with links that hold in the site; a link to a file that the site lacks becomes its text."""

    def relinked(link: re.Match[str]) -> str:
        head, target, anchor = link["head"], link["target"], link["anchor"] or ""
        if re.match(r"[a-z]+:", target) or not target:
            return link[0]
        aim = (path.parent / target).resolve()
        if (aim / "README.md").is_file():
            aim /= "README.md"
        if aim.parent == ROOT / "docs" / "images":
            return f"{head}{_between(page, f'images/{aim.name}')})"
        if aim in places:
            return f"{head}{_between(page, places[aim])}{anchor})"
        if not aim.exists():  # a translation that is not written yet
            aim = next((path for path in english if translations.translated(path) == aim), aim)
        if aim in english:  # a page that the translation does not have; mkdocs knows one language at a time
            return f'<a href="{_to_english(page, english[aim])}{anchor}">{head.removesuffix("](")[1:]}</a>'
        if not aim.exists():
            raise SystemExit(f"{path.relative_to(ROOT)}: {target} leads nowhere")
        return head.removeprefix("!").removeprefix("[").removesuffix("](")

    return translations.outside_code(text, LINK, relinked)


def _to_english(page: str, target: str) -> str:
    """Address of an English page from a page of the other language."""
    here, there = (name.removesuffix(".md").removesuffix("index") for name in (page, target))
    return posixpath.relpath(there or ".", f"{CHINESE.folder}/{here}") + "/"


def _between(page: str, target: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def navigation(language: Language, pages: list[str]) -> list[dict[str, list[str]]]:
    """The tabs and their pages: as the tables of the contents page list them, then packages and API."""
    contents = ROOT / "docs" / "README.md"
    if language is not ENGLISH:
        contents = translations.translated(contents)
    left = set(pages)
    tabs: dict[str, list[str]] = {}
    title = "UniRL"
    tabs[title] = [page for page in ("index.md", "contents.md") if page in left]
    left -= set(tabs[title])
    for line in contents.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            title = re.split("[:：]", line.removeprefix("## "))[0].strip()
            tabs[title] = []
        elif (listed := re.match(r"(?:\| |- )\[[^\]]+\]\((?P<page>[^)#]+)\)", line)) and listed["page"] in left:
            tabs[title].append(listed["page"])
            left.remove(listed["page"])
    for page in BUILT:
        if page in left:
            next(listed for listed in tabs.values() if listed[-1].startswith("reference/")).append(page)
            left.remove(page)
    for name, title in language.tabs.items():
        tabs[title] = sorted(page for page in left if page.split("/")[0].removesuffix(".md") == name)
        left -= set(tabs[title])
    if left:
        raise SystemExit(f"no table of {contents.relative_to(ROOT)} lists {', '.join(sorted(left))}")
    return [{title: listed} for title, listed in tabs.items() if listed]


def build(language: Language, work: Path, site: Path, address: str) -> list[tuple[str, str]]:
    """Builds one language into its folder of `site`. Returns its pages."""
    pages = gather(language, work / language.code)
    settings = yaml.load(SETTINGS.read_text(encoding="utf-8"), yaml.UnsafeLoader)
    settings |= {
        "docs_dir": str(work / language.code),
        "site_dir": str(site / language.folder),
        "site_url": f"{address}{language.folder}".rstrip("/") + "/" if address else "",
        "nav": navigation(language, [page for page, _ in pages]),
        "extra": {
            "generator": False,
            "alternate": [
                {"name": "English", "link": "./" if language is ENGLISH else "../", "lang": "en"},
                {"name": "中文", "link": "./zh/" if language is ENGLISH else "./", "lang": "zh"},
            ],
        },
    }
    settings["theme"]["language"] = language.theme
    file = work / f"{language.code}.yml"
    file.write_text(yaml.dump(settings, allow_unicode=True, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(file)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme
    if subprocess.run(command, check=False, env=os.environ | quiet).returncode:
        raise SystemExit(f"mkdocs found something to mend in the pages of {language.code}, above")
    for page, text in pages:
        target = site / language.folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return pages


def write_for_models(site: Path, pages: list[tuple[str, str]], address: str) -> None:
    """llms.txt, the contents with a line on each page, and llms-full.txt, all pages in one file (llmstxt.org)."""
    texts = dict(pages)
    first = next(line for line in texts["index.md"].splitlines()[1:] if line.strip())
    lines = ["# UniRL", "", f"> {first}", ""]
    for line in texts["contents.md"].splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        elif row := ROW.match(line):
            title = texts[row["page"]].splitlines()[0].removeprefix("# ") if row["page"] in texts else row["page"]
            lines.append(f"- [{title}]({address}{row['page']}): {_plain(row['text'])}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    whole = [f"<!-- {page} -->\n\n{text}" for page, text in pages if not page.startswith("api/")]
    (site / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


def _plain(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)


def main() -> None:
    """Builds both languages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="the folder to build into")
    parser.add_argument("--address", default="", help="where the site will be, such as https://docs.example.org/unirl/")
    parser.add_argument("--languages", default="en,zh")
    arguments = parser.parse_args()
    address = f"{arguments.address.rstrip('/')}/" if arguments.address else ""
    work = arguments.to.parent / f"{arguments.to.name}-pages"
    for folder in (arguments.to, work):
        shutil.rmtree(folder, ignore_errors=True)
    for language in LANGUAGES:
        if language.code not in arguments.languages.split(","):
            continue
        pages = build(language, work, arguments.to, address)
        sys.stdout.write(f"{language.code}: {len(pages)} pages\n")
        if language is ENGLISH:
            write_for_models(arguments.to, pages, address)
    sys.stdout.write(f"{arguments.to}\n")


if __name__ == "__main__":
    main()
