"""Trackers and image grids."""

import importlib
import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from rich.console import Console

from unirl.tracking import video
from unirl.tracking.console import ConsoleTracker, folded, reward_formula, sparkline
from unirl.tracking.jsonl import ALERTS, JsonlTracker, read_metrics
from unirl.tracking.media import GREEN, RED, answered, before_after, grid, marks
from unirl.tracking.media_files import write_medium
from unirl.tracking.swanlab import SwanLabTracker
from unirl.tracking.video import as_gif, strip, write_video
from unirl.tracking.wandb import WandbTracker
from unirl.types.errors import ContractError
from unirl.types.samples import Sound

CONFIG = {"recipe": "diffusion/test", "num_rollouts": 3}
RESUMED = {**CONFIG, "resume": "auto"}


def test_the_console_says_that_a_finished_run_has_nothing_to_do():
    console = Console(record=True, width=200)
    ConsoleTracker(console=console).start({"recipe": "a", "num_rollouts": 4}, Path("run"), 8)
    assert "nothing to do: 8 rollouts are done and num_rollouts is 4; set a larger one" in console.export_text()


def test_jsonl_writes_one_whole_line_a_step(tmp_path):
    tracker = JsonlTracker()
    tracker.start(CONFIG, tmp_path, 0)
    tracker.log({"reward/mean": 0.5, "train/loss": float("nan")}, 1)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "train/loss": "nan"}]
    tracker.finish({})


