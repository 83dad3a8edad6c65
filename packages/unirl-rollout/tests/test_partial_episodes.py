"""Episodes that are ended early continue, in the same engine or another one, as if nothing had been."""

import pickle

import pytest
from text_fakes import request
from turn_fakes import PARAMS, SAYS, STOP, CutEngine, Script, TalkingCodec, rows

from unirl.rollout.environments.base import Step
from unirl.rollout.environments.text import TextEnvironment
from unirl.rollout.turns.engine import TurnsEngine
from unirl.types.episodes import EPISODE
from unirl.types.messages import Message
from unirl.types.segments import SegmentStatus
from unirl.types.storage import load_rollout, save_rollout


class Sum(TextEnvironment):
    """Answers with the sum of the first numbers of all turns; a turn that begins with 0 ends the episode."""

    deterministic = True

    def reset(self, task, seed):
        self._total = 0
        return ()

    def step(self, action):
        first = int(action.text.split()[0])
        self._total += first
        message = Message("user", str(self._total))
        return Step((message,), reward=float(first), terminated=first == 0, counts={"moves": 1.0})


class KeptSum(Sum):
    """Neither repeated nor saved: another process cannot continue it."""

    deterministic = False


class SavedSum(Sum):
    """Saved."""

    deterministic = False
    resumable = True


SCRIPT: Script = {
    (1, 2): [3, 5, STOP],
    (1, 2, 3, 5, STOP, SAYS, 3): [2, STOP],
    (1, 2, 3, 5, STOP, SAYS, 3, 2, STOP, SAYS, 5): [0, STOP],
    (7,): [4, 4, STOP],
    (7, 4, 4, STOP, SAYS, 4): [0, 1, STOP],
    (5,): [0, STOP],
}
PROMPTS = ["1 2", "7", "5"]


@pytest.fixture
def make():
    made = []

    def engine(environment, **options):
        codec = TalkingCodec()
        inner = CutEngine(codec, SCRIPT)
        inner.owner = TurnsEngine(inner, codec, environment=environment, max_turns=4, **options)
        made.append(inner.owner)
        return inner.owner, inner

    yield engine
    for each in made:
        each.shutdown()


def told(resp):
    track = resp.root_track()
    summaries = [{**row[EPISODE]} for row in track.metadata]
    names = ("tokens", "log_probs", "loss_mask")
    counts = {name: values.tolist() for name, values in track.counts.items() if name != "environment_s"}
    return [rows(track, name) for name in names], track.segment.status.tolist(), summaries, track.decoded.texts, counts


CUTS = [(number, tokens) for number in range(3) for tokens in range(3)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("environment", "elsewhere"), [(Sum, False), (Sum, True), (SavedSum, True)])
def test_episodes_that_were_cut_anywhere_are_those_that_were_not(make, environment, elsewhere, stages, tmp_path):
    whole = told(make(Sum())[0].generate(request(PROMPTS, PARAMS)))
    engine, inner = make(environment(), pipeline_stages=stages)
    other = make(environment(), pipeline_stages=stages) if elsewhere else (engine, inner)
    for number, tokens in CUTS:
        inner.cut_at, inner.num_tokens, inner.version = len(inner.asked) + number, tokens, 4
        req = request(PROMPTS, PARAMS).replace(rollout_id=10 * number + tokens)
        begun = engine.generate(req)
        if not begun.num_unfinished:  # all that was left was written when it was cut
            assert told(begun) == whole and (number, tokens) == CUTS[-1]
            continue
        status = begun.root_track().segment.status
        assert ((status == SegmentStatus.ABORTED) == begun.root_track().is_unfinished).all()
        other[1].cut_at, other[1].version = None, 6
        save_rollout(tmp_path / "begun", begun)
        found = other[0].generate(req, None, load_rollout(tmp_path / "begun")[0])
        assert told(found) == whole and not found.num_unfinished
        check_versions(begun.root_track(), found.root_track())


def check_versions(begun, whole):
    """What was written before the cut has the old version."""
    first, last = whole.policy_versions.tolist(), whole.last_versions
    written = [sum(mask) for mask in rows(begun, "loss_mask")]
    if whole.segment.versions is None:
        assert set(first) == {6} and sum(written) == 0
        return
    for row, versions in enumerate(rows(whole, "versions")):
        assert versions == sorted(versions) and (versions[0], versions[-1]) == (first[row], int(last[row]))
        old = [v for v, mask in zip(versions, rows(whole, "loss_mask")[row], strict=True) if mask and v == 4]
        assert len(old) >= written[row], "what was begun of a turn keeps its version too"


def test_an_episode_may_be_cut_again_and_again(make):
    whole = told(make(Sum())[0].generate(request(PROMPTS, PARAMS)))
    engine, inner = make(Sum())
    req, resp, cuts = request(PROMPTS, PARAMS), None, 0
    while resp is None or resp.num_unfinished:
        inner.cut_at, inner.num_tokens, inner.version = len(inner.asked), 1, 4 + cuts
        resp = engine.generate(req, None, resp)
        cuts += 1
    assert told(resp) == whole and cuts > 5
    versions = rows(resp.root_track(), "versions")
    assert versions[0] == [4, 5, 6, 6, 6, 7, 8, 8, 8, 9, 10], "a token per version; what is read has the one before"


def test_what_no_other_process_can_continue_waits_where_it_began_and_begins_again_elsewhere(make):
    engine, inner = make(KeptSum())
    whole = told(make(Sum())[0].generate(request(PROMPTS, PARAMS)))
    inner.cut_at, req = 1, request(PROMPTS, PARAMS)
    begun = engine.generate(req)
    assert told(engine.generate(req, None, begun)) == whole
    inner.cut_at = len(inner.asked) + 1
    begun = pickle.dumps(engine.generate(req))
    other = make(KeptSum(), pipeline_stages=2)[0]
    found = other.generate(req, None, pickle.loads(begun))
    *parts, summaries, texts, counts = told(found)
    assert counts.pop("begun_again") == [1.0, 1.0, 0.0]
    assert [summary.pop("begun_again", None) for summary in summaries] == [1.0, 1.0, None]
    assert (*parts, summaries, texts, counts) == whole


def test_episodes_that_others_have_continued_are_forgotten_at_the_next_cut(make):
    engine, inner = make(Sum())
    (workers,) = engine._parts._workers
    for rollout in range(3):
        inner.cut_at = len(inner.asked) + 1
        assert engine.generate(request(PROMPTS, PARAMS).replace(rollout_id=rollout)).num_unfinished == 2
        assert len(workers._episodes) == 2
    engine.generate(request(PROMPTS, PARAMS).replace(rollout_id=5))
    assert len(workers._episodes) == 2, "those that wait, whatever is played meanwhile"
