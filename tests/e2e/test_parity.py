"""Engine and trainer sample the same held-out prompts, and a difference of their rewards is an alarm."""

import pytest
import stopping
from small import SMALL

from unirl.app.environment import register_resolvers
from unirl.config.check import check_recipe
from unirl.config.recipes import compose, resolve

PARITY = ["guardrails.action=warn", "guardrails.parity_interval=1", "guardrails.parity_samples=24"]
AHEAD = ["parts/schedule=async", "parts/correction=truncated_steps"]


def metrics(run_dir, *words, engine=None):
    """Metrics by rollout of a run that was compared after each."""
    register_resolvers()
    recipe = resolve(compose("worlds/shapes/replica", [*SMALL, *PARITY, "eval.num_samples=24", *words]))
    recipe["engine"] |= {} if engine is None else {"_target_": engine}
    check_recipe(recipe)
    return stopping.run(recipe, run_dir)[1]


@pytest.mark.parametrize("words", [[], pytest.param(AHEAD, marks=pytest.mark.matrix)], ids=["sync", "async"])
def test_an_engine_that_samples_as_the_trainer_does_has_its_rewards(tmp_path, words):
    found = metrics(tmp_path, *words)
    for step in (1, 2):
        assert found[step]["parity/engine_reward"] == found[step]["parity/trainer_reward"] > 0
        assert found[step]["parity/gap_stderr"] == 0 < found[step]["parity/reward_std"]
        assert found[step]["alarm/reward_parity"] == 0


def test_an_engine_with_another_decoder_has_right_log_probs_and_other_rewards(tmp_path, caplog):
    found = metrics(tmp_path, engine="inverting.InvertingEngine")
    assert found[1]["sync/logprob_gap_max"] == 0 and found[1]["alarm/logp_gap"] == 0
    assert found[1]["parity/engine_reward"] < found[1]["parity/trainer_reward"]
    assert [found[step]["alarm/reward_parity"] for step in (1, 2)] == [1, 1]
    assert "the engine does not sample as the trainer does; compare its weights, guidance, solver" in caplog.text


@pytest.mark.matrix
def test_comparing_changes_no_weight(tmp_path):
    assert stopping.comparable(without(metrics(tmp_path / "with")[2])) == stopping.comparable(
        without(metrics(tmp_path / "without", "guardrails.parity_interval=null")[2])
    )


def without(found):
    """Metrics that both runs have: the push before a comparison serves the next rollout too."""
    return {name: value for name, value in found.items() if not name.startswith(("parity/", "sync/"))}
