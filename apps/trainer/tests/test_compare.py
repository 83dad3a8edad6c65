"""`trainer compare`: what it refuses, what it runs again, how children end, and how numbers become a table."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from PIL import Image

from unirl.app import compare
from unirl.app.command_line import Command, parse
from unirl.app.compare import Plan, make_run, read_contenders, read_plan, require_one_evaluation
from unirl.app.compare_runs import Run, carry_out, digest
from unirl.app.comparison import (
    STUDENT_975,
    RecipeResult,
    SeedResult,
    as_document,
    as_markdown,
    binomial_half_width,
    counts_successes,
    student_half_width,
)
from unirl.app.comparison_picture import band, draw
from unirl.app.duels import duel, most_different
from unirl.app.environment import packaged_path
from unirl.app.main import INTERRUPTED, USER_ERROR, main
from unirl.types.errors import ConfigError

NFT, GRPO, DPO = "worlds/shapes/nft", "worlds/shapes/flowgrpo", "worlds/shapes/dpo"
TEXT, PPO = "worlds/arithmetic/grpo", "worlds/arithmetic/ppo"
SETTINGS = {"cpu_s": 60.0, "seeds": [0, 1], "overrides": [], "metric": "strict", "columns": [], "base_model": "base"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory; logging and threads as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")
    root, ours = logging.getLogger(), logging.getLogger("unirl")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield tmp_path
    root.handlers = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def own_recipe(folder, text, base=NFT, name="own"):
    path = folder / f"{name}.yaml"
    path.write_text(f"# @package _global_\ndefaults: [/{base}, _self_]\nrecipe: {name}\n{text}\n")
    return str(path)


def summary(curve, rollouts=3, is_complete=True):
    """A summary whose evaluations hold (CPU s, samples, value), one per rollout."""
    records = {
        str(step): {"overall": {"shapes/strict": v}, "num_samples": 512, "train_cpu_s": s, "num_samples_trained": n}
        for step, (s, n, v) in enumerate(curve)
    }
    return json.dumps({"is_complete": is_complete, "evaluations": records, "num_rollouts": rollouts})


# What is asked for --------------------------------------------------------------------------------------------------


def test_several_recipes_are_words_of_compare_alone():
    command = parse(["compare", "a", "b", "cpu_s=5", "seeds=3,1", "batch_size=2", "--jobs", "2", "--output", "out"])
    assert command.recipes == ("a", "b") and command.options == {"jobs": 2, "output": "out"}
    plan = read_plan(command)
    assert plan == Plan(("a", "b"), ("batch_size=2",), 5.0, (3, 1), Path("out"), 2)
    assert plan.changes[-1] == f"eval.interval_cpu_s={5 / 6}" and plan.changes[0] == "num_rollouts=10000"
    default = read_plan(parse(["compare", "a"]))
    assert (default.cpu_s, default.seeds, default.output, default.num_jobs) == (
        120.0,
        (0, 1, 2),
        Path("runs/compare"),
        1,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "compare needs recipes"),
        ([NFT, "cpu_s=long"], "cpu_s=long must be a number of seconds above 0"),
        ([NFT, "cpu_s=0"], "cpu_s=0 must be a number"),
        ([NFT, "cpu_s=inf"], "cpu_s=inf must be a number"),
        ([NFT, "seeds=0,0"], "seeds=0,0 must be different whole numbers"),
        ([NFT, "seeds=a"], "seeds=a must be different whole numbers"),
        ([NFT, "seeds="], "seeds= must be different whole numbers"),
        ([NFT, "seed=1"], "seed=1: compare sets seed in every run. Remove it; use cpu_s= and seeds=."),
        ([NFT, "eval=null"], "eval=null: recipes are compared by their held-out evaluations. Remove it."),
        ([NFT, "++eval.interval=1"], "compare sets eval.interval in every run"),
        ([NFT, "--jobs", "0"], "--jobs 0 must be at least 1"),
        ([NFT, "shapes/flowgrp"], "unknown recipe 'shapes/flowgrp'. Did you mean worlds/shapes/flowgrpo"),
        ([NFT, "shapes/nft"], "worlds/shapes/nft and shapes/nft are both called worlds/shapes/nft"),
        ([NFT, "batch_sice=2"], "worlds/shapes/nft: unknown key 'batch_sice'"),
        ([NFT, "runtime=ray"], "max_cpu_s = 120.0 counts CPU seconds of one process"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(words, message, capsys, here):
    assert main(["compare", *words]) == USER_ERROR
    err = capsys.readouterr().err
    assert err.startswith("ConfigError: ") and message in err and "Traceback" not in err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval: {num_samples: 20}", "eval.num_samples = 512 in worlds/shapes/nft, 20 in own."),
        ("eval: {seed: 7}", "eval.seed = 1234 in worlds/shapes/nft, 7 in own."),
        ("eval: {guidance_scale: 0.0}", "sampling.guidance_scale = 1.0 in worlds/shapes/nft, 0.0 in own."),
        ("sampling: {height: 64}", "sampling.height = 32 in worlds/shapes/nft, 64 in own."),
        ("pipeline: {schedule: {shift: 1.0}}", "pipeline.schedule.shift = 3.0 in worlds/shapes/nft, 1.0 in own."),
        ("save: {best_metric: reward}", 'save.best_metric = "shapes/strict" in worlds/shapes/nft, "reward" in own.'),
        ("reward: {scorers: {shapes: {soft_weight: 2.0}}}", "reward.scorers.shapes.soft_weight = 1.0 in"),
    ],
)
def test_recipes_that_are_judged_differently_are_refused(text, message, here, capsys):
    assert main(["compare", NFT, own_recipe(here, text)]) == USER_ERROR
    err = capsys.readouterr().err
    assert message in err and "compared from one base and by one evaluation" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval: {pass_prompts: 20}", "eval.pass_prompts = 100 in worlds/arithmetic/grpo, 20 in own."),
        ("sampling: {temperature: 0.5}", "sampling.passes.temperature = 1.0 in worlds/arithmetic/grpo, 0.5 in own."),
        ("sampling: {max_new_tokens: 4}", "sampling.max_new_tokens = 8 in worlds/arithmetic/grpo, 4 in own."),
    ],
)
def test_texts_that_are_judged_differently_are_refused(text, message, here, capsys):
    assert main(["compare", TEXT, own_recipe(here, text, TEXT)]) == USER_ERROR
    err = capsys.readouterr().err
    assert message in err and "compared from one base and by one evaluation" in err


def test_images_and_texts_are_not_compared(capsys):
    assert main(["compare", NFT, TEXT]) == USER_ERROR
    err = capsys.readouterr().err
    assert 'save.best_metric = "shapes/strict" in worlds/shapes/nft, "reward" in worlds/arithmetic/grpo.' in err


def test_other_bases_and_prompts_are_refused_together(here, capsys):
    (here / "model").mkdir()
    (here / "model" / "model_index.json").write_text("{}")
    (here / "prompts.txt").write_text("a red circle\n")
    text = f"bundle: {{pretrained_model: {here}/model}}\ndata: {{path: {here}/prompts.txt}}"
    assert main(["compare", NFT, own_recipe(here, text)]) == USER_ERROR
    err = capsys.readouterr().err
    assert "bundle.pretrained_model = " in err and f'"{here}/prompts.txt" in own' in err


def test_only_data_of_one_kind_is_the_same(here, capsys):
    shutil.copytree(packaged_path("shapes", "data/pairs"), here / "pairs")
    other = own_recipe(here, f"data: {{path: {here}/pairs/pairs.jsonl}}", DPO)
    require_one_evaluation(read_contenders(read_plan(parse(["compare", NFT, DPO]))))
    contenders = read_contenders(read_plan(parse(["compare", NFT, DPO, other])))
    with pytest.raises(ConfigError, match=rf'data.path = ".*" in {DPO}, "{here}/pairs/pairs.jsonl" in own.'):
        require_one_evaluation(contenders)


def test_what_is_trained_and_which_weights_are_shown_may_differ(here):
    text = (
        "eval: {policy: old, num_images: 4}\nreward: {scorers: {size: {_target_: %s}}, weights: {shapes: 1, size: 1}}"
    )
    scorer = "unirl.reward.local.images.compressibility.JPEGCompressibilityScorer"
    plan = read_plan(parse(["compare", NFT, own_recipe(here, text % scorer), GRPO]))
    require_one_evaluation(read_contenders(plan))


# What is run again --------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(here):
    """Two recipes with two seeds, of which a fake run is finished, in out/."""
    command = parse(["compare", NFT, GRPO, "cpu_s=60", "seeds=0,1", "--output", "out"])
    plan = read_plan(command)
    contenders = read_contenders(plan)
    finals = {(NFT, 0): 0.5, (NFT, 1): 0.75, (GRPO, 0): 0.375, (GRPO, 1): 0.375}
    for contender in contenders:
        for seed in plan.seeds:
            run = make_run(plan, contender, seed)
            run.folder.mkdir(parents=True)
            (run.folder / "settings.json").write_text(json.dumps(run.settings))
            curve = [(0.0, 0, 0.25), (61.0, 768, finals[contender.name, seed])]
            (run.folder / "summary.json").write_text(summary(curve))
    return ["compare", NFT, GRPO, "cpu_s=60", "seeds=0,1", "--output", "out"]


@pytest.fixture
def started(monkeypatch):
    """Labels of the runs that would have started; each leaves a summary, or fails where its seed is 7."""
    labels = []

    def fake(runs, num_jobs, stop):
        for run in runs:
            labels.append(run.label)
            if run.seed == 7:
                yield run, "RewardError: no"
                continue
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "summary.json").write_text(summary([(0.0, 0, 0.25), (61.0, 768, 0.5)]))
            yield run, None

    monkeypatch.setattr(compare, "carry_out", fake)
    return labels


def test_a_finished_comparison_is_only_tabulated(finished, started, capsys):
    assert main(finished) == 0
    assert started == []
    # NFT: 0.625 over 1024, base 0.25 over 512: 1.96 * sqrt(0.625 * 0.375 / 1024 + 0.25 * 0.75 / 512) = 0.0478.
    line = "| worlds/shapes/nft | DiffusionNFT | 0.250 | 0.625 +- 0.125 | +0.375 [+0.327, +0.423] | 768 | 3 | 61 | 2 |"
    out = capsys.readouterr().out
    assert line in out and out == Path("out/comparison.md").read_text()
    assert out.index(line) < out.index("| worlds/shapes/flowgrpo | DiffusionGRPO | 0.250 | 0.375 +- 0.000 |")
    document = json.loads(Path("out/comparison.json").read_text())
    assert document["settings"]["base_model"] == "shapes/checkpoint"
    assert document["recipes"][0]["runs"][1]["curve"] == [[0.0, 0, 0.25], [61.0, 768, 0.75]]
    assert Path("out/comparison.png").stat().st_size > 10_000


def test_texts_are_tabulated_with_their_pass_rates(here, started, capsys):
    words = ["compare", TEXT, PPO, "cpu_s=30", "seeds=0,1", "--output", "out"]
    plan = read_plan(parse(words))
    finals = {(TEXT, 0): (0.75, 0.5), (TEXT, 1): (0.875, 0.75), (PPO, 0): (0.5, 0.25), (PPO, 1): (0.5, 0.25)}
    for contender in read_contenders(plan):
        for seed in plan.seeds:
            run = make_run(plan, contender, seed)
            run.folder.mkdir(parents=True)
            (run.folder / "settings.json").write_text(json.dumps(run.settings))
            greedy, sampled = finals[contender.name, seed]
            records = {
                "0": {"overall": {"reward": 0.25, "pass@1": 0.125, "pass@8": 0.5}, "train_cpu_s": 0.0},
                "3": {"overall": {"reward": greedy, "pass@1": sampled, "pass@8": 1.0}, "train_cpu_s": 31.0},
            }
            for step, record in records.items():
                record |= {"num_samples": 8, "num_samples_trained": 512 * int(step)}
            content = {"is_complete": True, "evaluations": records, "num_rollouts": 3}
            (run.folder / "summary.json").write_text(json.dumps(content))
    assert main(words) == 0 and started == []
    out = capsys.readouterr().out
    assert "Held-out `reward` over 8 samples after 30 CPU seconds of training from `arithmetic/checkpoint`" in out
    assert "| recipe | algorithm | base | final | gain (95 %) | pass@1 | pass@8 | samples |" in out
    # 0.8125 over 16 and 0.25 over 8: 1.96 * sqrt(0.8125 * 0.1875 / 16 + 0.25 * 0.75 / 8) = 0.356.
    assert (
        f"| {TEXT} | ARGRPO | 0.250 | 0.812 +- 0.062 | +0.562 [+0.207, +0.918] | 0.125 to 0.625 | 0.500 to 1.000 |"
        " 1536 | 3 | 31 | 2 |" in out
    )
    recipe = json.loads(Path("out/comparison.json").read_text())["recipes"][1]
    assert recipe["columns"]["pass@1"] == {"base": 0.125, "final": 0.25}
    assert recipe["runs"][1]["columns"]["pass@8"] == {"base": 0.5, "final": 1.0}


def test_only_what_is_missing_runs(finished, started):
    Path(f"out/{GRPO}/seed1/summary.json").write_text(summary([(0.0, 0, 0.25)], is_complete=False))
    Path(f"out/{NFT}/seed0/summary.json").unlink()
    assert main([*finished, "seeds=0,1,2"]) == 0
    assert started == [f"{NFT} seed 0", f"{GRPO} seed 1", f"{NFT} seed 2", f"{GRPO} seed 2"]


def test_a_failed_run_is_named_and_leaves_the_others_alone(finished, started, capsys):
    assert main([*finished, "seeds=7,8"]) == 1
    said = capsys.readouterr()
    assert said.err.strip().endswith(f"failed: {NFT} seed 7, {GRPO} seed 7")
    assert f"- {NFT} seed 7: RewardError: no" in said.out and "0.500 [+0.2" not in said.out
    assert started == [f"{NFT} seed 7", f"{GRPO} seed 7", f"{NFT} seed 8", f"{GRPO} seed 8"]
    run = json.loads(Path("out/comparison.json").read_text())["recipes"][0]["runs"][0]
    assert (run["status"], run["error"], run["final"], run["curve"]) == ("failed", "RewardError: no", None, [])


def test_an_interrupted_comparison_tabulates_what_it_has(finished, monkeypatch, capsys):
    Path(f"out/{GRPO}/seed1/summary.json").unlink()

    def fake(runs, num_jobs, stop):
        stop.set()
        yield runs[0], "stopped before its budget was used up"

    monkeypatch.setattr(compare, "carry_out", fake)
    assert main(finished) == INTERRUPTED
    said = capsys.readouterr()
    assert f"- {GRPO} seed 1: not finished" in said.out and "the same command continues" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cpu_s=50"], "recipe.eval.interval_cpu_s = 10.0, now 8.33"),
        (
            ["batch_size=6"],
            "seed0 holds a run with other settings: recipe.batch_size = 12, now 6.",
        ),
    ],
)
def test_a_folder_with_other_settings_is_refused(finished, started, words, message, capsys):
    assert main([*finished, *words]) == USER_ERROR
    err = capsys.readouterr().err
    assert message in err and "Give another --output" in err and started == []
    assert all(f"out/{name}/seed{seed} holds" in err for name in (NFT, GRPO) for seed in (0, 1))


def test_another_base_under_the_same_name_is_other_settings(finished, started, capsys, monkeypatch):
    monkeypatch.setattr(compare, "digest", lambda path: "new" if path.endswith("checkpoint") else digest(path))
    assert main(finished) == USER_ERROR
    assert "files.bundle.pretrained_model = " in capsys.readouterr().err


def test_a_run_of_something_else_is_not_touched(here, capsys):
    folder = here / "out" / NFT / "seed0"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_text("kept\n")
    assert main(["compare", NFT, "--output", "out"]) == USER_ERROR
    assert "seed0 holds a run that is not of a comparison.\nGive another --output" in capsys.readouterr().err


def test_a_digest_follows_content_and_names(tmp_path):
    for folder, name, text in (("a", "x", "1"), ("b", "x", "1"), ("c", "y", "1"), ("d", "x", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    one, same, renamed, changed = (digest(str(tmp_path / name)) for name in "abcd")
    assert one == same and len({one, renamed, changed}) == 3
    assert digest("owner/model") == "owner/model"


# Children -----------------------------------------------------------------------------------------------------------

FINISH = "import json, pathlib; pathlib.Path('{folder}/summary.json').write_text(json.dumps({'is_complete': True}))"
UNTIL_TOLD = """
import pathlib, signal, sys, time
def told(number, frame):
    pathlib.Path('{folder}/saved').touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
