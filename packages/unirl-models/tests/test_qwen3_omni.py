"""Qwen3-Omni's Thinker against transformers' own forward, generate and processor; tolerances as in test_ar_stage."""

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from unirl.models.qwen3_omni.bundle import Qwen3OmniThinkerBundle
from unirl.models.qwen3_omni.pipeline import Qwen3OmniThinkerPipeline
from unirl.types.errors import CheckpointError, ConfigError, ContractError
from unirl.types.media import Audios, ImageLists, Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

from .tiny_text import qwen3_omni, save_omni_model

ROUNDING = 5e-6
PARAMS = ARSamplingParams(temperature=0.9, max_new_tokens=6, seed=1)
GREEDY = ARSamplingParams(temperature=0, max_new_tokens=6)
TEXTS = ["what is said?", "hear <audio> and see <image>", "nothing here", "and this, at some length?"]


def sound(seconds: float, seed: int) -> torch.Tensor:
    return torch.rand(int(16000 * seconds), generator=torch.Generator().manual_seed(seed)) - 0.5


def picture(height: int, width: int, seed: int) -> torch.Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed))


SOUNDS = [sound(1.0, 0), sound(1.25, 1), torch.zeros(0), sound(1.6, 2)]
"""At least a second long: the library pads shorter ones to their batch's longest and hears some padding."""
PICTURES = [[], [picture(60, 90, 0)], [], [picture(64, 32, 1), picture(40, 40, 2)]]
"""A sound alone, both, neither, and two images before a sound."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Any:
    """Read-only."""
    folder = save_omni_model(qwen3_omni(), tmp_path_factory.mktemp("omni"))
    return Qwen3OmniThinkerPipeline(Qwen3OmniThinkerBundle(str(folder)))


def inputs(texts=TEXTS, sounds=SOUNDS, pictures=PICTURES) -> dict[str, Any]:
    return {
        "text": Texts(texts=texts),
        "image": ImageLists(images=pictures),
        "audio": Audios.pack(waveform=sounds, sample_rate=16000),
    }


def sampled(pipeline, params=PARAMS) -> tuple[Any, TextSegment]:
    conditions = pipeline.encode(inputs(), params)
    with pipeline.evaluating():
        return conditions, pipeline.generate(conditions, params, noise_keys=[f"k{i}" for i in range(len(TEXTS))])


def library_model(folder) -> Any:
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def library_inputs(pipeline, conditions, row: int) -> dict[str, torch.Tensor]:
    """One sample as the library's processor hands it to its model, which finds the positions itself."""
    prompt = conditions["prompt"].unpack("tokens")[row][None]
    found = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    if conditions["images"].grids[row]:
        found["pixel_values"] = conditions["images"].unpack("patches")[row]
        found["image_grid_thw"] = torch.tensor(conditions["images"].grids[row])
    if len(SOUNDS[row]):
        out = pipeline.bundle.feature_extractor(
            SOUNDS[row].numpy(), sampling_rate=16000, padding=True, return_attention_mask=True, return_tensors="pt"
        )
        found["input_features"], found["feature_attention_mask"] = out["input_features"], out["attention_mask"]
    return found


def test_log_probs_are_those_of_the_librarys_own_model(pipeline):
    conditions, segment = sampled(pipeline)
    replayed = pipeline.replay(conditions, segment, PARAMS)
    model = library_model(pipeline.bundle.pretrained_model)
    for row, completion in enumerate(segment.unpack("tokens")):
        given = library_inputs(pipeline, conditions, row)
        length = given["input_ids"].shape[1]
        for name, tail in (("input_ids", completion), ("attention_mask", torch.ones_like(completion))):
            given[name] = torch.cat([given[name], tail[None]], dim=1)
        with torch.no_grad():
            logits = model(**given).logits[0, length - 1 : -1].double() / PARAMS.temperature
        expected = logits.log_softmax(-1).gather(-1, completion[:, None]).squeeze(-1).float()
        cut = slice(*segment.cu_seqlens[row : row + 2].tolist())
        torch.testing.assert_close(replayed.logp_N[cut].detach(), expected, rtol=0, atol=ROUNDING)
        torch.testing.assert_close(segment.unpack("log_probs")[row], expected, rtol=0, atol=ROUNDING)


