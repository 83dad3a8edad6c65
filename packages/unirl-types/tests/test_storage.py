"""Rollouts on disk: round trips bit for bit, and errors that name the file."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from unirl.types.conditions import (
    ImageEmbedCondition,
    ImagePatchCondition,
    PromptCondition,
    TextEmbedCondition,
    TextTokenCondition,
)
from unirl.types.errors import ContractError, DataError
from unirl.types.media import Audios, Embeddings, Images, Modality, Texts, Videos
from unirl.types.messages import Message, ShownImage
from unirl.types.rollout import DiffusionPlan, RolloutReq, RolloutResp, RolloutTrack
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, StagedSamplingParams
from unirl.types.segments import LatentSegment, SegmentStatus, TextSegment
from unirl.types.storage import flatten_response, load_rollout, rebuild_response, save_rollout


def latents(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


ENDED = SegmentStatus.TRUNCATED


def holding(values: dict[str, Any]) -> RolloutReq:
    """A request of one sample with these values in its row of data."""
    return RolloutReq(sample_ids=["a"], metadata=[values])


def held_by(req: RolloutReq) -> dict[str, Any]:
    """The values of `holding`."""
    (row,) = req.metadata
    assert row is not None
    return row


def rollout() -> tuple[RolloutResp, RolloutReq]:
    generator = torch.Generator().manual_seed(0)
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    ids = ["p:0", "p:1", "q:0"]
    req = RolloutReq(
        sample_ids=ids,
        group_ids=["p", "p", "q"],
        primitives={"text": Texts(texts=["a", "", "\u00e9\U0001f600 \ud800"])},
        metadata=[
            {
                "n": 1,
                "score": float("nan"),
                "box": (1, 2.5),
                "deep": {"x": [float("-inf"), None]},
                "status": SegmentStatus.TRUNCATED,
            },
            None,
            {},
        ],
        sampling_params=StagedSamplingParams(
            stages={
                "text": ARSamplingParams(temperature=0.7, stop_token_ids=(1, 2)),
                "image": DiffusionSamplingParams(num_inference_steps=4, sde_indices=[0, 2], samples_per_prompt=2),
            }
        ),
        sigmas=sigmas,
        plans={"image": DiffusionPlan(sigmas, (2, 3, 3), "flow_sde")},
        init_noise_latent_shape=[2, 3, 3],
        rollout_id=2**40,
    )
    text = RolloutTrack(
        sample_ids=ids,
        parent_ids=req.group_ids,
        conditions={
            "tokens": TextTokenCondition(input_ids=torch.arange(6).reshape(3, 2), attention_mask=torch.ones(3, 2)),
            "prompt": PromptCondition.pack(tokens=[torch.arange(1), torch.arange(3), torch.arange(2)]),
            "images": ImagePatchCondition.pack(
                patches=[latents(generator, 4, 2), latents(generator, 0, 2), latents(generator, 2, 2)],
                grids=[((1, 2, 1), (1, 1, 2)), (), ((1, 2, 1),)],
            ),
        },
        segment=TextSegment.pack(
            tokens=[torch.arange(3), torch.arange(0), torch.arange(2)],
            log_probs=[latents(generator, 3), latents(generator, 0), latents(generator, 2)],
            status=torch.tensor([1, 2, 3]),
            params=ARSamplingParams(temperature=0.7, stop_token_ids=(1, 2)),
        ),
        rewards=torch.tensor([float("nan"), -0.0, 1e-45]),
        component_rewards={"a": torch.zeros(3), "b": torch.ones(3)},
        policy_versions=torch.tensor([7, 7, 8]),
    )
    image = text.fork(
        "text",
        "image",
        2,
        conditions={
            "text": TextEmbedCondition(
                embeds=latents(generator, 6, 4, 5).to(torch.float16),
                pooled=latents(generator, 6, 5).to(torch.bfloat16),
                attention_mask=torch.ones(6, 4, dtype=torch.bool),
            ),
            "image": ImageEmbedCondition(embeds=latents(generator, 6, 1, 2), spatial_shapes=[(1, 2)]),
        },
        segment=LatentSegment(
            modality=Modality.VIDEO,
            latents=latents(generator, 6, 5, 2, 3, 3).to(torch.bfloat16),
            sigmas=sigmas,
            indices=[0, 1, 2, 3, 4],
            sde_indices=[0, 2],
            sde_logp=latents(generator, 6, 2),
        ),
        decoded=Images(pixels=latents(generator, 6, 3, 2, 2)),
    )
    return RolloutResp(tracks={"text": text, "image": image}, reward_compute_s=0.1), req


def loaded_request(path: Path) -> RolloutReq:
    req = load_rollout(path)[1]
    assert req is not None
    return req


def stored(path: Path) -> Path:
    resp, req = rollout()
    save_rollout(path, resp, req)
    return path


def rewritten(path: Path, **changes: str) -> Path:
    """The same tensors under changed metadata."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        metadata = dict(opened.metadata())
    save_file(load_file(path), path, metadata={**metadata, **changes})
    return path


