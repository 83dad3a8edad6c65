from pathlib import Path

from my_environment import MyEnvironment

from unirl.app.main import main
from unirl.rollout.environments.workers import EnvironmentWorkers
from unirl.rollout.turns.calls import Turn

HERE = Path(__file__).parent
ROW = {"prompt": "20+22=", "answer": "42"}


# These tests are of the environment as it was written for you: change them with it.
def begun(**options):
    episode = MyEnvironment(**options).fresh()
    assert episode.reset(ROW, 0) == ()
    return episode


def test_a_wrong_answer_costs_and_is_told_which_way_it_is_off():
    episode = begun(cost=0.5)
    for text, hint in (("41", "too low"), ("43", "too high"), ("a cat", "write a number")):
        step = episode.step(Turn(text))
        assert step.observation[0].content == hint
        assert step.reward == -0.5 and not step.terminated


def test_the_right_answer_ends_the_episode():
    step = begun().step(Turn(" 42\n"))
    assert step.terminated and step.reward == 0


def test_it_plays_in_a_process(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    workers = EnvironmentWorkers(MyEnvironment(), num_workers=1, step_timeout_s=30.0)
    try:
        assert workers.reset({"a": (ROW, 0), "b": (ROW, 0)}) == {"a": (), "b": ()}
        steps = workers.step({"a": Turn("42"), "b": Turn("7")})
        assert steps["a"].terminated and not steps["b"].terminated
    finally:
        workers.close()


def test_the_recipe_has_no_mistakes(monkeypatch):
    monkeypatch.chdir(HERE)
    assert main(["check", "my_environment.yaml"]) == 0
