"""Requests as vLLM's process gets them and answers as tracks: no vLLM needed."""

import dataclasses
import importlib.util
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.rollout.engine.begun_texts import BegunTexts
from unirl.rollout.engine.checkpoint import adapter_specs, checkpoint_shapes, full_specs
from unirl.rollout.engine.child import messages
from unirl.rollout.engine.child.messages import Failed, ReceiveWeights, Start
from unirl.rollout.engine.child.process import EngineProcess, interpreter
from unirl.rollout.engine.push import check_version
from unirl.rollout.engine.served_images import picture, shown_pictures
from unirl.rollout.engine.served_sounds import heard_sounds, waveform
from unirl.rollout.engine.served_text.call import Generations, Limits, check_fits, generation, part_of, text_segment
from unirl.rollout.engine.vllm_llm.engine import VLLMRolloutEngine
from unirl.rollout.engine.vllm_llm.host import prompts_of
from unirl.rollout.engine.vllm_llm.messages import CODEC, Ready
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError, WeightSyncError, WorkerError
from unirl.types.media import Audios, ImageLists, Images, Texts
from unirl.types.rollout import RolloutReq, RolloutTrack
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment
from unirl.types.weights import weight_spec

PARAMS = ARSamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=4, seed=3)
SERVER = "unirl.rollout.engine.vllm_llm.server"
LIMITS = Limits(context_length=8, vocab_size=50)
READY = Ready(
    version="0.32.0",
    torch_version="2.13.0",
    dtype="torch.float32",
    vocab_size=50,
    context_length=8,
    max_running=4,
    num_tensors=3,
)


def request(ids, params=PARAMS, rollout_id=0):
    return RolloutReq(
        sample_ids=ids,
        group_ids=["g"] * len(ids),
        primitives={"text": Texts(texts=["x"] * len(ids))},
        sampling_params=params,
        rollout_id=rollout_id,
    )


def conditions(*prompts):
    return {"prompt": PromptCondition.pack(tokens=[torch.tensor(prompt) for prompt in prompts])}


def call(num=2):
    return generation(request([f"s{i}" for i in range(num)]), conditions(*[[1, 2]] * num), (0,), 7)


# Messages


def test_a_message_comes_back_as_it_was_and_log_probs_keep_every_bit():
    log_probs = torch.randn(5, generator=torch.Generator().manual_seed(0)).tolist()
    for message in (
        Start("m", {"dtype": "float32", "max_model_len": None}, 3, "scratch"),
        Generations(2, [[1, 2, 3, 4, 5]], [log_probs], ["stop"]),
        ReceiveWeights(3, "p", [weight_spec("a.weight", torch.zeros(2, 3, dtype=torch.bfloat16))]),
        READY,
    ):
        assert CODEC.decode(CODEC.encode(message)) == message


@pytest.mark.parametrize("data", [b"\x80\x04N.", b"{}", b'{"message": "Reboot"}', b'{"message": "Sleep"}', b"[1]"])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ContractError, match="Install the same unirl-rollout in the trainer's environment"):
        CODEC.decode(data)


# Requests


def test_a_request_carries_tokens_parameters_and_a_seed_for_each_sample():
    made = generation(request(["a", "b"]), conditions([1, 2, 3], [4]), (0, 9), 7)
    assert made.prompts == [[1, 2, 3], [4]]
    assert (made.temperature, made.top_p, made.top_k, made.max_new_tokens) == (0.7, 0.9, 5, 4)
    assert (made.stop_token_ids, made.number) == ([0, 9], 7)
    assert len(set(made.seeds)) == 2
    assert all(0 <= seed < 2**63 for seed in made.seeds)


def test_a_sample_has_the_same_seed_in_any_batch_and_another_in_the_next_rollout():
    together = generation(request(["a", "b"]), conditions([1], [1]), (), 0).seeds
    alone = generation(request(["b"]), conditions([1]), (), 5).seeds
    later = generation(request(["b"], rollout_id=1), conditions([1]), (), 0).seeds
    assert together[1] == alone[0] != later[0]


