"""The README's programs run as they stand, one after the other."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_programs_in_the_readme_run(capsys):
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {"__name__": "readme"}
    exec(compile("\n".join(programs), str(README), "exec"), names)
    assert "brightness" in capsys.readouterr().out


def test_every_target_in_the_readme_exists():
    from unirl.reward.function import imported

    targets = set(re.findall(r"unirl\.reward\.[\w.]+\.[A-Z]\w+", README.read_text()))
    assert len(targets) >= 8
    assert all(callable(imported(target)) for target in targets)
