"""Writes docs/models/README.md from a run of the tests over all families:

    uv run --no-sync python docs/models/generate.py

Minutes on one core. Tests that fail make no page.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("README.md")
TESTS = ("packages/unirl-models/tests/families", "tests/families")
COMPARISONS = (
    "test_deterministic_sampling_equals_the_stock_pipeline",
    "test_decoded_media_equal_the_stock_pipelines",
    "test_the_lora_export_loads_in_the_stock_pipeline",
    "test_the_merged_export_is_a_stock_pipeline_of_the_trained_weights",
)
ALGORITHM = "test_an_algorithm_takes_two_steps_on_a_family"
RANKS = "test_two_ranks_differentiate_as_one"
SIZE = "test_the_published_size_is_built_on_the_meta_device"
INTRODUCTION = """# Models: what is proven of each

A family is a kind of diffusers pipeline. Every one samples, is replayed, trains whole or with LoRA, and is exported as
a folder or a LoRA file that the stock pipeline loads. Each row below is a tiny random model of the family's real
classes in its real folder layout, compared with diffusers' own pipeline on the same files, prompts, noise and sigmas,
in float32 on a CPU. Figures are the largest difference over the largest value. `docs/models/generate.py` writes this
page from a run of `packages/unirl-models/tests/families` and `tests/families`.

BAGEL, HunyuanImage3 and Qwen3-Omni, which have no diffusers pipeline, are on [their own page](unified.md).

## Against the stock pipeline

Sampling: final latents at two sizes, with guidance and without. LoRA, merged: latents of the stock pipeline that loaded
our export of trained weights. Every row's schedule equals the stock scheduler's sigmas, and every row passes the
adapter contract: replay equal to the rollout bit for bit at equal geometry and to 1e-6 at any other, mixed noise
levels, no influence of neighbours, gradients in what trains and nowhere else.

MiniMax-H3, which has no plain pipeline, is compared with the pipeline of blocks that diffusers has for it, its two
schedules walked by their own schedulers.

Two things differ from `pipe(prompt)` of a released folder:

- Guidance. LTX-2, 2.3 and HunyuanImage 2.1 are compared with classifier-free guidance alone, with which we sample.
  By default `LTX2Pipeline` also has spatio-temporal guidance (`stg_scale` 1), guidance between the two modalities
  (`modality_scale` 3), a rescale (0.7) and a scale of 7 for the sound, and `HunyuanImagePipeline` has adaptive
  projected guidance after its first steps. Rewards of a base model are not those of its default call.
- Solver. Rows are walked by Euler's method on the levels of the released scheduler. The released schedulers of Wan
  (UniPC) and Sana (DPM-Solver++) are of second order: at equal steps they are nearer to the ODE's solution.
  `sampling.post_solver` and `eval.post_solver` take `unipc` and `dpmpp_2m`; with them Wan 2.1 and Sana equal the stock
  pipelines with their own schedulers to 2e-5. A stochastic step has no multistep solver, since its log-probability
  follows from its own two ends: rollouts use one after the last stochastic step, or at every step with
  `sampling.eta: 0` (DiffusionNFT, AWM, CRD and all others that sample by the ODE). CogVideoX 5B's DPM solver, which
  adds noise, is not offered; its steps are DDIM's.

"""
METHODS = {"flow_grpo": "Flow-GRPO", "mix_grpo": "MixGRPO", "nft": "DiffusionNFT", "drtune": "DRTune"}


def main() -> int:
    """Run the tests and write the page; returns the exit status."""
    sys.path.insert(0, str(ROOT))
    kit: Any = importlib.import_module("packages.unirl-models.tests.families.kit")
    families = kit.families()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "matrix or not matrix", *TESTS]
        command += ["-k", " or ".join((*COMPARISONS, ALGORITHM, RANKS, SIZE))]
        command.append(f"--junitxml={report}")
        status = subprocess.run(command, cwd=ROOT).returncode
        if status:
            return status
        found = results(report, families)
    PAGE.write_text(INTRODUCTION + "\n".join(page(found, families)) + "\n", encoding="utf-8")
    return 0


def results(report: Path, families: dict[str, Any]) -> dict[str, dict[str, list[dict[str, str]]]]:
    """test function -> family -> properties of each of its cases."""
    found: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    names = sorted(families, key=len, reverse=True)
    for case in ElementTree.parse(report).iter("testcase"):
        matched = re.fullmatch(r"(\w+)\[(.+)\]", case.attrib["name"])
        if matched is None or case.find("skipped") is not None:
            continue
        test, parameters = matched.groups()
        family = next((name for name in names if parameters == name or parameters.startswith(f"{name}-")), None)
        if family is not None:
            properties = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
            found[test][family].append({**properties, "case": parameters.removeprefix(family).lstrip("-")})
    return found


def page(found: dict[str, dict[str, list[dict[str, str]]]], families: dict[str, Any]) -> list[str]:
    """The tables."""
    lines = ["| family | pipeline | sampling | decoding | LoRA | merged |", "|---|---|---|---|---|---|"]
    for name, family in families.items():
        errors = [max(float(case["error"]) for case in found[test][name]) for test in COMPARISONS]
        pipelines = ", ".join(f"`{each}`" for each in family.bundle.pipeline_classes)
        lines.append(f"| {name} | {pipelines} | " + " | ".join(f"{error:.0e}" for error in errors) + " |")
    lines += [
        "",
        "## Algorithms",
        "",
        "Two steps of each on each: loss finite, first ratio 1, what trains moves, nothing else does. Two ranks: the",
        "gradients of an update, sharded over two processes, are those of one. A video in chunks (AnyFlow FAR) is",
        "trained on its sampled steps alone, see [how a model answers](../design/model-adapter.md).",
        "",
        "| family | " + " | ".join(METHODS.values()) + " | two ranks |",
        "|---|" + "---|" * (len(METHODS) + 1),
    ]
    for name in families:
        trained = {case["case"] for case in found[ALGORITHM][name]}
        cells = ["yes" if method in trained else "no" for method in METHODS]
        cells.append("yes" if found[RANKS][name] else "no")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Released sizes",
        "",
        "What trains, built on the meta device from the released configuration: parameters counted and as published;",
        "the blocks that shard and every LoRA target were found in it. Weights: in bf16.",
        "",
        "| checkpoint | family | parameters | published | weights |",
        "|---|---|---|---|---|",
    ]
    for name, family in families.items():
        published = {each.hub_id: each.billions for each in family.published}
        for case in found[SIZE][name]:
            billions = float(case["billions"])
            said = published[case["hub_id"]]
            lines.append(f"| {case['hub_id']} | {name} | {billions:.2f} B | {said:g} B | {2 * billions:.1f} GB |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