def test_requests_that_vllm_cannot_serve_are_refused():
    with pytest.raises(ContractError, match="needs ARSamplingParams, the request has DiffusionSamplingParams"):
        generation(request(["a"], DiffusionSamplingParams()), conditions([1]), (), 0)
    with pytest.raises(ContractError, match="no PromptCondition under 'prompt'"):
        generation(request(["a"]), {}, (), 0)
    seen = request(["a"])
    seen.primitives["image"] = Images(pixels=torch.zeros(1, 3, 2, 2))
    with pytest.raises(ConfigError, match="names no image_token_id in its config.json: it reads text alone"):
        generation(seen, conditions([1]), (), 0)
    with pytest.raises(ConfigError, match="must hold Images or ImageLists, got Texts"):
        shown_pictures(Texts(texts=["x"]))


def test_pictures_travel_once_in_eight_bits_with_one_placeholder_each():
    small, large = torch.full((3, 2, 2), 0.5), torch.ones(3, 4, 4)
    req = request(["a", "b", "c"])
    req.primitives["image"] = ImageLists(images=[[small, large], [], [small]])
    made = generation(req, conditions([1, 9, 2, 9, 9], [4], [9, 5]), (), 0, placeholder=9)
    assert CODEC.decode(CODEC.encode(made)) == made
    assert made.shown == [[0, 1], [], [0]]
    assert [picture(uri).size for uri in made.pictures] == [(2, 2), (4, 4)]
    assert picture(made.pictures[0]).getpixel((0, 0)) == (128, 128, 128)
    first, second, third = prompts_of(made)
    assert [each["prompt_token_ids"] for each in (first, second, third)] == [[1, 9, 2, 9], [4], [9, 5]]
    assert [image.size for image in first["multi_modal_data"]["image"]] == [(2, 2), (4, 4)]
    assert "multi_modal_data" not in second and len(third["multi_modal_data"]["image"]) == 1
    with pytest.raises(ContractError, match="an image must be a data URI of a PNG file, got 'file:///etc/passwd'"):
        picture("file:///etc/passwd")


def test_sounds_travel_once_in_float32_and_are_heard_in_whole_frames():
    first, second = torch.randn(10), torch.randn(7)
    req = request(["a", "b", "c", "d"])
    sounds = Audios.pack(waveform=[first, torch.zeros(0), second, first.clone()], sample_rate=16000)
    req.primitives["audio"] = sounds
    made = generation(req, conditions([1, 8, 8, 8, 2], [4], [8, 8, 5], [8]), (), 0, placeholder=9, sound_placeholder=8)
    assert CODEC.decode(CODEC.encode(made)) == made
    assert made.heard == [[0], [], [1], [0]] and made.sound_rate == 16000 and not made.pictures
    assert torch.equal(waveform(made.sounds[1]), second)
    prompts = prompts_of(made, hop=4)
    assert [each["prompt_token_ids"] for each in prompts] == [[1, 8, 2], [4], [8, 5], [8]]
    ((heard, rate),) = prompts[0]["multi_modal_data"]["audio"]
    assert rate == 16000 and heard.tolist() == first[:8].tolist()
    assert "multi_modal_data" not in prompts[1] and "image" not in prompts[0]["multi_modal_data"]
    part = part_of(made, range(2, 3), 5)
    assert part.heard == [[0]] and part.sounds == [made.sounds[1]]
    assert prompts_of(part)[0]["multi_modal_data"]["audio"][0][0].tolist() == second.tolist()
    with pytest.raises(ConfigError, match="names no audio_token_id in its config.json: it hears none"):
        generation(req, conditions([1], [1], [1], [1]), (), 0, placeholder=9)
    with pytest.raises(ConfigError, match="must hold Audios of mono waveforms at a sample rate, got Texts"):
        heard_sounds(Texts(texts=["x"]))
    with pytest.raises(ContractError, match="a sound must be float32 samples in base64"):
        waveform("#")


def test_a_prompt_that_does_not_fit_names_its_tokens_and_the_fix():
    check_fits([[1] * 4], 4, LIMITS)
    with pytest.raises(ConfigError, match=r"prompt 0 has 5 tokens .*max_new_tokens = 4: 9 in all.* context of 8"):
        check_fits([[1] * 5], 4, LIMITS)
    with pytest.raises(ConfigError, match="prompt 1 has token 50, but the engine's model has 50 tokens"):
        check_fits([[1], [50]], 4, LIMITS)


# Answers


