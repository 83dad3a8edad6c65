"""Groups of earlier rollouts that train again: rewards are counted once, and runtimes and schedules agree."""

import json

import pytest
import stopping
from stopping import comparable

pytestmark = pytest.mark.slow

STATISTICS = ("reward/", "group/", "advantage/", "rollout/")
KEPT = ["num_rollouts=3", "schedule.experience.groups_per_rollout=4", "eval=null", "save.best_metric=reward"]


def test_what_trains_again_is_counted_once(recipe, tmp_path):
    _, plain = stopping.run(recipe("worlds/shapes/nft", *KEPT[:1], *KEPT[2:]), tmp_path / "plain")
    _, again = stopping.run(recipe("worlds/shapes/nft_replay", *KEPT), tmp_path / "again")
    first, second = comparable(again[1]), again[2]
    assert {name: value for name, value in first.items() if "experience" not in name} == comparable(plain[1])
    # The second rollout is of the same weights, and the first that trains on more than its own samples.
    trained = "group/trained_samples"
    own = {name: value for name, value in second.items() if name.startswith(STATISTICS) and "_s" not in name}
    assert {name: plain[2][name] for name in own if name != trained} == {n: own[n] for n in own if n != trained}
    assert second["schedule/experience/groups"] == 4 and second[trained] == 2 * plain[2][trained]
    assert second["train/loss"] != plain[2]["train/loss"]
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert summary["num_samples"] == json.loads((tmp_path / "plain" / "summary.json").read_text())["num_samples"]


@pytest.mark.parametrize("kind", ["async", "one_step_off"])
def test_kept_groups_train_while_others_are_collected(kind, recipe, tmp_path):
    words = ["parts/engine=replica", f"parts/schedule={kind}", "sync.canary_prompts=[a red circle,two blue squares]"]
    _, records = stopping.run(recipe("worlds/shapes/nft_replay", *KEPT, *words), tmp_path)
    assert records[3]["schedule/experience/groups"] == 4
    lags = [records[3][f"schedule/lag/{name}"] for name in ("oldest", "replayed_oldest")]
    assert lags[0] == 1 and lags[1] >= 2, "the group of the first rollout, or of the second, made one version earlier"


@pytest.mark.ray
def test_two_workers_train_on_the_same_groups_as_one(recipe, tmp_path):
    words = [*KEPT, "stack.num_updates_per_batch=2"]
    _, alone = stopping.run(recipe("worlds/shapes/nft_replay", *words), tmp_path / "alone")
    both = recipe("worlds/shapes/nft_replay", *words, "runtime=ray", "num_devices=2")
    _, together = stopping.run(both, tmp_path / "together")
    for step in (1, 2, 3):
        names = ("reward/mean", "train/loss", "train/grad_norm", "group/trained_samples", "schedule/experience/groups")
        ours, theirs = ([run[step][name] for name in names] for run in (alone, together))
        assert ours == pytest.approx(theirs, rel=1e-3), step  # gradients are summed in another order
    files = sorted(path.name for path in (tmp_path / "together" / "experience").iterdir())
    assert files == [f"rollout-00000{rollout}-0000{shard}.safetensors" for rollout in range(3) for shard in range(2)]
