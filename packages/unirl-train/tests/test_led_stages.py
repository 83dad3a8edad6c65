"""A request for several stages goes from group to group, and what was made goes along."""

import pytest

from unirl.distributed.stages import LedStages
from unirl.types.errors import ConfigError
from unirl.types.rollout import RolloutReq
from unirl.types.sampling import ARSamplingParams, StagedSamplingParams


class FakeHeld:
    """Stands for a held response: the tracks in it, and whether it was released."""

    def __init__(self, tracks: list[str]) -> None:
        self.tracks, self.is_released = tracks, False

    def release(self) -> None:
        self.is_released = True


class FakeEngine:
    """Stands for the StagesEngine of one group."""

    def __init__(self, *tracks: str, fails: bool = False) -> None:
        self.tracks, self.fails, self.made, self.awake = set(tracks), fails, [], True

    def generate(self, req: RolloutReq, policy: str | None = None, above: FakeHeld | None = None) -> FakeHeld:
        assert isinstance(req.sampling_params, StagedSamplingParams)
        asked = list(req.sampling_params.stages)
        assert self.tracks.issuperset(asked) and (above is None or not above.is_released)
        if self.fails:
            raise RuntimeError("the engine failed")
        self.made.append(FakeHeld([*(above.tracks if above else []), *asked]))
        return self.made[-1]

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
    led = LedStages({"text": one, "image": one, "redraw": other, "judged": one})
    held = led.generate(request("text", "image", "redraw", "judged"))
    assert [made.tracks for made in one.made] == [["text", "image"], ["text", "image", "redraw", "judged"]]
    assert held is one.made[-1]
    assert [made.is_released for made in (*one.made, *other.made)] == [True, False, True]
    led.generate(request("image"))
    assert one.made[-1].tracks == ["image"]


def test_what_was_made_is_released_where_a_later_stage_fails() -> None:
    one = FakeEngine("text")
    led = LedStages({"text": one, "image": FakeEngine("image", fails=True)})
    with pytest.raises(RuntimeError, match="the engine failed"):
        led.generate(request("text", "image"))
    assert one.made[0].is_released


def test_every_group_is_asked_once_for_plans_and_sleep() -> None:
    one, other = FakeEngine("text", "redraw"), FakeEngine("image")
    led = LedStages({"text": one, "image": other, "redraw": one})
    plans = led.plans(sampling("text", "image", "redraw"))
    assert list(plans.items()) == [("image", "plan of image"), ("redraw", "plan of redraw")]
    led.sleep()
    assert not one.awake and not other.awake
    with pytest.raises(ConfigError, match="the request names a stage 'film'; there are text, image, redraw"):
        led.generate(request("film"))
