"""The command itself: verbs, run directories, signals, the end screen, and the wheel."""

import datetime
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from unirl.app import environment, recipe, stopping
from unirl.app.command_line import Command, parse
from unirl.app.kept_recipes import KeptRecipes
from unirl.app.main import USER_ERROR, main
from unirl.app.report import After, final_screen, next_steps
from unirl.app.run_directory import choose_run_dir, make_run_dir
from unirl.app.stopping import stop_on_signals
from unirl.config.catalog import available
from unirl.config.recipes import compose, resolve
from unirl.reward.catalog import CATALOG
from unirl.train.backend.manifest import write_manifest
from unirl.trainer import commands
from unirl.trainer.held_out import EvaluationResult
from unirl.types import devices
from unirl.types.device_kinds import KINDS
from unirl.types.errors import ConfigError, ContractError, TrainingError
from unirl.types.samples import Image, SampleRecord
from unirl.types.weights import LostUpdate

SHAPES = "worlds/shapes/nft"
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5)
SUMMARY = {
    "recipe": SHAPES,
    "is_complete": True,
    "num_rollouts": 3,
    "num_samples": 12,
    "wall_s": 4.2,
    "settings": {"best_metric": "strict"},
    "eval_before": {"overall": {"reward": 0.5, "strict": 0.25}, "categories": {"one": {"reward": 0.5, "strict": 0.25}}},
    "eval_after": {"overall": {"reward": 0.9, "strict": 0.75}, "categories": {"one": {"reward": 0.9, "strict": 0.75}}},
    "run_dir": "runs/x",
}


@pytest.fixture(autouse=True)
def own_logging():
    """The command sets up logging for its process; here it is one test of many."""
    root, ours = logging.getLogger(), logging.getLogger("unirl")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a model folder and prompts, chosen by the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TQDM_DISABLE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    monkeypatch.setenv("PRETRAINED_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "prompts.txt"))
    monkeypatch.setenv("EVAL_DATA_PATH", str(tmp_path / "prompts.txt"))
    return tmp_path


@pytest.fixture
def fake_run(monkeypatch):
    """Stands for training: records what it was given."""
    calls = []

    def run_recipe(run, run_dir, trackers, stop, *, published):
        calls.append((run.resolved, run_dir, trackers, stop))
        return {**SUMMARY, "run_dir": str(run_dir)}

    monkeypatch.setattr(commands, "run_recipe", run_recipe)
    return calls


def test_words_become_a_verb_a_recipe_and_changes():
    assert parse([]) == Command("run", SHAPES)
    assert parse(["seed=1", "sd3/nft", "~eval"]) == Command("run", "sd3/nft", ("seed=1", "~eval"))
    assert parse(["show", "--resolve"]) == Command("show", SHAPES, (), {"resolve": True})
    assert parse(["--config-name=a/b", "--cfg", "job", "--resolve"]) == Command("show", "a/b", (), {"resolve": True})
    assert parse(["bench", "--warmup", "0", "--debug"]) == Command("bench", SHAPES, (), {"warmup": 0}, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a", "b"], "more than one recipe: a, b"),
        (["list", "reward"], "list takes one of recipes, worlds, algorithms, rewards, not 'reward'"),
        (["check", "--to", "x"], "--to does nothing with 'check'; it is for: export"),
        (["--resolve"], "--resolve does nothing with 'run'"),
        (["check", "--cfg", "job"], "--cfg shows the recipe instead of running it"),
        (["export", "worlds/shapes/nft"], "export needs --to FOLDER"),
        (["shapes/nfd"], "unknown recipe 'shapes/nfd'. Did you mean worlds/shapes/nft"),
        (["chek", "worlds/shapes/nft"], "unknown verb 'chek'. Did you mean check? The verbs: run, list, show, check"),
        (["exprt"], "unknown verb 'exprt'. Did you mean export?"),
        (["check", "num_rollout=3"], "unknown key 'num_rollout'"),
        (["--batch_size=4"], "no option --batch_size. Values of a recipe are key=value without dashes: batch_size=4."),
        (["check", "--sampling.eta", "0"], "without dashes: sampling.eta=VALUE."),
        (["check", "--strct"], "Or did you mean --strict?"),
    ],
)
def test_a_user_error_is_one_message_without_traceback(argv, message, capsys):
    assert main(argv) == USER_ERROR
    err = capsys.readouterr().err
    assert err.startswith("ConfigError: ") and message in err and "Traceback" not in err


