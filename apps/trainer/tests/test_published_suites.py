"""The suites of published benchmarks: their data, their scorers, and the files in their authors' formats."""

import inspect
import json
from typing import Any

import pytest
import torch
import transformers
from PIL import Image as PillowImage
from PIL import ImageDraw, ImageFont

from unirl.app.main import main
from unirl.config.instantiation import TARGET, import_target
from unirl.datasets.catalog import SETS
from unirl.datasets.preparing import prepare
from unirl.suites.catalog import SUITES
from unirl.suites.generating import claim
from unirl.suites.results import document
from unirl.suites.scoring import score
from unirl.suites.suite import Judged
from unirl.suites.vbench import BACKGROUND, FLICKERING, STYLE, SUBJECT
from unirl.tracking.sample_files import SampleFiles
from unirl.types.errors import ConfigError
from unirl.types.samples import Image, SampleRecord

from .published_sets import publish

SET_OF = {name: suite.prompts.split("/")[1] for name, suite in SUITES.items() if suite.prompts.startswith("datasets/")}


def judged(number, metadata, scores, index=0, categories=("x",), **details):
    media = {"kind": "image", "file": f"suite-000000/image-{number:04d}.png"}
    return Judged(f"prompt {number}", media, metadata, f"p{number}", index, categories, scores, None, details)


def files_of(name, samples):
    """What a suite writes in its authors' format."""
    publish = SUITES[name].publish
    assert publish is not None
    return publish(samples)


def built(node: Any) -> None:
    """Raises TypeError if a class does not take the keywords of a suite."""
    if isinstance(node, dict):
        keywords = {key: value for key, value in node.items() if key != TARGET}
        for value in keywords.values():
            built(value)
        if TARGET in node:
            inspect.signature(import_target(node[TARGET], "")).bind(**keywords)


@pytest.mark.parametrize("name", SUITES)
def test_scorers_take_what_a_suite_gives_them(name):
    for scorer, node in SUITES[name].scorers.items():
        built(dict(node) | {"name": scorer})


@pytest.mark.parametrize("name", SET_OF)
def test_prompts_come_from_the_data_command(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite, made = SUITES[name], SETS[SET_OF[name]]
    with pytest.raises(ConfigError, match=f"Make it with: uv run trainer data prepare {made.name}"):
        suite.rows()
    given = None if made.is_generated else publish(made.name, tmp_path / "published")
    prepare(made, tmp_path / "datasets" / made.name, given=given, is_partial=given is not None)
    rows = suite.rows()
    assert rows and all(suite.categories_of(row.metadata) for row in rows)


def test_a_published_set_keeps_what_scorers_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {}
    for name in ("geneval", "dpg", "gpqa", "wise", "hpdv2", "partiprompts", "vbench"):
        made = SETS[SET_OF[name]]
        given = publish(made.name, tmp_path / "published" / name)
        prepare(made, tmp_path / "datasets" / made.name, given=given, is_partial=True)
        found[name] = SUITES[name].rows()
    assert found["geneval"][1].metadata["include"] == [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}]
    first, second = found["dpg"]
    assert [each["parents"] for each in first.metadata["questions"]] == [[], [1]]
    assert first.metadata["questions"][1]["category"] == "attribute - state"
    assert (first.prompt, second.prompt) == ("A cat, asleep", "A red box")
    gpqa = found["gpqa"][0]
    letter = gpqa.metadata["answer"]
    assert f"{letter}. one" in gpqa.prompt and gpqa.prompt.startswith("What is 1?")
    categories = [row.metadata["category"] for row in found["wise"]]
    assert categories[:1] + categories[40:42] == ["cultural", "time", "space"] and categories[-1] == "biology"
    assert [row.metadata["category"] for row in found["hpdv2"]][::3] == ["anime", "concept-art", "paintings", "photo"]
    assert found["partiprompts"][1].prompt == 'a "sign"'
    assert SUITES["partiprompts"].categories_of(found["partiprompts"][1].metadata) == ("Artifacts", "Writing")
    assert found["vbench"][0].metadata["dimensions"] == ["temporal_flickering"]
    assert found["vbench"][2].metadata["appearance_style"] == "Van Gogh style"


# Published formats --------------------------------------------------------------------------------------------------


