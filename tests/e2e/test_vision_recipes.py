"""Recipes of questions about images, run whole on few samples: the packaged small one, and one of real size on a
random model with a table as Geometry3K has it."""

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve
from unirl.config.runs import run_of
from unirl.tracking.gallery import table_row
from unirl.tracking.sample_files import read_samples
from unirl.trainer.commands import run_recipe
from unirl.worlds.shapes.questions import pretrain

SMALL = ["num_rollouts=2", "media_interval=1", "eval.interval=2", "eval.pass_samples=2", "eval.pass_at=[1,2]"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(name: str, folder: Path, *overrides: str) -> dict[str, Any]:
    register_resolvers()
    recipe = resolve(compose(name, [*SMALL, *overrides]))
    check_recipe(recipe)
    return run_recipe(run_of(recipe), folder, [])


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """What trackers' tables say of the recorded samples."""
    return [table_row(record) for record in read_samples(folder / "samples" / f"{name}.jsonl")]


def test_the_small_recipe_asks_answers_trains_and_shows_its_pictures(tmp_path: Path):
    summary = run(
        "worlds/questions/grpo",
        tmp_path,
        *("batch_size=8", "sampling.samples_per_prompt=4", "stack.micro_batch_size=8", "engine.forward_batch_size=16"),
        *("eval.num_samples=20", "eval.batch_size=16", "eval.pass_prompts=4"),
    )
    # The anchor is taken at the very slices of training; rollouts decode with a cache, so they differ in the last bits.
    assert summary["first_ratio_max_abs_dev"] == 0.0
    assert 0 < summary["logp_gap"]["max"] < 2e-5
    assert {"reward", "exact_match", "pass@1", "pass@2"} <= summary["eval_after"]["overall"].keys()
    table = rows(tmp_path, "eval-000002")
    assert len(table) == 16
    assert table[0].keys() == {"prompt", "images", "completion", "answer", "tokens", "end", "reward", "exact_match"}
    assert all(("which has more" in row["prompt"]) == (", " in row["images"]) for row in table)
    assert all((row["completion"].strip() == row["answer"]) == (row["reward"] == 1) for row in table)
    for name in ("eval-000000", "eval-000002", "rollout-000001", "rollout-000002"):
        with Image.open(tmp_path / "samples" / f"{name}.png") as picture:
            assert min(picture.size) > 300


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, and a table of problems with one figure or two."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("geometry")
    pretrain.save_random_model(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)

    def figure(width: int, height: int) -> dict[str, Any]:
        file = io.BytesIO()
        Image.new("RGB", (width, height), "white").save(file, "png")
        return {"bytes": file.getvalue(), "path": None}

    problems = [
        {"problem": "<image>Find x.", "images": [figure(40, 30)], "choices": ["3", "5", "8", "9"], "answer": "B"},
        {"problem": "Find y.", "images": [figure(32, 32)] * 2, "choices": ["1", "2", "4", "7"], "answer": "4"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(problems), folder / "problems.parquet")
    return folder


@pytest.mark.parametrize("lora", [False, True])
def test_a_recipe_of_real_size_runs_on_a_random_model_and_a_table_of_problems(
    lora: bool, geometry: Path, tmp_path: Path
):
    summary = run(
        "vlm/qwen_vl_geo3k",
        tmp_path,
        *(["parts/train=lora_vl"] if lora else []),
        *("runtime=local", "num_devices=1", "device=cpu", "bundle.dtype=fp32", "backend.fsdp.param_dtype=fp32"),
        *("bundle.min_pixels=1024", "bundle.max_pixels=1024", f"bundle.pretrained_model={geometry / 'model'}"),
        *(f"data.path={geometry / 'problems.parquet'}", f"eval.prompts={geometry / 'problems.parquet'}"),
        *("batch_size=2", "sampling.samples_per_prompt=2", "sampling.max_new_tokens=6", "eval.num_samples=2"),
        "pipeline.system_prompt=Choose.",
    )
    assert summary["first_ratio_max_abs_dev"] == 0.0
    assert "mc_exact_match" in summary["eval_after"]["overall"]
    first, second = sorted(rows(tmp_path, "eval-000000"), key=lambda row: row["prompt"])
    assert (first["prompt"], first["answer"]) == ("<image>Find x.\nA. 3\nB. 5\nC. 8\nD. 9", "B")
    assert (second["prompt"], second["answer"]) == ("Find y.\nA. 1\nB. 2\nC. 4\nD. 7", "C")
