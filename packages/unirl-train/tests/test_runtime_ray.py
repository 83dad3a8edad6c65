"""The runtime contract on two Ray workers, and what happens when one fails."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from runtime_fakes import (
    Trainee,
    build,
    build_hanging,
    build_nothing,
    build_pairs,
    build_source,
    check_pairs,
    grown,
    numbered,
)

from unirl.distributed.group.device_pool import DevicePool
from unirl.distributed.group.ray_runtime import RayRuntime
from unirl.distributed.group.waiting import CallFailed, answers
from unirl.types.errors import ConfigError, ContractError, WorkerError
from unirl.types.rollout import RolloutResp, RolloutTrack

pytestmark = pytest.mark.ray


def is_alive(process_id: int) -> bool:
    """True if a process runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def runtime(ray_of_two_cores):
    """Two workers that the tests without failures share; killed by the last test that uses them."""
    with RayRuntime(build, num_devices=2, env={"COLOUR": "blue"}, timeout_s=120, start_timeout_s=600) as runtime:
        yield runtime


# These two first: the runtime below takes both cores.
def test_a_worker_has_as_many_threads_as_cores_are_reserved_for_it(ray_of_two_cores) -> None:
    with RayRuntime(build_source, num_devices=1, cpus_per_device=2, timeout_s=120, start_timeout_s=600) as runtime:
        assert runtime.role("source").environment("OMP_NUM_THREADS") == [("2", 2)]


def test_a_worker_that_hangs_is_named_with_what_it_does_since_when_and_where(ray_of_two_cores, monkeypatch, caplog):
    monkeypatch.setattr("unirl.distributed.group.waiting.SLOW_S", 1.5)
    with RayRuntime(build_hanging, num_devices=1, timeout_s=600, start_timeout_s=600) as runtime:
        assert runtime.role("source").environment("COLOUR")  # it is built and answers
        runtime._timeout_s = 4.0  # of the next call: to build takes longer
        with pytest.raises(
            WorkerError, match=r"worker-0 \(rank 0 of 1, pid \d+\): in source.hang for [45] s, at"
        ) as raised:
            runtime.role("source").hang()
    assert "time.sleep(HANGS_S)" in str(raised.value)
    assert "source.hang takes longer than 2 s" in caplog.text and "in source.hang for" in caplog.text


def test_a_control_method_is_answered_while_another_call_runs(ray_of_two_cores):
    with RayRuntime(build_hanging, num_devices=2, timeout_s=120, start_timeout_s=600) as runtime:
        waiting = runtime.role("source").submit.wait_until_told()
        assert runtime.role("source").tell() == [0, 1]
        assert waiting.result() == [True, True]


def test_a_worker_that_is_stopped_is_named_with_what_it_did_when_it_was_heard_last(
    ray_of_two_cores, monkeypatch, caplog
):
    monkeypatch.setattr("unirl.distributed.group.waiting.BEAT_S", 0.3)
    monkeypatch.setattr("unirl.types.heartbeat.SILENT_S", 1.5)
    monkeypatch.setattr("unirl.distributed.group.waiting.REPORT_S", 0.2)
    with RayRuntime(build_hanging, num_devices=1, timeout_s=600, start_timeout_s=600) as runtime:
        (pid,) = runtime.pids
        runtime._timeout_s = 6.0  # of the next call: to build takes longer
        stop = threading.Timer(2.0, os.kill, (pid, signal.SIGSTOP))
        stop.start()
        with pytest.raises(
            WorkerError, match=r"silent: its process is stopped.*last heard \d s ago: in source.hang for"
        ):
            runtime.role("source").hang()
    assert "source.hang waits: worker-0 (rank 0 of 1" in caplog.text and "has given no sign of life for" in caplog.text
    assert "time.sleep(HANGS_S)" in caplog.text


def test_every_rank_is_a_process_of_its_own(runtime) -> None:
    found = runtime.role("source").where(label="x")
    assert [(rank, size, label) for rank, size, _, label in found] == [(0, 2, "x"), (1, 2, "x")]
    assert len({pid for _, _, pid, _ in found} | {os.getpid()}) == 3


def test_workers_get_their_environment_and_threads(runtime) -> None:
    assert runtime.role("source").environment("COLOUR") == [("blue", 1), ("blue", 1)]
    assert runtime.role("source").environment("GLOO_SOCKET_IFNAME") == [("lo", 1), ("lo", 1)]


def test_ranks_form_one_process_group(runtime) -> None:
    assert runtime.role("source").sum_ranks() == [3.0, 3.0]


def test_first_answers_for_all(runtime) -> None:
    assert runtime.role("source").first_rank() == 0


def test_scatter_gives_each_rank_its_item(runtime) -> None:
    assert runtime.role("source").given(["a", "b"], named=[1, 2]) == [(0, "a", 1), (1, "b", 2)]


