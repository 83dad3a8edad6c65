"""A run whose workers die goes on from its newest checkpoint, in the same process, as if they had not."""

import json

import pytest
from small import SMALL

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.tracking.jsonl import JsonlTracker
from unirl.trainer.commands import run_recipe
from unirl.types.errors import WorkerError

MACHINE = ("timing_s/", "perf/", "sync/", "schedule/", "reward/shapes/utilisation")
AHEAD = ["schedule.kind=async", "schedule.max_staleness=0"]


@pytest.fixture
def run(tmp_path):
    """run(name, dies_at, *words) -> the metrics of training by step."""
    register_resolvers()
    (tmp_path / "marks").mkdir()

    def started(name, dies_at, *words, kills=False):
        recipe = resolve(compose("worlds/shapes/replica", [*SMALL, "num_rollouts=4", *words]))
        dying = {"_target_": "dying.DyingEngine", "dies_at": dies_at, "marks": str(tmp_path / "marks"), "kills": kills}
        recipe["engine"] |= dying
        check_recipe(recipe)
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        run_recipe(run_of(recipe), run_dir, [JsonlTracker()])
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(5))
        return [{key: value for key, value in line.items() if not key.startswith(MACHINE)} for line in lines]

    return started


@pytest.mark.parametrize("words", [[], AHEAD], ids=["sync", "async"])
def test_a_run_whose_workers_die_has_the_numbers_of_one_whose_workers_lived(run, tmp_path, words, caplog):
    expected = run("whole", "", *words)
    assert run("dies", "0,2", "max_restarts=2", *words) == expected
    assert "restart 1 of 2, from the start, since there is no checkpoint" in caplog.text
    assert "restart 2 of 2, from rollout 2" in caplog.text


def test_more_deaths_than_restarts_end_the_run_and_what_is_finished_is_kept(run, tmp_path):
    with pytest.raises(WorkerError, match="it died"):
        run("dies", "1,3", "max_restarts=1")
    assert len((tmp_path / "dies" / "metrics.jsonl").read_text().splitlines()) == 4  # 0 to 3
    assert run("dies", "", "resume=auto") == run("whole", "")


@pytest.mark.matrix
def test_a_killed_process_of_an_even_pool_is_restarted_with_the_others(run):
    words = ["runtime=ray", "num_devices=2", "parts/layout=separate_halves"]
    expected = run("whole", "", *words)
    assert run("killed", "2", "max_restarts=1", *words, kills=True) == expected