def test_geneval_writes_the_lines_and_the_summary_of_its_repository():
    dog = {"class": "dog", "count": 1}
    rows = {"single_object": {"tag": "single_object", "include": [dog], "category": "single_object"}}
    rows["counting"] = {"tag": "counting", "include": [dog | {"count": 2}], "category": "counting"}
    boxes = {"dog": [[1.0, 2.0, 3.0, 4.0, 0.95]]}
    samples = [
        judged(0, rows["single_object"], {"geneval/reward": 1.0}, correct=True, reason="", boxes=boxes),
        judged(0, rows["single_object"], {"geneval/reward": 0.0}, 1, correct=False, reason="expected dog>=1, found 0"),
        judged(1, rows["counting"], {"geneval/reward": 0.0}, correct=False, reason="expected dog>=2, found 1"),
    ]
    samples = [
        Judged(each.prompt, each.media, each.metadata, each.prompt_id, each.index, (each.metadata["tag"],),
               each.scores, None, {"boxes": {}, **each.details})
        for each in samples
    ]  # fmt: skip
    files = files_of("geneval", samples)
    first, second, _ = map(json.loads, files["results.jsonl"].splitlines())
    assert list(first) == ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert first["filename"] == "samples/suite-000000/image-0000.png" and first["correct"] is True
    assert json.loads(first["metadata"]) == {"tag": "single_object", "include": [dog], "prompt": "prompt 0"}
    assert json.loads(first["details"]) == boxes
    assert second["reason"] == "expected dog>=1, found 0"
    assert files["summary.txt"].splitlines() == [
        "Summary",
        "=======",
        "Total images: 3",
        "Total prompts: 2",
        "% correct images: 33.33%",
        "% correct prompts: 50.00%",
        "",
        "Task breakdown",
        "==============",
        "single_object    = 50.00% (1 / 2)",
        "counting         = 0.00% (0 / 1)",
        "",
        "Overall score (avg. over tasks): 0.25000",
    ]
    found = document(SUITES["geneval"], {"name": "m"}, samples, [])
    assert found["metrics"]["geneval/reward"]["overall"]["value"] == 0.25


def test_dpg_scores_questions_by_category_before_dependencies():
    questions = [
        {"id": 1, "question": "a cat?", "parents": [], "category": "entity - whole"},
        {"id": 2, "question": "asleep?", "parents": [1], "category": "attribute - state"},
    ]
    sample = judged(0, {"questions": questions}, {"dpg": 0.0}, answers=[False, True])
    files = files_of("dpg", [sample])
    assert files["dpg-bench_results_detail.txt"].splitlines()[1].endswith("image-0000.png, asleep?, yes")
    assert "DPG-Bench score: 0.0" in files["dpg-bench_results.txt"]
    found = document(SUITES["dpg"], {"name": "m"}, [sample], [])["metrics"]["dpg"]
    assert {name: part["value"] for name, part in found["categories"].items()} == {"entity": 0.0, "attribute": 1.0}
    assert found["overall"]["value"] == 0.0


def test_wise_weighs_its_categories():
    scores = {"wise": 0.5, "wise/consistency": 1.0, "wise/realism": 1.0, "wise/aesthetic": 1.0}
    samples = [
        judged(number, {"number": number, "subcategory": "s"}, scores | {"wise": value}, categories=(category,))
        for number, (category, value) in enumerate(
            zip(("cultural", "time", "space", "biology", "physics", "chemistry"), (1, 0.5, 0.5, 0, 0, 1), strict=True)
        )
    ]
    failed = Judged("p", {}, {"number": 9, "subcategory": "s"}, "p9", 0, ("time",), {}, "no answer")
    found = document(SUITES["wise"], {"name": "m"}, samples, [])["metrics"]["wise"]["overall"]["value"]
    assert found == pytest.approx(0.4 * 1 + 0.167 * 0.5 + 0.133 * 0.5 + 0.1 * 1)
    lines = files_of("wise", [*samples, failed])["scores_results.jsonl"].splitlines()
    assert list(json.loads(lines[0])) == ["prompt_id", "Subcategory", "consistency", "realism", "aesthetic_quality"]
    assert json.loads(lines[-1])["consistency"] == 999


def test_hpdv2_gives_means_and_deviations_of_groups_of_eighty():
    values = [0.25] * 80 + [0.27] * 80
    samples = [judged(n, {}, {"hpsv2": value}, categories=("anime",)) for n, value in enumerate(values)]
    assert files_of("hpdv2", samples)["hpsv2.txt"] == "anime           26.00 \t 1.0000\n"


