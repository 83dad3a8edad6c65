from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.sde.windows import AllSteps, ExplicitSteps, FirstFraction, MixGRPOWindow, RandomSubset

UNKNOWN: Any = "unknown"
STRATEGIES: list[Any] = ["progressive", "random", "decay", "exp_decay"]


def test_all_steps():
    assert AllSteps(4).indices(0) == AllSteps(4).indices(17) == [0, 1, 2, 3]
    assert AllSteps(4, exclude_last=True).indices(0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("num_steps", "fraction", "count"), [(10, 0.99, 9), (10, 1.0, 10), (16, 0.6, 9), (100, 0.29, 29), (10, 0.1, 1)]
)
def test_first_fraction_takes_the_integer_part(num_steps, fraction, count):
    assert FirstFraction(num_steps, fraction).indices(3) == list(range(count))


def test_explicit_steps_are_sorted_and_may_be_empty():
    assert ExplicitSteps(indices=[5, 1]).indices(9) == [1, 5]
    assert ExplicitSteps([]).indices(0) == []


def test_random_subset_is_uniform_over_its_stretch():
    scheduler = RandomSubset(10, 3, fraction=(0.2, 0.8))
    counts = Counter(step for rollout in range(3000) for step in scheduler.indices(rollout))
    # 3 of 6 steps, 3000 times: 1500 each, standard deviation 27.
    assert sorted(counts) == [2, 3, 4, 5, 6, 7]
    assert all(abs(count - 1500) < 120 for count in counts.values())
    assert len({tuple(scheduler.indices(rollout)) for rollout in range(300)}) == 20


def test_random_choices_depend_on_the_seed():
    subsets = [[RandomSubset(20, 5, seed=seed).indices(rollout) for rollout in range(20)] for seed in (0, 1)]
    starts = [
        [MixGRPOWindow(20, strategy="random", iters_per_window=1, seed=s).start(r) for r in range(20)] for s in (0, 1)
    ]
    assert subsets[0] != subsets[1] and starts[0] != starts[1]


def test_progressive_window_of_the_published_recipe():
    """w = 4, 25 rollouts a window, stride 1, 25 steps of which the last two are never trained."""
    window = MixGRPOWindow(25, window_size=4, iters_per_window=25, stride=1, max_step=23)
    assert window.indices(0) == window.indices(24) == [0, 1, 2, 3]
    assert window.indices(25) == [1, 2, 3, 4]
    assert window.indices(19 * 25) == [19, 20, 21, 22]


def test_progressive_window_stays_at_the_end_without_roll_back():
    window = MixGRPOWindow(10, window_size=4, iters_per_window=2, stride=2)
    assert [window.start(rollout) for rollout in range(12)] == [0, 0, 2, 2, 4, 4, 6, 6, 6, 6, 6, 6]
    assert window.indices(10**9) == [6, 7, 8, 9]


def test_roll_back_starts_again_at_init():
    window = MixGRPOWindow(10, window_size=4, iters_per_window=2, stride=2, init=2, roll_back=True)
    assert [window.start(rollout) for rollout in range(9)] == [2, 2, 4, 4, 6, 6, 2, 2, 4]


def test_the_last_window_is_pulled_back_to_be_whole():
    window = MixGRPOWindow(10, window_size=4, iters_per_window=1, stride=4)
    assert [window.indices(rollout) for rollout in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9]]


def test_stride_zero_freezes_the_window():
    for strategy in STRATEGIES:
        window = MixGRPOWindow(10, window_size=3, iters_per_window=1, stride=0, init=2, strategy=strategy)
        assert {window.start(rollout) for rollout in range(50)} == {2}


def test_a_window_of_all_steps_is_flow_grpo():
    assert MixGRPOWindow(10, window_size=10).indices(123) == AllSteps(10).indices(123)


def test_random_window_stays_and_then_jumps_anywhere():
    window = MixGRPOWindow(12, window_size=4, iters_per_window=5, strategy="random", init=1, max_step=10)
    starts = [window.start(rollout) for rollout in range(5 * 700)]
    assert all(len(set(starts[at : at + 5])) == 1 for at in range(0, len(starts), 5))
    counts = Counter(starts[::5])
    # Six starts, 700 draws: 117 each, standard deviation 10.
    assert sorted(counts) == [1, 2, 3, 4, 5, 6]
    assert all(abs(count - 117) < 45 for count in counts.values())


def test_decay_shortens_the_stay_linearly():
    window = MixGRPOWindow(25, iters_per_window=25, strategy="decay", max_step=23, min_iters=2)
    stays = [window.stay(start) for start in range(20)]
    assert stays[0] == 25 and stays == sorted(stays, reverse=True) and stays[-1] < stays[0]
    assert [round(25 - 23 * start / 23) for start in range(20)] == stays
    walked = Counter(window.start(rollout) for rollout in range(sum(stays)))
    assert [walked[start] for start in range(20)] == stays


def test_exp_decay_shortens_the_stay_after_the_knee():
    window = MixGRPOWindow(25, iters_per_window=20, strategy="exp_decay", decay_rate=0.5, decay_knee=13)
    stays = [window.stay(start) for start in range(22)]
    assert stays[:14] == [20] * 14
    assert stays[14:18] == [13, 8, 5, 3]  # ceil(20 e^(-k / 2))
    assert stays == sorted(stays, reverse=True) and min(stays) >= 1
    walked = Counter(window.start(rollout) for rollout in range(sum(stays)))
    assert [walked[start] for start in range(22)] == stays


