"""The launchers print the commands that they would run, and refuse what cannot be."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
SINGLE, MULTI = EXAMPLES / "run_experiment_single_node.sh", EXAMPLES / "run_experiment_multi_node.sh"
RECIPE = "worlds/shapes/nft"
PLAIN = {"NUM_NODES": "2", "HEAD_ADDRESS": "10.0.0.1", "DEVICES_PER_NODE": "8"}
RUN = ["uv", "run", "--no-sync"]


def launched(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the script says with these variables and no others."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [str(script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def commands(script: Path, *words: str, **variables: str) -> list[list[str]]:
    """The commands that it would run."""
    done = launched(script, *words, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_one_node_trains_on_its_gpus() -> None:
    found = commands(SINGLE, RECIPE, "seed=1", CUDA_VISIBLE_DEVICES="0,2,3", RAY_ADDRESS="10.0.0.9:1")
    assert found == [[*RUN, "trainer", RECIPE, "num_devices=3", "runtime=ray", "cluster.num_nodes=1", "seed=1"]]
    assert commands(SINGLE, RECIPE) == [[*RUN, "trainer", RECIPE, "num_devices=1"]]


def test_entry_output_and_starter_can_be_chosen() -> None:
    chosen = {"ENTRY": "unirl.train_diffusion", "OUTPUT_DIR": "/runs/a b", "RUN": ""}
    (found,) = commands(SINGLE, RECIPE, **chosen)
    assert found == ["python", "-m", "unirl.train_diffusion", RECIPE, "num_devices=1", "run_dir='/runs/a b'"]


def test_the_first_of_several_machines_starts_ray_and_trains() -> None:
    head, train = commands(MULTI, RECIPE, "seed=1", **PLAIN, NODE_RANK="0", RAY_PORT="7000")
    assert (
        head[: len(RUN) + 2] == [*RUN, "ray", "start"]
        and "--node-ip-address=10.0.0.1" in head
        and "--port=7000" in head
    )
    assert train == [*RUN, "trainer", RECIPE, "num_devices=16", "runtime=ray", "cluster.num_nodes=2", "seed=1"]


def test_the_others_join_the_first() -> None:
    (joined,) = commands(MULTI, RECIPE, **PLAIN, NODE_RANK="1", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    assert joined == [
        *RUN,
        "ray",
        "start",
        "--address=10.0.0.1:6379",
        "--num-gpus=8",
        "--disable-usage-stats",
        "--block",
    ]


def test_slurm_starts_the_script_on_every_node_which_then_knows_its_place(tmp_path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    (srun,) = commands(MULTI, RECIPE, **job)
    assert srun == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", str(MULTI), RECIPE]
    scontrol = tmp_path / "scontrol"
    # A long list, of which only the first line is used: who stops reading early would end the writer by a signal.
    scontrol.write_text("#!/bin/sh\necho node7\necho node8\nseq 100000\n")
    scontrol.chmod(0o755)
    step = {**job, "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "node[7-8]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    head, train = commands(MULTI, RECIPE, **step, SLURM_NODEID="0", DEVICES_PER_NODE="8")
    assert "--node-ip-address=node7" in head and "num_devices=16" in train
    (joined,) = commands(MULTI, RECIPE, **step, SLURM_NODEID="1")
    assert "--address=node7:6379" in joined


def test_in_kubernetes_the_trainer_joins_the_ray_that_runs() -> None:
    manifest = yaml.safe_load((EXAMPLES / "launch/rayjob.yaml").read_text())["spec"]
    variables = yaml.safe_load(manifest["runtimeEnvYAML"])["env_vars"]
    script, recipe = manifest["entrypoint"].split()
    assert Path(script).name == MULTI.name
    (train,) = commands(MULTI, recipe, RAY_ADDRESS="10.1.0.4:6379", **variables)
    assert train[len(RUN) :] == [
        *("trainer", recipe, "num_devices=32", "runtime=ray", "cluster.num_nodes=4", "run_dir='/runs/sd3_flowgrpo'")
    ]
    (workers,) = manifest["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] + 1 == int(variables["NUM_NODES"])
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["DEVICES_PER_NODE"])


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**PLAIN}, "NODE_RANK = '' must be 0 to 1, another one on every machine"),
        ({**PLAIN, "NODE_RANK": "2"}, "NODE_RANK = 2 is not below NUM_NODES = 2"),
        ({**PLAIN, "NODE_RANK": "0", "NUM_NODES": "two"}, "NUM_NODES = 'two' must be a number of at least 1"),
        (
            {**PLAIN, "NODE_RANK": "0", "HEAD_ADDRESS": "127.0.0.1"},
            "HEAD_ADDRESS = 127.0.0.1 is reached by one",
        ),
        ({**PLAIN, "NODE_RANK": "0", "HEAD_ADDRESS": ""}, "HEAD_ADDRESS is not set"),
        ({"RAY_ADDRESS": "10.1.0.4:6379", "NUM_NODES": "2"}, "DEVICES_PER_NODE = '' must be a number"),
        (
            {**PLAIN, "NODE_RANK": "1", "HEAD_ADDRESS": "[::1]", "RAY_PORT": "1", "START_TIMEOUT_S": "0"},
            "no Ray answers at [::1]:1 after 0 s",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_with_its_variable(variables: dict[str, str], message: str) -> None:
    done = launched(MULTI, RECIPE, **variables)
    assert done.returncode == 2 and f"error: {message}" in done.stderr


def test_without_a_recipe_the_usage_is_shown() -> None:
    for script in (SINGLE, MULTI):
        done = launched(script)
        assert done.returncode == 2 and "DRY_RUN" in done.stderr and "RECIPE [KEY=VALUE ...]" in done.stderr
