"""`scripts/release`: what a release changes, and what it takes for a mistake. The whole check runs nightly."""

import importlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
bump: Any = importlib.import_module("releasing.bump")
installed: Any = importlib.import_module("releasing.installed")
workspace: Any = importlib.import_module("releasing.workspace")
interpreters: Any = importlib.import_module("releasing.interpreters")
probe: Any = importlib.import_module("releasing.probe")

CHANGELOG = "# Changelog\n\n## Unreleased\n\n- One thing.\n- Another.\n\n## 0.1.0 - 2026-01-02\n\n- The first.\n"


def script(name: str) -> Any:
    loader = importlib.machinery.SourceFileLoader(f"script_{name}", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "part", "after", "bounds"),
    [
        ("0.1.0", "first", "0.1.0", ">=0.1,<0.2"),
        ("0.1.3", "patch", "0.1.4", ">=0.1,<0.2"),
        ("0.1.3", "minor", "0.2.0", ">=0.2,<0.3"),
        ("0.9.9", "major", "1.0.0", ">=1.0,<2"),
        ("1.4.2", "minor", "1.5.0", ">=1.5,<2"),
    ],
)
def test_a_version_is_followed_by_another_that_its_bounds_admit(version, part, after, bounds):
    assert bump.next_version(version, part) == after
    assert bump.bounds(after) == bounds
    assert Requirement(f"x{bounds}").specifier.contains(after)


def test_bounds_of_one_package_change_and_no_other_does():
    text = 'dependencies = ["unirl-reward[clip,remote]>=0.1,<0.2", "unirl-reward-server>=0.1,<0.2", "torch>=2.13"]\n'
    assert bump.with_bounds(text, "unirl-reward", "0.2.0") == text.replace(
        "unirl-reward[clip,remote]>=0.1,<0.2", "unirl-reward[clip,remote]>=0.2,<0.3"
    )
    extra = 'ocr = ["unirl-reward[ocr]"]\n'  # without bounds: those of the dependencies hold
    assert bump.with_bounds(extra, "unirl-reward", "0.2.0") == extra


def test_a_released_changelog_has_a_dated_heading_and_room_for_the_next():
    text = bump.released(CHANGELOG, "x", "0.2.0", "2026-11-25")
    assert text.startswith(
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2026-11-25\n\n- One thing.\n- Another.\n\n## 0.1.0 -"
    )
    assert bump.is_dated(text, "0.2.0") and not bump.is_dated(text, "0.3.0")
    with pytest.raises(workspace.ReleaseError, match="no entry under ## Unreleased"):
        bump.released(text, "x", "0.3.0", "2026-11-26")


def test_a_changelog_without_a_section_of_what_is_not_released_is_refused():
    with pytest.raises(workspace.ReleaseError, match="add ## Unreleased"):
        bump.unreleased("# Changelog\n\n## 0.1.0 - 2026-01-02\n\n- The first.\n", "x")


def test_an_entry_goes_to_what_is_not_released():
    assert bump.unreleased(bump.with_entry(CHANGELOG, "Needs y."), "x") == "- Needs y.\n- One thing.\n- Another."
    dated = "# Changelog\n\n## 0.1.0 - 2026-01-02\n\n- The first.\n"
    assert bump.with_entry(dated, "Needs y.").startswith("# Changelog\n\n## Unreleased\n\n- Needs y.\n\n## 0.1.0 -")
    after = bump.released(CHANGELOG, "x", "0.2.0", "2026-11-25")
    assert "## Unreleased\n\n- Needs y.\n\n## 0.2.0 -" in bump.with_entry(after, "Needs y.")


def test_every_changelog_of_the_workspace_can_be_released_and_every_bound_holds():
    among = workspace.distributions()
    assert len(among) == 8 and among[-1].name == "unirl-trainer"
    for each in among:
        assert bump.unreleased((each.folder / "CHANGELOG.md").read_text(), each.name)
    assert workspace.bounds_that_exclude(among) == []


def test_a_tag_names_its_package():
    assert bump.from_tag(bump.tag("unirl-reward-server", "1.2.3")) == ("unirl-reward-server", "1.2.3")
    with pytest.raises(workspace.ReleaseError, match="'v1.2.3' is none of a release"):
        bump.from_tag("v1.2.3")
    release = script("release")
    with pytest.raises(workspace.ReleaseError, match="unirl-sde has version"):
        release.verified("unirl-sde-v99.0.0", workspace.distributions())


@pytest.mark.parametrize(
    ("failure", "extras", "waits"),
    [
        (
            ["ImportError", "", "x needs aiohttp. Install it: pip install 'unirl-reward[remote]'"],
            set(),
            "unirl-reward[remote]",
        ),
        (["ImportError", "", "x needs aiohttp. Install it: pip install 'unirl-reward[remote]'"], {"remote"}, None),
        (["ModuleNotFoundError", "scipy.ndimage", "No module named 'scipy'"], {"clip"}, "unirl-reward[geneval]"),
        (["ModuleNotFoundError", "numpi", "No module named 'numpi'"], set(), None),
        (["NameError", "", "name 'x' is not defined"], set(), None),
    ],
)
def test_a_module_may_wait_for_an_extra_that_is_absent_and_for_nothing_else(failure, extras, waits):
    [reward] = workspace.chosen(["unirl-reward"], workspace.distributions())
    assert installed.judge_import(failure, reward, extras) == waits


