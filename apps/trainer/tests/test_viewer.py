"""The server of `trainer view`, without a browser."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer, unused_port

from unirl.app.main import USER_ERROR, main
from unirl.types.errors import ConfigError
from unirl.viewer.command import view
from unirl.viewer.curves import band, drawn, json_numbers, smoothed
from unirl.viewer.metrics import MetricsCache, MetricsFile, last_line, preview
from unirl.viewer.run_files import NotFoundError, RunsFolder
from unirl.viewer.server import make_app

T = TypeVar("T")


def write_metrics(run: Path, lines: list[dict[str, Any]], mode: str = "w") -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_run(run: Path, *, seed: int = 0, num_steps: int = 5) -> Path:
    write_metrics(run, [{"step": step, "reward/mean": seed + step / 10} for step in range(1, num_steps + 1)])
    (run / "config.yaml").write_text(f"recipe: worlds/a\nseed: {seed}\nnum_rollouts: 9\n", encoding="utf-8")
    return run


def ask(folder: Path, *paths: str, token: str | None = None, **headers: str) -> list[tuple[int, Any]]:
    """Status and JSON (or text) of each path."""

    async def asked(client: TestClient) -> list[tuple[int, Any]]:
        found = []
        for path in paths:
            response = await client.get(path, headers=headers, allow_redirects=False)
            text = await response.text()
            found.append((response.status, json.loads(text) if response.content_type.endswith("json") else text))
        return found

    return with_client(folder, asked, token=token)


def with_client(folder: Path, action: Callable[[TestClient], Awaitable[T]], *, token: str | None = None) -> T:
    async def run() -> T:
        async with TestClient(TestServer(make_app(folder, token))) as client:
            return await action(client)

    return asyncio.run(run())


# Runs ---------------------------------------------------------------------------------------------------------------


def test_runs_are_found_at_every_depth_and_not_within_each_other(tmp_path: Path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "worlds" / "b" / "20260101")
    write_run(tmp_path / "a" / "samples" / "copy")
    (tmp_path / "notes").mkdir()
    assert [run.name for run in RunsFolder(tmp_path).runs()] == ["a", "worlds/b/20260101"]
    assert [run.name for run in RunsFolder(tmp_path / "a").runs()] == ["."]


def test_the_list_says_where_each_run_stands(tmp_path: Path):
    write_run(tmp_path / "ended")
    (write_run(tmp_path / "done") / "summary.json").write_text('{"is_complete": true}', encoding="utf-8")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("recipe: worlds/b\n", encoding="utf-8")
    ((_, found),) = ask(tmp_path, "/api/runs")
    rows = {row["name"]: row for row in found["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "ended": "ended",
        "done": "finished",
        "begun": "ended",
    }
    assert (rows["ended"]["step"], rows["ended"]["reward"], rows["begun"]["step"]) == (5, 0.5, None)


@pytest.mark.parametrize("name", ["../outside", "/etc", "link", "nothing", "a/../../outside"])
def test_a_run_outside_the_folder_is_refused(tmp_path: Path, name: str):
    write_run(tmp_path / "outside")
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(NotFoundError):
        RunsFolder(tmp_path / "runs").run(name)
    ((status, found),) = ask(tmp_path / "runs", f"/api/curves?run={name}")
    assert status == 404 and set(found) == {"error"}


def test_what_links_lead_to_elsewhere_is_not_listed(tmp_path: Path):
    write_run(tmp_path / "outside")
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "there").symlink_to(tmp_path / "outside")
    (tmp_path / "runs" / "here").symlink_to(tmp_path / "runs" / "a")
    assert [run.name for run in RunsFolder(tmp_path / "runs").runs()] == ["a", "here"]


# Metrics ------------------------------------------------------------------------------------------------------------


def test_a_line_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"', encoding="utf-8")
    file = MetricsFile(path)
    file.read_on()
    assert list(file.columns["a"].values) == [1]
    with path.open("a", encoding="utf-8") as out:
        out.write(': 2}\n{"step": 3, "a": "nan"}\nno JSON\n')
    file.read_on()
    assert list(file.columns["a"].steps) == [1, 2, 3] and np.isnan(file.columns["a"].values[2])
    assert file.num_bad_lines == 1


def test_a_file_that_a_resumed_run_wrote_anew_is_read_from_its_start(tmp_path: Path):
    write_metrics(tmp_path, [{"step": step, "a": 0} for step in range(9)])
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.read_on()
    write_metrics(tmp_path, [{"step": step, "a": 1} for step in range(9)])
    file.read_on()
    assert list(file.columns["a"].values) == [1] * 9


def test_a_long_file_is_read_in_slices_to_the_same_end(tmp_path: Path):
    write_metrics(tmp_path, [{"step": step, "a": step / 7} for step in range(500)])
    whole, sliced = MetricsFile(tmp_path / "metrics.jsonl"), MetricsFile(tmp_path / "metrics.jsonl")
    assert whole.read_on()
    assert not sliced.read_on(16)  # less than a line
    while not sliced.read_on(100):
        pass
    assert sliced.columns == whole.columns


def test_a_preview_has_lines_from_the_first_to_the_last(tmp_path: Path):
    write_metrics(tmp_path, [{"step": step, "a": step / 7} for step in range(1000)])
    steps = list(preview(tmp_path / "metrics.jsonl", 50)["a"].steps)
    assert (steps[0], steps[-1]) == (0, 999) and steps == sorted(set(steps)) and 40 < len(steps) <= 51
    assert json.loads(last_line(tmp_path / "metrics.jsonl") or b"")["step"] == 999


def test_of_many_runs_those_asked_for_last_stay_in_memory(tmp_path: Path):
    paths = [write_run(tmp_path / name) / "metrics.jsonl" for name in "abc"]
    cache = MetricsCache(most=2)
    first = cache.columns(paths[0])[0]
    assert cache.columns(paths[0])[0] is first
    for path in paths[1:]:
        cache.columns(path)
    again, is_whole = cache.columns(paths[0])
    assert is_whole and again is not first and again == first


# Curves -------------------------------------------------------------------------------------------------------------


def test_no_peak_of_a_long_curve_is_lost():
    steps, values = np.arange(10_000), np.zeros(10_000)
    values[[1234, 8765]] = 5, -3
    found = drawn([(steps, values)], 200)
    assert len(found.x) == 200 and (np.nanmax(found.y[0]), np.nanmin(found.y[0])) == (5, -3)
    assert abs(found.x[np.nanargmax(found.y[0])] - 1234) <= 100


def test_short_curves_of_different_steps_are_drawn_as_they_are():
    found = drawn([(np.array([1, 2, 3]), np.array([1.0, 2, 3])), (np.array([0, 3]), np.array([7.0, 8]))], 100)
    assert found.x.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(found.y, [[np.nan, 1, 2, 3], [7, np.nan, np.nan, 8]])


def test_smoothing_is_the_weighted_mean_of_what_came_before():
    found = smoothed(np.array([1.0, np.nan, 3.0]), 0.5)
    np.testing.assert_allclose(found, [1, np.nan, (3 + 0.5 * 1) / 1.5])
    np.testing.assert_array_equal(smoothed(np.array([1.0, 4.0]), 0), [1, 4])


def test_a_band_is_over_the_runs_that_have_the_step():
    mean, low, high = band([(np.array([1, 2]), np.array([1.0, 2])), (np.array([2, 3]), np.array([4.0, np.inf]))])
    assert [curve[1].tolist() for curve in (mean, low, high)] == [[1, 3], [1, 2], [1, 4]]
    assert mean[0].tolist() == [1, 2]


def test_numbers_are_cut_to_six_digits():
    given = [1.23456789, -0.000123456789, 123456789.0, 0.0, 1e-320, 1.7e308, np.nan, np.inf]
    found = json_numbers(np.array(given))
    assert found[:4] == [1.23457, -0.000123457, 123457000.0, 0.0] and found[6:] == [None, None]
    assert found[4:6] == pytest.approx(given[4:6], rel=1e-5)


def test_curves_of_seeds_are_one_band(tmp_path: Path):
    write_run(tmp_path / "s0", seed=0)
    write_run(tmp_path / "s2", seed=2)
    (_, single), (_, banded) = ask(
        tmp_path, *(f"/api/curves?run=s0&run=s2&metric=reward/mean{end}" for end in ("", "&band=1&from=2"))
    )
    assert [series["name"] for series in single["series"]] == ["s0", "s2"] and single["is_whole"]
    assert [series["part"] for series in banded["series"]] == ["", "low", "high"]
    assert banded["x"] == [2, 3, 4, 5] and banded["series"][0]["y"][0] == pytest.approx(1.2)


def test_a_long_run_is_shown_coarsely_at_once_and_whole_soon_after(tmp_path: Path):
    write_metrics(
        tmp_path / "a", [{"step": step, "reward/mean": step / 7, "filling": "x" * 200} for step in range(9000)]
    )

    async def asked(client: TestClient) -> list[Any]:
        found = []
        while not found or not found[-1]["is_whole"]:
            found.append(await (await client.get("/api/curves?run=a")).json())
        return found

    first, *_, last = with_client(tmp_path, asked)
    assert not first["is_whole"] and 50 < len(first["x"]) < 120
    assert len(last["x"]) == 600


def test_a_number_that_is_none_is_said(tmp_path: Path):
    write_run(tmp_path / "a")
    assert ask(tmp_path, "/api/curves?run=a&points=many") == [(400, {"error": "points = 'many' is no number."})]


# Who may ask --------------------------------------------------------------------------------------------------------


def test_every_answer_forbids_inline_script(tmp_path: Path):
    write_run(tmp_path / "a")

    async def asked(client: TestClient) -> list[ClientResponse]:
        return [await client.get(path) for path in ("/", "/assets/app.js", "/api/runs", "/api/curves?run=no", "/no")]

    for response in with_client(tmp_path, asked):
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy


def test_a_token_is_needed_where_one_is_set(tmp_path: Path):
    write_run(tmp_path / "a")

    async def asked(client: TestClient) -> list[int]:
        paths = ("/api/runs", "/?token=no", "/?token=yes", "/api/runs")
        return [(await client.get(path, allow_redirects=False)).status for path in paths]

    async def run() -> list[int]:
        server = TestServer(make_app(tmp_path, "yes"))
        async with TestClient(server, cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
            return await asked(client)

    assert asyncio.run(run()) == [403, 403, 302, 200]


def test_a_page_elsewhere_cannot_ask_by_a_name_that_leads_here(tmp_path: Path):
    write_run(tmp_path / "a")
    assert ask(tmp_path, "/api/runs", Host="evil.example")[0][0] == 403
    assert ask(tmp_path, "/api/runs", Host="localhost:8317")[0][0] == 200


@pytest.mark.parametrize("path", ["/assets/..%2fserver.py", "/assets/%2fetc/passwd", "/assets/no.js"])
def test_only_files_of_the_page_are_served(tmp_path: Path, path: str):
    assert ask(tmp_path, path)[0][0] == 404


# Live ---------------------------------------------------------------------------------------------------------------


def test_a_page_hears_of_a_run_that_is_written(tmp_path: Path):
    run = write_run(tmp_path / "a")

    async def heard(client: TestClient) -> str:
        response = await client.get("/api/events")
        await response.content.readline()
        write_metrics(run, [{"step": 6, "reward/mean": 1}], "a")
        async with asyncio.timeout(10):
            while not (line := await response.content.readline()).startswith(b"data"):
                pass
        response.close()
        return line.decode()

    assert with_client(tmp_path, heard) == 'data: ["a"]\n'


def test_nothing_in_a_run_directory_changes(tmp_path: Path):
    write_run(tmp_path / "a")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    ask(tmp_path, "/", "/api/runs", "/api/metrics?run=a", "/api/curves?run=a")
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


# The command --------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_message(tmp_path: Path):
    async def both() -> None:
        async with TestServer(make_app(tmp_path), port=unused_port()) as first:
            port = first.port
            assert port is not None
            with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use.*--port {port + 1}"):
                await asyncio.to_thread(view, tmp_path, host="127.0.0.1", port=port, token=None)

    asyncio.run(both())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["view", "nowhere"], "FOLDER = nowhere is not there"),
        (["view"], "there is no folder runs here"),
        (["view", "a", "b"], "view takes one folder"),
        (["view", "--port", "99999"], "--port 99999 is no port"),
        (["check", "--port", "80"], "--port does nothing with 'check'"),
    ],
)
def test_mistakes_are_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == USER_ERROR
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_the_viewer_starts_without_torch():
    heavy = (
        "import sys, unirl.viewer.command; sys.exit(str(sorted({'torch', 'ray', 'transformers'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, timeout=600)
    assert done.stderr.strip() == "[]"


def test_help_is_of_view_alone(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["view", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "trainer view /mnt/shared/runs" in text and "--gpus" not in text
    assert all(option in text for option in ("FOLDER", "--host", "--port", "--token"))
