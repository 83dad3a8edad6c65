"""docs/reference/metrics.md lists every metric that the code reports."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FAMILIES = (
    "reward|group|advantage|policy|mismatch|response|nft|awm|crd|dgpo|dpo|guard|dppo|drpo|cppo|sapo|vespo|otb|dro|ppo|train|eval"
    "|parity|timing_s|perf"
)


def test_every_metric_in_the_code_is_documented():
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    source = ROOT / "packages" / "unirl-train" / "src" / "unirl"
    found = set()
    for folder in ("trainer", "algorithms", "train"):
        for path in (source / folder).rglob("*.py"):
            found.update(re.findall(rf'"((?:{FAMILIES})/[\w/{{}}]+)"', path.read_text()))
    source = (ROOT / "packages" / "unirl-reward" / "src" / "unirl" / "reward" / "scorer_queues.py").read_text()
    gauges = re.findall(r'"(async/[\w/]+)"', source)
    assert len(found) > 20 and len(gauges) > 4
    found.update(f"reward/{name}" for name in gauges)
    placeholders = {"eval/{category}/{name}": "eval/<category>/", "eval/{name}": "eval/<scorer>"}
    placeholders |= {"reward/{name}/mean": "reward/<scorer>/mean", "reward/{name}/std": "reward/<scorer>/std"}
    placeholders |= {"reward/{name}": "reward/async/"}  # what a reward service measures of itself
    placeholders |= {"advantage/weight/{name}": "advantage/weight/<component>"}
    placeholders |= {"train/{name}_grad_norm": "train/critic_grad_norm"}
    placeholders |= {"timing_s/{name}": "timing_s/rollout"}
    for name in found:
        documented = placeholders.get(name, name.replace("{step}", "<step>").replace("{medium}", "<medium>"))
        assert f"`{documented}" in text, f"{name} is not in docs/reference/metrics.md"