def test_jsonl_of_a_resumed_run_drops_what_the_checkpoint_does_not_know(tmp_path, caplog):
    tracker = JsonlTracker()
    tracker.start(CONFIG, tmp_path, 0)
    for step in range(4):
        tracker.log({"x": step}, step)
    tracker.finish({})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')  # cut short by a crash
    again = JsonlTracker()
    again.start(RESUMED, tmp_path, 2)
    assert 'metrics.jsonl: its last line was cut short by a crash and is left out: {"step": 4, "x"' in caplog.text
    again.log({"x": 30}, 3)
    again.finish({})
    assert [(line["step"], line["x"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 30),
    ]


def test_jsonl_of_a_run_stopped_before_its_first_rollout_keeps_the_evaluation_before_it(tmp_path):
    tracker = JsonlTracker()
    tracker.start(CONFIG, tmp_path, 0)
    tracker.log({"eval/reward": 0.5}, 0)
    tracker.finish({})
    again = JsonlTracker()
    again.start(RESUMED, tmp_path, 0)
    again.log({"x": 1}, 1)
    again.finish({})
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    anew = JsonlTracker()
    anew.start(CONFIG, tmp_path, 0)  # an attempt that came to no checkpoint counts for nothing
    anew.finish({})
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_alerts_of_a_resumed_run_are_those_before_its_checkpoint_and_its_own(tmp_path):
    tracker = JsonlTracker()
    tracker.start(CONFIG, tmp_path, 0)
    assert not (tmp_path / ALERTS).exists()
    for step in (1, 3):
        tracker.alert("zero_gradient", "no weight moves", step)
    again = JsonlTracker()
    again.start(RESUMED, tmp_path, 2)
    again.alert("penalty_share", "it is most of the loss", 3)
    assert [(line["step"], line["alarm"]) for line in read_metrics(tmp_path / ALERTS)] == [
        (1, "zero_gradient"),
        (3, "penalty_share"),
    ]
    JsonlTracker().start(CONFIG, tmp_path, 0)
    assert read_metrics(tmp_path / ALERTS) == []


def test_the_last_alarm_stays_in_sight_on_a_terminal(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    tracker = ConsoleTracker(console=console)
    tracker.start(CONFIG, tmp_path, 0)
    tracker.alert("zero_gradient", "no weight moves", 2)
    with console.capture() as capture:
        console.print(tracker._table())
    assert "zero_gradient at 2: no weight moves" in capture.get()
    tracker.close()


def test_a_run_that_fails_gives_the_terminal_back():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    tracker = ConsoleTracker(console=Console(file=stream, force_terminal=True, width=80))
    tracker.start(CONFIG, Path("run"), 0)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert hidden in stream.getvalue() and shown not in stream.getvalue()
    tracker.close()
    tracker.close()
    assert shown in stream.getvalue()


def test_jsonl_before_start_is_an_error():
    with pytest.raises(ContractError, match="before start"):
        JsonlTracker().log({}, 0)


def test_sparkline_scales_to_its_range_and_averages_into_bins():
    assert sparkline([0, 1, 2, 3], blocks="0123") == "0123"
    assert sparkline([0, 0, 3, 3], width=2, blocks="0123") == "03"
    assert sparkline([1, 1], blocks="0123") == "22"
    assert sparkline([float("nan")]) == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_console_shows_reward_evaluation_and_phases(tmp_path, is_terminal):
    rich_console = pytest.importorskip("rich.console")
    out = io.StringIO()
    tracker = ConsoleTracker(
        console=rich_console.Console(file=out, force_terminal=is_terminal, width=100, highlight=False)
    )
    tracker.start(CONFIG, tmp_path, 0)
    tracker.log({"eval/reward": 0.25}, 0)
    for step in range(1, 4):
        tracker.log({"reward/mean": step / 4, "train/loss": 1.0, "timing_s/rollout": 1.5}, step)
    tracker.image("eval", Image.new("RGB", (4, 4)), 3, [])
    tracker.finish({})
    text = out.getvalue()
    assert "diffusion/test" in text and "0.75" in text and "0.25" in text and "rollout" in text
    assert ("\x1b[" in text) == is_terminal


SCORER = {"_target_": "my_package.Scorer"}


@pytest.mark.parametrize(
    ("reward", "formula"),
    [
        ({"scorers": {"shapes": SCORER}}, "shapes"),
        ({"scorers": {"a": SCORER, "b": SCORER}, "weights": {"a": 1.0, "b": 0.1}}, "a + 0.1 * b"),
        ({"scorers": {"a": SCORER, "b": SCORER}, "weights": {"a": -2.0, "b": 0.0}}, "-2 * a; only reported: b"),
        ({"scorers": {"a": SCORER, "b": SCORER}, "aggregation": "weighted_mean"}, "(a + b) / 2"),
        ({"scorers": [SCORER, {**SCORER, "name": "mine"}]}, "Scorer + mine"),
    ],
)
def test_a_run_begins_with_the_reward_that_it_trains_on(tmp_path, reward, formula):
    assert reward_formula(reward) == formula
    out = io.StringIO()
    ConsoleTracker(console=Console(file=out, width=100)).start({**CONFIG, "reward": reward}, tmp_path, 0)
    assert f"reward: {formula}\n" in out.getvalue()


def test_plain_lines_are_folded_between_values():
    assert (
        folded("1/40  ", ["reward 1.5", "loss 0.25", "train 3.0s"], 28)
        == "1/40  reward 1.5  loss 0.25\n      train 3.0s"
    )
    assert (
        folded("1/40  ", ["a value that is wider than all of it"], 10) == "1/40  a value that is wider than all of it"
    )
    assert folded("1/40  ", [], 10) == "1/40  "


def test_tensorboard_writes_scalars_and_pictures_and_purges_on_resume(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    from unirl.tracking.tensorboard import FOLDER, TensorBoardTracker

    # TensorBoard reads files in the order of their names: second, process, and the process's count of writers, which
    # sorts as text ("10" before "9"). Four processes would have four seconds; here the count starts anew.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    # An attempt without a checkpoint, the run, stopped before its first rollout, and after its second.
    for number, (config, done) in enumerate([(CONFIG, 0), (CONFIG, 0), (RESUMED, 0), (RESUMED, 2)]):
        tracker = TensorBoardTracker()
        tracker.start(config, tmp_path, done)
        if config == CONFIG:
            tracker.log({"x": 10 * number}, 0)
        for step in range(done + 1, 4):
            tracker.log({"x": step + 10 * number}, step)
        tracker.image("eval", Image.new("RGB", (4, 4)), 3, [])
        tracker.finish({"num_rollouts": 3})
    events = EventAccumulator(str(tmp_path / FOLDER / "test"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(0, 10), (1, 21), (2, 22), (3, 33)]
    assert "eval" in events.Tags()["images"]


def test_tensorboard_plays_sounds(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from unirl.tracking.tensorboard import FOLDER, TensorBoardTracker

    heard = Sound(torch.linspace(-1, 1, 100), 8000)
    write_medium(heard, tmp_path, "a")
    tracker = TensorBoardTracker()
    tracker.start(CONFIG, tmp_path, 0)
    tracker.sound("rollout", [tmp_path / "a.wav"], 3, ["a cat: pass"])
    tracker.close()
    events = EventAccumulator(str(tmp_path / FOLDER / "test"))
    events.Reload()
    (event,) = events.Audio("rollout/0")
    assert (event.step, event.sample_rate, event.length_frames) == (3, 8000, 100)


def test_tensorboard_has_the_recipe_as_hyper_parameters_and_captions_in_a_run_of_its_name(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams import metadata

    from unirl.tracking.tensorboard import FOLDER, TensorBoardTracker

    recipe = {
        **CONFIG,
        "run_dir": "somewhere",
        "backend": {"optimizer": {"learning_rate": 3e-4, "betas": [0.9, 0.99]}, "lora": None},
        "data": {"shuffle": True},
        "save": {"best_metric": "strict"},
    }
    tracker = TensorBoardTracker()
    tracker.start(recipe, tmp_path, 0)
    tracker.image("rollout", Image.new("RGB", (4, 4)), 2, ["a cat: pass", "two\ndogs: fail"])
    tracker.alert("zero_gradient", "no weight moves", 2)
    tracker.finish({"num_rollouts": 3})
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / FOLDER)).Reload()
    assert list(runs.Runs()) == ["test"]

    content = runs.GetAccumulator("test").PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    kinds = {"number_value": lambda value: value.number_value, "string_value": lambda value: value.string_value}
    found = {key: kinds[value.WhichOneof("kind")](value) for key, value in start.hparams.items()}
    assert found == {
        "num_rollouts": 3,
        "backend.optimizer.learning_rate": 3e-4,
        "backend.optimizer.betas": "[0.9, 0.99]",
        "data.shuffle": "True",
        "save.best_metric": "strict",
    }
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    assert [each.name.tag for each in experiment.metric_infos] == ["reward/mean", "eval/reward", "eval/strict"]
    end = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    assert end.status == 1  # STATUS_SUCCESS

    (captions,) = runs.Tensors("test", "rollout/captions/text_summary")
    assert captions.step == 2
    (alert,) = runs.Tensors("test", "alerts/zero_gradient/text_summary")
    assert (alert.step, alert.tensor_proto.string_val) == (2, [b"no weight moves"])
    assert captions.tensor_proto.string_val == [b"1. a cat: pass\n2. two dogs: fail"]


@pytest.mark.parametrize(
    ("module", "class_name", "fix"),
    [
        ("wandb", "WandbTracker", r"unirl-train\[wandb\]"),
        ("swanlab", "SwanLabTracker", r"unirl-train\[swanlab\]"),
    ],
)
def test_optional_trackers_name_their_extra_and_log_through_their_library(
    tmp_path, monkeypatch, module, class_name, fix
):
    tracker_class = getattr(importlib.import_module(f"unirl.tracking.{module}"), class_name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=fix):
        tracker_class()
    calls = []

    class FakeRun:
        """Records what a run of either library is told."""

        def __init__(self):
            self.summary = {}

        def log(self, values, step):
            calls.append((sorted(values), step))

        def alert(self, title, text, level):
            calls.append((title, text, level))

        def finish(self, **how):
            calls.append("finished")

    def picture_of(picture, caption):
        calls.append(caption)
        return picture

    def init(**options):
        calls.append((options["project"], options["resume"]))
        return FakeRun()

    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(init=init, Image=picture_of, Text=str))
    tracker = tracker_class(project="p")
    tracker.start(CONFIG, tmp_path, 1)
    tracker.log({"x": 1.0}, 2)
    tracker.image("eval", Image.new("RGB", (4, 4)), 2, ["a cat"])
    tracker.alert("zero_gradient", "no weight moves", 2)
    tracker.finish({"wall_s": 1.0})
    alert = {
        "wandb": ("zero_gradient after rollout 2", "no weight moves", "WARN"),
        "swanlab": (["alerts/zero_gradient"], 2),
    }[module]
    assert calls == [("p", "allow"), (["x"], 2), "1. a cat", (["samples/eval"], 2), alert, "finished"]


def test_strips_are_enlarged_until_they_are_as_wide_as_a_cell_may_be():
    picture = grid(torch.ones(1, 3, 32, 5 * 32), columns=1)
    assert picture.size == (3 * 5 * 32 + 12, 3 * 32 + 12)


def test_grid_enlarges_small_images_and_leaves_room_for_captions():
    images = torch.rand(5, 3, 32, 32)
    plain, captioned = grid(images, columns=3), grid(images, ["a long caption " * 5] * 5, columns=3)
    assert plain.width == captioned.width == 3 * (160 + 12)
    assert captioned.height > plain.height


def test_grid_keeps_colours_and_order():
    images = torch.zeros(2, 3, 8, 8)
    images[0, 0] = 1.0
    images[1, 2] = 2.0  # clamped to 1
    picture = grid(images, columns=2, scale=1)
    assert picture.getpixel((10, 10)) == (255, 0, 0)
    assert picture.getpixel((8 + 12 + 10, 10)) == (0, 0, 255)


def test_before_and_after_stand_side_by_side():
    before, after = torch.zeros(1, 3, 160, 160), torch.ones(1, 3, 160, 160)
    picture = before_after(before, after, ["a cat"])
    assert picture.getpixel((80, 90)) == (0, 0, 0)
    assert picture.getpixel((160 + 80, 90)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(0, 3, 4, 4), None, "needs images"),
        (torch.zeros(2, 4, 4), None, "needs images"),
        (torch.zeros(2, 3, 4, 4), ["a"], "1 labels for 2 images"),
    ],
)
def test_grid_refuses_other_shapes(images, labels, message):
    with pytest.raises(ContractError, match=message):
        grid(images, labels)
    with pytest.raises(ContractError, match="one shape"):
        before_after(torch.zeros(1, 3, 4, 4), torch.zeros(2, 3, 4, 4), ["a"])


def test_metrics_lines_are_plain_json(tmp_path):
    tracker = JsonlTracker("m.jsonl")
    tracker.start(CONFIG, tmp_path, 0)
    tracker.log({"x": np.float64(1.5)}, 1)
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "x": 1.5}


