"""The README's examples run as they stand."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_of_the_readme_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    scope: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README block {number}", "exec"), scope)
    assert (tmp_path / "rollout.safetensors").is_file()


def test_the_module_table_names_every_module():
    text = README.read_text(encoding="utf-8")
    package = README.parent / "src" / "unirl" / "types"
    missing = [path.stem for path in package.glob("[a-z]*.py") if f"`{path.stem}`" not in text]
    assert missing == []
