"""One process at a time writes into a run directory; locks of processes that have ended do not stand in the way."""

import dataclasses
import datetime
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unirl.app.main import USER_ERROR, main
from unirl.app.run_directory import CONFIG_FILE, claimed_run_dir, make_run_dir
from unirl.app.run_lock import Holder, RunIsLockedError, locked, this_process
from unirl.train.backend.manifest import write_manifest
from unirl.trainer import commands
from unirl.types.errors import ConfigError

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
RECIPE = {"recipe": "llm/x", "run_dir": None, "resume": None}


def leave_lock(folder: Path, number: int = 1, **changes: object) -> Path:
    """A lock as a process leaves it that is killed; it differs from this one by `changes`."""
    path = folder / f"run.lock.{number}"
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(this_process(), **changes))) + "\n")
    return path


def locks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_second_run_is_told_who_holds_the_directory_and_what_to_do(tmp_path: Path):
    with locked(tmp_path):
        with pytest.raises(RunIsLockedError) as caught, locked(tmp_path):
            pass
        assert locks(tmp_path) == ["run.lock.1"]
    own = this_process()
    for part in (
        f"run_dir = {tmp_path} is in use by process {own.pid} on {own.host}",
        "another run_dir",
        "resume=auto",
    ):
        assert part in str(caught.value)
    assert locks(tmp_path) == []
    with locked(tmp_path):
        pass


