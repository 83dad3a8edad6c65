"""The guides work as written: their files are made, their Python is run, their `trainer` commands are typed.

A block whose first line after the fence names a file (```python my_rewards.py) is that file. A `text` block right after
commands has lines that their output must hold; where it names an error, the commands must fail. Training commands are
made small, and pytest is run. Commands of other programs are not run, and no comparisons.
"""

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from small import SMALL as SMALL_RUN
from small import SMALL_STAGES

from unirl.app.command_line import VERBS
from unirl.app.conformance.cases import ENGINES
from unirl.app.main import USER_ERROR, main
from unirl.config.signatures import read_module, read_target

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = [
    page
    for page in [DOCS.parent / "README.md", DOCS / "tutorial.md", *sorted((DOCS / "guides").glob("*.md"))]
    # Trains for minutes; test_compare.py runs a small comparison. A rehearsal needs a process that has trained nothing;
    # apps/trainer/tests/test_rehearse.py starts one.
    # VeOmni is an extra; its tests compare the curves. A suite samples for a minute; test_suites.py runs smaller ones.
    # A viewer serves until it is interrupted; test_viewer.py asks it.
    if page.stem not in ("compare", "large_models", "suites", "veomni", "viewer")
]
BLOCK = re.compile(r"^```(?P<language>\w*)(?: (?P<file>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"[A-Z_]+=")
COMMAND = ["uv", "run", "trainer"]
PYTEST = ["uv", "run", "python", "-m", "pytest"]
SMALL = [
    "num_rollouts=1",
    "eval.before=false",
    *(value for value in SMALL_RUN if not value.startswith("num_rollouts=")),
]
SMALL_STAGES_RUN = ["num_rollouts=1", "eval.before=false", *SMALL_STAGES]
OF_IMAGES = ("engine.", "sampling.num_inference_steps", "eval.num_inference_steps")
SMALL_TEXTS = [value for value in SMALL if not value.startswith(OF_IMAGES)]


@dataclass
class Guide:
    """A page being followed in its own folder."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    status: int = 0
    output: str = ""

    def follow(self, block: re.Match[str]) -> None:
        language, file, text = block.group("language", "file", "text")
        if file:
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / file).write_text(text)
        elif language == "python":
            exec(compile(text, "guide", "exec"), {"__name__": "guide"})
        elif language == "bash":
            self.run(text)
        elif language == "text":
            self.expect(text)

    def run(self, text: str) -> None:
        assert self.status == 0, self.output
        self.output = ""
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and SETTING.match(words[0]):
                self.monkeypatch.setenv(*words.pop(0).split("=", 1))
            if words[:3] == COMMAND and words[3:4] != ["compare"]:
                assert self.status == 0, self.output
                self.status = main(self.made_small(words[3:]))
                self.output += "".join(self.capsys.readouterr())
            elif words[: len(PYTEST)] == PYTEST:
                subprocess.run([sys.executable, *words[3:], "-n", "0"], cwd=self.folder, check=True)

    def made_small(self, argv: list[str]) -> list[str]:
        if argv and argv[0] in VERBS and argv[0] != "run":
            return argv
        given = {word.split("=")[0] for word in argv}
        folder = next((word.rpartition("/")[0] for word in argv if "=" not in word), "")
        small = {"worlds/arithmetic": SMALL_TEXTS, "worlds/phrases": SMALL_STAGES_RUN}.get(folder, SMALL)
        if "guess.yaml" in argv:
            small = SMALL_TEXTS
        return [*argv, *(word for word in small if word.split("=")[0] not in given)]

    def expect(self, text: str) -> None:
        shown = " ".join(self.output.split())
        for line in text.splitlines():
            assert " ".join(line.split()) in shown, f"{line!r} is not in {self.output!r}"
        assert self.status == (USER_ERROR if "Error" in text else 0), self.output
        self.status = 0


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_works_as_written(page, tmp_path, monkeypatch, capsys, own_process):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENGINES, "latents", dict(ENGINES["latents"]))  # a page adds its engine
    forget_modules()
    guide = Guide(tmp_path, monkeypatch, capsys)
    try:
        for block in BLOCK.finditer(page.read_text()):
            guide.follow(block)
        assert guide.status == 0, guide.output
    finally:
        forget_modules()


def forget_modules() -> None:
    """Another page, or another test, may call its own module by the same name."""
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    read_target.cache_clear()
    read_module.cache_clear()
