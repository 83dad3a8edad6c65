"""Scorers of several groups: each writes its part where the response is, and the last composes."""

from typing import Any

from unirl.distributed.rewards import LedRewards


class FakeService:
    """Stands for the reward service of one group."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls

    def score_part(self, resp: Any, track: str, *, is_training: bool = True) -> None:
        self.calls.append((self.name, "part", resp, track, is_training))

    def score_track(self, resp: Any, track: str, *, is_training: bool = True) -> list[dict[str, float]]:
        self.calls.append((self.name, "all", resp, track, is_training))
        return [{"wait_s": 1.0}]

    def offload(self) -> None:
        self.calls.append((self.name, "offload"))

    def onload(self) -> None:
        self.calls.append((self.name, "onload"))


def test_the_last_group_is_asked_when_the_others_have_scored() -> None:
    calls: list[tuple[Any, ...]] = []
    led = LedRewards([FakeService("clip", calls), FakeService("ocr", calls)], FakeService("last", calls))
    resp: Any = object()
    assert led.score_track(resp, "image", is_training=False) == [{"wait_s": 1.0}]
    assert calls == [
        ("clip", "part", resp, "image", False),
        ("ocr", "part", resp, "image", False),
        ("last", "all", resp, "image", False),
    ]
    del calls[:]
    led.offload()
    led.onload()
    assert [call[1] for call in calls] == ["offload"] * 3 + ["onload"] * 3
