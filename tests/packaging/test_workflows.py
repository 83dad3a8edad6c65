"""Workflows, Dockerfiles and launch files name what exists, and say what their tools understand."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
LAUNCH = ROOT / "examples/launch"
SCHEMAS = Path(__file__).parent / "schemas"
PROJECTS = {
    tomllib.loads(path.read_text())["project"]["name"]: path.parent
    for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
}
IN_A_PATH = re.compile(
    r"(?<![\w./$*-])((?:packages|apps|scripts|docs|docker|tests|examples|environments|\.ci|\.github)/[\w./-]+)"
)
WRITTEN = {"docs/api"}
"""Folders that a command makes."""


def read(path: Path) -> dict:
    """A workflow; YAML 1.1 reads its key `on` as true."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["on"] = content.pop(True)
    return content


def commands(path: Path) -> list[str]:
    return [step["run"] for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step]


def filters(path: Path) -> list[str]:
    events = read(path)["on"].values()
    return [name for event in events if isinstance(event, dict) for name in event.get("paths", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_path_and_program_of_a_workflow_exists(path):
    named = {name.rstrip(".") for command in commands(path) for name in IN_A_PATH.findall(command)}
    named |= {
        found for job in read(path)["jobs"].values() for found in IN_A_PATH.findall(json.dumps(job.get("strategy", {})))
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    empty = [each for each in filters(path) if not any(ROOT.glob(each.removesuffix("/**")))]
    assert empty == [], "path filters that match no file"
    assert {name for command in commands(path) for name in re.findall(r"--package (unirl[\w-]+)", command)} <= set(
        PROJECTS
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_can_do_no_more_than_it_says_and_holds_no_secret(path):
    content = read(path)
    assert content["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text() and "password" not in path.read_text()
    for name, job in content["jobs"].items():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step.get("uses", "a/b@v1")), step
        assert set(job.get("needs", []) if isinstance(job.get("needs"), list) else [job.get("needs", name)]) <= set(
            content["jobs"]
        )


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_every_package_has_a_workflow_that_runs_when_it_or_what_it_needs_changes(name):
    path = ROOT / f".github/workflows/{name}.yml"
    needed, waiting = set(), [name]
    while waiting:
        package = waiting.pop()
        needed.add(package)
        dependencies = tomllib.loads((PROJECTS[package] / "pyproject.toml").read_text())["project"]["dependencies"]
        found = {re.split(r"[\[><=~! ]", each)[0] for each in dependencies} & set(PROJECTS)
        waiting += sorted(found - needed)
    folders = {f"{PROJECTS[package].relative_to(ROOT)}/**" for package in needed}
    for event in ("pull_request", "push"):
        watched = set(read(path)["on"][event]["paths"])
        assert folders <= watched and {"uv.lock", f".github/workflows/{name}.yml"} <= watched
    assert any(f"--package {name}" in command for command in commands(path))


def test_publishing_is_trusted_by_environment_and_needs_the_check():
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    publish = jobs["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi-${{ needs.build.outputs.package }}"
    assert any("scripts/release check" in step.get("run", "") for step in jobs["build"]["steps"])
    assert read(ROOT / ".github/workflows/release.yml")["on"] == {"push": {"tags": ["unirl-*-v[0-9]*"]}}


def test_the_nightly_alarm_waits_for_every_other_job():
    jobs = read(ROOT / ".github/workflows/nightly.yml")["jobs"]
    assert set(jobs["alarm"]["needs"]) == set(jobs) - {"alarm"}
    assert "failure()" in jobs["alarm"]["if"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_there_is_a_dockerfile_for_a_cpu_a_gpu_each_engine_and_a_reward_node():
    assert {path.suffix[1:] for path in DOCKERFILES} == {"cpu", "cuda", "vllm", "sglang", "vllm-omni", "reward"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_a_dockerfile_has_stages_a_plain_user_and_copies_what_exists(path):
    found = instructions(path)
    last = max(at for at, (word, _) in enumerate(found) if word == "FROM")
    assert sum(word == "FROM" for word, _ in found) >= 3
    final = found[last:]
    assert [rest for word, rest in final if word == "USER"] == ["10001"]
    assert "useradd --create-home --uid 10001" in " ".join(rest for word, rest in final if word == "RUN")
    assert {"ENTRYPOINT", "CMD"} <= {word for word, _ in final}
    for word, rest in found:
        assert not re.search(r"(?i)(token|password|secret|api_key)=", rest), rest
        if word == "FROM":
            assert ":" in rest.split()[0] or rest.split()[0] in stages(found), "an image without a tag"
        if word in ("COPY", "ADD") and "--from=" not in rest:
            sources = [each for each in shlex.split(rest) if not each.startswith("--")][:-1]
            assert [each for each in sources if not (ROOT / each).exists()] == []
    extras = {extra for _, rest in found for extra in re.findall(r"--extra ([\w-]+)", rest)}
    known = tomllib.loads((ROOT / "apps/trainer/pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras <= set(known)


def stages(found: list[tuple[str, str]]) -> set[str]:
    return {rest.split(" AS ")[1] for word, rest in found if word == "FROM" and " AS " in rest}


def test_what_images_are_built_from_leaves_out_environments_and_runs():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv*", "runs", "build", ".env*"} <= set(ignored)
    # Packages are built from these.
    assert not {"LICENSE", "README.md", "packages", "apps", "examples"} & set(ignored)


def test_the_ray_job_has_the_fields_of_kuberay():
    schema = json.loads((SCHEMAS / "rayjob.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    job = yaml.safe_load((LAUNCH / "rayjob.yaml").read_text())
    validator.validate(job)
    spec = job["spec"]["rayClusterSpec"]
    for pod in (spec["headGroupSpec"]["template"]["spec"], spec["workerGroupSpecs"][0]["template"]["spec"]):
        mounted = {each["name"] for container in pod["containers"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]}
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] = {
        "num-gpus": 8
    }  # a number, where KubeRay has texts
    with pytest.raises(jsonschema.ValidationError, match="8 is not of type 'string'"):
        validator.validate(job)


def test_the_skypilot_task_is_one_by_its_schema():
    schema = json.loads((SCHEMAS / "skypilot.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    validator.validate(task)
    assert task["num_nodes"] == 2 and "examples/run_experiment_multi_node.sh" in task["run"]
    with pytest.raises(jsonschema.ValidationError, match="num_node"):
        validator.validate({**task, "num_node": 2})


SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"1",  # one launcher per node starts Ray there
    "gpus-per-node": r"([\w.-]+:)?\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "exclusive": r"",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "output": r"[\w/.%-]+",
}
"""Options of sbatch that the file uses -> what they take."""


def test_the_slurm_file_has_options_that_sbatch_knows_before_its_first_command():
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    assert lines[0].startswith("#!")
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert options and all(
        line.startswith("#SBATCH --") for line in lines if "SBATCH" in line and not line.startswith("# ")
    )
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")], "sbatch reads no option after a command"
    for option in options:
        name, _, value = option.removeprefix("--").partition("=")
        assert re.fullmatch(SBATCH[name], value), option


def test_the_slurm_file_starts_the_launcher_on_every_node(tmp_path):
    subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sbatch")], check=True)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DRY_RUN": "1", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "worlds/shapes/nft", "seed=1"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    launcher = str(ROOT / "examples/run_experiment_multi_node.sh")
    starter = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", launcher, "worlds/shapes/nft", "seed=1"]
    assert shlex.split(done.stdout) == starter


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_skypilot_task_starts_ray_on_every_node_and_trains_on_the_first(tmp_path, rank):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    sky |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "sky-1", **task["envs"]}
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DRY_RUN": "1", "RAY_AUTH_TOKEN": "x", **sky}
    done = subprocess.run(
        ["bash", "-c", task["run"]], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert ("--head" in done.stdout and "num_devices=16" in done.stdout) == (rank == "0")
    assert ("--address=10.0.0.1:6399" in done.stdout) == (rank == "1")


def test_recipes_of_launch_files_and_images_are_packaged():
    packaged = (ROOT / "docs/reference/recipes.md").read_text()
    texts = [path.read_text() for path in [*DOCKERFILES, *LAUNCH.iterdir()]]
    named = {name for text in texts for name in re.findall(r"\b((?:worlds|sd3)/[a-z_]+(?:/[a-z_]+)?)\b", text)}
    assert len(named) >= 4
    assert [name for name in sorted(named) if f"`{name}`" not in packaged] == []


def test_the_bill_of_materials_lists_what_the_lock_installs(uv):
    environment = {**os.environ, "OFFLINE": "1", "PATH": f"{Path(uv).parent}:{os.environ['PATH']}"}
    subprocess.run([str(ROOT / "scripts/audit"), "unirl-types"], env=environment, check=True, timeout=60)
    bill = json.loads((ROOT / "build/sbom/unirl-types.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["name"] == "unirl-types"
    names = {each["name"] for each in bill["components"]}
    assert {"torch", "numpy", "safetensors", "xxhash"} <= names and not names & {"pytest", "hypothesis", "ray"}
