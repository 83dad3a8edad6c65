"""Files of the page about what additions cost have at most the lines that it states."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "growing.md"
ROW = re.compile(r"^\| `([^`]+)` \| (\d+) \|", re.MULTILINE)


def test_no_file_has_more_lines_than_the_page_states():
    stated = {path: int(lines) for path, lines in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    found = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in stated}
    assert len(stated) >= 10
    assert {path: lines for path, lines in found.items() if lines > stated[path]} == {}