def test_vbench_counts_the_prompts_of_a_dimension_and_names_what_it_does_not_measure():
    scores = {"frames/frames": 5.0, "frames/consistency": 0.9}
    samples = [judged(n, {"dimensions": [each]}, scores) for n, each in enumerate(["temporal_flickering"] * 2 + ["x"])]
    samples.append(judged(3, {"dimensions": ["aesthetic_quality"]}, scores))
    files = json.loads(files_of("vbench", samples)["vbench_eval_results.json"])
    assert files["aesthetic_quality"][0] == 0.5 and len(files["temporal_flickering"][1]) == 2
    found = document(SUITES["vbench"], {"name": "m"}, samples, [])
    assert found["metrics"]["frames/consistency"]["overall"]["num_prompts"] == 2
    assert "no scorer here for motion_smoothness" in found["changes"][-1]


def test_geneval2_writes_the_probabilities_of_atoms():
    sample = judged(0, {}, {"geneval2": 0.5}, atoms=[0.25, 1.0])
    assert json.loads(files_of("geneval2", [sample])["score_lists.json"]) == [[0.25, 1.0]]


# Whole paths --------------------------------------------------------------------------------------------------------


def test_aime_takes_several_samples_and_gives_pass_at_1(tmp_path):
    prompts = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in ((12, 5), (40, 21), (31, 64))]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"suite.prompts={prompts}", "suite.samples_per_prompt=4", "suite.template={prompt}"]
    exact = "suite.scorers.math._target_=unirl.reward.local.texts.exact_match.ExactMatchScorer"
    command = ["eval", "--suite", "aime", "worlds/arithmetic/grpo", *words, exact, "--output", str(tmp_path)]
    assert main(command) == 0
    folder = tmp_path / "suites/aime/worlds-arithmetic-grpo"
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 12 and [line["index"] for line in lines[:4]] == [0, 1, 2, 3]
    right = [line["completion"].strip() == line["answer"] for line in lines]
    assert [line["correct"] for line in lines] == right and any(right)
    found = json.loads((folder / "results.json").read_text())
    assert found["metrics"]["math"]["overall"]["value"] == pytest.approx(sum(right) / 12)
    assert found["metrics"]["math"]["overall"]["interval"] == "wilson"
    assert "**12+5=**" in (folder / "results.md").read_text()


JUDGED_PROMPTS = """
from pathlib import Path


def judge(media, prompts, metadata):
    with (Path(__file__).parent / "asked.txt").open("a") as file:
        file.writelines(prompt + chr(10) for prompt in prompts)
    return [1.0] * len(prompts)
"""


