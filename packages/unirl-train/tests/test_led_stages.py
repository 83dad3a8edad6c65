"""A request for several stages goes from group to group, and what was made goes along."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from unirl.distributed.stages import LedStages
from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, StagedSamplingParams


class FakeHeld:
    """Stands for a held response: the tracks in it, and whether it was released."""

    def __init__(self, tracks: list[str], unfinished: Collection[str] = ()) -> None:
        self.tracks, self.is_released = tracks, False
        self.meta = RolloutResp(
            tracks={
                name: RolloutTrack(
                    sample_ids=["a", "b"],
                    parent_ids=["a", "b"],
                    parent_track=tracks[number - 1] if number else None,
                    is_unfinished=torch.tensor([True, False]) if name in unfinished else None,
                )
                for number, name in enumerate(tracks)
            }
        )

    def release(self) -> None:
        self.is_released = True


class FakeEngine:
    """Stands for the StagesEngine of one group."""

    def __init__(self, *tracks: str, fails: bool = False) -> None:
        self.tracks, self.fails, self.made, self.awake = set(tracks), fails, [], True
        self.ends: dict[str, Callable[[], None]] = {}
        """Track -> what happens while it is made; then it is unfinished if it was ended early."""
        self.is_ending = False

    def generate(self, req: RolloutReq, policy: str | None = None, begun: FakeHeld | None = None) -> FakeHeld:
        assert isinstance(req.sampling_params, StagedSamplingParams)
        asked = list(req.sampling_params.stages)
        assert self.tracks.issuperset(asked) and (begun is None or not begun.is_released)
        if self.fails:
            raise RuntimeError("the engine failed")
        self.is_ending, tracks = False, list(begun.tracks) if begun else []
        for track in asked:
            tracks += [track] if track not in tracks else []
            if track in self.ends:
                self.ends.pop(track)()
            if self.is_ending:
                break
        self.made.append(FakeHeld(tracks, tracks[-1:] if self.is_ending and self.can_cut else ()))
        return self.made[-1]

    can_cut = True

    def abort(self) -> None:
        self.is_ending = True

    def plans(self, params: StagedSamplingParams) -> dict[str, str]:
        assert self.tracks.issuperset(params.stages)
        return {track: f"plan of {track}" for track in params.stages if track != "text"}

    def sleep(self) -> None:
        assert self.awake
        self.awake = False


def sampling(*tracks: str) -> StagedSamplingParams:
    return StagedSamplingParams(stages={track: ARSamplingParams(max_new_tokens=4, temperature=1.0) for track in tracks})


def request(*tracks: str) -> RolloutReq:
    return RolloutReq(sample_ids=["a", "b"], sampling_params=sampling(*tracks))


def test_stages_in_a_row_of_one_group_are_one_call_and_only_the_last_response_stays() -> None:
    one, other = FakeEngine("text", "image", "judged"), FakeEngine("redraw")
    led: Any = LedStages({"text": one, "image": one, "redraw": other, "judged": one})
    held = led.generate(request("text", "image", "redraw", "judged"))
    assert [made.tracks for made in one.made] == [["text", "image"], ["text", "image", "redraw", "judged"]]
    assert held is one.made[-1]
    assert [made.is_released for made in (*one.made, *other.made)] == [True, False, True]
    led.generate(request("image"))
    assert one.made[-1].tracks == ["image"]


def test_what_was_made_is_released_where_a_later_stage_fails() -> None:
    one = FakeEngine("text")
    led: Any = LedStages({"text": one, "image": FakeEngine("image", fails=True)})
    with pytest.raises(RuntimeError, match="the engine failed"):
        led.generate(request("text", "image"))
    assert one.made[0].is_released


def test_every_group_is_asked_once_for_plans_and_sleep() -> None:
    one, other = FakeEngine("text", "redraw"), FakeEngine("image")
    led: Any = LedStages({"text": one, "image": other, "redraw": one})
    plans = led.plans(sampling("text", "image", "redraw"))
    assert list(plans.items()) == [("image", "plan of image"), ("redraw", "plan of redraw")]
    led.sleep()
    assert not one.awake and not other.awake
    with pytest.raises(ConfigError, match="the request names a stage 'film'; there are text, image, redraw"):
        led.generate(request("film"))


def test_a_request_that_is_ended_early_goes_on_where_it_was_and_later_stages_wait() -> None:
    one, other = FakeEngine("text", "critique"), FakeEngine("image")
    led: Any = LedStages({"text": one, "critique": one, "image": other})
    asked = request("text", "critique", "image")
    one.ends = {"text": led.abort}
    begun = led.generate(asked)
    assert begun.tracks == ["text"] and not asked.is_answered_by(begun.meta) and not other.made
    one.ends = {"critique": led.abort}
    again = led.generate(asked, begun=begun)
    assert again.tracks == ["text", "critique"] and not other.made
    assert not begun.is_released  # whoever has it releases it
    whole = led.generate(asked, begun=again)
    assert whole.tracks == ["text", "critique", "image"] and asked.is_answered_by(whole.meta)
    assert [made.is_released for made in one.made] == [False, False, True] and len(other.made) == 1


def test_a_request_that_is_ended_early_in_a_later_group_goes_on_there_alone() -> None:
    one, other = FakeEngine("text"), FakeEngine("image")
    led: Any = LedStages({"text": one, "image": other})
    asked, other.ends = request("text", "image"), {"image": led.abort}
    begun = led.generate(asked)
    assert begun.meta.num_unfinished == 1 and not asked.is_answered_by(begun.meta)
    whole = led.generate(asked, begun=begun)
    assert asked.is_answered_by(whole.meta) and (len(one.made), len(other.made)) == (1, 2)


def test_between_two_groups_a_request_is_ended_after_a_stage_that_runs_to_its_end() -> None:
    one, other, third = FakeEngine("text"), FakeEngine("image"), FakeEngine("redraw")
    led: Any = LedStages({"text": one, "image": other, "redraw": third})
    asked, other.can_cut = request("text", "image", "redraw"), False
    other.ends = {"image": led.abort}
    begun = led.generate(asked)
    assert begun.tracks == ["text", "image"] and not begun.is_released and begun.meta.num_unfinished == 0
    assert not asked.is_answered_by(begun.meta) and one.made[0].is_released and not third.made
    whole = led.generate(asked, begun=begun)
    assert whole.tracks == ["text", "image", "redraw"] and (len(one.made), len(other.made)) == (1, 1)
    other.ends = {"image": led.abort}
    numbered = led.generate(asked.replace(number=3))  # its gates hold the calls up, not the abort
    assert numbered.tracks == ["text", "image", "redraw"]