def test_an_answer_becomes_a_segment_with_its_endings():
    answer = Generations(4, [[5, 6, 5, 6], [7, 0]], [[-0.5, -1.0, -1.0, -3.0], [-2.0, 0.0]], ["length", "stop"])
    segment = text_segment(answer, call(), PARAMS)
    assert [row.tolist() for row in segment.unpack("tokens")] == [[5, 6, 5, 6], [7, 0]]
    assert segment.log_probs is not None and segment.log_probs.tolist() == [-0.5, -1.0, -1.0, -3.0, -2.0, 0.0]
    assert segment.status is not None
    assert segment.status.tolist() == [SegmentStatus.TRUNCATED, SegmentStatus.COMPLETED]
    assert segment.params == PARAMS


def test_an_aborted_sample_keeps_what_it_had_even_if_that_is_nothing():
    answer = Generations(4, [[5], []], [[-0.5], []], ["abort", "abort"])
    segment = text_segment(answer, call(), PARAMS)
    assert segment.lengths.tolist() == [1, 0]
    assert segment.status is not None and set(segment.status.tolist()) == {SegmentStatus.ABORTED}


def test_a_sample_that_is_aborted_in_the_step_of_its_last_token_is_whole():
    answer = Generations(4, [[5, 0], [5, 6, 5, 6], [5, 6]], [[-0.5] * 2, [-0.5] * 4, [-0.5] * 2], ["abort"] * 3)
    segment = text_segment(answer, call(3), PARAMS)
    assert segment.status is not None
    assert segment.status.tolist() == [SegmentStatus.COMPLETED, SegmentStatus.TRUNCATED, SegmentStatus.ABORTED]


def test_greedy_samples_have_no_log_probs():
    greedy = ARSamplingParams(temperature=0, max_new_tokens=4)
    assert text_segment(Generations(4, [[0]], [[0.0]], ["stop"]), call(1), greedy).log_probs is None


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Generations(0, [[0]], [[-1.0]], ["stop"]), "answered 2 prompts with 1 completions"),
        (Generations(0, [[0], [0]], [[-1.0], []], ["stop", "stop"]), "log_probs has lengths"),
        (Generations(0, [[0], [0]], [[math.nan], [-1.0]], ["stop", "stop"]), "1 log-probs are not finite"),
        (Generations(0, [[0], [2]], [[-1.0], [-1.0]], ["stop", "stop"]), "sample 1 is COMPLETED but its last token"),
        (Generations(0, [[0], [0]], [[-1.0], [-1.0]], ["stop", "odd"]), r"ended samples with \['odd'\]"),
    ],
)
def test_an_incomplete_answer_is_refused(answer, text):
    with pytest.raises(ContractError, match=text):
        text_segment(answer, call(), PARAMS)


def test_samples_of_another_version_are_refused():
    answer = Generations(3, [], [], [])
    check_version(answer.policy_version, 3)
    with pytest.raises(WeightSyncError, match="sampled with policy version 3, but version 4 was pushed last"):
        check_version(answer.policy_version, 4)


# The checkpoint that pushes are compared with


