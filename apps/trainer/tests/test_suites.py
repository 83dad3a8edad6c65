"""Suites: aggregates and intervals against hand-worked cases, both stages on the shapes world, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from scipy import stats

from unirl.app.main import main
from unirl.suites import generating
from unirl.suites.catalog import SUITES
from unirl.suites.intervals import bootstrapped, combined, fraction, fraction_difference, mean_difference, wilson
from unirl.suites.pages import comparison_page
from unirl.suites.results import compared, document
from unirl.suites.suite import Judged, Metric, Suite

QUICK = ["suite.samples_per_prompt=1", "eval.num_inference_steps=2", "eval.batch_size=5"]


def judged(prompt_id, index, category, **scores):
    return Judged(f"prompt {prompt_id}", {}, {"category": category}, prompt_id, index, (category,), scores, None)


TINY = Suite(
    name="tiny",
    what="",
    makes="image",
    prompts="x.txt",
    samples_per_prompt=2,
    scorers={},
    metrics=(Metric("right", is_fraction=True), Metric("soft", is_fraction=False)),
    source="here",
)


def suite(**changes):
    return dataclasses.replace(TINY, **changes)


# Intervals ----------------------------------------------------------------------------------------------------------


def test_a_fraction_of_single_samples_has_wilsons_interval():
    found = fraction([[1.0]] * 7 + [[0.0]] * 13)
    expected = stats.binomtest(7, 20).proportion_ci(0.95, method="wilson")
    assert (found.value, found.num_prompts, found.num_samples) == (0.35, 20, 20)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_equal_samples_of_a_prompt_count_once_and_unlike_ones_each():
    alike = fraction([[1.0] * 4] * 5 + [[0.0] * 4] * 5)
    # Ten prompts: the variance over prompts is larger by 10 / 9 than that of ten samples, but never counts above 4.
    assert (alike.low, alike.high) == wilson(0.5, 10)
    unlike = fraction([[1.0, 0.0]] * 10)
    assert (unlike.low, unlike.high) == wilson(0.5, 20)
    same = fraction([[1.0, 1.0]] * 10)
    assert (same.low, same.high) == wilson(1.0, 10)


def test_the_bootstrap_covers_the_mean_as_the_normal_approximation_does():
    values = [[math.sin(each)] for each in range(400)]
    found = bootstrapped(values)
    plain = [own[0] for own in values]
    half = 1.96 * stats.tstd(plain) / math.sqrt(400)
    assert found.value == pytest.approx(math.fsum(plain) / 400)
    # A percentile interval of 4,000 resamples: within a twentieth of its width.
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=half / 10)
    assert bootstrapped(values) == found


def test_a_mean_of_categories_joins_their_intervals():
    parts = {"a": fraction([[1.0]] * 3 + [[0.0]]), "b": fraction([[1.0]] + [[0.0]] * 3)}
    found = combined(parts, {})
    below = math.hypot(parts["a"].value - parts["a"].low, parts["b"].value - parts["b"].low) / 2
    assert (found.value, found.low) == pytest.approx((0.5, 0.5 - below))
    assert combined(parts, {"a": 3, "b": 1}).value == pytest.approx(0.75 * 0.75 + 0.25 * 0.25)


def test_differences_are_paired_by_prompt():
    before = [[0.0], [1.0], [0.0], [1.0]] * 10
    after = [[0.0], [1.0], [1.0], [1.0]] * 10
    found = fraction_difference(before, after)
    assert found.value == pytest.approx(0.25)
    apart = math.hypot(0.75 - fraction(after).low, fraction(before).high - 0.5)
    assert 0 < found.value - found.low < apart
    assert fraction_difference(before, before).high > 0  # agreement is no certainty
    assert mean_difference([[1.0], [5.0]], [[1.5], [5.5]]).low == pytest.approx(0.5)


# Aggregates ---------------------------------------------------------------------------------------------------------


def test_overall_is_the_mean_of_samples_or_of_categories():
    samples = [judged("a", 0, "x", right=1.0, soft=0.5), judged("a", 1, "x", right=0.0, soft=0.5)]
    samples += [judged("b", 0, "x", right=1.0, soft=1.0), judged("c", 0, "y", right=0.0, soft=0.0)]
    by_samples = document(suite(), {"name": "m"}, samples, [])["metrics"]
    assert by_samples["right"]["overall"]["value"] == 0.5
    by_categories = document(suite(overall="categories"), {"name": "m"}, samples, [])["metrics"]
    assert by_categories["right"]["overall"]["value"] == pytest.approx((2 / 3 + 0) / 2)
    weighted = document(suite(overall="categories", weights={"x": 3, "y": 1}), {"name": "m"}, samples, [])
    assert weighted["metrics"]["soft"]["overall"]["value"] == pytest.approx((3 * 2 / 3 + 0) / 4)


def test_samples_without_a_score_are_counted_and_left_out():
    failed = Judged("p", {}, {}, "d", 0, ("x",), {}, "judge said no")
    found = document(suite(), {"name": "m"}, [judged("a", 0, "x", right=1.0, soft=1.0), failed], [])
    assert (found["num_samples"], found["num_failed"], found["first_error"]) == (2, 1, "judge said no")
    assert found["metrics"]["right"]["overall"]["num_samples"] == 1


def test_a_part_of_a_published_benchmark_says_so():
    found = document(suite(published_prompts=553), {"name": "m"}, [judged("a", 0, "x", right=1.0, soft=1.0)], [])
    assert found["changes"] == ["1 prompts; the published benchmark has 553, so numbers cannot be compared"]


def test_only_shared_prompts_of_one_suite_are_compared():
    first = document(suite(), {"name": "m"}, [judged(p, 0, "x", right=0.0, soft=0.0) for p in "ab"], [])
    second = document(suite(), {"name": "n"}, [judged(p, 0, "x", right=1.0, soft=1.0) for p in "bc"], [])
    found = compared(first, second)["metrics"]["right"]["overall"]
    assert (found["value"], found["num_prompts"]) == (1.0, 1)
    other = document(suite(name="other"), {"name": "n"}, [judged("a", 0, "x", right=1.0, soft=1.0)], [])
    with pytest.raises(Exception, match="results of suite tiny .* cannot be compared with those of other"):
        compared(first, other)


# Both stages --------------------------------------------------------------------------------------------------------


def folder_of(root: Path, name: str = "worlds-shapes-nft") -> Path:
    return root / "suites" / "shapes" / name


def test_an_interrupted_suite_continues_to_the_same_results(tmp_path, monkeypatch, capsys):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    prompts = tmp_path / "some.jsonl"
    prompts.write_text("".join(SUITES["shapes"].prompt_file.read_text().splitlines(keepends=True)[6:14]))
    command = ["eval", "--suite", "shapes", "worlds/shapes/nft", *QUICK, f"suite.prompts={prompts}"]
    assert main([*command, "--output", str(whole)]) == 0
    make = generating._make_part

    def interrupted(runtime, plan, number, files):
        if number == 1:
            raise KeyboardInterrupt
        make(runtime, plan, number, files)

    with monkeypatch.context() as patched:
        patched.setattr(generating, "_make_part", interrupted)
        assert main([*command, "--output", str(parted)]) == 130
    capsys.readouterr()
    assert main([*command, "--output", str(parted), "--stage", "score"]) == 2
    assert "1 of 2 parts are missing. Make them with: --stage generate" in capsys.readouterr().err
    first = (folder_of(parted) / "samples/suite-000000.jsonl").stat().st_mtime_ns
    assert main([*command, "--output", str(parted), "--stage", "generate"]) == 0
    assert (folder_of(parted) / "samples/suite-000000.jsonl").stat().st_mtime_ns == first
    assert not (folder_of(parted) / "results.json").exists()
    assert main([*command, "--output", str(parted), "--stage", "score"]) == 0
    for name in ("results.json", "results.md", "samples.png", "scores/suite-000001.jsonl"):
        assert (folder_of(whole) / name).read_bytes() == (folder_of(parted) / name).read_bytes(), name
    found = json.loads((folder_of(whole) / "results.json").read_text())
    assert (found["num_prompts"], found["num_samples"], found["num_failed"]) == (8, 8, 0)
    assert list(found["metrics"]["shapes/strict"]["categories"]) == ["color", "two"]
    assert found["changes"] == ["suite.samples_per_prompt=1", f"suite.prompts={prompts}"]
    capsys.readouterr()
    assert main([*command, "eval.batch_size=4", "--output", str(parted)]) == 2
    assert "samples_per_part = 5, now 4" in capsys.readouterr().err


def test_a_run_is_compared_with_its_model_before_training(tmp_path, capsys):
    run = tmp_path / "run"
    small = ["num_rollouts=1", "batch_size=2", "sampling.samples_per_prompt=2", "eval=null", "save.interval=1"]
    small += ["stack.micro_batch_size=1", "backend.optimizer.learning_rate=0.01", "stack.num_updates_per_batch=1"]
    assert main(["run", "worlds/shapes/nft", *small, f"run_dir={run}"]) == 0
    words = [word for word in QUICK if not word.startswith("eval.")]
    limited = tmp_path / "few.txt"
    limited.write_text("a red circle\ntwo green squares\n")
    command = ["eval", "--suite", "shapes", str(run), *words, f"suite.prompts={limited}"]
    assert main([*command, "--against", "base"]) == 0
    folder = folder_of(run, "step-000001")
    found = json.loads((folder / "comparison.json").read_text())
    assert found["before"]["step"] is None and found["after"]["step"] == 1
    assert found["metrics"]["shapes/strict"]["overall"]["num_prompts"] == 2
    names = ("results.md", "comparison.md", "comparison.png", "samples.png")
    assert all((folder / name).stat().st_size for name in names)
    images = [path / "samples/suite-000000/image-0000.png" for path in (folder, folder_of(run, "base"))]
    assert images[0].read_bytes() != images[1].read_bytes()
    capsys.readouterr()
    assert main([*command, "--checkpoint", "7"]) == 2
    assert "has no checkpoint of step 7; it has 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--suite", "shape", "worlds/shapes/nft"], "unknown suite 'shape'. Did you mean shapes?"),
        (["--suite", "shapes", "worlds/arithmetic/grpo"], "judges images, and worlds/arithmetic/grpo makes texts"),
        (
            ["--suite", "shapes", "worlds/shapes/nft", "--stage", "draw"],
            "--stage is one of generate, score, not 'draw'",
        ),
        (["worlds/shapes/nft", "--stage", "score"], "--stage of eval needs --suite NAME"),
        (["--suite", "shapes", "worlds/shapes/nft", "--checkpoint", "best"], "a recipe has none"),
        (["--suite", "shapes", "worlds/shapes/nft", "--against", "base"], "this is a model before training"),
        (["--suite", "shapes", "worlds/shapes/nft", "--against", "absent"], "--against absent: no results of a suite"),
        (["--suite", "shapes", "worlds/shapes/nft", "--stage", "score"], "has no samples. Make them with"),
        (["--suite", "shapes", "worlds/shapes/nft", "suite.colour=red"], "has no suite.colour to change"),
        (["--suite", "shapes", "worlds/shapes/nft", "suite.samples_per_prompt=0"], "at least one sample per prompt"),
        (["--suite", "shapes", "worlds/shapes/nft", "suite.scorers.shape.x=1"], "no scorer 'shape', only shapes"),
        (["--suite", "shapes", "worlds/shapes/nft", "suite.scorers.shapes=1"], "a scorer is {_target_: CLASS"),
        (["--suite", "shapes", "worlds/shapes/nft", "suite.template=x"], "has no {prompt}"),
        (["--suite", "shapes", "worlds/shapes/nft", "suite.prompts=absent.txt"], "no prompt file absent.txt"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(words, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_absent_prompts_are_named_before_the_recipe_is_read(capsys):
    assert main(["eval", "--suite", "shapes", "no/such", "suite.prompts=absent.txt"]) == 2
    assert "no prompt file absent.txt" in capsys.readouterr().err


def test_a_folder_of_a_model_is_given_to_a_recipe(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text("{}")
    assert main(["eval", "--suite", "shapes", str(tmp_path)]) == 2
    assert f"RECIPE bundle.pretrained_model={tmp_path}" in capsys.readouterr().err


def test_models_that_were_measured_otherwise_are_compared_with_a_note():
    first = document(suite(), {"name": "m"}, [judged("a", 0, "x", right=0.0, soft=0.0)], [])
    second = document(suite(), {"name": "n"}, [judged("a", 0, "x", right=1.0, soft=1.0)], ["suite.template=x"])
    page = comparison_page(compared(first, second), None, [])
    assert "The two were not measured alike:\n\n- m: the suite unchanged\n- n: suite.template=x" in page


def test_every_suite_is_described():
    for name, each in SUITES.items():
        assert each.name == name and each.metrics and each.source and each.what