def test_a_response_and_its_request_come_back_bit_for_bit(tmp_path):
    resp, req = rollout()
    save_rollout(tmp_path / "a.safetensors", resp, req)
    again, again_req = load_rollout(str(tmp_path / "a.safetensors"))
    assert again.equals(resp)
    assert again_req is not None
    assert again_req.equals(req)
    assert again_req.sampling_params == req.sampling_params
    row = again_req.metadata[0]
    assert row is not None and type(row["box"]) is tuple
    assert row["status"] is ENDED
    assert list(again.tracks) == ["text", "image"]


def test_a_response_is_a_text_and_tensors():
    resp, _ = rollout()
    structure, tensors = flatten_response(resp)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert rebuild_response(structure, tensors).equals(resp)
    with pytest.raises(DataError, match="a flattened response holds dict"):
        rebuild_response(json.dumps({"$": "dict", "items": []}), {})


def test_a_response_alone_comes_back_without_a_request(tmp_path):
    save_rollout(tmp_path / "a", RolloutResp())
    again, req = load_rollout(tmp_path / "a")
    assert again.equals(RolloutResp())
    assert req is None


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64],
)
def test_every_dtype_survives_strides_scalars_and_empty_tensors(tmp_path, dtype):
    base = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {"t": base.t(), "step": base[:, ::2], "one": base[1], "scalar": base[0, 0], "none": base[:0], "all": base}
    save_rollout(tmp_path / "a", RolloutResp(), holding(tensors))
    again = loaded_request(tmp_path / "a")
    assert again.equals(holding(tensors))


def test_one_tensor_in_two_places_is_stored_once(tmp_path):
    shared = torch.arange(5)
    save_rollout(tmp_path / "a", RolloutResp(), holding({"a": shared, "b": shared}))
    again = held_by(loaded_request(tmp_path / "a"))
    assert again["a"] is again["b"]
    assert len(load_file(tmp_path / "a")) == 1


def test_gradients_are_left_behind_and_loaded_tensors_can_be_written(tmp_path):
    save_rollout(tmp_path / "a", RolloutResp(), holding({"w": torch.ones(3, requires_grad=True)}))
    loaded = held_by(loaded_request(tmp_path / "a"))["w"]
    assert not loaded.requires_grad
    loaded.add_(1)
    assert torch.equal(held_by(loaded_request(tmp_path / "a"))["w"], torch.ones(3))


@pytest.mark.parametrize(
    "media",
    [
        Texts(),
        Videos.pack(frames=[torch.zeros(0, 3, 2, 2), torch.ones(2, 3, 2, 2)], fps=8.0),
        Audios.pack(waveform=[torch.ones(4), torch.zeros(1)], sample_rate=16000),
        Embeddings(embeds=torch.zeros(2, 3)),
    ],
)
def test_every_kind_of_media_comes_back(tmp_path, media):
    save_rollout(tmp_path / "a", RolloutResp(), RolloutReq(primitives={"slot": media}))
    assert loaded_request(tmp_path / "a").primitives["slot"].equals(media)


def test_selected_shards_come_back_too(tmp_path):
    resp, _ = rollout()
    save_rollout(tmp_path / "a", resp.select([2, 0]))
    assert load_rollout(tmp_path / "a")[0].equals(resp.select([2, 0]))


class Choice:
    def indices(self, rollout_id: int) -> list[int]:
        return [0]


def test_an_unresolved_scheduler_is_refused_with_the_fix(tmp_path):
    params = DiffusionSamplingParams(scheduler=Choice())
    with pytest.raises(
        ContractError, match=r"req\.sampling_params\.scheduler holds a .*Choice.*resolved\(rollout_id\)"
    ):
        save_rollout(tmp_path / "a", RolloutResp(), RolloutReq(sampling_params=params))
    save_rollout(tmp_path / "a", RolloutResp(), RolloutReq(sampling_params=params.resolved(3)))
    assert loaded_request(tmp_path / "a").sampling_params == params.resolved(3)


