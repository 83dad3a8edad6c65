"""What `trainer view` says of single runs: samples, groups, timeline, recipe, log, checkpoints."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer

from unirl.tracking import sample_files
from unirl.tracking.sample_files import SampleFiles
from unirl.types.samples import Image, SampleRecord, Text
from unirl.viewer import gallery
from unirl.viewer.gallery import SampleIndex, updates_per_rollout
from unirl.viewer.run_files import RunFolder
from unirl.viewer.server import make_app
from unirl.viewer.spans import TimelineFile

HOSTILE = "<img src=x onerror=alert(1)>\u2028</script>"


def ask(folder: Path, path: str, **params: Any) -> tuple[int, Any]:
    """Status and JSON, or the body."""

    async def asked() -> tuple[int, Any]:
        async with TestClient(TestServer(make_app(folder))) as client:
            response = await client.get(path, params={name: str(value) for name, value in params.items()})
            body = await response.read()
            return response.status, json.loads(body) if response.content_type.endswith("json") else body

    return asyncio.run(asked())


def record(name: str, **fields: Any) -> SampleRecord:
    usual: dict[str, Any] = {"sample_id": name, "track": "image", "group_id": "g", "prompt_id": "p", "prompt": "a cat"}
    usual["media"] = Image(torch.zeros(3, 4, 4, dtype=torch.uint8))
    return SampleRecord(**{**usual, **fields})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two optimizer steps per rollout with one evaluation, and rollouts 1 and 3 of two groups each."""
    run = tmp_path / "runs" / "a"
    (run / "samples").mkdir(parents=True)
    (run / "config.yaml").write_text(
        "recipe: worlds/a\nseed: 1\nstack:\n  num_updates_per_batch: 2\n", encoding="utf-8"
    )
    files = SampleFiles(run / "samples")
    files.write("eval", 0, [record("e0", group_size=1, group_reward_std=0.0, scores={"reward": 0.5})])
    for step, version in ((1, 0), (3, 2)):
        own = [
            record(
                f"{group}{number}",
                group_id=group,
                prompt_id=group,
                prompt=HOSTILE if group == "same" else "a dog",
                group_size=2,
                group_reward_std=0.0 if group == "same" else 0.5,
                scores={"reward": 1.0 if group == "same" else number, "size": step * 10 + number},
                advantage=float("nan") if group == "same" else number - 0.5,
                policy_version=version,
                metadata={"answer": "x" * 10},
            )
            for group in ("same", "differ")
            for number in range(2)
        ]
        files.write("rollout", step, own)
    return run


def test_samples_are_sorted_over_all_steps_and_those_without_the_value_come_last(run: Path):
    _, found = ask(run, "/api/samples", run=".", sort="advantage", kind="rollout")
    assert [sample["advantage"] for sample in found["samples"]][:4] == [0.5, 0.5, -0.5, -0.5]
    assert found["total"] == 8 and [sample["advantage"] for sample in found["samples"]][4:] == ["nan"] * 4
    _, found = ask(run, "/api/samples", run=".", sort="size", down=0, count=1)
    assert found["samples"][0]["scores"]["size"] == 10
    _, found = ask(run, "/api/samples", run=".", sort="staleness", count=1)
    assert (found["samples"][0]["step"], found["samples"][0]["staleness"]) == (3, 1)


def test_samples_are_found_by_step_prompt_and_words_page_by_page(run: Path):
    _, found = ask(run, "/api/samples", run=".", step=3, find="dog", first=1, count=1)
    assert found["total"] == 2 and [sample["sample_id"] for sample in found["samples"]] == ["differ1"]
    _, found = ask(run, "/api/samples", run=".", prompt="same", down=0)
    assert [sample["step"] for sample in found["samples"]] == [1, 1, 3, 3]
    assert "metadata" not in found["samples"][0]
    _, facts = ask(run, "/api/steps", run=".")
    assert facts["steps"] == {"rollout": [1, 3], "eval": [0]} and facts["scores"] == ["reward", "size"]


def test_one_sample_is_whole(run: Path):
    _, found = ask(run, "/api/samples", run=".", step=3, find="dog")
    _, whole = ask(run, "/api/sample", run=".", kind="rollout", step=3, offset=found["samples"][0]["offset"])
    assert whole["sample"]["metadata"] == {"answer": "x" * 10} and whole["parent"] is None
    assert ask(run, "/api/sample", run=".", step=3, offset=1)[0] == 404


def test_a_sample_comes_with_what_it_grew_from(run: Path):
    text = record("t", track="text", media=Text("y" * 5000, 3))
    image = record("t/i", parent_id="t", parent_track="text", drawn_from="y" * 5000)
    SampleFiles(run / "samples").write("rollout", 4, [text, image])
    _, found = ask(run, "/api/samples", run=".", step=4, track="image")
    assert len(found["samples"][0]["drawn_from"]) < 1000
    _, whole = ask(run, "/api/sample", run=".", step=4, kind="rollout", offset=found["samples"][0]["offset"])
    assert whole["parent"]["media"]["text"] == whole["sample"]["drawn_from"] == "y" * 5000


