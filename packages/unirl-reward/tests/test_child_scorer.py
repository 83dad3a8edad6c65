"""Scorers in child processes: the same numbers, another environment, and what becomes of processes that die or hang."""

import os
import signal
import site
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.reward.child.rules import environment_is_there
from unirl.reward.child.scorer import ChildScorer
from unirl.reward.service import RewardService
from unirl.types.errors import ConfigError, ContractError, RewardError
from unirl.types.media import Images, Texts, Videos
from unirl.types.recipe import Machine, Part
from unirl.types.reward import RewardRequest

from . import scorers_of_tests

HERE = str(Path(__file__).parent)


def child(scorer, arguments=None, **options) -> ChildScorer:
    return ChildScorer(scorer, arguments=arguments, variables={"PYTHONPATH": HERE}, name="own", **options)


def images(num=5) -> RewardRequest:
    pixels = torch.rand(num, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    pixels[1] = 0.01
    return RewardRequest(
        sample_ids=[f"s{row}" for row in range(num)],
        group_ids=["g"] * num,
        primitives={"text": Texts(texts=["a cat"] * num)},
        generated={"image": Images(pixels=pixels)},
        metadata=[{"row": row} for row in range(num)],
    )


def texts(*said) -> RewardRequest:
    return RewardRequest(
        sample_ids=[f"s{row}" for row in range(len(said))], generated={"text": Texts(texts=list(said))}
    )


@pytest.fixture
def steered(tmp_path):
    scorer = child("scorers_of_tests.Steered", {"folder": str(tmp_path)}, timeout_s=30.0)
    yield scorer
    scorer.close()


def test_the_numbers_are_those_of_the_scorer_in_this_process_bit_for_bit():
    scorer = child("scorers_of_tests.Uneven", {"scale": 3.0})
    own = scorers_of_tests.Uneven(name="own", scale=3.0)
    found, expected = scorer.score(images()), own.score_isolated(images(), "sample")
    good = [0, 2, 3, 4]
    assert found.select(good).equals(expected.select(good)) and found.sample_ids == expected.sample_ids
    assert found.errors == expected.errors and found.rewards[1].isnan()
    assert found.errors[1] == "too dark" and list(found.component_rewards) == ["own/mean", "own/corner"]
    service = RewardService({"own": scorer}, on_failure="drop_group")
    assert service.score(images()).errors[1] == "scorer own: too dark"
    service.close()
    assert scorer.pid is None


def test_videos_of_several_sizes_are_one_request():
    scorer = child("unirl.reward.function.FunctionRewardScorer", {"function": "scorers_of_tests.frames"})
    frames = [torch.rand(num, 3, 4, 4) for num in (2, 3, 2)]
    request = RewardRequest(
        sample_ids=list("abc"),
        primitives={"text": Texts(texts=["a"] * 3)},
        generated={"video": Videos.pack(frames=frames, fps=8.0)},
    )
    assert scorer.score(request).rewards.tolist() == [2.0, 3.0, 2.0]
    scorer.close()


def other_environment(folder: Path, *, has_unirl: bool = True) -> Path:
    """An environment with a module that this one lacks."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    if has_unirl:
        roots = [path for path in sys.path if path and "tests" not in Path(path).parts]
        (packages / "unirl.pth").write_text("\n".join([*roots, *map(str, site.getsitepackages())]))
    (packages / "only_there.py").write_text(
        "import sys\ndef where(images, prompts, metadata):\n    return [float(len(sys.prefix))] * len(prompts)\n"
    )
    return folder / "bin" / "python"


def test_a_scorer_has_the_libraries_of_its_own_environment(tmp_path):
    python = other_environment(tmp_path / "other")
    arguments = {"function": "only_there.where"}
    scorer = ChildScorer("unirl.reward.function.FunctionRewardScorer", str(python), arguments, name="own")
    assert scorer.score(images(2)).rewards.tolist() == [float(len(str(tmp_path / "other")))] * 2
    assert "only_there" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        __import__("only_there")
    scorer.close()


def test_a_process_that_dies_is_replaced_and_its_request_answered(steered, tmp_path, caplog):
    assert steered.score(texts("a", "bb")).rewards.tolist() == [1.0, 2.0]
    pid = steered.pid
    (tmp_path / "die").touch()
    assert steered.score(texts("ccc")).rewards.tolist() == [3.0]
    assert steered.pid != pid and "ended with status 7" in caplog.text
    (tmp_path / "deadly").touch()
    with pytest.raises(RewardError, match="2 processes died of one request. It ended with status 7"):
        steered.score(texts("d"))
    (tmp_path / "deadly").unlink()
    assert steered.score(texts("dd")).rewards.tolist() == [2.0]


def test_a_process_that_is_killed_while_it_makes_the_scorer_is_replaced(tmp_path):
    scorer = child("scorers_of_tests.Steered", {"folder": str(tmp_path)})
    assert scorer.pid is not None
    os.kill(scorer.pid, signal.SIGKILL)
    assert scorer.score(texts("a", "bb")).rewards.tolist() == [1.0, 2.0]
    assert scorer.pid is not None
    os.kill(scorer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, scorer.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / "die").touch()
    assert scorer.score(texts("ccc")).rewards.tolist() == [3.0], "an idle process does not die of the next request"
    scorer.close()
    scorer = child("scorers_of_tests.Deadly", {})
    with pytest.raises(ConfigError, match="before it made the scorer, the process of .* ended by signal 9"):
        scorer.score(texts("a"))
    scorer.close()


def test_a_process_that_is_late_is_ended_and_the_next_request_answered(tmp_path):
    scorer = child("scorers_of_tests.Steered", {"folder": str(tmp_path)}, timeout_s=1.0)
    scorer.score(texts("a"))
    pid = scorer.pid
    (tmp_path / "hang").touch()
    with pytest.raises(RewardError, match=r"scores for more than 1 s, so it was ended\. .*raise timeout_s"):
        scorer.score(texts("a"))
    assert not is_alive(pid)
    assert scorer.score(texts("aa")).rewards.tolist() == [2.0]
    scorer.close()
    scorer.close()
    with pytest.raises(RewardError, match="is closed"):
        scorer.score(texts("a"))


def test_what_a_scorer_raises_is_raised_here_with_its_trace(steered, tmp_path):
    (tmp_path / "raise").touch()
    with pytest.raises(RewardError, match=r"raised TypeError: a bug of the scorer\n(.|\n)*scorers_of_tests.py"):
        steered.score(texts("a"))
    with pytest.raises(ContractError, match="one generated medium can be sent at a time"):
        steered.score(RewardRequest(sample_ids=["a"], generated={}))
    assert steered.score(texts("a")).rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    ("scorer", "arguments", "message"),
    [
        ("nowhere.Scorer", {}, "scorer = nowhere.Scorer: No module named 'nowhere'. Install it in the environment of"),
        ("scorers_of_tests.Nothing", {}, "has no attribute 'Nothing'"),
        ("scorers_of_tests.Uneven", {"scales": 1}, "unexpected keyword argument 'scales'"),
        ("scorers_of_tests.Colliding", {}, "has a component called reward, which is what the sum is called"),
        ("pathlib.Path", {}, "makes a PosixPath, which has no `name` and `score`"),
    ],
)
def test_a_scorer_that_cannot_be_made_says_why(scorer, arguments, message):
    own = child(scorer, arguments)
    with pytest.raises(ConfigError, match=message):
        own.score(texts("a"))
    own.close()


def test_an_environment_without_unirl_is_named(tmp_path):
    python = str(other_environment(tmp_path / "bare", has_unirl=False))
    scorer = ChildScorer("only_there.Scorer", python, name="own")
    with pytest.raises(ConfigError, match=r"(?s)before it made the scorer, .*Its environment needs unirl-reward"):
        scorer.score(texts("a"))
    scorer.close()
    with pytest.raises(ConfigError, match="is no file"):
        ChildScorer("only_there.Scorer", str(tmp_path / "python"))
    found = dict.fromkeys((python, str(tmp_path / "python"), None))
    for path in found:
        node: dict[str, Any] = {"python": path, "scorer": "only_there.Scorer"}
        part = Part(at="reward.scorers.own", path="unirl.reward.child.scorer.ChildScorer", node=node)
        run: Any = None
        (found[path],) = environment_is_there(part, run, Machine(1, 0))
    bare, missing, here = map(str, found.values())
    assert "does not find" in bare and "ModuleNotFoundError" in bare
    assert "no such interpreter" in missing
    assert "this environment does not find only_there. Install it there" in here


def is_alive(pid: Any) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_ends_with_the_trainer_that_is_killed_also_while_it_scores(tmp_path):
    (tmp_path / "hang").touch()
    code = (
        "import sys, threading, time\n"
        "from unirl.reward.child.scorer import ChildScorer\n"
        "from unirl.types.media import Texts\n"
        "from unirl.types.reward import RewardRequest\n"
        "scorer = ChildScorer('scorers_of_tests.Steered', arguments={'folder': sys.argv[1]})\n"
        "request = RewardRequest(sample_ids=['a'], generated={'text': Texts(texts=['a'])})\n"
        "threading.Thread(target=scorer.score, args=(request,), daemon=True).start()\n"
        "print(scorer.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": HERE}, text=True)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    deadline = time.monotonic() + 60
    while (tmp_path / "hang").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
