"""The README's programs run as they stand, one after the other."""

import re
from pathlib import Path

from unirl.reward.local.images.compressibility import JPEGCompressibilityScorer

from .fake_server import FakeServer

README = Path(__file__).parents[1] / "README.md"


def test_the_programs_in_the_readme_run(capsys):
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with FakeServer({"jpeg_compressibility": JPEGCompressibilityScorer()}) as server:
        text = "\n".join(programs).replace("http://127.0.0.1:8080", server.url)
        exec(compile(text, str(README), "exec"), {"__name__": "readme"})
    assert "brightness" in capsys.readouterr().out


def test_every_target_in_the_readme_exists():
    from unirl.reward.function import imported

    targets = set(re.findall(r"unirl\.reward\.[\w.]+\.[A-Z]\w+", README.read_text()))
    assert len(targets) >= 8
    assert all(callable(imported(target)) for target in targets)