def test_the_clock_on_a_terminal_runs_between_rollouts(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("unirl.tracking.console.time.perf_counter", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    tracker = ConsoleTracker(console=console)
    tracker.start({"recipe": "fake", "num_rollouts": 4}, tmp_path, 0)
    now[0] = 160.0
    tracker.log({"reward/mean": 0.5}, 1)

    def shown() -> str:
        with console.capture() as capture:
            console.print(tracker._table())
        return capture.get()

    assert "1 of 4   1:00, 3:00 left" in shown()
    now[0] = 190.0
    assert "1 of 4   1:30, 2:30 left" in shown()
    tracker.close()


def has_ink(picture, ink):
    """True if text of this colour is there: letters are antialiased, so a pixel may be paler."""
    distance = np.abs(np.array(picture).astype(int) - np.array(ink)).sum(-1)
    return bool((distance < 60).any())


def test_marks_say_pass_or_fail_only_where_the_metric_is_nothing_between():
    strict = [{"reward": 2.0, "strict": 1.0}, None, {"reward": 0.254, "strict": 0.0}]
    assert marks(strict, "strict") == [("pass, reward 2", True), ("no score", None), ("fail, reward 0.254", False)]
    assert marks(strict, "reward") == [("reward 2", None), ("no score", None), ("reward 0.254", None)]
    assert marks(strict, "absent") == marks(strict, "reward")
    soft = [{"reward": 1.0, "soft": 1.0}, {"reward": 0.5, "soft": 0.5}]
    assert marks(soft, "soft") == [("soft 1, reward 1", None), ("soft 0.5, reward 0.5", None)]
    assert marks([{"reward": 1.0}, {"reward": 0.0}], "reward") == [("pass, reward 1", True), ("fail, reward 0", False)]
    assert marks([None], "strict") == [("no score", None)]


def framed(picture, left, top):
    """The colour around the first 160 pixel image at this place, None where there is no frame."""
    line = {picture.getpixel((left - 2, y)) for y in (top, top + 80, top + 159)}
    assert len(line) == 1
    colour = line.pop()
    return None if colour == (255, 255, 255) else colour


def test_a_grid_frames_what_is_right_and_what_is_wrong():
    marked = [("pass, reward 2", True), ("fail, reward 0", False), ("no score", None)]
    picture = grid(torch.ones(3, 3, 32, 32) / 2, ["a", "b", "c"], columns=3, marked=marked)
    assert [framed(picture, 6 + column * 172, 6) for column in range(3)] == [GREEN, RED, None]
    assert has_ink(picture, GREEN) and has_ink(picture, RED)
    assert picture.getpixel((6 + 80, 6 + 80)) == (128, 128, 128)
    with pytest.raises(ContractError, match="1 marks for 3 images"):
        grid(torch.ones(3, 3, 8, 8), marked=marked[:1])


def test_a_pair_says_of_both_whether_they_are_right():
    images = torch.ones(1, 3, 160, 160) / 2
    picture = before_after(images, images, ["a cat"], marked=([("fail, reward 0", False)], [("pass, reward 2", True)]))
    top = 6 + 15
    assert [framed(picture, left, top) for left in (6, 6 + 160 + 8)] == [RED, GREEN]


def test_what_prompts_show_stands_left_of_what_was_made_without_a_frame():
    red = torch.zeros(3, 32, 32)
    red[0] = 1
    wide = torch.ones(3, 16, 32)
    made = torch.ones(2, 3, 32, 32) / 2
    marked = [("pass, reward 2", True), ("fail, reward 0", False)]
    step, top = 160 + 8, 6 + 15  # a title above the first row
    picture = grid(made, ["a", "b"], columns=2, marked=marked, given=[[red], [red, wide]])
    assert picture.width == 2 * (2 * step + 160 + 12)
    for left, inks in ((6, [(255, 0, 0), (255, 255, 255)]), (6 + 2 * step + 160 + 12, [(255, 0, 0)] * 2)):
        assert picture.getpixel((left + 80, top + 80)) == inks[0]
        assert picture.getpixel((left + 2 * step + 80, top + 80)) == (128, 128, 128)
        assert [framed(picture, left + place * step, top) for place in (0, 1)] == [None, None]
    assert [framed(picture, 6 + 2 * step + cell * (2 * step + 172), top) for cell in (0, 1)] == [GREEN, RED]

    pairs = before_after(made, made, ["a", "b"], columns=1, marked=(marked, marked[::-1]), given=[[red], [red]])
    assert pairs.width == 2 * step + 160 + 12
    assert pairs.getpixel((6 + 80, top + 80)) == (255, 0, 0)
    assert [framed(pairs, 6 + place * step, top) for place in (0, 1, 2)] == [None, GREEN, RED]
    assert before_after(made, made, ["a", "b"], columns=1, given=[[], []]).width == 160 + 3 + 160 + 12
    with pytest.raises(ContractError, match="given images of 1 prompts for 2 samples"):
        grid(made, given=[[red]])


def test_answers_stand_in_their_colour_below_pictures_of_any_number_and_size():
    small, wide = torch.zeros(3, 20, 20), torch.ones(3, 50, 900)
    wide[1:] = 0
    picture = answered(
        [[small, wide], [small], []], ["a", "b", "c"], [("green", True), ("rather red", False), ("3", None)]
    )
    assert all(has_ink(picture, ink) for ink in (GREEN, RED, (0, 0, 0), (255, 0, 0)))
    assert picture.width == 3 * (2 * 160 + 3 + 12)
    narrow = answered([[small], [small], []], ["a", "b", "c"], [("1", None)] * 3, columns=1)
    assert not has_ink(narrow, GREEN) and not has_ink(narrow, RED) and narrow.width == 160 + 12


def test_a_long_question_leaves_room_for_its_answer():
    short, long = (
        answered([[torch.zeros(3, 8, 8)]], [question], [("7: wrong, 8", False)]) for question in ("a", "a b c d " * 99)
    )
    assert has_ink(short, RED) and has_ink(long, RED) and 0 < long.height - short.height < 40


def test_answers_without_their_questions_are_refused():
    with pytest.raises(ContractError, match="1 samples, 0 questions and 1 verdicts"):
        answered([[]], [], [("1", None)])


def test_a_strip_shows_first_to_last_and_a_short_video_fills_it():
    frames = torch.arange(11.0).view(11, 1, 1, 1).expand(11, 3, 2, 4) / 10
    assert strip(frames, 3)[0, 0].tolist() == [0.0] * 4 + [0.5] * 4 + [1.0] * 4
    assert strip(frames[:1], 3).shape == (3, 2, 12)
    with pytest.raises(ContractError, match=r"frames \[F, 3, H, W\] with F > 0"):
        strip(frames[:0])


def test_without_an_encoder_a_video_is_a_gif(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "_av", lambda: None)
    frames = torch.linspace(0, 1, 4)[:, None, None, None].expand(4, 3, 6, 8)
    path = video.write_video(tmp_path, "rollout", frames, 5.0)
    with Image.open(path) as opened:
        num_frames = sum(1 for _ in ImageSequence.Iterator(opened))
        assert (path.name, num_frames, opened.size, opened.info["duration"]) == ("rollout.gif", 4, (8, 6), 200)


@pytest.mark.parametrize(("module", "name"), [("mlflow", "MlflowTracker"), ("trackio", "TrackioTracker")])
def test_a_tracker_without_its_library_names_the_extra(monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"unirl-train\[{module}\]"):
        getattr(importlib.import_module(f"unirl.tracking.{module}"), name)()


def test_a_video_becomes_a_gif_with_its_frames(tmp_path):
    frames = torch.zeros(3, 3, 16, 16)
    frames[1] = 1
    file = write_video(tmp_path, "a", frames, fps=4)
    gif = as_gif(file, tmp_path)
    with Image.open(gif) as opened:
        assert (len(list(ImageSequence.Iterator(opened))), opened.info["duration"]) == (3, 250)
    assert as_gif(gif, tmp_path) == gif


@pytest.mark.parametrize("module", ["wandb", "swanlab"])
def test_videos_and_sounds_reach_the_services_as_files(tmp_path, monkeypatch, module):
    logged = []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    fake = types.SimpleNamespace(init=lambda **_: run, Video=lambda file, caption: (file, caption))
    fake.Audio = fake.Video
    monkeypatch.setattr("unirl.tracking.swanlab.as_gif", lambda file, folder: file)
    monkeypatch.setitem(sys.modules, module, fake)
    tracker = WandbTracker() if module == "wandb" else SwanLabTracker()
    tracker.start({"recipe": "a"}, tmp_path, 0)
    tracker.video("eval", [tmp_path / "a.mp4"], 3, ["a cat: pass"])
    tracker.sound("eval", [tmp_path / "a.wav"], 3, ["a cat: pass"])
    assert logged == [
        ({"samples/eval/video": [(str(tmp_path / "a.mp4"), "a cat: pass")]}, 3),
        ({"samples/eval/sound": [(str(tmp_path / "a.wav"), "a cat: pass")]}, 3),
    ]