def test_the_lock_is_given_back_where_the_run_fails(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert locks(tmp_path) == []


def test_locks_of_processes_that_have_ended_are_taken_over(tmp_path: Path):
    own = this_process()
    leave_lock(tmp_path, 1, pid=ended_process())
    leave_lock(tmp_path, 2, start_ticks=own.start_ticks - 1)  # this id belonged to an earlier process
    leave_lock(tmp_path, 3, boot_id="before the machine was started anew")
    with locked(tmp_path):
        assert locks(tmp_path) == ["run.lock.4"]
    assert locks(tmp_path) == []


def test_a_process_that_has_ended_and_was_not_waited_for_holds_nothing(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{process.pid}/stat")
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    leave_lock(tmp_path, pid=process.pid, start_ticks=ticks)
    try:
        with pytest.raises(RunIsLockedError, match=f"in use by process {process.pid}"), locked(tmp_path):
            pass
        process.kill()
        deadline = time.monotonic() + 300
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with locked(tmp_path):
            assert locks(tmp_path) == ["run.lock.2"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("changes", [{"host": "node7"}, {"pid_namespace": "pid:[1]"}])
def test_a_lock_that_cannot_be_judged_from_here_stays_and_the_message_says_what_to_do(changes, tmp_path: Path):
    path = leave_lock(tmp_path, **changes, pid=4242, started="2026-01-02T03:04:05+00:00")
    with pytest.raises(RunIsLockedError, match="cannot be seen from here") as caught, locked(tmp_path):
        pass
    holder = Holder(**json.loads(path.read_text()))
    assert str(holder) in str(caught.value) and f"rm {path}" in str(caught.value)
    assert f"process 4242 on {holder.host}, since 2026" in str(holder)
    assert locks(tmp_path) == ["run.lock.1"]


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]"])
def test_a_lock_that_cannot_be_read_stays(content: str, tmp_path: Path):
    (tmp_path / "run.lock.1").write_text(content)
    with pytest.raises(RunIsLockedError, match="cannot be read, run.lock.1. If no run writes there"), locked(tmp_path):
        pass
    assert locks(tmp_path) == ["run.lock.1"]


def test_what_a_process_leaves_that_is_killed_while_it_makes_its_lock_is_none(tmp_path: Path):
    (tmp_path / "run.lock.0a1b2c3d.new").write_text('{"host": "')
    with locked(tmp_path):
        assert locks(tmp_path) == ["run.lock.0a1b2c3d.new", "run.lock.1"]


def test_a_lock_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    link = os.link

    def watched(source: Path, target: Path) -> None:
        assert Holder(**json.loads(Path(source).read_text())).pid == os.getpid()
        link(source, target)

    monkeypatch.setattr(os, "link", watched)
    with locked(tmp_path):
        assert locks(tmp_path) == ["run.lock.1"]


def test_of_many_that_find_a_dead_lock_at_once_one_wins(tmp_path: Path):
    dead = ended_process()
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        leave_lock(folder, pid=dead)
        start, end, won, lost = threading.Barrier(6), threading.Barrier(6), [], []

        def contend(folder=folder, start=start, end=end, won=won, lost=lost) -> None:
            start.wait(300)
            try:
                with locked(folder):
                    won.append(1)
                    end.wait(300)
            except RunIsLockedError:
                lost.append(1)
                end.wait(300)

        threads = [threading.Thread(target=contend) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert (len(won), len(lost)) == (1, 5)
        assert locks(folder) == []


def test_a_directory_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    with pytest.raises(ConfigError, match="cannot be locked: Operation not permitted"), locked(tmp_path):
        pass
    assert locks(tmp_path) == []


# The command --------------------------------------------------------------------------------------------------------


def test_two_new_runs_of_one_second_get_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with claimed_run_dir(RECIPE, NOW) as (first, _), claimed_run_dir(RECIPE, NOW) as (second, is_resumed):
        assert (first.name, second.name, is_resumed) == ("20260102-030405", "20260102-030405-2", False)


def test_a_run_that_came_and_went_before_the_lock_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def one_that_is_slow(folder: Path) -> None:
        make_run_dir(folder)
        (folder / CONFIG_FILE).write_text("recipe: llm/other\n")
        (folder / "summary.json").write_text("{}\n")

    monkeypatch.setattr("unirl.app.run_directory.make_run_dir", one_that_is_slow)
    with (
        pytest.raises(ConfigError, match="already holds a run"),
        claimed_run_dir({**RECIPE, "run_dir": str(tmp_path / "run")}, NOW),
    ):
        pass


@pytest.mark.parametrize("resume", [(), ("resume=auto",)])
def test_a_second_command_leaves_the_first_ones_files_alone(resume, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    statuses = []

    def run_recipe(recipe, run_dir, trackers, stop, *, published):
        (run_dir / "checkpoints" / "step-000001").mkdir(parents=True)
        before = (run_dir / CONFIG_FILE).read_text()
        statuses.append(main(["run_dir=run", "seed=2", *resume]))
        assert (run_dir / CONFIG_FILE).read_text() == before
        raise ConfigError("the first ends")

    monkeypatch.setattr(commands, "run_recipe", run_recipe)
    assert main(["run_dir=run", "seed=1"]) == USER_ERROR
    assert statuses == [USER_ERROR]
    said = capsys.readouterr().err
    assert ("run_dir = run is in use by" if resume else "already holds a run") in said
    assert not list(Path("run").glob("run.lock*"))


def test_a_run_that_is_being_written_can_be_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "evaluate_recipe", lambda *_, **__: (_ for _ in ()).throw(ConfigError("was read")))
    monkeypatch.setattr(commands, "export_recipe", lambda *_, **__: None)

    def run_recipe(recipe, run_dir, trackers, stop, *, published):
        (run_dir / "checkpoints" / "step-000001").mkdir(parents=True)
        assert main(["export", "run", "--to", "out", "--merged"]) == 0
        main(["eval", "run"])
        raise ConfigError("the run ends")

    monkeypatch.setattr(commands, "run_recipe", run_recipe)
    main(["run_dir=run"])
    assert "was read" in capsys.readouterr().err


def test_a_run_begins_on_no_mirror_of_another_and_resumes_from_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "mirror" / "step-000002"
    step.mkdir(parents=True)
    (step / "driver_state.json").write_text("{}")
    write_manifest(step, {"step": 2})
    recipe = {"recipe": "r", "run_dir": "new", "resume": None, "save": {"mirror": str(tmp_path / "mirror")}}
    now = datetime.datetime(2026, 1, 1)
    with pytest.raises(ConfigError, match="has checkpoints of another run, up to step-000002. Set resume=auto"):
        with claimed_run_dir(recipe, now):
            pass
    for given in ("new", None):
        with claimed_run_dir({**recipe, "run_dir": given, "resume": "auto"}, now) as (folder, is_resumed):
            assert is_resumed and (folder / "checkpoints" / "step-000002" / "driver_state.json").is_file()
    assert str(folder) == "runs/r/20260101-000000"