def test_modules_that_no_environment_imported_are_kept_until_one_does():
    [reward] = workspace.chosen(["unirl-reward"], workspace.distributions())
    findings = installed.Findings()
    missing = ["ModuleNotFoundError", "scipy", "No module named 'scipy'"]
    installed.note(findings, {"a": None, "b": missing}, reward, set())
    assert findings.waiting == {"b": "unirl-reward[geneval]"} and findings.failures == []
    installed.note(findings, {"a": None, "b": None}, reward, {"shapes"})
    installed.note(findings, {"a": None, "b": missing}, reward, {"clip"})
    assert findings.waiting == {} and findings.imported == {"a", "b"}
    installed.note(findings, {"a": ["NameError", "", "x"]}, reward, {"clip"})
    assert findings.failures == ["with [clip], import a: NameError: x"]


def test_environments_within_the_repository_are_refused(tmp_path):
    with pytest.raises(workspace.ReleaseError, match="is in the repository"):
        installed.Environments(ROOT / "build", tmp_path, is_newest=False)


def test_examples_that_need_a_gpu_a_server_or_downloads_are_left_out(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(
        '```python\nx = 1\n```\n```python\nmodel = load(device="cuda")\n```\n```python\nassert x == 1\n```\n'
    )
    assert probe.run_readme(page) == {"ran": 2, "left_out": 1}
    page.write_text('```python\nurl = "http://127.0.0.1:8080"\n```\n')
    assert probe.run_readme(page) == {"ran": 0, "left_out": 1}
    assert probe.run_readme(page, is_served=True) == {"ran": 1, "left_out": 0}


def test_an_interpreter_of_another_version_does_not_count():
    here = "{}.{}".format(*sys.version_info[:2])
    assert interpreters.version_of(sys.executable) == here
    assert interpreters.version_of("/nowhere/python3.11") is None
    assert set(interpreters.SUPPORTED) == {"3.11", "3.12"} and interpreters.NEXT not in interpreters.SUPPORTED
    for each in workspace.distributions():
        specifier = Requirement(f"x{each.project['requires-python']}").specifier
        assert all(specifier.contains(f"{version}.0") for version in interpreters.SUPPORTED)
        assert not specifier.contains(f"{interpreters.NEXT}.0")
    # The reason that is given for it.
    assert interpreters.WHY_NOT_NEXT.split()[0] in (ROOT / "packages/unirl-rollout/pyproject.toml").read_text()


@pytest.mark.slow
def test_bumping_changes_versions_bounds_changelogs_and_locks_and_refuses_a_second_time(tmp_path, uv):
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tree)], check=True)
    for path in ("scripts", "environments", "uv.lock"):  # what the working tree has, committed or not
        source, target = ROOT / path, tree / path
        shutil.copytree(
            source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".venv", "__pycache__")
        ) if source.is_dir() else shutil.copy(source, target)
    for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tree / path.relative_to(ROOT))
    git = ["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--all", "--allow-empty", "--message=Now"], check=True)

    def bumped(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tree / "scripts/release"), "bump", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tree)

    done = bumped("unirl-sde", "minor")
    if "Failed to fetch" in done.stderr:
        pytest.skip("the package index is not reached")
    assert done.returncode == 0, done.stderr
    assert "unirl-sde 0.1.0 -> 0.2.0" in done.stdout and "git tag unirl-sde-v0.2.0" in done.stdout
    assert "unirl-models needs unirl-sde >=0.2,<0.3 now: release it too" in done.stdout
    changed = subprocess.run([*git, "diff", "--name-only"], capture_output=True, text=True, check=True).stdout.split()
    assert {"packages/unirl-sde/pyproject.toml", "packages/unirl-sde/CHANGELOG.md", "uv.lock"} <= set(changed)
    assert "packages/unirl-types/pyproject.toml" not in changed
    assert '"unirl-sde>=0.2,<0.3"' in (tree / "packages/unirl-models/pyproject.toml").read_text()
    assert "- Needs unirl-sde >=0.2,<0.3." in (tree / "packages/unirl-models/CHANGELOG.md").read_text()
    subprocess.run([uv, "lock", "--check", "--quiet"], cwd=tree, check=True)
    again = bumped("unirl-sde", "patch")
    assert again.returncode == 1 and "the tree has changes" in again.stderr
    subprocess.run([*git, "commit", "--quiet", "--all", "--message=Release"], check=True)
    again = bumped("unirl-sde", "patch")
    assert again.returncode == 1 and "has no entry under ## Unreleased" in again.stderr