def test_vbench_makes_the_videos_that_it_measures(tmp_path, monkeypatch):
    (tmp_path / "judged_prompts.py").write_text(JUDGED_PROMPTS)
    monkeypatch.syspath_prepend(tmp_path)
    prompts = tmp_path / "videos.jsonl"
    rows = [("a red circle moves left", ["temporal_flickering"]), ("a red circle moves up", ["human_action"])]
    rows.append(("a blue circle moves up", ["subject_consistency", "appearance_style"]))
    prompts.write_text("".join(json.dumps({"prompt": text, "dimensions": each}) + "\n" for text, each in rows))
    jpeg = "suite.scorers.frames.scorer={_target_: unirl.reward.local.images.compressibility.JPEGCompressibilityScorer}"
    own = "{_target_: unirl.reward.function.FunctionRewardScorer, function: judged_prompts.judge}"
    models = [f"suite.scorers.{name}={own}" for name in (SUBJECT, BACKGROUND, STYLE)]
    words = [f"suite.prompts={prompts}", "suite.samples_per_prompt=2", jpeg, *models, "eval.num_inference_steps=1"]
    assert main(["eval", "--suite", "vbench", "worlds/moves/nft", *words, "--output", str(tmp_path)]) == 0
    folder = tmp_path / "suites/vbench/worlds-moves-nft"
    found = json.loads((folder / "vbench_eval_results.json").read_text())
    assert {name: len(videos) for name, (_, videos) in found.items()} == {FLICKERING: 2, SUBJECT: 2, STYLE: 2}
    assert all((folder / each["video_path"]).is_file() for each in found[FLICKERING][1])
    document = json.loads((folder / "results.json").read_text())
    assert set(document["metrics"]) == {"frames/consistency", SUBJECT, STYLE}
    assert (folder / "samples.png").is_file()
    # A scorer is asked about the prompts of its dimensions alone.
    asked = (tmp_path / "asked.txt").read_text().splitlines()
    assert set(asked) == {"a blue circle moves up"} and len(asked) == 4


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A tiny random Mask2Former."""
    path = tmp_path_factory.mktemp("mask2former")
    torch.manual_seed(0)
    layers: dict[str, Any] = {"image_size": 32, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
    layers |= {"window_size": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    sizes: dict[str, Any] = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 5}
    sizes |= {"encoder_feedforward_dim": 16, "dim_feedforward": 16, "encoder_layers": 1, "decoder_layers": 2}
    config: Any = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(**layers), num_attention_heads=2, id2label={0: "dog", 1: "cat"}, **sizes
    )
    model: Any = transformers.Mask2FormerForUniversalSegmentation(config).eval()
    model.class_predictor.weight.data.mul_(30)
    model.save_pretrained(path)
    size = {"height": 64, "width": 64}
    transformers.Mask2FormerImageProcessorPil(size=size, ignore_index=255).save_pretrained(path)
    return str(path)


def test_geneval_runs_whole_with_a_detector_of_transformers(tmp_path, detector):
    prompts = tmp_path / "geneval.jsonl"
    asked = {"single_object": [{"class": "dog", "count": 1}], "counting": [{"class": "cat", "count": 2}]}
    rows = [
        {"prompt": prompt, "tag": tag, "category": tag, "include": asked[tag]}
        for prompt, tag in (("a red circle", "single_object"), ("two green squares", "counting"))
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"suite.prompts={prompts}", "suite.samples_per_prompt=2", "suite.scorers.geneval.colours=null"]
    words += [f"suite.scorers.geneval.detector.model={detector}", "eval.num_inference_steps=2"]
    assert main(["eval", "--suite", "geneval", "worlds/shapes/nft", *words, "--output", str(tmp_path)]) == 0
    folder = tmp_path / "suites/geneval/worlds-shapes-nft"
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["tag"] for line in lines] == ["single_object"] * 2 + ["counting"] * 2
    assert all(line["correct"] == (line["reason"] == "") for line in lines)
    assert all((folder / line["filename"]).is_file() for line in lines)
    tasks = json.loads((folder / "results.json").read_text())["metrics"]["geneval/reward"]["categories"]
    assert tasks["single_object"]["value"] == sum(line["correct"] for line in lines[:2]) / 2
    assert "2 prompts; the published benchmark has 553" in (folder / "results.md").read_text()


def test_a_detector_that_is_not_there_is_named_with_how_to_get_it(tmp_path, capsys):
    prompts = tmp_path / "geneval.jsonl"
    row = {"prompt": "a red circle", "tag": "single_object", "include": [{"class": "dog", "count": 1}]}
    prompts.write_text(json.dumps(row) + "\n")
    words = [f"suite.prompts={prompts}", "suite.samples_per_prompt=1", "eval.num_inference_steps=1"]
    words += [f"suite.scorers.geneval.detector.model={tmp_path / 'absent'}"]
    assert main(["eval", "--suite", "geneval", "worlds/shapes/nft", *words, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "suite geneval:" in error and "suite.scorers.geneval.detector.model=FOLDER" in error
    assert not list(tmp_path.rglob("suite-*.jsonl")), "nothing was generated"


def test_ocr_reads_samples_offline(tmp_path):
    pytest.importorskip("rapidocr")
    image = PillowImage.new("RGB", (256, 96), "white")
    ImageDraw.Draw(image).text((30, 20), "OPEN", fill="black", font=ImageFont.load_default(size=48))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(96, 256, 3).permute(2, 0, 1)
    records = [
        SampleRecord(
            sample_id=f"s{number}",
            track="image",
            group_id=f"prompt:ocr:test.jsonl:{number}@0",
            prompt_id=f"prompt:ocr:test.jsonl:{number}@0",
            prompt=f'A sign that says "{word}"',
            media=Image(pixels.contiguous()),
            metadata={"category": "one word"},
        )
        for number, word in enumerate(("OPEN", "EXIT"))
    ]
    samples = tmp_path / "samples"
    samples.mkdir()
    claim(samples, {"num_prompts": 2, "samples_per_prompt": 1, "samples_per_part": 2})
    SampleFiles(samples).write("suite", 0, records)
    found = score(SUITES["ocr"], samples, tmp_path / "scores", 1, None, "cpu")
    assert [each.prompt_id for each in found] == ["test.jsonl:0", "test.jsonl:1"]
    assert found[0].scores["ocr"] == 1.0 > found[1].scores["ocr"]