def test_rank_zero_runs_on_rank_zero_only(runtime) -> None:
    source = runtime.role("source")
    assert source.count_on_zero() == 1
    assert source.zero_calls() == [1, 0]


def test_a_batch_is_cut_and_joined_in_order(runtime) -> None:
    track = RolloutTrack(sample_ids=list("abcd"), rewards=torch.arange(4.0))
    resp = RolloutResp(tracks={"image": track})
    assert runtime.role("source").echo(resp).equals(resp)


def test_a_share_travels_without_the_rest(runtime) -> None:
    assert runtime.role("source").weigh(numbered(list("abcdef"), rewards=torch.arange(6.0))) == [
        ([0.0, 1.0, 2.0], 3),
        ([3.0, 4.0, 5.0], 3),
    ]
    result = runtime.role("source").slice_of_something_large()
    assert result.untyped_storage().nbytes() == 8
    assert not result.requires_grad


def test_held_values_stay_with_their_workers(runtime) -> None:
    ids = ["1", "2", "3", "4"]
    with runtime.role("source").make(numbered(ids), 2.0) as held:
        assert held.meta.tracks["image"].sample_ids == ids
        assert held.meta.tracks["image"].rewards.tolist() == [2.0, 4.0, 6.0, 8.0]
        assert runtime.role("sink").is_same_object(held) == [True, True]
        assert held.map(lambda resp, bonus: resp.batch_size + bonus, 10) == [12, 12]
        held.attach("image", advantages=torch.arange(4.0))
        assert held.map(lambda resp: resp.tracks["image"].advantages.tolist()) == [[0.0, 1.0], [2.0, 3.0]]
        assert held.fetch().tracks["image"].component_rewards["raw"].tolist() == [1.0, 2.0, 3.0, 4.0]
        with pytest.raises(ContractError, match="only its own share"):
            runtime.role("sink").read_on_zero(held)
        assert runtime.num_held() == 1
    assert runtime.num_held() == 0


def test_a_response_of_the_driver_can_be_held(runtime) -> None:
    resp = RolloutResp(tracks={"image": RolloutTrack(sample_ids=list("abcd"), rewards=torch.arange(4.0))})
    with runtime.hold(resp) as held:
        assert held.map(lambda share: share.tracks["image"].sample_ids) == [["a", "b"], ["c", "d"]]
        assert held.fetch().equals(resp)


def test_held_values_are_written_where_they_lie_and_read_into_the_object_store(runtime, tmp_path) -> None:
    with runtime.hold(grown(list("abcd"))) as held:
        held.write(tmp_path, "of_workers")
        landed = runtime.hold(grown(list("abcd"))).landed()
        landed.write(tmp_path, "landed")
        assert [path.name for path in sorted(tmp_path.iterdir())] == [
            f"{name}-0000{shard}.safetensors" for name in ("landed", "of_workers") for shard in range(2)
        ]
        for name in ("landed", "of_workers"):
            with runtime.read(sorted(tmp_path.glob(f"{name}-*"))) as found:
                assert found.is_landed and found.fetch().equals(held.fetch()) and found.meta.equals(held.meta)
                with runtime.gather([(found, [3, 0])]) as some:
                    assert some.fetch().equals(held.fetch().select([3, 0]))
        landed.release()


def test_samples_of_held_values_go_from_worker_to_worker(runtime) -> None:
    with runtime.hold(grown(list("abcd"))) as first, runtime.hold(grown(list("efgh"), offset=9.0)) as second:
        for sources in (
            [(first, [3, 0, 1, 2])],
            [(first, [0, 2]), (second, [3, 1])],
            [(first, [0]), (second, [2])],
            [(first, [0, 1, 2, 3]), (second, [0, 1, 2, 3])],
        ):
            wanted = RolloutResp.concat([held.fetch().select(rows) for held, rows in sources])
            with runtime.gather(sources) as found:
                assert found.fetch().equals(wanted)
                assert len({share.batch_size for share in found.map(lambda share: share)}) == 1
                assert found.meta.equals(wanted.metadata_only())
        assert runtime.num_held() == 2
        second.release()
        with pytest.raises(ContractError, match="released"):
            runtime.gather([(first, [0, 1]), (second, [0, 1])])


def test_what_no_worker_can_join_leaves_nothing_behind(runtime) -> None:
    bare = RolloutResp(tracks={"text": RolloutTrack(sample_ids=["x", "y"])})
    with runtime.hold(grown(list("ab"))) as first, runtime.hold(bare) as second:
        with pytest.raises(ContractError, match="disagree|different keys|present in"):
            runtime.gather([(first, [0]), (second, [1])])
        with pytest.raises(ContractError, match="disagree|different keys|present in"):
            runtime.gather([(first, [0, 1]), (second, [0, 1])])
        assert runtime.num_held() == 2