def test_a_checkpoint_names_what_a_push_must_bring_and_a_tied_head_is_none(tmp_path):
    from safetensors.torch import save_file

    save_file({"model.a.weight": torch.zeros(2, 3), "lm_head.weight": torch.zeros(4, 2)}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert checkpoint_shapes(tmp_path) == {"model.a.weight": (2, 3), "lm_head.weight": (4, 2)}
    (tmp_path / "config.json").write_text('{"text_config": {"tie_word_embeddings": true}}')
    shapes = checkpoint_shapes(tmp_path)
    assert [(spec.name, spec.shape, spec.dtype) for spec in full_specs(shapes, "torch.bfloat16")] == [
        ("model.a.weight", (2, 3), "torch.bfloat16")
    ]
    save_file({"thinker.lm_head.weight": torch.zeros(4, 2), "talker.a": torch.zeros(1)}, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_omni_moe"}')
    assert checkpoint_shapes(tmp_path) == {"lm_head.weight": (4, 2)}
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no safetensors files"):
        checkpoint_shapes(tmp_path)


def test_an_adapter_must_bring_both_factors_of_the_layers_that_it_names():
    specs = adapter_specs(
        ["a.lora_A.weight", "b.lora_A.weight", "norm.lora_B.weight"], {"a.weight": (5, 3), "norm.weight": (3,)}, "d", 2
    )
    assert [(spec.name, spec.shape) for spec in specs] == [("a.lora_A.weight", (2, 3)), ("a.lora_B.weight", (5, 2))]


# The process, played by small scripts


def start(tmp_path, monkeypatch, source):
    (tmp_path / "played.py").write_text(
        "import sys, os\nfrom multiprocessing.connection import Connection\npipe = Connection(int(sys.argv[1]))\n"
        + source
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return EngineProcess(CODEC, sys.executable, {"COLOUR": "blue"}, tmp_path, module="played", log=tmp_path / "log")


def test_a_process_answers_and_leaves_when_its_pipe_ends(tmp_path, monkeypatch):
    process = start(
        tmp_path,
        monkeypatch,
        "pipe.recv_bytes()\ncolour = os.environ['COLOUR']\n"
        'pipe.send_bytes(b\'{"message": "Failed", "kind": "ConfigError", "text": "%s"}\' % colour.encode())\n'
        "try:\n    pipe.recv_bytes()\nexcept EOFError:\n    pass\n",
    )
    with pytest.raises(ConfigError, match="^blue$"):
        process.call(messages.WakeUp(), 60)
    process.stop()
    process.stop()
    assert not process.is_alive


def test_a_process_that_dies_leaves_its_status_and_the_end_of_its_log(tmp_path, monkeypatch):
    process = start(
        tmp_path, monkeypatch, "pipe.recv_bytes()\nprint('out of memory')\nsys.stdout.flush()\nos._exit(3)\n"
    )
    with pytest.raises(WorkerError, match=r"(?s)died in Sleep and ended with status 3.*out of memory"):
        process.call(messages.Sleep(1), 60)
    with pytest.raises(WorkerError, match="ended with status 3"):
        process.call(messages.Sleep(1), 60)
    process.stop()


def test_a_process_that_does_not_answer_is_stopped(tmp_path, monkeypatch):
    process = start(tmp_path, monkeypatch, "pipe.recv_bytes()\npipe.recv_bytes()\n")
    with pytest.raises(WorkerError, match=r"no answer to WakeUp within 0 s.*raise engine.timeout_s"):
        process.call(messages.WakeUp(), 0.2)
    assert not process.is_alive


def test_the_end_of_the_pipe_ends_the_process_and_its_folder(tmp_path):
    folder = tmp_path / "exchange"
    folder.mkdir()
    process = EngineProcess(CODEC, sys.executable, {}, folder, module=SERVER, log=folder / "log")
    (folder / "bucket-0.safetensors").touch()
    process._hang_up()  # as when this process is killed
    assert process._child.wait(60) == -signal.SIGKILL
    assert not folder.exists()


def test_an_error_that_is_none_of_ours_brings_its_traceback(tmp_path, monkeypatch):
    failed = CODEC.encode(Failed("WorkerError", "short", "Traceback: KeyError 'x'"))
    process = start(tmp_path, monkeypatch, f"pipe.recv_bytes()\npipe.send_bytes({failed!r})\npipe.recv_bytes()\n")
    with pytest.raises(WorkerError, match="KeyError 'x'"):
        process.call(messages.WakeUp(), 60)
    process.stop()


# Another version, or none


def engine_of(tmp_path, monkeypatch, source=None):
    """An engine whose process is the running interpreter, with `source` instead of vLLM's side."""
    if source is not None:
        played = "import sys\nfrom multiprocessing.connection import Connection\npipe = Connection(int(sys.argv[1]))\n"
        (tmp_path / "played.py").write_text(played + source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(VLLMRolloutEngine, "module", "played")
    codec: Any = None
    return VLLMRolloutEngine(codec, model=str(tmp_path), kv_cache_bytes=1, transfer_dir=str(tmp_path))


@pytest.mark.parametrize(("version", "protocol"), [("0.99.1", messages.PROTOCOL), ("0.32.0", 999)])
def test_an_engine_of_another_version_is_refused_and_stopped(tmp_path, monkeypatch, version, protocol):
    ready = CODEC.encode(dataclasses.replace(READY, version=version, protocol=protocol))
    engine = engine_of(tmp_path, monkeypatch, f"pipe.recv_bytes()\npipe.send_bytes({ready!r})\npipe.recv_bytes()\n")
    with pytest.raises(
        ConfigError, match=rf"has vLLM {version} and speaks protocol {protocol}; .* needs vLLM 0\.32\.0 and"
    ):
        engine.wait_until_ready()
    assert not Path(f"/proc/{engine.pids[0]}").exists() and not list(tmp_path.glob("unirl-engine-*"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this environment has vLLM")
def test_an_environment_without_vllm_names_what_to_install(tmp_path, monkeypatch):
    engine = engine_of(tmp_path, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"vLLM cannot be imported in its process .* `uv sync --project environments/"
    ):
        engine.wait_until_ready()
    engine.shutdown()


def test_sources_of_another_version_are_refused_by_the_process(tmp_path):
    process = EngineProcess(CODEC, sys.executable, {}, tmp_path, module=SERVER, log=tmp_path / "log")
    start = Start("m", {}, policy_version=0, scratch_dir="", protocol=messages.PROTOCOL + 1)
    text = rf"speaks protocol {start.protocol}, vLLM's environment {messages.PROTOCOL}\. Install the same"
    with pytest.raises(ConfigError, match=text):
        process.call(start, 120)
    process.stop()


# Wrong options


def test_options_that_cannot_work_are_refused_before_a_process_starts(tmp_path):
    for options, text in (
        ({"engine_args": {"dtype": "float32"}, "kv_cache_bytes": 1}, r"sets \['dtype'\], which the engine sets itself"),
        ({"sleep_level": 1, "kv_cache_bytes": 1}, "does nothing on a CPU"),
        ({}, "kv_cache_bytes is needed on a CPU"),
        ({"device": "cuda", "dtype": "fp32", "max_lora_rank": 8}, "adapters on a GPU need bf16 or fp16"),
        ({"kv_cache_bytes": 1, "python": str(tmp_path / "no")}, "uv sync --project environments/vllm-cpu"),
    ):
        with pytest.raises(ConfigError, match=text):
            VLLMRolloutEngine(None, model="m", **options)  # ty: ignore[invalid-argument-type]
    assert interpreter(None, engine="vLLM", environment="e") == sys.executable


def test_what_wrote_a_placeholder_of_a_medium_begins_anew():
    req = request(["a", "b", "c"])
    status = torch.tensor([SegmentStatus.ABORTED, SegmentStatus.ABORTED, SegmentStatus.TRUNCATED])
    segment = TextSegment.pack(
        tokens=[torch.tensor([5]), torch.tensor([9, 5]), torch.tensor([9, 1, 1, 1])],
        log_probs=[torch.zeros(1), torch.zeros(2), torch.zeros(4)],
        status=status,
        params=PARAMS,
    )
    track = RolloutTrack(sample_ids=req.sample_ids, segment=segment, policy_versions=torch.tensor([3, 3, 3]))
    req = req.replace(begun=track)
    begun = BegunTexts.of(req, frozenset({9}))
    made = generation(req, conditions([1, 9], [2], [3]), (), 0, placeholder=9, begun=begun)
    assert (made.prompts, made.num_begun) == ([[1, 9, 5], [2]], [1, 0])
    assert [made.budget(row) for row in range(2)] == [PARAMS.max_new_tokens - 1, PARAMS.max_new_tokens]
    answer = Generations(4, [[0], [7, 0]], [[-1.0], [-1.0, -2.0]], ["stop", "stop"])
    whole = text_segment(answer, dataclasses.replace(made, stop_token_ids=[0]), PARAMS, begun)
    assert [row.tolist() for row in whole.unpack("tokens")] == [[5, 0], [7, 0], [9, 1, 1, 1]]
    assert [row.tolist() for row in whole.unpack("versions")] == [[3, 4], [4, 4], [3, 3, 3, 3]]
    answer = Generations(4, [[7, 7, 7], [7, 7, 7]], [[-1.0] * 3] * 2, ["abort", "abort"])
    whole = text_segment(answer, dataclasses.replace(made, stop_token_ids=[0]), PARAMS, begun)
    assert whole.status is not None
    assert whole.status.tolist()[:2] == [SegmentStatus.TRUNCATED, SegmentStatus.ABORTED], "the budget is what is left"