def test_greedy_sampling_is_the_librarys(pipeline):
    conditions, segment = sampled(pipeline, GREEDY)
    model = library_model(pipeline.bundle.pretrained_model)
    for row, completion in enumerate(segment.unpack("tokens")):
        given = library_inputs(pipeline, conditions, row)
        out = model.generate(**given, do_sample=False, max_new_tokens=6)
        assert out[0, given["input_ids"].shape[1] :].tolist() == completion.tolist()


def test_positions_are_the_librarys_with_sounds_counted(pipeline):
    """The library is told the number of frames of each sound; here a sound counts as so many words."""
    conditions, _ = sampled(pipeline)
    prompts = conditions["prompt"].unpack("tokens")
    found = pipeline.adapter.positions(conditions, [len(prompt) for prompt in prompts])
    for row in (1, 3):
        expected, _ = pipeline.bundle.model.get_rope_index(
            prompts[row][None],
            image_grid_thw=torch.tensor(conditions["images"].grids[row]),
            attention_mask=torch.ones_like(prompts[row])[None],
            audio_seqlens=conditions["sounds"].lengths[row : row + 1],
        )
        assert torch.equal(found[row], expected[:, 0].long())


def test_prompts_have_as_many_tokens_as_the_encoder_makes(pipeline):
    conditions, _ = sampled(pipeline)
    bundle = pipeline.bundle
    for row, prompt in enumerate(conditions["prompt"].unpack("tokens")):
        given = library_inputs(pipeline, conditions, row)
        heard = int((prompt == bundle.audio_token_id).sum())
        if "input_features" not in given:
            assert heard == 0
            continue
        out = bundle.model.get_audio_features(given["input_features"], given["feature_attention_mask"])
        assert heard == len(out.last_hidden_state) > 0


def test_media_stand_where_the_text_says_so_or_before_it(pipeline):
    decode = pipeline.bundle.tokenizer.decode
    seen, heard = "<|vision_start|><|image_pad|><|vision_end|>", "<|audio_start|><|audio_pad|><|audio_end|>"
    around = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n".format
    prompt_with = pipeline.adapter.prompt_with
    assert decode(prompt_with("hear <audio> here", {"audio": 1})) == around(f"hear {heard} here")
    assert decode(prompt_with("so <image>?", {"image": 1, "audio": 1})) == around(f"{heard}so {seen}?")
    assert decode(prompt_with("so?", {"image": 1, "audio": 1})) == around(f"{seen}{heard}so?")
    with pytest.raises(ConfigError, match="a prompt with 1 audios says <audio> 2 times"):
        prompt_with("<audio><audio>", {"audio": 1})


def test_a_replay_of_the_same_samples_has_the_same_bits_and_a_selection_takes_its_media_along(pipeline):
    conditions, segment = sampled(pipeline)
    first, second = (pipeline.replay(conditions, segment, PARAMS).logp_N for _ in range(2))
    assert torch.equal(first, second)
    rows = [3, 1]
    chosen = {name: condition.select(rows) for name, condition in conditions.items()}
    whole = first.split(segment.lengths.tolist())
    part = pipeline.replay(chosen, segment.select(rows), PARAMS).logp_N
    torch.testing.assert_close(part, torch.cat([whole[row] for row in rows]), rtol=0, atol=ROUNDING)


def test_what_is_heard_matters_to_those_who_hear_it(pipeline):
    conditions, segment = sampled(pipeline)
    sounds = conditions["sounds"]
    other = {**conditions, "sounds": sounds.replace(frames=torch.zeros_like(sounds.frames))}
    before, after = (
        pipeline.replay(c, segment, PARAMS).logp_N.detach().split(segment.lengths.tolist()) for c in (conditions, other)
    )
    assert [float((a - b).abs().max()) > 1e-5 for a, b in zip(before, after, strict=True)] == [True, True, False, True]


def test_a_short_sound_is_the_same_alone_and_beside_others(pipeline):
    short = [sound(0.3, 3), sound(0.5, 4), sound(1.3, 5)]

    def scored(rows: list[int]) -> torch.Tensor:
        given = inputs(["what?"] * len(rows), [short[row] for row in rows], [[]] * len(rows))
        conditions = pipeline.encode(given, PARAMS)
        words = TextSegment.pack(tokens=[torch.tensor([5, 6, 7])] * len(rows))
        return pipeline.replay(conditions, words, PARAMS).logp_N.detach().view(len(rows), 3)

    together = scored([0, 1, 2])
    for rows in ([0], [1], [0, 1], [2, 1]):
        torch.testing.assert_close(scored(rows), together[rows], rtol=0, atol=ROUNDING)
    assert float((together[0] - together[1]).abs().max()) > 1e-4