def test_a_submitted_call_runs_while_the_driver_does_other_things(runtime, tmp_path) -> None:
    source = runtime.role("source")
    waiting = source.submit.wait_for(str(tmp_path / "go"))
    after = source.submit.sum_ranks()  # behind it in the workers' queues
    (tmp_path / "go").touch()
    assert after.result() == [3.0, 3.0]
    assert waiting.result() == waiting.result() == [0, 1]
    with source.submit.keep(grown(list("ab"))).result() as held:
        assert held.fetch().equals(grown(list("ab")))
    with pytest.raises(ConfigError, match="a is 1; set a=2"):
        source.submit.refuse(1, "config").result()


def test_two_sharded_ranks_train_as_one(runtime) -> None:
    alone = Trainee()
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs = torch.randn(8, 4, generator=generator)
        targets = torch.randn(8, generator=generator)
        batch = numbered(list("abcdefgh"), advantages=inputs, rewards=targets)
        whole = alone.step(batch)
        shares = runtime.role("trainee").step(batch)
        assert sum(shares) / 2 == pytest.approx(whole, abs=1e-6)
    # float32; a mean of two means of four against a mean of eight, through AdamW
    for name, value in runtime.role("trainee").weights().items():
        torch.testing.assert_close(value, alone.weights()[name], atol=1e-6, rtol=0)


def test_an_error_of_ours_keeps_its_class_and_names_the_worker(runtime) -> None:
    with pytest.raises(ConfigError, match=r"^a is 1; set a=2") as caught:
        runtime.role("source").refuse(1, "config")
    assert "worker-1 (rank 1 of 2, pid " in caught.value.__notes__[0]
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "in refuse" in str(caught.value.__cause__)


@pytest.mark.parametrize(("kind", "text"), [("value", "ValueError: odd"), ("lock", "it holds a lock")])
def test_any_other_error_carries_its_own_traceback(runtime, kind, text) -> None:
    with pytest.raises(WorkerError) as caught:
        runtime.role("source").refuse(0, kind)
    assert caught.value.worker.startswith("worker-0 (rank 0 of 2, pid ")
    assert text in caught.value.traceback_text
    assert 'runtime_fakes.py", line' in caught.value.traceback_text
    assert "in refuse" in caught.value.traceback_text
    assert "\x1b" not in caught.value.traceback_text
    assert len(runtime.role("source").where()) == 2  # every rank had answered, so the runtime goes on


def test_more_devices_than_there_are_names_both_numbers(ray_of_two_cores) -> None:
    with pytest.raises(ConfigError, match="num_devices = 3 .* needs 3 CPU cores; the Ray cluster has 2"):
        RayRuntime(build, num_devices=3)
    with pytest.raises(ConfigError, match="asks for 1 GPUs; the Ray cluster has 0"):
        RayRuntime(build, num_devices=1, device="cuda")


def test_devices_that_stay_taken_are_named(runtime) -> None:
    with pytest.raises(WorkerError, match=r"waited 1 s for 1 devices .* has .* free"):
        RayRuntime(build, num_devices=1, start_timeout_s=1)


def test_a_killed_worker_is_named_and_nothing_is_left(runtime) -> None:
    processes = [pid for _, _, pid, _ in runtime.role("source").where()] + runtime.role("source").start_child()
    held = runtime.role("source").make(numbered(["1", "2"]), 1.0)
    unasked = runtime.role("source").submit.where()
    assert all(is_alive(pid) for pid in processes)
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        runtime.role("source").die_in_collective(1)
    assert time.monotonic() - begin < 90  # a collective that waits for the dead would take 120
    assert caught.value.worker == f"worker-1 (rank 1 of 2, pid {processes[1]})"
    assert "the process died" in caught.value.traceback_text
    end = time.monotonic() + 60
    while any(is_alive(pid) for pid in processes):  # those that the workers started are killed, not awaited
        assert time.monotonic() < end
        time.sleep(0.02)
    held.release()
    runtime.close()
    runtime.close()
    for ask in (runtime.role("source").where, unasked.result):
        with pytest.raises(ContractError, match="closed: worker-1 .* failed in source.die_in_collective"):
            ask()


def test_another_cluster_than_the_one_in_use_is_refused(ray_of_two_cores) -> None:
    joined = ray_of_two_cores.get_runtime_context().gcs_address
    with DevicePool(1, address=joined) as pool:
        assert pool.num_devices == 1
    host = ray_of_two_cores.util.get_node_ip_address()
    with socket.create_server((host, 0)) as other:
        address = f"{host}:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address!r} cannot be joined: .* already uses the Ray at {joined}"):
            DevicePool(1, address=address)
    with pytest.raises(ConfigError, match=r"no Ray answers at 127\.0\.0\.1:1 .*refused"):
        DevicePool(1, address="127.0.0.1:1")


