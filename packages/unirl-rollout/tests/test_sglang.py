"""The SGLang engine against a server that speaks SGLang's protocol."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_fakes import IMAGE, SGLangFake
from text_fakes import PARAMS, NumberCodec, request

from unirl.rollout.engine.sglang_llm import engine as engine_module
from unirl.rollout.engine.sglang_llm.engine import SGLangRolloutEngine, _flags
from unirl.rollout.engine.sglang_llm.response import checksums, kept_parameters
from unirl.rollout.engine.sglang_llm.server import SGLangServer
from unirl.types.errors import ConfigError, ContractError, RefusedError, WeightSyncError, WorkerError
from unirl.types.media import ImageLists, Images
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus
from unirl.types.weights import AdapterConfig, WeightBucket, weight_buckets, weight_spec

WEIGHTS = {"model.q.weight": torch.arange(6.0).view(2, 3), "model.norm.weight": torch.ones(3)}


@pytest.fixture
def server():
    fake = SGLangFake()
    yield fake
    fake.close()


@pytest.fixture
def model(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False, "image_token_id": IMAGE}))
    return tmp_path


def make_engine(server, model, **options: Any):
    if Path(model).is_dir():
        server.weights = load_file(Path(model) / "model.safetensors")
    options = {"context_length": 26, "vocab_size": 50, "dtype": "fp32", **options}
    return SGLangRolloutEngine(NumberCodec(), model=str(model), url=server.url, **options)


@pytest.fixture
def engine(server, model):
    engine = make_engine(server, model)
    yield engine
    engine.shutdown()


def drawn(server):
    """The one request for samples that were drawn; with temperature 0 instances are compared."""
    bodies = [body for path, body in server.log if path == "/generate"]
    (body,) = [body for body in bodies if body["sampling_params"][0]["temperature"]]
    return body


def push(engine, weights, version, max_bytes=20):
    buckets = list(weight_buckets(weights.items(), policy_version=version, max_bytes=max_bytes))
    engine.begin_weights(version, [spec for bucket in buckets for spec in bucket.specs])
    for bucket in buckets:
        engine.receive_weights(bucket)
    return engine.finish_weights(version)


def test_tokens_go_out_and_come_back_with_log_probs_endings_and_the_version(server, engine):
    track = engine.generate(request(["1 2", "7"])).tracks["text"]
    assert [row.tolist() for row in track.segment.unpack("tokens")] == [[3, 4, 5], [8, 9]]
    assert track.segment.status.tolist() == [SegmentStatus.TRUNCATED, SegmentStatus.COMPLETED]
    assert track.segment.log_probs.tolist() == [-0.5] * 5
    assert track.decoded.texts == ["3 4 5", "8 9"]
    assert track.policy_versions.tolist() == [0, 0]
    body = drawn(server)
    assert body["input_ids"] == [[1, 2], [7]]
    assert body["return_logprob"] is True
    assert len({params["sampling_seed"] for params in body["sampling_params"]}) == 2
    assert all(params["stop_token_ids"] == [9] for params in body["sampling_params"])


def test_a_prompt_that_the_server_refuses_fails_alone(server, engine):
    texts = ["1 2", "7", "13 1", "5 6", "3", "13"]
    undisturbed = engine.generate(request(["1 2", "7", "5 6", "3"])).tracks["text"].segment
    server.bad_tokens = {13}
    track = engine.generate(request(texts)).tracks["text"]
    failed = SegmentStatus.FAILED
    assert [status == failed for status in track.segment.status.tolist()] == [False, False, True, False, False, True]
    assert track.segment.lengths.tolist()[2] == track.segment.lengths.tolist()[5] == 0
    assert track.segment.tokens.tolist() == undisturbed.tokens.tolist()
    reasons = [(row or {}).get("episode", {}).get("reason") for row in track.metadata]
    assert [reason is None for reason in reasons] == [True, True, False, True, True, False]
    assert "no media for tokens [13]" in reasons[2]
    asked = [rid for path, body in server.log if path == "/generate" for rid in body["rid"]]
    assert len(set(asked)) == len(asked), "SGLang refuses a request with an id that it knows"


def test_a_rollout_of_prompts_that_are_all_refused_ends_the_run(server, engine):
    server.bad_tokens = {13}
    with pytest.raises(RefusedError, match=r"SGLang refused all of 2 prompts, .*no media for tokens \[13\]"):
        engine.generate(request(["13", "1 13"]))


def test_an_aborted_rollout_returns_what_it_has(server, engine):
    server.waits_for_abort = True
    found = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(request(["1"]))))
    thread.start()
    while server.paths().count("/generate") < 2:  # the first is what instances are compared by
        thread.join(0.01)
    engine.abort()
    thread.join(120)
    segment = found[0].tracks["text"].segment
    assert (segment.tokens.tolist(), segment.status.tolist()) == ([2], [SegmentStatus.ABORTED])


def test_a_sample_that_was_aborted_before_its_turn_is_empty(server, engine):
    server.change = lambda answer: [answer[0], not_begun(answer[1]["meta_info"])]
    segment = engine.generate(request(["1 2", "7"])).tracks["text"].segment
    assert [row.tolist() for row in segment.unpack("tokens")] == [[3, 4, 5], []]
    assert segment.status.tolist() == [SegmentStatus.TRUNCATED, SegmentStatus.ABORTED]


def not_begun(meta):
    """What SGLang 0.5.23 answers for such a sample."""
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    kept = {name: meta[name] for name in ("id", "weight_version") if name in meta}
    return {"text": "", "output_ids": [], "meta_info": {**kept, "finish_reason": reason, "e2e_latency": 0.01}}


def test_what_sglang_cannot_do_is_refused(engine):
    with pytest.raises(ConfigError, match=r"top_p = 0.9 and top_k = 0 draw from a part"):
        engine.generate(request(["1"], ARSamplingParams(temperature=1, top_p=0.9, max_new_tokens=3)))
    with pytest.raises(WeightSyncError, match="the policy 'ema' are asked for. Push it first"):
        engine.generate(request(["1"]), policy="ema")
    for look in (engine.generate, engine.check_prompts):
        with pytest.raises(ConfigError, match="prompt 0 has token 50"):
            look(request(["50"]))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda answer: answer[:1], ContractError, "answered 2 prompts with 1"),
        (lambda answer: [{"output_ids": [1], "meta_info": {}}] * 2, ContractError, "lacks what /generate gives"),
        (lambda answer: [{**one, "output_ids": [1]} for one in answer], ContractError, "but log-probs of"),
        (lambda answer: with_version(answer, "3"), WeightSyncError, r"of weight versions \['0', '3'\]"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(server, engine, change, error, text):
    server.change = change
    with pytest.raises(error, match=text):
        engine.generate(request(["1", "2"]))


def with_version(answer, version):
    answer[0]["meta_info"]["weight_version"] = version
    return answer


def test_a_full_push_is_read_by_the_server_under_its_version(server, engine):
    new = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    receipt = push(engine, new, 4)
    assert (receipt.policy_version, receipt.num_tensors, receipt.num_bytes, receipt.num_bound) == (4, 2, 36, 2)
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in new.items())
    assert server.version == "4"
    (body,) = [body for path, body in server.log if path == "/update_weights_from_disk"]
    assert body["flush_cache"] is True
    assert engine.generate(request(["1"])).tracks["text"].policy_versions.tolist() == [4]


def test_weights_that_do_not_fit_never_reach_the_server(server, engine):
    wrong = {"model.q.weight": torch.zeros(3, 2), "model.norms.weight": torch.ones(3)}
    with pytest.raises(WeightSyncError) as raised:
        push(engine, wrong, 4)
    for line in (
        "missing: model.norm.weight [3]",
        "unknown: model.norms.weight [3]",
        "shape: model.q.weight is [3, 2]",
    ):
        assert line in str(raised.value)
    with pytest.raises(WeightSyncError, match="dtype: model.q.weight is torch.float16"):
        push(engine, {name: tensor.half() for name, tensor in WEIGHTS.items()}, 4)
    first, second = weight_buckets(WEIGHTS.items(), policy_version=4, max_bytes=20)
    engine.begin_weights(4, [*first.specs, *second.specs])
    with pytest.raises(WeightSyncError, match="weights arrived changed"):
        engine.receive_weights(WeightBucket(4, {name: -1 * t for name, t in first.tensors.items()}, first.specs))
    engine.receive_weights(first)
    with pytest.raises(WeightSyncError, match="twice: model.q.weight"):
        engine.receive_weights(first)
    with pytest.raises(WeightSyncError, match="missing: model.norm.weight"):
        engine.finish_weights(4)
    assert "/update_weights_from_disk" not in server.paths()
    assert engine.policy_version == 0


def test_a_push_that_the_server_refuses_stops_the_rollouts(server, engine):
    server.refuses.add("/update_weights_from_disk")
    with pytest.raises(WeightSyncError, match="did not succeed.*it did not fit"):
        push(engine, WEIGHTS, 4)
    with pytest.raises(WeightSyncError, match="push them again"):
        engine.generate(request(["1"]))
    server.refuses.clear()
    push(engine, WEIGHTS, 4)
    with pytest.raises(WeightSyncError, match="version 3 of the policy is older than the engine's version 4"):
        push(engine, WEIGHTS, 3)


def test_a_parameter_that_a_push_does_not_reach_is_found_by_the_servers_own_checksums(server, engine):
    server.leaves_out.add("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"took no value \(1\):\n  model.norm.weight"):
        push(engine, WEIGHTS, 1)
    with pytest.raises(WeightSyncError, match="push them again"):
        engine.generate(request(["1"]))
    server.leaves_out.clear()
    assert push(engine, WEIGHTS, 1).num_bound == 2


def test_what_sglang_computes_takes_no_noise_and_must_stay_as_it_was(server, engine):
    axes = {"model.layers.0.self_attn.rotary_emb.axis_map": torch.tensor([0, 1, 2])}
    server.weights |= axes
    assert push(engine, WEIGHTS, 1).num_bound == 2
    assert server.weights["model.layers.0.self_attn.rotary_emb.axis_map"].tolist() == [0, 1, 2]
    server.writes = {name: value + 1 for name, value in axes.items()}
    with pytest.raises(WeightSyncError, match=r"constants of SGLang's model changed \(1\):\n  .*axis_map"):
        push(engine, WEIGHTS, 2)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({}, "gave no checksums"),
        ({"ranks": [{"checksums": {}}]}, "checksums of no parameter"),
        ({"ranks": []}, "checksums of no parameter"),
    ],
)
def test_a_server_without_checksums_is_refused(answer, text):
    with pytest.raises(ContractError, match=text):
        checksums(answer)


def test_a_parameter_counts_as_kept_where_one_rank_kept_it():
    before = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert kept_parameters(before, [{"a": "5", "b": "6"}, {"a": "7", "b": "8"}]) == []
    assert kept_parameters(before, [{"a": "5", "b": "6"}, {"a": "3", "b": "8"}]) == ["a on rank 1"]
    assert kept_parameters(before, [{"a": "5"}, {"a": "7", "b": "8", "c": "9"}]) == ["b on rank 0", "c on rank 0, 1"]
    with pytest.raises(ContractError, match="had 2 ranks before a push and has 1"):
        kept_parameters(before, before[:1])


def test_another_release_of_sglang_is_refused(server, engine):
    server.release = "0.6.0"
    with pytest.raises(ConfigError, match=r"the server has SGLang 0.6.0; this unirl-rollout speaks to 0.5.23"):
        engine.generate(request(["1"]))


def test_an_adapter_replaces_the_last_one_under_a_name_of_its_own(server, model):
    engine = make_engine(server, model, max_lora_rank=4)
    config = AdapterConfig(2, 4.0, ("q",))
    for version in (1, 2):
        tensors = {"model.q.lora_A.weight": torch.ones(2, 3), "model.q.lora_B.weight": torch.ones(2, 2) * version}
        specs = tuple(weight_spec(name, tensor) for name, tensor in tensors.items())
        engine.load_adapter(WeightBucket(version, tensors, specs), config)
        ((name, loaded),) = server.adapters.items()
        assert torch.equal(loaded["base_model.model.model.q.lora_B.weight"], tensors["model.q.lora_B.weight"])
        assert engine.generate(request(["1"])).tracks["text"].policy_versions.tolist() == [version]
        assert server.log[-1][1]["lora_path"] == [name]
    wrong = {**tensors, "model.q.lora_B.weight": torch.ones(3, 2)}
    specs = tuple(weight_spec(name, tensor) for name, tensor in wrong.items())
    with pytest.raises(WeightSyncError, match=r"lora_B.weight is \[3, 2\], expected \[2, 2\]"):
        engine.load_adapter(WeightBucket(3, wrong, specs), config)
    with pytest.raises(ConfigError, match="push the adapter"):
        push(engine, WEIGHTS, 3)
    engine.shutdown()


def test_sleep_frees_weights_that_must_then_be_pushed(server, model):
    engine = make_engine(server, model, sleep_level=2)
    engine.sleep()
    engine.wake_up()
    with pytest.raises(WeightSyncError, match="push them again"):
        engine.generate(request(["1"]))
    push(engine, WEIGHTS, 1)
    assert engine.generate(request(["1"])).tracks["text"].policy_versions.tolist() == [1]
    assert {"/release_memory_occupation", "/resume_memory_occupation"} <= set(server.paths())
    engine.shutdown()


def test_a_server_that_is_gone_or_answers_with_an_error_is_named(server, engine):
    server.change = lambda answer: {}
    with pytest.raises(ContractError):
        engine.generate(request(["1", "2"]))
    with pytest.raises(WorkerError, match=r"/nowhere answered 404"):
        engine._pool._members[0]._post("/nowhere", {})
    server.close()
    with pytest.raises(WorkerError, match=r"/generate failed"):
        engine.generate(request(["1"]))


def test_a_server_that_dies_while_it_starts_leaves_its_status_and_log(tmp_path):
    source = "import sys; print('no GPU found'); sys.exit(4)"
    server = SGLangServer("http://127.0.0.1:9", [sys.executable, "-c", source], tmp_path / "log", tmp_path)
    with pytest.raises(WorkerError, match=r"(?s)ended with status 4 while it started.*no GPU found"):
        server.wait_until_ready(60)
    server.stop()


def test_options_become_flags():
    assert _flags({"port": 3, "enable-lora": False, "skip-tokenizer-init": True}) == [
        "--port",
        "3",
        "--skip-tokenizer-init",
    ]


def test_a_model_that_is_no_folder_and_options_of_a_running_server_are_refused(server, model):
    with pytest.raises(ConfigError, match="is no folder"):
        make_engine(server, "org/model")
    with pytest.raises(
        ConfigError, match="engine.engine_args = {'schedule-policy': 'fcfs'}: does nothing for the serv"
    ):
        make_engine(server, model, engine_args={"schedule-policy": "fcfs"})
    with pytest.raises(ConfigError, match=r"engine_args sets \['tp-size'\], which the engine sets itself"):
        SGLangRolloutEngine(NumberCodec(), model=str(model), engine_args={"tp-size": 2})


@pytest.mark.parametrize(
    ("url", "transfer_dir", "message"),
    [
        ("http://10.0.0.1:30000", "/dev/shm", "is another host, and engine.transfer_dir = /dev/shm is memory of this"),
        ("10.0.0.1:30000", "/mnt/shared", "engine.url = 10.0.0.1:30000 names no host. Give one as http://HOST:PORT"),
    ],
)
def test_a_server_elsewhere_reads_pushes_from_a_folder_that_it_sees(model, url, transfer_dir, message):
    with pytest.raises(ConfigError, match=message):
        SGLangRolloutEngine(NumberCodec(), model=str(model), url=url, transfer_dir=transfer_dir)


def test_a_server_on_several_hosts_must_see_the_folder_of_pushes_on_each(server, model):
    server.sizes = {"tp_size": 2, "pp_size": 1, "nnodes": 2}
    engine = make_engine(server, model)
    with pytest.raises(ConfigError, match="SGLang is split over 2 hosts, and engine.transfer_dir = /dev/shm is memory"):
        engine.ready()
    engine = make_engine(server, model, transfer_dir=str(model))
    with pytest.raises(WeightSyncError, match="split over 2 ranks, of which 1 gave checksums"):
        push(engine, WEIGHTS, 1)
    server.num_stale = 1
    unseen = rf"(?s)took no value; each of its 2 hosts must see {model}/.*: *\n  {min(WEIGHTS)} on rank 1\n"
    with pytest.raises(WeightSyncError, match=unseen):
        push(engine, WEIGHTS, 2)
    with pytest.raises(WeightSyncError, match="loading the weights of version 2 did not end well"):
        engine.generate(request(["1"]))
    engine.shutdown()


def test_a_server_whose_weights_cannot_all_be_checked_is_refused(server, model):
    server.sizes = {"tp_size": 1, "pp_size": 2, "nnodes": 2}
    with pytest.raises(ConfigError, match="started with --pp-size 2; SGLang checks the weights of one stage alone"):
        make_engine(server, model).ready()


def asking(texts, shown, params=PARAMS):
    req = request(texts, params)
    req.primitives["image"] = shown if isinstance(shown, Images) else ImageLists(images=shown)
    return req


def square(side, value):
    return torch.full((3, side, side), value)


def test_images_travel_in_eight_bits_one_placeholder_each_and_the_prompt_stays_as_it_was(server, engine):
    small, large = square(4, 0.5), square(8, 1.0)
    prompts = [f"1 {IMAGE} 2 {IMAGE} {IMAGE} {IMAGE} {IMAGE} 3", "7", f"5 {IMAGE} 6"]
    track = engine.generate(asking(prompts, [[small, large], [], [small]])).tracks["text"]
    body = drawn(server)
    assert body["input_ids"] == [[1, IMAGE, 2, IMAGE, 3], [7], [5, IMAGE, 6]]
    assert [len(each) for each in body["image_data"]] == [2, 0, 1]
    assert body["image_data"][0][0] == body["image_data"][2][0]
    assert [each.size for each in server.images[0]] == [(4, 4), (8, 8)]
    assert server.images[0][0].getpixel((0, 0)) == (128, 128, 128)
    # Replay needs the tokens that SGLang made of the images.
    assert track.conditions["prompt"].unpack("tokens")[0].tolist() == [int(word) for word in prompts[0].split()]
    assert [row.tolist() for row in track.segment.unpack("tokens")] == [[4, 5, 6], [8, 9], [7, 8, 9]]


def test_another_number_of_image_tokens_than_replay_counts_is_refused(server, engine):
    with pytest.raises(ContractError, match=r"prompt 0 has 4 tokens, SGLang read 6: its image processor resizes"):
        engine.generate(asking([f"1 {IMAGE} {IMAGE} 2"], [[square(8, 0.5)]]))


def test_images_for_a_model_that_reads_text_alone_are_refused(server, model):
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    engine = make_engine(server, model)
    with pytest.raises(ConfigError, match="names no image_token_id in its config.json: it reads text alone"):
        engine.generate(asking(["1"], [[square(4, 0.5)]]))
    engine.shutdown()


def test_limits_are_those_of_the_models_own_configuration_unless_given(server, model):
    text = {"max_position_embeddings": 12, "vocab_size": 8}
    for config in (text, {"text_config": text}):
        (model / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **config}))
        engine = make_engine(server, model, context_length=None, vocab_size=None)
        with pytest.raises(ConfigError, match="of the engine's context of 6"):
            engine.generate(request(["1 2 3 4"]))
        with pytest.raises(ConfigError, match="has token 8"):
            engine.generate(request(["8"]))
        engine.shutdown()
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no max_position_embeddings; set engine.context_length"):
        make_engine(server, model, context_length=None)


def test_a_server_of_ours_keeps_the_tokens_of_prompts_with_images(model, monkeypatch):
    started = []
    monkeypatch.setattr(engine_module, "SGLangServer", lambda url, command, log, folder: started.append(command))
    SGLangRolloutEngine(
        NumberCodec(), model=str(model), device="cuda", context_length=9, vocab_size=9, transfer_dir=str(model)
    )
    before, after = started[0][: started[0].index("-m")], started[0][started[0].index("-m") :]
    assert before[0] == "env" and "SGLANG_MM_AVOID_RETOKENIZE=1" in before and before[-1] == sys.executable
    assert after[:2] == ["-m", "sglang.launch_server"] and "--device" not in after
    assert after[after.index("--context-length") + 1] == "15"  # SGLang uses 6 less


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "engine.kv_cache_tokens is needed on a CPU"),
        (
            {"kv_cache_tokens": 64, "max_lora_rank": 2},
            "max_lora_rank = 2, but SGLang's adapters need a GPU. Push whole",
        ),
        ({"kv_cache_tokens": 64, "sleep_level": 2}, "engine.sleep_level = 2 does nothing on a CPU"),
        ({"kv_cache_tokens": 64, "python": "none/python"}, "Make SGLang's environment with `uv sync --project env"),
    ],
)
def test_what_a_server_on_a_cpu_needs_is_asked_for_before_it_starts(model, options, message):
    with pytest.raises(ConfigError, match=message):
        SGLangRolloutEngine(
            NumberCodec(),
            model=str(model),
            device="cpu",
            context_length=9,
            vocab_size=9,
            transfer_dir=str(model),
            **options,
        )
    assert list(model.glob("unirl-*")) == []


def test_a_server_on_a_cpu_gets_a_free_port_and_what_needs_no_gpu(model, monkeypatch):
    started = []
    monkeypatch.setattr(engine_module, "SGLangServer", lambda url, command, log, folder: started.append((url, command)))
    monkeypatch.setattr(engine_module.os, "sched_getaffinity", lambda process: {0, 1, 2})
    for size in (1, 2):
        SGLangRolloutEngine(
            NumberCodec(),
            model=str(model),
            device="cpu",
            context_length=9,
            vocab_size=9,
            kv_cache_tokens=64,
            num_devices=size,
            transfer_dir=str(model),
        )
    (url, command), (_, split) = started
    port = command[command.index("--port") + 1]
    assert url.endswith(f":{port}") and 20_000 <= int(port) < 32_768
    assert split[split.index("--tp-size") + 1] == "2" and "SGLANG_CPU_OMP_THREADS_BIND=0,2|1" in split
    assert "OMP_NUM_THREADS=1" in command and command[command.index("--max-total-tokens") + 1] == "64"
    assert command[command.index("--attention-backend") + 1] == "torch_native"


def test_a_server_ends_with_the_trainer_that_started_it_and_takes_its_folder_along(tmp_path):
    """The trainer is a process that starts a server and is killed; the server one that leaves its id and sleeps."""
    folder, told = tmp_path / "engine", tmp_path / "pid"
    folder.mkdir()
    sleeper = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    trainer = (
        "import pathlib, sys, time; from unirl.rollout.engine.sglang_llm.server import SGLangServer\n"
        f"server = SGLangServer('http://127.0.0.1:9', [sys.executable, '-c', {sleeper!r}], "
        f"pathlib.Path({str(folder)!r}) / 'log', pathlib.Path({str(folder)!r})); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", trainer]) as process:
        wait_until(lambda: told.exists() and told.read_text())
        process.kill()
    wait_until(lambda: not folder.exists() and not Path("/proc", told.read_text()).exists())


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_weights_of_a_checkpoint_with_old_names_are_pushed_under_present_ones_and_written_under_its_own(
    server, tmp_path
):
    old = {"visual.merger.weight": torch.ones(2), "model.layers.0.w": torch.ones(2, 2), "lm_head.weight": torch.ones(3)}
    save_file(old, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    engine = make_engine(server, tmp_path)
    new = ["model.visual.merger.weight", "model.language_model.layers.0.w", "lm_head.weight"]
    push(engine, dict(zip(new, old.values(), strict=True)), 1, max_bytes=1000)
    assert sorted(server.weights) == sorted(old)
    engine.shutdown()