def test_the_end_of_a_sound_that_fills_no_frame_is_not_heard(pipeline):
    longer = [torch.cat([own, torch.rand(150) - 0.5]) if len(own) else own for own in SOUNDS]
    hears = [pipeline.encode(inputs(sounds=sounds), PARAMS)["sounds"] for sounds in (SOUNDS, longer)]
    assert torch.equal(hears[0].frames, hears[1].frames) and hears[0].lengths.tolist() == [100, 125, 0, 160]


def test_equal_prompts_with_other_sounds_are_not_mistaken_for_each_other(pipeline):
    given = inputs(["what?"] * 3, [SOUNDS[0], SOUNDS[0].clone(), SOUNDS[0].flip(0)], [[], [], []])
    keys = pipeline.adapter.prompt_keys(pipeline.encode(given, PARAMS))
    assert keys[0] == keys[1] != keys[2]


def test_a_written_placeholder_is_a_word(pipeline):
    """The model may write a token that stands for media in prompts."""
    conditions, segment = sampled(pipeline)
    tokens = segment.tokens.clone()
    tokens[0] = pipeline.bundle.audio_token_id
    replayed = pipeline.replay(conditions, segment.replace(tokens=tokens), PARAMS)
    assert bool(replayed.logp_N.isfinite().all())


def test_encoders_stay_as_they_are_and_lora_meets_the_decoder_alone(pipeline):
    conditions, segment = sampled(pipeline)
    model = pipeline.bundle.model
    pipeline.replay(conditions, segment, PARAMS).logp_N.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    assert trained and not any(name.startswith(("audio_tower", "visual")) for name in trained)
    modules = dict(model.named_modules())
    assert len(pipeline.bundle.lora_target_modules) == 8
    assert all(isinstance(modules[name], torch.nn.Linear) for name in pipeline.bundle.lora_target_modules)


def test_what_is_exported_loads_in_the_stock_library(pipeline, tmp_path):
    state = {name: tensor + 0.01 for name, tensor in pipeline.bundle.model.state_dict().items()}
    pipeline.bundle.export_merged(str(tmp_path / "out"), {"model": state})
    loaded = library_model(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items() if name in loaded)
    assert set(loaded) >= {name for name, _ in pipeline.bundle.model.named_parameters()}
    again = Qwen3OmniThinkerBundle(str(tmp_path / "out"))
    assert again.feature_extractor.feature_size == 16


def test_the_thinker_is_taken_out_of_a_whole_checkpoint(pipeline, tmp_path):
    """As released: one configuration of several parts, and weights whose names begin with the part's."""
    folder = pipeline.bundle.folder.path
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": config, "enable_audio_output": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {f"thinker.{name}": each for name, each in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    found = Qwen3OmniThinkerBundle(str(tmp_path)).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in pipeline.bundle.model.state_dict().items())


def test_what_does_not_fit_is_named(pipeline, tmp_path):
    one = {"text": Texts(texts=["a"])}
    with pytest.raises(
        ConfigError, match=r"must hold 1 waveforms \[L\] at 16000 Hz, one per text; got 1 .* at 8000 Hz"
    ):
        pipeline.encode({**one, "audio": Audios.pack(waveform=[SOUNDS[0]], sample_rate=8000)}, PARAMS)
    with pytest.raises(ConfigError, match="a prompt with 1 sounds has 2 audio placeholders"):
        pipeline.encode(inputs(["a <|audio_pad|>"], SOUNDS[:1], [[]]), PARAMS)
    with pytest.raises(ConfigError, match="reads 'text': Texts, 'image' and 'audio': Audios"):
        pipeline.encode({**one, "audio": Texts(texts=["b"])}, PARAMS)
    conditions = pipeline.encode(inputs(), PARAMS)
    mixed = {**conditions, "sounds": conditions["sounds"].select([1, 0, 2, 3])}
    with pytest.raises(ContractError, match="the prompt of sample 0 has .* audio tokens, but its sound takes"):
        pipeline.adapter.positions(mixed, [600] * 4)
    folder = save_omni_model(qwen3_omni(), tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "feature_size": 80}))
    with pytest.raises(CheckpointError, match="makes 80 mel bins, the audio encoder reads 16"):
        Qwen3OmniThinkerBundle(str(folder))