@dataclasses.dataclass(kw_only=True, eq=False)
class Other(Texts):
    """A container of another package."""


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), Other(), 1j, torch.zeros(2, dtype=torch.complex128)])
def test_what_the_format_cannot_hold_is_refused_by_its_place(tmp_path, value):
    with pytest.raises(ContractError, match=r"req\.metadata\[0\]\['deep'\]\[1\]"):
        save_rollout(tmp_path / "a", RolloutResp(), holding({"deep": [0, value]}))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "value",
    [
        b"\x00bytes",
        list(range(-300, 300)),
        [0.1 * number for number in range(300)] + [math.inf],
        [number % 3 == 0 for number in range(300)],
        [*range(300), 2**70],
        [*range(300), True],
        [*range(300), "text"],
        [Message("user", "hello", (ShownImage(1, 2, b"\x01" * 6),))],
    ],
)
def test_bytes_and_long_lists_come_back_with_their_kinds(tmp_path, value):
    save_rollout(tmp_path / "a", RolloutResp(), holding({"deep": [0, value]}))
    _, req = load_rollout(tmp_path / "a")
    assert req is not None
    found = held_by(req)["deep"][1]
    assert found == value and type(found) is type(value)
    if isinstance(value, list):
        assert [type(each) for each in found] == [type(each) for each in value]


def test_a_failed_write_leaves_the_earlier_file_and_nothing_aside(tmp_path, monkeypatch):
    path = stored(tmp_path / "a")
    before = path.read_bytes()

    def fails(tensors, filename, metadata):
        Path(filename).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        save_rollout(path, RolloutResp())
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_bytes() == before


def test_a_missing_file_or_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no stored rollout at .*nowhere"):
        load_rollout(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        save_rollout(tmp_path / "nowhere" / "a", RolloutResp())


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -1000])
def test_a_truncated_file_is_named(tmp_path, kept):
    path = stored(tmp_path / "cut.safetensors")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"cut\.safetensors is truncated"):
        load_rollout(path)


def test_a_foreign_file_is_named(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(DataError, match=r"weights\.safetensors is no stored rollout: its format is None"):
        load_rollout(path)
    path.write_text("prompt\n" * 100)
    with pytest.raises(DataError, match=r"weights\.safetensors is truncated or not a safetensors file"):
        load_rollout(path)


def test_an_unknown_version_is_named(tmp_path):
    path = rewritten(stored(tmp_path / "a"), version="2")
    with pytest.raises(DataError, match=r"a has version '2' of the rollout format; this unirl-types reads 1"):
        load_rollout(path)


def test_one_flipped_bit_of_a_tensor_is_found(tmp_path):
    path = stored(tmp_path / "a")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="a is damaged: tensors"):
        load_rollout(path)


def test_a_changed_structure_is_found(tmp_path):
    path = stored(tmp_path / "a")
    content = path.read_bytes()
    assert content.count(b"flow_sde") == 1
    path.write_bytes(content.replace(b"flow_sde", b"flow_sdf"))
    with pytest.raises(DataError, match="a is damaged: its structure"):
        load_rollout(path)


@pytest.mark.parametrize(
    ("resp", "message"),
    [
        ({"$": "object", "type": "os.system", "fields": {}}, "os.system that cannot be rebuilt"),
        ({"$": "object", "type": "RolloutResp", "fields": {"evil": 1}}, "RolloutResp that cannot be rebuilt"),
        ({"$": "bytes", "value": "!"}, "bytes that cannot be rebuilt"),
        ({"$": "object", "type": "Turn", "fields": {"evil": 1}}, "Turn that cannot be rebuilt"),
        ({"$": "pickle", "value": ""}, "unknown tag 'pickle'"),
        ({"$": "tensor", "name": "t9"}, "tensor that cannot be rebuilt"),
        ([1], "holds list and NoneType instead of a response"),
    ],
)
def test_a_forged_structure_is_refused(tmp_path, resp, message):
    import hashlib

    save_rollout(tmp_path / "a", RolloutResp())
    structure = json.dumps({"resp": resp, "req": None, "checksums": {}})
    checksum = hashlib.blake2b(structure.encode(), digest_size=16).hexdigest()
    path = rewritten(tmp_path / "a", structure=structure, structure_checksum=checksum)
    with pytest.raises(DataError, match=message):
        load_rollout(path)