@st.composite
def schedulers(draw):
    num_steps = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["subset", "window"]))
    if kind == "subset":
        start = draw(st.integers(0, num_steps - 1))
        end = draw(st.integers(start + 1, num_steps))
        count = draw(st.integers(1, end - start))
        return num_steps, RandomSubset(num_steps, count, (start / num_steps, end / num_steps), draw(st.integers(0, 9)))
    max_step = draw(st.integers(1, num_steps))
    size = draw(st.integers(1, max_step))
    iters = draw(st.integers(1, 30))
    strategy = draw(st.sampled_from(STRATEGIES))
    settings: dict[str, Any] = {} if strategy == "random" else {"roll_back": draw(st.booleans())}
    if strategy in ("decay", "exp_decay"):
        settings["min_iters"] = draw(st.integers(1, iters))
    if strategy == "exp_decay":
        settings |= {"decay_rate": draw(st.floats(0, 3)), "decay_knee": draw(st.integers(0, 20))}
    return num_steps, MixGRPOWindow(
        num_steps,
        window_size=size,
        iters_per_window=iters,
        stride=draw(st.integers(0, 6)),
        strategy=strategy,
        init=draw(st.integers(0, max_step - size)),
        max_step=draw(st.sampled_from([max_step, None])),
        seed=draw(st.integers(0, 9)),
        **settings,
    )


@settings(deadline=None)  # a loaded machine is not a failure
@given(schedulers(), st.integers(0, 10**6))
def test_indices_are_never_empty_sorted_and_inside(case, rollout_id):
    num_steps, scheduler = case
    steps = scheduler.indices(rollout_id)
    assert steps
    assert steps == sorted(set(steps))
    assert 0 <= steps[0] and steps[-1] < num_steps
    assert scheduler.indices(rollout_id) == steps
    if isinstance(scheduler, MixGRPOWindow):
        assert steps == list(range(steps[0], steps[0] + scheduler.window_size))
        assert steps[0] >= scheduler.init
        assert steps[-1] < (scheduler.max_step or num_steps)


@settings(deadline=None)  # a loaded machine is not a failure
@given(schedulers(), st.lists(st.integers(0, 500), max_size=20))
def test_indices_do_not_depend_on_what_was_asked_before(case, history):
    num_steps, scheduler = case
    expected = {rollout: scheduler.indices(rollout) for rollout in sorted(history)}
    assert [scheduler.indices(rollout) for rollout in history] == [expected[rollout] for rollout in history]


@settings(deadline=None)  # a loaded machine is not a failure
@given(schedulers())
def test_a_moving_window_visits_every_step_from_init_on(case):
    num_steps, scheduler = case
    if isinstance(scheduler, MixGRPOWindow) and 0 < scheduler.stride <= scheduler.window_size:
        if scheduler.strategy != "random":
            last = scheduler._ends[-1]
            visited = {step for rollout in range(last) for step in scheduler.indices(rollout)}
            assert visited == set(range(scheduler.init, scheduler.max_step or num_steps))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllSteps(0), "num_steps = 0"),
        (lambda: AllSteps(1, exclude_last=True), "num_steps = 1"),
        (lambda: FirstFraction(10, 0.05), "fraction = 0.05 of num_steps = 10"),
        (lambda: FirstFraction(10, 1.5), "fraction = 1.5"),
        (lambda: RandomSubset(10, 0), "num_sde_steps = 0"),
        (lambda: RandomSubset(10, 6, (0.0, 0.5)), "num_sde_steps = 6 cannot be drawn from the 5 steps"),
        (lambda: RandomSubset(10, 1, (0.5, 0.5)), r"fraction = \(0.5, 0.5\)"),
        (lambda: ExplicitSteps([1, 1]), r"indices = \[1, 1\]"),
        (lambda: ExplicitSteps([-1]), r"indices = \[-1\]"),
        (lambda: MixGRPOWindow(10, strategy=UNKNOWN), "strategy = 'unknown'"),
        (lambda: MixGRPOWindow(10, window_size=0), "window_size = 0"),
        (lambda: MixGRPOWindow(10, stride=-1), "stride = -1"),
        (lambda: MixGRPOWindow(10, iters_per_window=0), "iters_per_window = 0"),
        (lambda: MixGRPOWindow(10, init=-1), "init = -1"),
        (lambda: MixGRPOWindow(10, init=7), r"init \+ window_size = 7 \+ 4 = 11 exceeds max_step = 10"),
        (lambda: MixGRPOWindow(10, max_step=11), "max_step = 11"),
        (lambda: MixGRPOWindow(10, max_step=3), "exceeds max_step = 3"),
        (lambda: MixGRPOWindow(10, strategy="decay", min_iters=26), "min_iters = 26 exceeds iters_per_window = 25"),
        (lambda: MixGRPOWindow(10, strategy="random", roll_back=True), "roll_back = True has no effect with strategy"),
        (lambda: MixGRPOWindow(10, min_iters=2), "min_iters = 2 has no effect with strategy = 'progressive'"),
        (lambda: MixGRPOWindow(10, strategy="decay", decay_knee=3), "decay_knee = 3 has no effect"),
        (lambda: MixGRPOWindow(10, decay_rate=-1.0), "decay_rate = -1.0"),
        (lambda: AllSteps(3).indices(-1), "rollout_id = -1"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