def test_degenerate_groups_are_those_of_several_samples_with_one_reward(run: Path):
    _, found = ask(run, "/api/groups", run=".")
    marked = {(row["kind"], row["step"], row["group_id"]): row["is_degenerate"] for row in found["groups"]}
    assert marked == {
        ("rollout", 3, "same"): True,
        ("rollout", 3, "differ"): False,
        ("rollout", 1, "same"): True,
        ("rollout", 1, "differ"): False,
        ("eval", 0, "g"): False,
    }
    assert found["degenerate"] == 2 and len(found["groups"][0]["samples"]) == 2
    by_step = {step: [row["mean"] for row in found["groups"] if row["step"] == step] for step in (1, 3)}
    assert found["curve"] == {
        "steps": [1, 3],
        "mean": pytest.approx([sum(means) / len(means) for means in by_step.values()]),
        "low": [min(means) for means in by_step.values()],
        "high": [max(means) for means in by_step.values()],
    }
    assert ask(run, "/api/groups", run=".", degenerate=1)[1]["total"] == 2


def test_media_are_served_and_nothing_else(run: Path):
    (run / "samples" / "rollout-000001" / "page.html").write_text("<script>", encoding="utf-8")
    (run.parent / "secret.png").write_text("secret", encoding="utf-8")
    (run / "secret.png").write_text("secret", encoding="utf-8")
    (run / "samples" / "link.png").symlink_to(run.parent / "secret.png")
    assert ask(run, "/media", run=".", file="rollout-000001/image-0000.png")[1].startswith(b"\x89PNG")
    wrong = ("rollout-000001/page.html", "../secret.png", "../../secret.png", "link.png", "/etc/passwd", "no.png", "..")
    assert [ask(run, "/media", run=".", file=name)[0] for name in wrong] == [400, 404, 404, 404, 404, 404, 404]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"version": 2, "sample_id": "a", "track": "t", "group_id": "g", "prompt_id": "p"}\n', "has version 2"),
        ('{"version": 1}\n', "is no record of a sample"),
        ("no JSON\n", "is no record of a sample"),
        ('{"version": 1, "samp', "is cut off"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message_and_the_others_are_shown(run: Path, line: str, message: str):
    (run / "samples" / "rollout-000002.jsonl").write_text(line, encoding="utf-8")
    status, found = ask(run, "/api/samples", run=".")
    assert status == 200 and found["total"] == 9
    assert len(found["problems"]) == 1 and message in found["problems"][0]


def test_a_step_that_a_resumed_run_wrote_anew_is_read_anew(run: Path):
    index = SampleIndex(RunFolder(".", run))
    assert len(index.entries(index.files("rollout"))[0]) == 8
    SampleFiles(run / "samples").write("rollout", 3, [record("new")])
    assert [entry.sample_id for entry in index.entries(index.files("rollout"))[0]][:1] == ["new"]


def test_the_version_is_the_one_that_is_written():
    assert gallery.VERSION == sample_files.VERSION


def test_more_samples_than_can_be_sorted_are_left_out_from_the_oldest(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gallery, "MAX_RECORDS", 4)
    _, found = ask(run, "/api/samples", run=".", sort="reward")
    assert found["total"] == 4 and found["files_left_out"] == 2
    assert {sample["step"] for sample in found["samples"]} == {3}
    assert ask(run, "/api/samples", run=".", step=1)[1]["total"] == 4


# Timeline -----------------------------------------------------------------------------------------------------------


def span(lane: str, what: str, begin: float, end: float, step: int = 1, **more: int) -> str:
    return json.dumps({"step": step, "lane": lane, "what": what, "begin": begin, "end": end, **more}) + "\n"


def test_a_window_has_what_overlaps_it_and_how_busy_each_lane_was(tmp_path: Path):
    lines = [
        span("rollout-0", "engine.generate", 100, 104),
        span("engine", "rollout", 100, 104, rollout=0, request=1, version=0),
        span("learner", "train", 104, 110),
        span("learner", "sync", 109, 112),
    ]
    (tmp_path / "timeline.jsonl").write_text("".join(lines) + '{"step": 1, "lane', encoding="utf-8")
    file = TimelineFile(tmp_path / "timeline.jsonl")
    file.refresh()
    found = file.window(2, 12)
    assert [lane["name"] for lane in found["lanes"]] == ["engine", "learner", "rollout-0"]
    assert [lane["busy"] for lane in found["lanes"]] == pytest.approx([0.2, 0.8, 0.2])
    assert found["spans"][1] == ["engine", "rollout", 0, 4, 0, 1, 0]
    assert len(file.window(5, 6)["spans"]) == 1
    with (tmp_path / "timeline.jsonl").open("a", encoding="utf-8") as out:
        out.write('": "reward", "what": "reward", "begin": 112, "end": 113}\n')
    file.refresh()
    assert file.window(None, None)["to"] == 13


def test_of_too_many_spans_the_longest_stay(tmp_path: Path):
    lines = [span("learner", "train", at, at + (0.9 if at % 100 else 0.1)) for at in range(5000)]
    (tmp_path / "timeline.jsonl").write_text("".join(lines), encoding="utf-8")
    file = TimelineFile(tmp_path / "timeline.jsonl")
    file.refresh()
    found = file.window(0, 5000)
    assert found["num_left_out"] == 1000 and min(one[3] - one[2] for one in found["spans"]) > 0.5


# Details ------------------------------------------------------------------------------------------------------------


def test_recipes_are_compared_key_by_key(run: Path):
    other = run.parent / "b"
    other.mkdir()
    (other / "config.yaml").write_text("recipe: worlds/a\nseed: 2\n", encoding="utf-8")

    async def asked() -> Any:
        async with TestClient(TestServer(make_app(run.parent))) as client:
            return await (await client.get("/api/recipes?run=a&run=b")).json()

    rows = {row["key"]: row for row in asyncio.run(asked())["rows"]}
    assert {key for key, row in rows.items() if row["differs"]} == {"seed", "stack.num_updates_per_batch"}
    assert rows["stack.num_updates_per_batch"]["values"] == ["2", None]


def test_commands_of_checkpoints_are_those_of_the_command_line(run: Path):
    for step in (2, 10):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (run / "checkpoints" / "step-000012.tmp-1").mkdir()
    (run / "checkpoints" / "best.json").write_text('{"step": 2, "score": 0.5}', encoding="utf-8")
    _, found = ask(run, "/api/checkpoints", run=".")
    assert [(each["step"], each["is_newest"], each["is_best"]) for each in found["checkpoints"]] == [
        (10, True, False),
        (2, False, True),
    ]
    assert found["checkpoints"][1]["commands"] == [
        ["evaluate", f"uv run trainer eval {run} --checkpoint 2"],
        ["export", f"uv run trainer export {run} --checkpoint 2 --to exported --merged"],
    ]
    assert found["continue"] == f"uv run trainer {run} resume=auto"


def test_log_and_alarms_are_read_as_far_as_they_are_whole(run: Path):
    (run / "alerts.jsonl").write_text('{"step": 1, "alarm": "a", "text": "b"}\n{"step": 2, "al', encoding="utf-8")
    (run / "run.log").write_text("x" * 300_000 + "end", encoding="utf-8")
    assert ask(run, "/api/alerts", run=".")[1] == [{"step": 1, "alarm": "a", "text": "b"}]
    _, log = ask(run, "/api/log", run=".")
    assert log["is_cut"] and log["text"].endswith("end") and len(log["text"]) == 256 << 10
    (run / "run.log").unlink()
    assert ask(run, "/api/log", run=".")[1]["file"] is None


def test_a_recipe_that_is_no_yaml_leaves_the_rest_of_the_run(run: Path):
    (run / "config.yaml").write_text("a: [", encoding="utf-8")
    assert ask(run, "/api/recipes", run=".")[1]["rows"] == []
    assert ask(run, "/api/samples", run=".")[1]["total"] == 9
    assert [row["name"] for row in ask(run, "/api/runs")[1]["runs"]] == ["."]


def test_looking_at_samples_changes_nothing(run: Path):
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    for name in ("steps", "samples", "groups", "timeline", "recipes", "alerts", "log", "checkpoints"):
        assert ask(run, f"/api/{name}", run=".")[0] == 200
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_sample_comes_with_its_trace_where_there_is_one(run: Path):
    (run / "samples" / "rollout-000003" / "traces.jsonl").write_text(
        '{"version": 1, "kind": "steps", "sample_id": "same0"}\n{"version": 1, "sample_id": "diff', encoding="utf-8"
    )
    _, found = ask(run, "/api/samples", run=".", step=3)
    traces = {}
    for sample in found["samples"]:
        status, whole = ask(run, "/api/sample", run=".", kind="rollout", step=3, offset=sample["offset"])
        assert status == 200
        traces[sample["sample_id"]] = whole["trace"]
    assert traces.pop("same0")["kind"] == "steps" and set(traces.values()) == {None}


def test_versions_count_the_updates_of_all_epochs():
    assert updates_per_rollout({"stack": {"num_updates_per_batch": 2, "num_epochs": 3}}) == 6
    assert updates_per_rollout({"policies": {"a": {"stack": {"num_updates_per_batch": 4}}, "b": {}}}) == 4
    assert updates_per_rollout({"stack": {"num_epochs": "${x}"}}) == 1