@pytest.mark.matrix
def test_blocks_of_one_pool_hold_runtimes_of_their_own(ray_of_two_cores) -> None:
    with DevicePool(2, start_timeout_s=600) as pool:
        with pytest.raises(ConfigError, match="lacks a model; set model.path"):
            RayRuntime(build_nothing, num_devices=1, block=pool.block("broken", 0, 1))
        block = pool.block("reward", 1, 2)
        with pytest.raises(ConfigError, match=r"block engine = \[0, 1\] overlaps block reward = \[1\]"):
            pool.block("engine")
        with pytest.raises(ConfigError, match=r"block engine = \[1, 2\] must name devices of the pool, which has 2"):
            pool.block("engine", 1, 3)
        with pytest.raises(ConfigError, match="block reward has 1 cpu devices; the runtime asks for 2 cpu"):
            RayRuntime(build, num_devices=2, block=block)
        with RayRuntime(build_source, num_devices=1, block=block) as runtime:
            held = runtime.hold(grown(list("abcd")))
            with RayRuntime(build_source, num_devices=1, block=pool.block("train", 0, 1)) as other:
                with other.gather([(held, [2, 1])]) as moved:
                    assert moved.fetch().equals(grown(list("abcd")).select([2, 1]))
                    with pytest.raises(ContractError, match="is held by other workers"):
                        runtime.role("source").echo(moved)
            with pytest.raises(WorkerError) as caught:
                runtime.role("source").refuse(0, "value")
            assert caught.value.worker.startswith("reward-0 (rank 0 of 1, pid ")
            ((_, _, pid, _),) = runtime.role("source").where()
        assert not is_alive(pid)
        pool.block("everything")


@pytest.mark.matrix
def test_four_processes_at_two_places_train_on_two_shards(ray_of_two_cores) -> None:
    with DevicePool(4, cpus_per_device=0.5, start_timeout_s=600) as pool:
        with RayRuntime(build_pairs, num_devices=4, block=pool.block("train"), start_timeout_s=600) as runtime:
            check_pairs(runtime, [[0, 1], [2, 3]])


@pytest.fixture(scope="module")
def bare_actors(ray_of_two_cores):
    """Two actors without torch: one process each, in a second. One that sleeps still answers other calls."""

    class Bare:
        def sleep(self, seconds: float) -> None:
            time.sleep(seconds)

        def fail(self, text: str) -> None:
            raise ValueError(text)

        def pid(self) -> int:
            return os.getpid()

    actors = [ray_of_two_cores.remote(Bare).options(num_cpus=0, max_concurrency=4).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray_of_two_cores.kill(actor)


def test_a_broken_collective_is_not_taken_for_the_cause(bare_actors) -> None:
    first, second = bare_actors
    pending = {first.fail.remote("[gloo] Connection closed by peer"): "w-0", second.fail.remote("mine"): "w-1"}
    with pytest.raises(CallFailed) as caught:
        answers(pending, "role.method", 60)
    assert caught.value.is_settled
    with pytest.raises(WorkerError, match="ValueError: mine") as raised:
        caught.value.raise_cause()
    assert raised.value.worker == "w-1"
    assert raised.value.__notes__ == ["worker w-0 failed too: ValueError: [gloo] Connection closed by peer"]


def test_ranks_that_wait_for_a_failed_one_are_not_awaited(bare_actors, monkeypatch) -> None:
    monkeypatch.setattr("unirl.distributed.group.waiting.SETTLE_S", 0.3)
    first, second = bare_actors
    begin = time.monotonic()
    with pytest.raises(CallFailed) as caught:
        answers({first.sleep.remote(600.0): "w-0", second.fail.remote("mine"): "w-1"}, "role.method", 300)
    assert time.monotonic() - begin < 200
    assert not caught.value.is_settled


def test_a_call_that_takes_too_long_names_who_is_awaited(bare_actors) -> None:
    first, second = bare_actors
    answered = second.sleep.remote(0.0)
    answers({answered: "w-1"}, "role.method", 60)
    with pytest.raises(WorkerError, match="worker w-0 failed:\nno answer to role.method within 0 s"):
        answers({first.sleep.remote(600.0): "w-0", answered: "w-1"}, "role.method", 0.4)


def test_an_idle_worker_that_was_killed_is_named_at_the_next_call(bare_actors) -> None:
    _, second = bare_actors
    (pid,) = answers({second.pid.remote(): "w-1"}, "role.method", 60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CallFailed) as caught:
        answers({second.sleep.remote(60.0): "w-1"}, "role.method", 60)
    assert caught.value.failures[0].is_death