pathlib.Path('{folder}/ready').touch()
time.sleep(600)
"""
MEETING = """
import pathlib, time
pathlib.Path('{folder}/here').touch()
while len(list(pathlib.Path('{folder}').parent.glob('*/here'))) < 2:
    time.sleep(0.02)
"""


def child(folder, script):
    command = (sys.executable, "-c", script.replace("{folder}", str(folder)))
    return Run(folder.name, 0, folder, command, {"cpu_s": 1})


def wait_for(path, seconds=600):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_children_report_how_they_ended(tmp_path):
    scripts = {
        "fine": FINISH,
        "refused": "import sys; sys.stderr.write('12:00 INFO x\\nConfigError: a\\nb\\n'); sys.exit(2)",
        "crashed": "raise ValueError('deep')",
        "silent": "import sys; sys.exit(3)",
        "killed": "import os; os.kill(os.getpid(), 9)",
        "early": "pass",
    }
    runs = [child(tmp_path / name, script) for name, script in scripts.items()]
    ended = {run.name: error for run, error in carry_out(runs, 3, threading.Event())}
    assert ended == {
        "fine": None,
        "refused": "ConfigError: a",
        "crashed": "ValueError: deep",
        "silent": "ended with status 3",
        "killed": "killed by SIGKILL",
        "early": "stopped before its budget was used up",
    }
    assert json.loads((tmp_path / "fine" / "settings.json").read_text()) == {"cpu_s": 1}


def test_jobs_run_at_the_same_time(tmp_path):
    runs = [child(tmp_path / name, MEETING) for name in "ab"]
    assert len(list(carry_out(runs, 2, threading.Event()))) == 2


def test_a_stop_lets_children_save_and_starts_no_more(tmp_path):
    stop = threading.Event()
    runs = [child(tmp_path / "first", UNTIL_TOLD), child(tmp_path / "second", FINISH)]

    def ask():
        wait_for(tmp_path / "first" / "ready")
        stop.set()

    asking = threading.Thread(target=ask)
    asking.start()
    ended = [run.name for run, _ in carry_out(runs, 1, stop)]
    asking.join()
    assert ended == ["first"] and (tmp_path / "first" / "saved").exists()
    assert not (tmp_path / "second").exists()


def test_children_end_where_the_table_cannot_be_written(tmp_path):
    ended = carry_out([child(tmp_path / "fine", FINISH), child(tmp_path / "long", UNTIL_TOLD)], 2, threading.Event())
    assert next(ended)[0].name == "fine"
    wait_for(tmp_path / "long" / "ready")
    ended.close()
    assert (tmp_path / "long" / "saved").exists()


PARENT = """
import threading
from unirl.app.compare_runs import Run, carry_out
from pathlib import Path
list(carry_out([Run("x", 0, Path({folder!r}), {command!r}, {{}})], 1, threading.Event()))
"""


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path):
    run = child(tmp_path, UNTIL_TOLD)
    code = PARENT.format(folder=str(tmp_path), command=run.command)
    parent = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    wait_for(tmp_path / "ready")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(tmp_path / "saved")


# Numbers ------------------------------------------------------------------------------------------------------------


def result(name, *curves, num_evaluated=8):
    runs = [
        SeedResult(seed, f"{name}/seed{seed}", "complete", None, tuple(curve), 3 + seed, num_evaluated)
        for seed, curve in enumerate(curves)
    ]
    return RecipeResult(name, "Algorithm", tuple(runs))


def test_intervals_are_those_of_the_books():
    # 0.5 * 0.5 / 400 + 0.25 * 0.75 / 100 = 0.0025, whose root is 0.05.
    assert binomial_half_width(0.25, 0.5, 100, 4) == pytest.approx(1.959964 * 0.05, rel=1e-6)
    # Gains 0.1, 0.2, 0.3 have standard deviation 0.1; two degrees of freedom.
    assert student_half_width([0.1, 0.2, 0.3]) == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert student_half_width([0.1]) is None
    theirs = [scipy.stats.t.ppf(0.975, freedom) for freedom in range(1, len(STUDENT_975) + 1)]
    assert STUDENT_975 == pytest.approx(theirs, abs=5e-4)


def test_successes_are_told_from_scores():
    assert counts_successes([result("a", [(0, 0, 0.25), (9, 9, 1.0)])])
    assert not counts_successes([result("a", [(0, 0, 0.25), (9, 9, 0.3)])])
    assert not counts_successes([result("a", [(0, 0, 0.25), (9, 9, 1.5)])])


def test_the_document_has_means_and_spreads_with_the_best_first():
    slow = result("slow", [(0.0, 0, 0.25), (60.0, 100, 0.5)], [(0.0, 0, 0.25), (62.0, 120, 0.75)])
    fast = result("fast", [(0.0, 0, 0.25), (61.0, 300, 0.875)], [(0.0, 0, 0.25), (61.0, 300, 0.875)])
    lost = RecipeResult("lost", "Algorithm", (SeedResult(0, "lost/seed0", "failed", "E: x"),))
    document = as_document(SETTINGS, [lost, slow, fast])
    assert [recipe["recipe"] for recipe in document["recipes"]] == ["fast", "slow", "lost"]
    assert document["settings"] == {**SETTINGS, "num_evaluated": 8, "interval": "binomial"}
    recipe = document["recipes"][1]
    # 0.625 over 16 and 0.25 over 8: 0.0146484 + 0.0234375 = 0.0380859.
    half = 1.959964 * 0.0380859**0.5
    assert recipe["gain_interval"] == pytest.approx([0.375 - half, 0.375 + half], abs=1e-6)
    numbers = {key: value for key, value in recipe.items() if isinstance(value, float)}
    assert numbers == pytest.approx(
        {
            "base": 0.25,
            "final": 0.625,
            "final_half_range": 0.125,
            "gain": 0.375,
            "num_samples": 110.0,
            "num_rollouts": 3.5,
            "train_cpu_s": 61.0,
        }
    )
    assert [run["gain"] for run in recipe["runs"]] == [0.25, 0.5]
    assert document["recipes"][2]["final"] is None
    text = as_markdown(document)
    assert text.startswith(
        "Held-out `strict` over 8 samples after 60 CPU seconds of training from `base`, seeds 0, 1.\n"
    )
    assert "| lost | Algorithm | - | - | - | - | - | - | 0 |" in text and "- lost seed 0: E: x" in text


def test_scores_get_an_interval_from_the_seeds():
    curves = ([(0.0, 0, 20.0), (60.0, 9, 20.1)], [(0.0, 0, 20.0), (60.0, 9, 20.2)], [(0.0, 0, 20.0), (60.0, 9, 20.3)])
    document = as_document(SETTINGS, [result("a", *curves)])
    half = 4.303 * 0.1 / 3**0.5
    assert document["settings"]["interval"] == "student"
    assert document["recipes"][0]["gain_interval"] == pytest.approx([0.2 - half, 0.2 + half])
    single = as_document(SETTINGS, [result("a", curves[0])])
    assert single["recipes"][0]["gain_interval"] is None and "| 20.100 | +0.100 | 9 |" in as_markdown(single)


def test_a_band_joins_seeds_up_to_the_shortest():
    curves = [[(0.0, 0, 0.0), (10.0, 100, 1.0)], [(0.0, 0, 0.5), (4.0, 60, 0.5), (12.0, 80, 0.9)]]
    x, mean, low, high = band(curves, 0)
    np.testing.assert_allclose(x, [0, 4, 10])
    np.testing.assert_allclose(low, [0.0, 0.4, 0.8])
    np.testing.assert_allclose(high, [0.5, 0.5, 1.0])
    np.testing.assert_allclose(mean, [0.25, 0.45, 0.9])
    np.testing.assert_allclose(band(curves, 1)[0], [0, 60, 80])


def test_the_picture_grows_with_the_number_of_recipes(tmp_path):
    many = [result(f"r{i}", [(0.0, 0, 0.25), (60.0, 90, 0.5)], [(0.0, 0, 0.25), (61.0, 95, 0.625)]) for i in range(16)]
    draw(as_document(SETTINGS, many[:2]), tmp_path / "few.png")
    draw(as_document(SETTINGS, many), tmp_path / "many.png")
    few, more = (np.asarray(Image.open(tmp_path / name).convert("L")) for name in ("few.png", "many.png"))
    assert more.shape[0] > few.shape[0] > 400
    assert few.min() < 64 and few.std() > 5
    assert more.min() < 64 and more.std() > 5


def test_a_run_of_the_trainer_is_what_a_child_is_told(here):
    plan = read_plan(Command("compare", NFT, ("cpu_s=6", "seeds=4", "batch_size=2"), {"output": "out"}, recipes=(NFT,)))
    (contender,) = read_contenders(plan)
    run = make_run(plan, contender, 4)
    words = run.command[3:]
    command = parse(list(words))
    assert run.command[:3] == (sys.executable, "-m", "unirl.app.main") and command.recipe == NFT
    assert {"seed=4", "max_cpu_s=6.0", "eval.interval_cpu_s=1.0", f"run_dir='out/{NFT}/seed4'"} <= set(words)
    assert run.settings["recipe"]["seed"] == 4 and run.settings["recipe"]["max_cpu_s"] == 6.0
    assert set(run.settings["files"]) == {"bundle.pretrained_model", "data.path", "eval.prompts"}
    assert all(len(value) == 64 for value in run.settings["files"].values())
    assert "run_dir" not in run.settings["recipe"] and str(here) not in json.dumps(run.settings)


# Prompt by prompt ---------------------------------------------------------------------------------------------------


def test_a_duel_counts_prompts_by_their_mean_over_seeds():
    scores = {
        "a": {0: {"x": 1.0, "y": 0.0, "z": 1.0, "w": 1.0}, 1: {"x": 1.0, "y": 1.0, "z": 0.0, "w": 1.0}},
        "b": {0: {"x": 0.0, "y": 0.0, "z": 1.0, "w": 0.0}, 1: {"x": 0.0, "y": 0.0, "z": 1.0}, 2: {"x": 9.0}},
    }
    found = duel("a", "b", scores, {"a": {0: 0.75, 1: 0.75}, "b": {0: 0.25, 1: 0.5}})
    assert (found.prompts, found.wins, found.ties, found.losses) == (4, 3, 0, 1)
    assert found.p_prompts == pytest.approx(2 * (4 + 1) / 16)  # two-sided: P(at most 1 of 4), twice
    # Differences .5 and .25: t = .375 / (.1768 / sqrt 2) = 3 with one degree of freedom.
    assert found.p_seeds == pytest.approx(1 - 2 * math.atan(3) / math.pi)
    assert duel("a", "a", scores, {"a": {0: 0.5, 1: 0.5}}).p_prompts is None


def test_samples_that_runs_kept_are_compared_and_drawn(finished, started, capsys):
    for name, strict in ((NFT, (1.0, 1.0, 0.0)), (GRPO, (0.0, 1.0, 0.0))):
        for seed in (0, 1):
            folder = Path("out") / name / f"seed{seed}" / "samples"
            (folder / "eval-000003").mkdir(parents=True)
            lines = []
            for place, score in enumerate(strict):
                file = f"eval-000003/image-{place}.png"
                Image.new("RGB", (8, 8), "red" if score else "black").save(folder / file)
                scores = {"reward": score, "shapes/strict": score}
                media = {"kind": "image", "file": file}
                lines.append({"sample_id": str(place), "prompt": f"prompt {place}", "scores": scores, "media": media})
            (folder / "eval-000003.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(finished) == 0
    assert "| worlds/shapes/flowgrpo | 3 | 1 | 2 | 0 | 1 | 0.3 |" in capsys.readouterr().out
    (found,) = json.loads(Path("out/comparison.json").read_text())["duels"]
    assert (found["recipe"], found["against"]) == (NFT, GRPO)
    with Image.open("out/comparison_samples.png") as sheet:
        assert sheet.width > sheet.height, "one prompt differs: one row, a column per recipe"


def test_prompts_that_differ_most_are_shown_on_both_sides():
    first = {"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.2}
    second = {"a": 0.0, "b": 0.5, "c": 0.9, "d": 0.1}
    assert most_different([first, second]) == ["a", "d", "c"]
