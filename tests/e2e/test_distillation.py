"""A student and its teacher from recipe to checkpoint: the teacher judges, is saved nowhere, and does not change."""

import json
import shutil
import threading

import pytest
from safetensors.torch import load_file, save_file
from stopping import run

from unirl.app.environment import packaged_path
from unirl.config.check import check_recipe
from unirl.config.runs import run_of
from unirl.trainer.commands import export_recipe, run_recipe
from unirl.trainer.resuming import check_resume
from unirl.types.errors import CheckpointError, ConfigError
from unirl.types.recipe import Machine

FEW = ("num_rollouts=1", "eval=null", "batch_size=2", "stack.num_updates_per_batch=1", "algorithm.num_timesteps=2")


PLENTY = Machine(num_cpus=1024, num_gpus=1024)


def taught_by(folder, *changes):
    return (f"policies.teacher.bundle.pretrained_model={folder}", *FEW, *changes)


@pytest.fixture(scope="module")
def displaced(tmp_path_factory):
    """The packaged painter with other weights, as an export is its own folder."""
    folder = tmp_path_factory.mktemp("teacher") / "painter"
    shutil.copytree(packaged_path("shapes", "checkpoint"), folder)
    [file] = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    save_file({name: 0.9 * tensor for name, tensor in weights.items()}, file, metadata={"format": "pt"})
    return folder


def test_a_teacher_that_is_the_student_teaches_nothing_and_another_one_does(recipe, displaced, tmp_path):
    own = packaged_path("shapes", "checkpoint")
    distances = {}
    for name, folder in (("same", own), ("other", displaced)):
        place = tmp_path / name
        _, records = run(recipe("worlds/shapes/distill", *taught_by(folder)), place)
        distances[name] = records[1]["distillation/velocity_distance"]
        [saved] = (place / "checkpoints").glob("step-*")
        assert "teacher" not in "".join(path.name for path in saved.rglob("*"))
    # Float32 of two copies of one model, in batches of equal size.
    assert distances["same"] < 1e-9 < 1e-4 < distances["other"]


def test_a_student_is_exported_without_its_teacher(recipe, displaced, tmp_path):
    gone = tmp_path / "gone"
    shutil.copytree(displaced, gone)
    small = recipe("worlds/shapes/distill", *taught_by(gone), f"run_dir={tmp_path / 'run'}")
    run(small, tmp_path / "run")
    shutil.rmtree(gone)
    with pytest.raises(ConfigError, match=r"policies\.teacher\.bundle\.pretrained_model = .*: no such folder"):
        check_recipe(small, PLENTY)
    check_recipe(small, PLENTY, asks_teachers=False)
    folder = tmp_path / "student"
    export_recipe(run_of(small), tmp_path / "run", folder, merged=True)
    assert (folder / "model_index.json").is_file()


def test_a_run_is_not_resumed_with_another_teacher(recipe, displaced, tmp_path):
    small = recipe("worlds/shapes/distill", *taught_by(displaced))
    run_recipe(run_of(small), tmp_path, [], threading.Event())
    other = recipe("worlds/shapes/distill", *taught_by(packaged_path("shapes", "checkpoint"), "resume=auto"))
    with pytest.raises(CheckpointError, match=r"policies\.teacher\.bundle\.pretrained_model: "):
        check_resume(other, tmp_path)
    state = json.loads((tmp_path / "checkpoints" / "step-000001" / "driver_state.json").read_text())
    assert state["next_rollout"] == 1