def test_debug_adds_the_traceback(capsys):
    assert main(["sd3_shape", "--debug"]) == USER_ERROR
    assert "Traceback" in capsys.readouterr().err


def test_list_names_every_recipe_with_what_it_is(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} " in out for name in available())
    assert "Dr. GRPO on arithmetic" in out  # no sentence ends there
    (animate,) = [line for line in out.splitlines() if line.startswith("wan22/animate ")]
    assert animate.endswith("PickScore and steadiness of frames.")


def test_list_rewards_says_what_each_scorer_takes_gives_and_needs(capsys):
    assert main(["list", "rewards"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "input", "range", "and", "scale", "extra", "source"]
    assert {line.split()[0] for line in lines[1:]} == set(CATALOG)
    (pickscore,) = [line for line in lines if line.startswith("pickscore ")]
    for cell in ("image + prompt", "x / 26, on by default", " clip ", "arXiv 2305.01569"):
        assert cell in pickscore


def test_list_worlds_says_what_each_trains_and_with_which_recipes(capsys):
    assert main(["list", "worlds"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["world", "model", "recipes", "what", "it", "is"]
    worlds = {name.split("/")[1] for name in available() if name.startswith("worlds/")}
    assert {line.split()[0] for line in lines} == worlds
    (shapes,) = [line for line in lines if line.startswith("shapes ")]
    count = sum(name.startswith("worlds/shapes/") for name in available())
    for cell in ("flux2_klein, sd3 ", f" {SHAPES}, ", f" and {count - 2} more ", "  The shapes world: "):
        assert cell in shapes
    assert all(len(line.split("  ")[-1]) > 20 for line in lines)


def test_list_algorithms_has_every_class_that_a_recipe_trains_with(capsys):
    assert main(["list", "algorithms"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["algorithm", "recipes", "what", "it", "is"]
    listed = {line.split()[0] for line in lines}
    assert {"DiffusionNFT", "DiffusionGRPO", "DPOK", "ARGRPO", "ARPPO", "SRPO", "WeightedMatching"} <= listed
    assert not listed & {"StageAlgorithm", "TokenAlgorithm", "NoiseCredit", "AdvantageConfig"}
    (nft,) = [line for line in lines if line.startswith("DiffusionNFT ")]
    assert " worlds/edits/nft, " in nft and "DiffusionNFT: reinforcement on the forward process." in nft


@pytest.mark.parametrize("name", [SHAPES, "worlds/shapes/dpo", "worlds/shapes/drtune", "sd3/ppo"])
def test_what_show_writes_runs_by_path_and_shows_itself(name, tmp_path, capsys):
    assert main(["show", name, "seed=5"]) == 0
    shown = capsys.readouterr().out
    path = tmp_path / "shown.yaml"
    path.write_text(shown)
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == shown
    assert resolve(compose(str(path))) == resolve(compose(name, ["seed=5"]))


def test_show_keeps_files_of_the_package_portable_and_resolves_on_demand(capsys):
    main(["show"])
    assert "${shapes:checkpoint}" in capsys.readouterr().out
    main(["show", "--resolve"])
    resolved = capsys.readouterr().out
    assert "${" not in resolved and str(Path(environment.packaged_path("shapes", "checkpoint"))) in resolved


def test_check_notes_what_this_machine_lacks_and_strict_makes_it_an_error(capsys, monkeypatch):
    monkeypatch.delenv("DATA_PATH", raising=False)
    assert main(["check", "sd3/nft", "data.path=nowhere.txt"]) == 0
    out = capsys.readouterr().out
    assert "sd3/nft: ok" in out and "not on this machine yet: data.path = nowhere.txt" in out
    assert main(["check", "sd3/nft", "data.path=nowhere.txt", "--strict"]) == USER_ERROR


@pytest.mark.parametrize("key", ["data.path", "eval.prompts"])
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.jsonl", b'{"prompt": "a red circle"}\n{"prompt": \n', "rows.jsonl:2: not JSON"),
        ("rows.csv", b"text\na red circle\n", "neither `prompt` nor `caption`"),
        ("rows.txt", b"\xff\xfe", "not UTF-8"),
        ("rows.txt", b"", "is empty"),
        ("rows.xml", b"<a/>", "unknown format '.xml'"),
        ("rows.txt", b"a purple dragon\n", "cannot judge 1 of 1 prompts"),
    ],
)
def test_check_refuses_a_data_file_that_is_here_and_wrong(key, name, content, reason, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    assert main(["check", SHAPES, f"{key}={tmp_path / name}"]) == USER_ERROR
    out, err = capsys.readouterr()
    assert key in err and reason in err and "ok" not in out


@pytest.mark.parametrize("key", ["data.path", "eval.prompts"])
def test_check_refuses_a_folder_that_is_no_data_set(key, tmp_path, capsys):
    assert main(["check", SHAPES, f"{key}={tmp_path}"]) == USER_ERROR
    assert "not a Hugging Face dataset folder" in capsys.readouterr().err


@pytest.mark.matrix
def test_check_all_with_values(capsys):
    assert main(["check", "--all", "--values"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: ok" in out for name in available())


def test_run_writes_its_recipe_and_hands_over_trackers(here, fake_run, capsys):
    assert main(["num_rollouts=3", "trackers.tensorboard.enabled=false"]) == 0
    recipe, run_dir, trackers, stop = fake_run[0]
    assert run_dir.parent == Path("runs") / SHAPES and (run_dir / "samples").is_dir()
    assert [type(tracker).__name__ for tracker in trackers] == ["ConsoleTracker", "JsonlTracker"]
    assert recipe["num_rollouts"] == 3 and recipe["resume"] is None and recipe["device"] == "cpu"
    assert not stop.is_set()
    kept = resolve(compose(str(run_dir / "config.yaml")))
    assert kept["run_dir"] is None and kept["num_rollouts"] == 3
    assert "finished" in capsys.readouterr().out


def test_the_log_of_a_run_ends_with_what_ended_it(tmp_path: Path):
    for text in ("one", "two"):
        with pytest.raises(TrainingError), environment.logging_to(tmp_path / "run.log"):
            logging.getLogger("unirl.test").warning(text)
            raise TrainingError("it failed")
    logging.getLogger("unirl.test").warning("three")
    lines = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    said = ["WARNING one", "ERROR TrainingError: it failed", "WARNING two", "ERROR TrainingError: it failed"]
    assert [line.split(" ", 2)[2] for line in lines] == said


def test_run_by_its_module_name(here, fake_run):
    from unirl import train_diffusion

    assert train_diffusion.main(["--config-name=worlds/shapes/mixgrpo"]) == 0
    assert fake_run[0][0]["recipe"] == "worlds/shapes/mixgrpo"


def test_a_failure_on_purpose_is_one_message_and_trackers_are_closed(here, monkeypatch, capsys):
    given = []

    def fails(run, run_dir, trackers, stop, *, published):
        given.extend(trackers)
        trackers[1].start(run.resolved, run_dir, 0)
        raise TrainingError("stopped after rollout 3")

    monkeypatch.setattr(commands, "run_recipe", fails)
    assert main([]) == USER_ERROR
    with pytest.raises(ContractError, match="before start"):
        given[1].log({}, 1)
    assert capsys.readouterr().err.strip().endswith("TrainingError: stopped after rollout 3")


def test_a_full_disk_is_said_before_the_librarys_error(here, monkeypatch, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")

    def logs(run, run_dir, trackers, stop, *, published):
        trackers[-1].start(run.resolved, run_dir, 0)
        trackers[-1].log({"x": 1.0}, 1)

    monkeypatch.setattr(commands, "run_recipe", logs)
    assert main(["trackers.jsonl.file_name=/dev/full", "trackers.tensorboard.enabled=false"]) == USER_ERROR
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-2].startswith("The disk is full. Make room") and "resume=auto" in lines[-2]
    assert lines[-1] == "OSError: [Errno 28] No space left on device"


def with_checkpoint(folder):
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    return folder


def test_a_new_run_gets_a_directory_by_recipe_and_time(here):
    recipe = {"recipe": SHAPES, "run_dir": None, "resume": None}
    first, is_resumed = choose_run_dir(recipe, NOW)
    assert (first, is_resumed) == (Path("runs") / SHAPES / "20260102-030405", False)
    make_run_dir(first)
    assert choose_run_dir(recipe, NOW)[0].name == "20260102-030405-2"


def test_resume_finds_the_newest_run_with_a_checkpoint_or_starts_anew(here):
    recipe = {"recipe": SHAPES, "run_dir": None, "resume": "auto"}
    assert choose_run_dir(recipe, NOW) == (Path("runs") / SHAPES / "20260102-030405", False)
    with_checkpoint(Path("runs") / SHAPES / "20250101-000000")
    newest = with_checkpoint(Path("runs") / SHAPES / "20250601-000000")
    make_run_dir(Path("runs") / SHAPES / "20250701-000000")
    assert choose_run_dir(recipe, NOW) == (newest, True)
    assert choose_run_dir({**recipe, "run_dir": "other"}, NOW) == (Path("other"), False)
    assert choose_run_dir({**recipe, "resume": str(newest)}, NOW) == (newest, True)


def test_resume_finds_a_run_of_the_recipe_under_its_old_name(here):
    recipe = {"recipe": SHAPES, "run_dir": None, "resume": "auto"}
    with_checkpoint(Path("runs/diffusion/sd3_shapes_awm/20260101-000000"))
    with_checkpoint(Path("runs") / SHAPES / "20250601-000000")
    before = with_checkpoint(Path("runs/diffusion/sd3_shapes/20250701-000000"))
    assert choose_run_dir(recipe, NOW) == (before, True)
    newest = with_checkpoint(Path("runs") / SHAPES / "20250801-000000")
    assert choose_run_dir(recipe, NOW) == (newest, True)


def test_what_a_killed_run_left_unfinished_is_no_checkpoint(here):
    (Path("cut") / "checkpoints" / "step-000001.tmp-0a1b2c3d").mkdir(parents=True)
    assert choose_run_dir({"recipe": SHAPES, "run_dir": "cut", "resume": "auto"}, NOW) == (Path("cut"), False)


def test_a_scorer_beside_the_recipe_is_found(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("my_scorers_here.py").write_text("class Brightness:\n    def __init__(self, *, power: float = 1.0): ...\n")
    change = "+reward.scorers.mine={_target_:my_scorers_here.Brightness,power:2.0}"
    assert main(["check", change]) == 0
    assert main(["check", change.replace("power", "powr")]) == USER_ERROR
    assert "has no argument 'powr'. Did you mean power" in capsys.readouterr().err


def test_a_run_that_failed_to_start_leaves_its_directory_free(here):
    recipe = {"recipe": SHAPES, "run_dir": "again", "resume": None}
    make_run_dir(Path("again"))
    Path("again/config.yaml").write_text("recipe: shapes\n")
    assert choose_run_dir(recipe, NOW) == (Path("again"), False)
    Path("again/metrics.jsonl").write_text("{}\n")
    Path("again/summary.json").write_text("{}\n")
    with pytest.raises(ConfigError, match="again already holds a run"):
        choose_run_dir(recipe, NOW)


@pytest.mark.parametrize("resume", [(), ("resume=auto",)])
def test_a_run_that_failed_before_its_first_checkpoint_makes_room_for_the_next(resume, here, monkeypatch, capsys):
    def fails(run, run_dir, trackers, stop, *, published):
        (run_dir / "metrics.jsonl").write_text("{}\n")
        (run_dir / "samples" / "eval-000000.jsonl").write_text("{}\n")
        (run_dir / "checkpoints" / "step-000001.tmp-0a1b2c3d").mkdir(parents=True)
        raise TrainingError(f"no luck with seed {run.seed}")

    monkeypatch.setattr(commands, "run_recipe", fails)
    Path("again").mkdir()
    Path("again/notes.txt").write_text("kept\n")
    for seed in (1, 2, 3):
        assert main(["run_dir=again", f"seed={seed}", *resume]) == USER_ERROR
        assert f"no luck with seed {seed}" in capsys.readouterr().err
    for folder, seed in (("again/failed-1", 1), ("again/failed-2", 2), ("again", 3)):
        assert f"no luck with seed {seed}" in Path(folder, "run.log").read_text()
        assert f"\nseed: {seed}\n" in Path(folder, "config.yaml").read_text()
        assert Path(folder, "samples/eval-000000.jsonl").is_file()
        assert Path(folder, "checkpoints/step-000001.tmp-0a1b2c3d").is_dir()
    assert Path("again/notes.txt").is_file()


def test_run_directories_that_contradict_are_errors(here):
    recipe = {"recipe": SHAPES, "run_dir": "taken", "resume": None}
    with_checkpoint(Path("taken"))
    with pytest.raises(ConfigError, match="taken already holds a run. Set resume=auto to continue it"):
        choose_run_dir(recipe, NOW)
    with pytest.raises(ConfigError, match="resume = none: no checkpoint in none/checkpoints"):
        choose_run_dir({**recipe, "run_dir": None, "resume": "none"}, NOW)
    with pytest.raises(ConfigError, match="name two runs"):
        choose_run_dir({**recipe, "run_dir": "a", "resume": "taken"}, NOW)
    Path("file").write_text("")
    with pytest.raises(ConfigError, match="run_dir = file/x cannot be made"):
        make_run_dir(Path("file") / "x")


def test_a_resumed_run_keeps_its_recipe_until_the_checkpoint_accepts_another(here, fake_run):
    folder = with_checkpoint(here / "old")
    (folder / "config.yaml").write_text("recipe: kept\n")
    assert main([f"run_dir={folder}", "resume=auto"]) == 0
    assert (folder / "config.yaml").read_text() == "recipe: kept\n"
    assert fake_run[0][0]["resume"] == "auto"


def test_config_yaml_is_the_recipe_that_runs_and_the_others_are_numbered(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")

    def recipes():
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    for text in ("a: 1\n", "a: 2\n", "a: 2\n", "a: 3\n"):
        KeptRecipes(text).start({}, tmp_path, 0)
        if text == "a: 1\n":
            assert recipes() == {"config.yaml": "a: 1\n"}
    assert recipes() == {
        "config-1.yaml": "a: 1\n",
        "config-2.yaml": "a: 2\n",
        "config-3.yaml": "a: 3\n",
        "config.yaml": "a: 3\n",
    }


def test_a_resume_with_another_reward_is_refused_before_models_load_or_kept_beside_the_old(here, monkeypatch, capsys):
    loaded = []

    def make_runtime(run, run_dir):
        loaded.append(run.resolved)
        raise ContractError("models would load here")

    monkeypatch.setattr(commands, "make_runtime", make_runtime)
    assert main(["run_dir=run", "trackers.tensorboard.enabled=false"]) == USER_ERROR
    kept = Path("run/config.yaml").read_text()
    step = Path("run/checkpoints/step-000001")
    step.mkdir(parents=True)
    (step / "driver_state.json").write_text(json.dumps({"config": resolve(compose("run/config.yaml"))}))
    write_manifest(step, {"step": 1})
    change = ["run", "run/config.yaml", "run_dir=run", "resume=auto", "reward.weights={shapes:0.5}"]
    capsys.readouterr()
    assert main(change) == USER_ERROR
    message = capsys.readouterr().err
    assert "CheckpointError: the checkpoint was trained with other settings: reward.weights.shapes: " in message
    assert len(loaded) == 1
    assert main([*change, "resume_changes=allow"]) == USER_ERROR
    assert len(loaded) == 2 and loaded[1]["resume_changes"] == "allow"
    assert Path("run/config.yaml").read_text() == kept and not list(Path("run").glob("config-*"))
    assert main(["check", "resume_changes=allow"]) == USER_ERROR
    assert "resume_changes = 'allow' does nothing without resume" in capsys.readouterr().err


def test_a_recipe_that_was_resumed_with_changes_does_not_allow_the_next_ones(here, fake_run):
    folder = with_checkpoint(here / "old")
    main([f"run_dir={folder}", "resume=auto", "resume_changes=allow", "num_rollouts=7"])
    recipe, run_dir, trackers, _ = fake_run[0]
    trackers[-1].start(recipe, run_dir, 1)
    kept = resolve(compose(str(folder / "config.yaml")))
    assert (kept["resume_changes"], kept["resume"], kept["num_rollouts"]) == ("refuse", None, 7)


def test_the_end_screen_says_what_a_resume_has_changed():
    changes = [{"rollout": 2, "settings": {"reward.weights.mine": [1.0, 0.5], "seed": [1, 2]}}]
    text = rendered({**SUMMARY, "resume_changes": changes})
    assert "resumed after rollout 2 with other settings" in text
    assert "reward.weights.mine: 1.0 -> 0.5" in text and "seed: 1 -> 2" in text
    assert "held-out evaluation" in text
    bare = rendered({**SUMMARY, "resume_changes": changes, "eval_before": None, "eval_after": None})
    assert "reward.weights.mine: 1.0 -> 0.5" in bare


def test_eval_of_a_recipe_has_no_checkpoint_to_choose(here, capsys):
    assert main(["eval", "worlds/shapes/nft", "--checkpoint", "4"]) == 2
    assert "--checkpoint is of a run; a recipe has none. Give the folder of a run." in capsys.readouterr().err


def test_eval_scores_the_recipe_or_a_run(here, monkeypatch, capsys, fake_run):
    calls = []

    def evaluate_recipe(recipe, run_dir, *, checkpoint):
        calls.append((str(run_dir), checkpoint))
        media = Image(torch.zeros(3, 8, 8, dtype=torch.uint8))
        shown = SampleRecord(sample_id="a", track="image", group_id="p", prompt_id="p", prompt="a cat", media=media)
        return EvaluationResult({"strict": 0.5}, {"one": {"strict": 0.5}}, 4, records=[shown])

    monkeypatch.setattr(commands, "evaluate_recipe", evaluate_recipe)
    assert main(["eval", "--output", "result.json"]) == 0
    assert calls[0][1] is None and '"num_samples": 4' in Path("result.json").read_text()
    assert Path("result.png").is_file() and "0.500" in capsys.readouterr().out
    main(["run_dir=run"])
    assert main(["eval", "run"]) == USER_ERROR
    with_checkpoint(Path("run"))
    assert main(["eval", "run"]) == 0
    assert calls[1] == ("run", "newest")
    assert main(["eval", "run", "--checkpoint", "best"]) == 0
    assert calls[2] == ("run", "best")


def test_export_writes_a_runs_weights(here, monkeypatch, capsys, fake_run):
    calls = []

    def export_recipe(recipe, run_dir, folder, *, merged, policy, checkpoint, published, in_float32):
        calls.append((str(run_dir), str(folder), merged, policy, checkpoint, in_float32))
        return LostUpdate("bfloat16", 0.125, 0.5)

    monkeypatch.setattr(commands, "export_recipe", export_recipe)
    assert main(["export", "worlds/shapes/nft", "--to", "out"]) == USER_ERROR
    assert "worlds/shapes/nft is no folder of a run" in capsys.readouterr().err
    assert main(["export", "nosuch", "--to", "out"]) == USER_ERROR
    assert "nosuch is no folder of a run (no config.yaml in it)" in capsys.readouterr().err
    Path("own.yaml").write_text("defaults: [/worlds/shapes/nft, _self_]")
    assert main(["export", "own.yaml", "--to", "out"]) == USER_ERROR
    assert "export needs the run to take weights from" in capsys.readouterr().err
    main(["run_dir=run"])
    with_checkpoint(Path("run"))
    assert main(["export", "run", "--to", "out"]) == USER_ERROR
    assert "there is no LoRA to write. Add --merged" in capsys.readouterr().err
    assert main(["export", "run", "--to", "out", "--float32"]) == USER_ERROR
    capsys.readouterr()
    assert main(["export", "run", "--to", "out", "--merged", "--policy", "old", "--checkpoint", "3"]) == 0
    assert calls == [("run", "out", True, "old", "3", False)]
    out = capsys.readouterr().out
    assert out.startswith("wrote out\nRounding to bfloat16 took 12.50% of the update's norm; 50.00% of the weights")
    assert out.endswith(" --float32 keeps the update.\n")
    assert main(["export", "run", "--to", "out", "--merged", "--float32"]) == 0
    assert calls[1] == ("run", "out", True, "default", "newest", True)
    capsys.readouterr()
    Path("file").write_text("")
    assert main(["export", "run", "--to", "file/out", "--merged"]) == USER_ERROR
    assert "--to file/out cannot be made: Not a directory" in capsys.readouterr().err
    assert main(["eval", "run", "--output", "file/x.json"]) == USER_ERROR
    assert "the folder of --output, file cannot be made" in capsys.readouterr().err


def test_first_signal_asks_to_stop_and_handlers_come_back(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: stopping after this step" in capsys.readouterr().err


def test_a_signal_that_comes_twice_at_once_is_one_and_a_later_one_ends_the_process(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(stopping.os, "_exit", ended.append)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(60) and not ended
        monkeypatch.setattr(stopping, "SAME_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [130]
    assert "SIGINT: stopped at once; nothing was saved since" in capsys.readouterr().err


def rendered(summary):
    out = io.StringIO()
    Console(file=out, width=100).print(final_screen(summary, After()), crop=False)
    return out.getvalue()


def test_final_screen_compares_before_and_after_by_category():
    text = rendered(SUMMARY)
    assert re.search(r"one .*0\.250.*0\.750.*\+0\.500.*0\.500.*0\.900", text)
    assert "trainer export runs/x" in text and "resume=" not in text


def test_final_screen_of_a_stopped_run_says_how_to_go_on():
    text = rendered({**SUMMARY, "is_complete": False, "eval_after": None})
    assert "stopped early" in text and "trainer runs/x resume=auto" in text


@pytest.mark.parametrize("width", [40, 80])
def test_commands_of_the_final_screen_stand_on_one_line_each(width):
    folder = "runs/worlds/shapes/flowgrpo_fast_of_own/20260101-120000"
    summary = {**SUMMARY, "run_dir": folder, "is_complete": False}
    out = io.StringIO()
    Console(file=out, width=width).print(final_screen(summary, After({"default": True})), crop=False)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    for line in (
        f"evaluate   uv run trainer eval {folder}",
        f"export     uv run trainer export {folder} --to exported-lora",
        f"merged     uv run trainer export {folder} --to exported --merged",
        f"continue   uv run trainer {folder} resume=auto",
    ):
        assert line in lines


def test_a_run_of_lora_suggests_to_export_the_lora_first():
    text = next_steps(SUMMARY, After({"default": True}))
    assert "export     uv run trainer export runs/x --to exported-lora\nmerged     uv run trainer export runs/x" in text
    whole = next_steps(SUMMARY, After())
    assert whole.count("trainer export") == 1 and "--merged" in whole


def test_every_policy_of_a_run_is_exported_by_its_name():
    text = next_steps(SUMMARY, After({"writer": True, "painter": False}))
    commands = [line[11:] for line in text.splitlines() if "trainer export" in line]
    assert commands == [
        "uv run trainer export runs/x --to exported-writer-lora --policy writer",
        "uv run trainer export runs/x --to exported-writer --merged --policy writer",
        "uv run trainer export runs/x --to exported-painter --merged --policy painter",
    ]


def test_a_run_with_code_of_its_own_suggests_commands_that_trust_it():
    stopped = {**SUMMARY, "is_complete": False}
    for needs_trust in (True, False):
        text = next_steps(stopped, After({"default": True}, needs_trust=needs_trust))
        commands = [line for line in text.splitlines() if "trainer" in line and line[:4] not in ("view", "more")]
        assert len(commands) == 4 and {line.endswith(" --trust") for line in commands} == {needs_trust}


def test_a_run_without_an_evaluation_suggests_none():
    assert "trainer eval" in next_steps(SUMMARY, After())
    assert "trainer eval" not in next_steps(SUMMARY, After(evaluates=False))


@pytest.mark.parametrize(
    ("files", "variable"),
    [("nvidia", "CUDA_VISIBLE_DEVICES"), ("davinci", "ASCEND_RT_VISIBLE_DEVICES")],
)
def test_accelerators_are_counted_without_torch(tmp_path, files, variable):
    for name in (f"{files}0", f"{files}1", f"{files}ctl", "null"):
        (tmp_path / name).touch()
    assert environment._counted({}, tmp_path) == 2
    assert environment._counted({variable: "1"}, tmp_path) == 1
    assert environment._counted({variable: ""}, tmp_path) == environment._counted({variable: "-1"}, tmp_path) == 0
    assert environment._counted({"OTHER": "1"}, tmp_path) == 2


def test_accelerators_without_files_of_their_own_are_asked_for(tmp_path, monkeypatch):
    (tmp_path / "null").touch()
    assert environment._counted({}, tmp_path) == 0
    (tmp_path / "kfd").touch()
    assert environment._counted({}, tmp_path) is None
    monkeypatch.setattr(environment, "_DEV", tmp_path)
    monkeypatch.setattr(devices, "accelerator", lambda: KINDS["cuda"])
    monkeypatch.setattr(devices, "num_devices", {"cuda": 3}.__getitem__)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert environment.this_machine().num_gpus == 3 and environment.device_here() == "cuda"
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    assert environment.this_machine().num_gpus == 0 and environment.device_here() == "cpu"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert environment.device_here() == "cuda"


@pytest.mark.parametrize("name", ["npu", "xpu", "mps"])
def test_auto_is_whatever_accelerator_torch_finds(tmp_path, monkeypatch, name):
    (tmp_path / "dri").touch()
    monkeypatch.setattr(environment, "_DEV", tmp_path)
    monkeypatch.setattr(devices, "accelerator", lambda: KINDS[name])
    monkeypatch.setattr(devices, "num_devices", lambda device: 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = recipe.composed(Command("check", "worlds/shapes/nft", ("device=auto",)))
    assert recipe.settled(config)["device"] == name


def test_a_device_that_torch_does_not_have_is_refused_before_a_model_loads(monkeypatch):
    many = environment.Machine(8, 8)
    monkeypatch.setattr(recipe, "this_machine", lambda: many)
    config = recipe.composed(Command("check", "worlds/shapes/nft", ("device=npu",)))
    with pytest.raises(ConfigError, match=r"device: npu \(Ascend NPU\) is not here: torch .* and torch_npu, installed"):
        recipe.checked(config)


def test_a_cluster_is_not_judged_by_this_machine(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert environment.this_machine().num_gpus > 1000


def test_a_run_joins_the_cluster_that_the_environment_names_unless_it_says_another(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = recipe.composed(Command("check", "worlds/shapes/nft", ("device=cpu",)))
    assert recipe.settled(config)["cluster"]["address"] == "10.0.0.1:6379"
    assert config.cluster.address == "auto"  # what a run keeps
    config.cluster.address = "local"
    assert recipe.settled(config)["cluster"]["address"] == "local"


QUICK_VERBS = """
import sys
from unirl.app.main import main
for argv in (["list"], ["list", "rewards"], ["show"], ["check"]):
    assert main(argv) == 0, argv
heavy = sorted({"torch", "ray", "diffusers", "transformers", "numpy"} & set(sys.modules))
assert not heavy, heavy
"""


def test_list_show_and_check_import_no_heavy_library():
    subprocess.run([sys.executable, "-c", QUICK_VERBS], check=True, capture_output=True, timeout=600)


@pytest.mark.parametrize("module", ["unirl.app.main", "unirl.train_diffusion"])
def test_help_is_a_process_of_its_own(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "trainer [VERB] [RECIPE]" in done.stdout


SHOW_FROM_WHEEL = """
import sys
import unirl.recipes
from unirl.app.main import main
sys.stdout.write(unirl.recipes.__file__ + chr(10))
sys.exit(main(["show", "sd3/nft"]))
"""


@pytest.mark.slow
def test_wheel_holds_the_recipes_and_shows_them(uv, tmp_path):
    root = Path(__file__).parents[3]
    subprocess.run(
        [uv, "build", "--package", "unirl-trainer", "--wheel", "--offline", "--out-dir", str(tmp_path)],
        cwd=root,
        check=True,
        capture_output=True,
        timeout=600,
    )
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = wheel.namelist()
    source = root / "apps" / "trainer" / "src"
    wanted = [str(path.relative_to(source)) for path in (source / "unirl" / "recipes").rglob("*.yaml")]
    wanted += [
        str(path.relative_to(source)) for path in (source / "unirl" / "worlds" / "shapes" / "data").glob("*.jsonl")
    ]
    assets = source / "unirl" / "viewer" / "assets"
    wanted += [str(path.relative_to(source)) for path in assets.rglob("*") if path.is_file()]
    assert len(wanted) > 10 and set(wanted) <= set(names)
    assert "unirl/__init__.py" not in names
    wheel.extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", SHOW_FROM_WHEEL],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site")) and "recipe: sd3/nft" in done.stdout
