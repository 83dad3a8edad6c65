"""Sampling and replay against transformers' own forward and generate, in float32 on a CPU.

Two computations of one log-prob differ by the order in which float32 sums are taken: some 1e-6 at |logp| below 20, and
1e-5 where linear attention goes token by token in one and by solving for 64 tokens at once in the other.
"""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from unirl.models.causal_lm.bundle import CausalLMBundle
from unirl.models.qwen3.bundle import Qwen3Bundle
from unirl.models.qwen3.pipeline import Qwen3Pipeline
from unirl.models.qwen3_5.bundle import Qwen35Bundle, Qwen35MoeBundle
from unirl.models.qwen3_5.pipeline import Qwen35MoePipeline, Qwen35Pipeline
from unirl.models.text_adapter import TextAdapter
from unirl.models.text_pipeline import AutoregressivePipeline
from unirl.types.conditions import PromptCondition
from unirl.types.errors import ConfigError, ContractError
from unirl.types.kept_texts import KeptTexts
from unirl.types.media import Texts
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

from .tiny_text import qwen3, qwen3_5, qwen3_5_moe, save_text_model

PARAMS = ARSamplingParams(temperature=0.8, max_new_tokens=12, seed=5)
PROMPTS = ["hi", "what is 17 + 25?", "hi", "a much longer prompt, to pad the others: " * 3]
KEYS = ["r0:a", "r0:b", "r0:c", "r0:d"]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5", "qwen3_5_moe"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, request, tmp_path_factory):
    """Read-only."""
    if family == "qwen3":
        return request.getfixturevalue("qwen3_folder")
    make = qwen3_5_moe if family == "qwen3_5_moe" else qwen3_5
    return save_text_model(make(), tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def pipeline(family, folder, request):
    """Read-only."""
    if family == "qwen3":
        return request.getfixturevalue("qwen3_pipeline")
    if family == "qwen3_5_moe":
        return Qwen35MoePipeline(Qwen35MoeBundle(str(folder)))
    return Qwen35Pipeline(Qwen35Bundle(str(folder)))


def rounding(pipeline) -> float:
    """How far two computations of one log-prob may be apart: a recurrence rounds otherwise by chunks than token by
    token, and how much depends on the processor."""
    return 2e-4 if pipeline.bundle.recurrent_class_names else 3e-6


def sampled(pipeline, prompts=PROMPTS, keys=KEYS, params=PARAMS, **kwargs) -> tuple[Any, TextSegment]:
    conditions = pipeline.encode({"text": Texts(texts=list(prompts))}, params)
    with pipeline.evaluating():
        return conditions, pipeline.generate(conditions, params, noise_keys=list(keys), **kwargs)


def own(pipeline, **kwargs):
    """A pipeline of the same weights whose gradients or weights a test may change."""
    return type(pipeline)(type(pipeline.bundle)(pipeline.bundle.pretrained_model), **kwargs)


def reference_logp(folder, prompt, completion, temperature) -> torch.Tensor:
    """From the library's model as it loads it, one sample alone, float64 softmax."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model_logp(model, prompt, completion, temperature)


def model_logp(model, prompt, completion, temperature) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(-1, completion[:, None]).squeeze(-1)


def test_log_probs_are_those_of_the_librarys_own_model(pipeline, folder):
    conditions, segment = sampled(pipeline)
    replayed = pipeline.replay(conditions, segment, PARAMS)
    for row, (prompt, completion) in enumerate(
        zip(conditions["prompt"].unpack("tokens"), segment.unpack("tokens"), strict=True)
    ):
        expected = reference_logp(folder, prompt, completion, 0.8).float()
        torch.testing.assert_close(segment.unpack("log_probs")[row], expected, rtol=0, atol=rounding(pipeline))
        cut = slice(*segment.cu_seqlens[row : row + 2].tolist())
        torch.testing.assert_close(replayed.logp_N[cut].detach(), expected, rtol=0, atol=rounding(pipeline))


def test_a_replay_of_the_same_samples_gives_the_same_bits(pipeline):
    conditions, segment = sampled(pipeline)
    first, again = (pipeline.replay(conditions, segment, PARAMS) for _ in range(2))
    assert torch.equal(first.logp_N, again.logp_N)
    assert torch.equal(first.entropy_N, again.entropy_N)
    with torch.no_grad():
        assert torch.equal(pipeline.replay(conditions, segment, PARAMS).logp_N, first.logp_N)


def test_a_sample_does_not_depend_on_its_batch(pipeline):
    _, together = sampled(pipeline)
    order = [3, 0, 2, 1]
    _, shuffled = sampled(pipeline, [PROMPTS[i] for i in order], [KEYS[i] for i in order])
    assert torch.equal(shuffled.tokens, together.select(order).tokens)
    for row in range(4):
        _, alone = sampled(pipeline, [PROMPTS[row]], [KEYS[row]])
        assert torch.equal(alone.tokens, together.unpack("tokens")[row])
        torch.testing.assert_close(alone.log_probs, together.unpack("log_probs")[row], rtol=0, atol=rounding(pipeline))


@pytest.mark.parametrize("prompts", [["one", "two", "three"], ["b", "a", "b", "c", "a"]])
def test_every_sample_follows_its_own_prompt(pipeline, prompts):
    """Equal prompts are read once and distinct ones each by itself, in whatever order they come."""
    keys = [f"k{i}" for i in range(len(prompts))]
    conditions, segment = sampled(pipeline, prompts, keys)
    replayed = pipeline.replay(conditions, segment, PARAMS)
    torch.testing.assert_close(replayed.logp_N.detach(), segment.log_probs, rtol=0, atol=rounding(pipeline))


def test_samples_of_one_prompt_differ_by_their_keys_alone(pipeline):
    _, segment = sampled(pipeline, ["hi"] * 3, ["x", "y", "x"])
    first, second, third = segment.unpack("tokens")
    assert torch.equal(first, third) and not torch.equal(first, second)


def test_greedy_sampling_is_the_librarys(pipeline, folder):
    greedy = replace(PARAMS, temperature=0)
    conditions, segment = sampled(pipeline, params=greedy)
    assert segment.log_probs is None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, completion in zip(conditions["prompt"].unpack("tokens"), segment.unpack("tokens"), strict=True):
        out = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, max_new_tokens=12
        )
        assert torch.equal(out[0, len(prompt) :], completion)


def test_a_sample_ends_with_its_stop_token_and_the_others_go_on(pipeline):
    """A token that some sample draws in its middle, made a stop token, ends every sample at its first place."""
    _, free = sampled(pipeline)
    stop = int(free.unpack("tokens")[1][4])
    params = replace(PARAMS, stop_token_ids=(stop,))
    _, segment = sampled(pipeline, params=params)
    assert segment.status is not None
    rows = zip(free.unpack("tokens"), segment.unpack("tokens"), segment.status.tolist(), strict=True)
    lengths = set()
    for whole, cut, status in rows:
        place = whole.tolist().index(stop) + 1 if stop in whole else len(whole)
        assert cut.tolist() == whole[:place].tolist()
        assert status == (SegmentStatus.COMPLETED if stop in whole else SegmentStatus.TRUNCATED)
        lengths.add(place)
    assert len(lengths) > 1 and 5 in lengths


def test_the_models_own_end_of_sequence_stops_too(pipeline):
    end = pipeline.bundle.tokenizer.eos_token_id
    assert pipeline.stop_token_ids(replace(PARAMS, stop_token_ids=(9, 3))) == (3, 9, end)
    with pytest.raises(ConfigError, match=r"\[9999\] lie beyond the vocabulary of 272"):
        pipeline.stop_token_ids(replace(PARAMS, stop_token_ids=(9999,)))


def ending_after(num_tokens: int):
    """Says that sampling ends once so many tokens are drawn: it is asked before each token."""
    asked = itertools.count()
    return lambda: next(asked) >= num_tokens


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 11])
def test_what_was_ended_early_goes_on_with_the_tokens_that_it_would_have_had(pipeline, num_tokens):
    stop = int(sampled(pipeline)[1].unpack("tokens")[1][2])
    params = replace(PARAMS, stop_token_ids=(stop,))
    conditions, whole = sampled(pipeline, params=params)
    _, begun = sampled(pipeline, params=params, is_ending=ending_after(num_tokens))
    assert begun.status is not None and whole.status is not None
    rows = (begun.status == SegmentStatus.ABORTED).nonzero().flatten().tolist()
    kept = [begun.unpack("tokens")[row] for row in rows]
    assert [len(tokens) for tokens in kept] == [num_tokens] * len(rows) and 0 in rows
    prompts = [
        torch.cat([conditions["prompt"].unpack("tokens")[row], own]) for row, own in zip(rows, kept, strict=True)
    ]
    with pipeline.evaluating():
        more = pipeline.generate(
            {"prompt": PromptCondition.pack(tokens=prompts)},
            params,
            noise_keys=[KEYS[row] for row in rows],
            num_begun=[num_tokens] * len(rows),
        )
    assert more.status.tolist() == whole.status[rows].tolist()
    for new, row in enumerate(rows):
        assert torch.equal(torch.cat([kept[new], more.unpack("tokens")[new]]), whole.unpack("tokens")[row])
        log_probs = torch.cat([begun.unpack("log_probs")[row], more.unpack("log_probs")[new]])
        torch.testing.assert_close(log_probs, whole.unpack("log_probs")[row], rtol=0, atol=rounding(pipeline))


def in_turns(pipeline, lengths, params, change=lambda number: None):
    """The completions of all prompts, ended early after so many further tokens each time and continued with what was
    kept; and the number of calls that began without a prefill. change: called before each continuation."""
    conditions = pipeline.encode({"text": Texts(texts=PROMPTS)}, params)
    prompts = conditions["prompt"].unpack("tokens")
    written: list[list[torch.Tensor]] = [[] for _ in prompts]
    log_probs: list[list[torch.Tensor]] = [[] for _ in prompts]
    rows, kept, num_held = list(range(len(prompts))), KeptTexts(), 0
    for number, length in enumerate([*lengths, params.max_new_tokens]):
        if number:
            change(number)
        asked = [torch.cat([prompts[row], *written[row]]) for row in rows]
        with pipeline.evaluating():
            segment = pipeline.generate(
                {"prompt": PromptCondition.pack(tokens=asked)},
                params,
                noise_keys=[KEYS[row] for row in rows],
                num_begun=[sum(map(len, written[row])) for row in rows],
                is_ending=ending_after(length),
                kept=kept,
            )
        num_held += kept.was_held
        for row, tokens, values in zip(rows, segment.unpack("tokens"), segment.unpack("log_probs"), strict=True):
            written[row].append(tokens)
            log_probs[row].append(values)
        rows = [
            row for row, status in zip(rows, segment.status.tolist(), strict=True) if status == SegmentStatus.ABORTED
        ]
        if not rows:
            break
    return prompts, written, log_probs, num_held


@pytest.mark.parametrize("lengths", [[5], [1, 0, 4], [3, 3, 3]])
def test_what_is_kept_goes_on_without_a_prefill_with_the_tokens_that_it_would_have_had(pipeline, lengths):
    stop = int(sampled(pipeline)[1].unpack("tokens")[1][2])
    params = replace(PARAMS, stop_token_ids=(stop,))
    read = list[int]()
    model = pipeline.bundle.model
    handle = model.register_forward_pre_hook(
        lambda *given: read.append(given[2]["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        _, written, log_probs, num_held = in_turns(pipeline, lengths, params)
    finally:
        handle.remove()
    assert num_held == len(lengths) and [width > 1 for width in read] == [True] + [False] * (len(read) - 1)
    _, whole = sampled(pipeline, params=params)
    assert len(set(whole.lengths.tolist())) > 1
    for row in range(len(PROMPTS)):
        assert torch.equal(torch.cat(written[row]), whole.unpack("tokens")[row])
        found = torch.cat(log_probs[row])
        torch.testing.assert_close(found, whole.unpack("log_probs")[row], rtol=0, atol=rounding(pipeline))


def test_what_is_kept_goes_on_with_new_weights_over_the_old_keys_and_values(pipeline, folder):
    """Against transformers: the cache of each part is written by its weights, and the last token of a part is read by
    those of the next."""
    pipeline = own(pipeline)
    models: Any = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    for number, model in enumerate(models[1:]):
        torch.manual_seed(number)
        for weight in model.parameters():
            weight.data += 0.3 * weight.data.std() * torch.randn_like(weight) if weight.dim() > 1 else 0.0

    def change(number):
        pipeline.bundle.model.load_state_dict(models[number].state_dict())

    prompts, written, log_probs, num_held = in_turns(pipeline, [4, 3], PARAMS, change)
    assert num_held == 2
    gaps = []
    for prompt, parts, values in zip(prompts, written, log_probs, strict=True):
        assert [len(part) for part in parts] == [4, 3, 5]
        cache, unread, expected, anew = transformers.DynamicCache(config=models[0].config), prompt, [], []
        for model, part in zip(models, parts, strict=True):
            for token in part:
                with torch.no_grad():
                    logits = model(unread[None], past_key_values=cache, use_cache=True).logits[0, -1].double()
                expected.append((logits / PARAMS.temperature).log_softmax(-1)[token])
                unread = token[None]
            anew.append(model_logp(model, prompt, torch.cat(parts), PARAMS.temperature)[len(expected) - len(part) :])
            anew[-1] = anew[-1][: len(part)]
        torch.testing.assert_close(
            torch.cat(values), torch.stack(expected).float(), rtol=0, atol=max(1e-5, rounding(pipeline))
        )
        gaps.append((torch.cat(values) - torch.cat(anew).float()).abs())
    # What another prefill with the new weights would have given is something else, but for the first part.
    gap = torch.stack(gaps)
    assert float(gap[:, :4].max()) < rounding(pipeline) and float(gap[:, 4:].max()) > 100 * 1e-5


def test_other_texts_than_those_that_are_kept_are_read_anew(pipeline):
    params, kept = replace(PARAMS, stop_token_ids=()), KeptTexts()
    conditions, begun = sampled(pipeline, params=params, is_ending=ending_after(4), kept=kept)
    prompts = [
        torch.cat(pair) for pair in zip(conditions["prompt"].unpack("tokens"), begun.unpack("tokens"), strict=True)
    ]

    def go_on(rows, keys):
        with pipeline.evaluating():
            return pipeline.generate(
                {"prompt": PromptCondition.pack(tokens=[prompts[row] for row in rows])},
                params,
                noise_keys=keys,
                num_begun=[4] * len(rows),
                kept=kept,
            ), kept.was_held

    fewer, is_held = go_on([0, 1], KEYS[:2])
    assert not is_held
    assert not go_on([0, 1, 2, 3], ["r0:e", *KEYS[1:]])[1]
    prompts[2][-1] += 1
    assert not go_on([0, 1, 2, 3], KEYS)[1]
    prompts[2][-1] -= 1
    whole, is_held = go_on([0, 1, 2, 3], KEYS)
    assert is_held and torch.equal(whole.select([0, 1]).tokens, fewer.tokens)
    assert not go_on([0, 1, 2, 3], KEYS)[1]  # it is kept until it goes on


def test_texts_of_several_lengths_end_where_their_own_budget_does(pipeline):
    begun = [3, 0, 11]
    prompts = [torch.arange(5 + num) for num in begun]
    with pipeline.evaluating():
        segment = pipeline.generate(
            {"prompt": PromptCondition.pack(tokens=prompts)}, PARAMS, noise_keys=KEYS[:3], num_begun=begun
        )
    assert segment.lengths.tolist() == [9, 12, 1]
    assert segment.status is not None and set(segment.status.tolist()) == {SegmentStatus.TRUNCATED}


def test_ranks_that_are_done_go_on_until_all_are(pipeline):
    """A sharded model is gathered in every step: the ranks must agree on how many there are."""
    _, free = sampled(pipeline)
    stop = int(free.unpack("tokens")[0][0])
    params = replace(PARAMS, stop_token_ids=(stop,))
    forwards = []
    handle = pipeline.bundle.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    asked = []
    _, alone = sampled(pipeline, ["hi"], [KEYS[0]], params)
    assert alone.lengths.tolist() == [1] and len(forwards) == 1
    forwards.clear()
    _, waited = sampled(
        pipeline, ["hi"], [KEYS[0]], params, any_rank=lambda value: asked.append(value) or len(asked) < 6
    )
    handle.remove()
    assert waited.equals(alone)
    assert asked == [False] * 6 and len(forwards) == 6


def test_padded_replay_agrees_with_packed_gradients_included(pipeline):
    conditions, segment = sampled(pipeline)
    weights = torch.randn(2, len(segment.tokens), generator=torch.Generator().manual_seed(0))

    def run(pipeline):
        out = pipeline.replay(conditions, segment, PARAMS)
        pipeline.bundle.model.zero_grad()
        ((weights[0] * out.logp_N).sum() + (weights[1] * out.entropy_N).sum() + out.hidden_N.square().sum()).backward()
        return out, {name: p.grad.clone() for name, p in pipeline.bundle.model.named_parameters()}

    packed, packed_gradients = run(own(pipeline))
    padded, padded_gradients = run(own(pipeline, packed=False))
    torch.testing.assert_close(packed.logp_N, padded.logp_N, rtol=0, atol=rounding(pipeline))
    torch.testing.assert_close(packed.hidden_N, padded.hidden_N, rtol=0, atol=rounding(pipeline))
    assert set(packed_gradients) == set(padded_gradients)
    largest = max(float(gradient.abs().max()) for gradient in padded_gradients.values())
    for name, gradient in packed_gradients.items():
        # The decay of a head gets sums of large terms that cancel.
        scale = max(float(padded_gradients[name].abs().max()), 1e-3 * largest if "linear_attn" in name else 0.0)
        torch.testing.assert_close(gradient, padded_gradients[name], rtol=0, atol=7 * rounding(pipeline) * scale)


def test_packed_replay_runs_the_model_on_no_padding(pipeline):
    conditions, segment = sampled(pipeline)
    seen = []
    model = pipeline.bundle.model
    handle = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2]))
    pipeline.replay(conditions, segment, PARAMS)
    handle.remove()
    # The last token of a completion predicts nothing that is scored.
    needed = int(conditions["prompt"].lengths.sum() + segment.lengths.sum()) - segment.batch_size
    assert seen == [(1, needed)]


def test_gradients_are_those_of_finite_differences(pipeline, family):
    """In float64 along one direction in the space of all weights. Experts are kept: a token that goes elsewhere is a
    jump."""
    pipeline = own(pipeline, **({"replays_experts": True} if family == "qwen3_5_moe" else {}))
    conditions, segment = sampled(pipeline)
    model = pipeline.bundle.model
    with torch.no_grad():  # the padding token's embedding is 0, where the norms have no derivative to speak of
        embeddings = model.get_input_embeddings().weight
        embeddings[embeddings.norm(dim=1) == 0] = embeddings[:1].clone()
    parameters = list(model.parameters())
    directions = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * float(p.detach().std())
        for i, p in enumerate(parameters)
    ]
    out = pipeline.replay(conditions, segment, PARAMS)
    out.logp_N.mean().backward()
    slope = sum(float((p.grad.double() * d.double()).sum()) for p, d in zip(parameters, directions, strict=True))
    step, ends = 5e-4 if family == "qwen3_5_moe" else 2e-3, []  # experts bend it more
    for sign in (1, -1):
        moved = copy.deepcopy(pipeline)
        for p, d in zip(moved.bundle.model.parameters(), directions, strict=True):
            p.data.add_(d, alpha=sign * step)
        with torch.no_grad():
            ends.append(float(moved.replay(conditions, segment, PARAMS).logp_N.double().mean()))
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=2e-2)


def test_completions_of_no_tokens_and_of_one_are_replayed(pipeline):
    conditions, segment = sampled(pipeline)
    lengths = [0, 1, 5, 0]
    rows = [row[:n] for row, n in zip(segment.unpack("tokens"), lengths, strict=True)]
    cut = TextSegment.pack(tokens=rows)
    out = pipeline.replay(conditions, cut, PARAMS)
    whole = pipeline.replay(conditions, segment, PARAMS)
    starts = segment.cu_seqlens.tolist()
    places = [starts[row] + i for row, n in enumerate(lengths) for i in range(n)]
    torch.testing.assert_close(out.logp_N, whole.logp_N[places], rtol=0, atol=rounding(pipeline))


def test_hidden_states_are_those_that_the_head_projects(pipeline):
    conditions, segment = sampled(pipeline)
    out = pipeline.replay(conditions, segment, PARAMS)
    logits = out.hidden_N @ pipeline.bundle.head.weight.T / 0.8
    expected = logits.log_softmax(-1).gather(-1, segment.tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(out.logp_N, expected, rtol=0, atol=rounding(pipeline))


def test_sliding_windows_are_replayed_as_they_were_sampled(tmp_path):
    """Prompts and completions longer than the window of the second layer."""
    model = qwen3(use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    pipeline = Qwen3Pipeline(Qwen3Bundle(str(save_text_model(model, tmp_path))))
    conditions, segment = sampled(pipeline)
    assert pipeline.is_packed
    for packed in (True, False):
        out = AutoregressivePipeline(pipeline.adapter, packed=packed).replay(conditions, segment, PARAMS)
        torch.testing.assert_close(out.logp_N.detach(), segment.log_probs, rtol=0, atol=rounding(pipeline))


LLAMA = transformers.LlamaConfig(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    eos_token_id=258,
)
GEMMA = transformers.Gemma2Config(
    vocab_size=272,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    eos_token_id=258,
    sliding_window=8,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=None,
)


@pytest.mark.parametrize(("config", "is_packed"), [(LLAMA, True), (GEMMA, False)], ids=["llama", "gemma2"])
def test_any_causal_language_model_is_sampled_and_replayed(config, is_packed, tmp_path, caplog):
    """Gemma 2 caps its attention logits, which packed SDPA does not: it is padded, and the log says so."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    bundle = CausalLMBundle(str(save_text_model(model, tmp_path)))
    pipeline = AutoregressivePipeline(TextAdapter(bundle))
    assert pipeline.is_packed is is_packed
    assert ("cannot be packed" in caplog.text) is not is_packed
    conditions, segment = sampled(pipeline)
    out = pipeline.replay(conditions, segment, PARAMS)
    torch.testing.assert_close(out.logp_N.detach(), segment.log_probs, rtol=0, atol=rounding(pipeline))
    if not is_packed:
        with pytest.raises(ConfigError, match="Gemma2ForCausalLM cannot be packed"):
            AutoregressivePipeline(TextAdapter(bundle), packed=True)


def test_a_model_that_caps_its_logits_behind_the_projection_is_refused(tmp_path):
    config = copy.deepcopy(GEMMA)
    config.final_logit_softcapping = 30.0
    folder = save_text_model(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM scales or caps its logits"):
        CausalLMBundle(str(folder))


@pytest.mark.parametrize("changes", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}])
def test_tokens_that_were_not_drawn_from_the_whole_softmax_are_not_replayed(pipeline, changes):
    params = replace(PARAMS, **changes)
    conditions, segment = sampled(pipeline, params=params)
    with pytest.raises(ConfigError, match="tokens must be drawn from it. Set a temperature above 0, top_p: 1"):
        pipeline.replay(conditions, segment, params)


def test_another_temperature_than_the_rollouts_is_refused(pipeline):
    conditions, segment = sampled(pipeline)
    with pytest.raises(ContractError, match=r"sampled at temperature 0\.8 and are to be replayed at 1\.0"):
        pipeline.replay(conditions, segment, replace(PARAMS, temperature=1.0))


def test_sizes_that_disagree_are_named(pipeline):
    conditions, segment = sampled(pipeline)
    with pytest.raises(ContractError, match="4 prompts, 2 noise keys and 4"):
        pipeline.generate(conditions, PARAMS, noise_keys=["a", "b"])
    with pytest.raises(ContractError, match="conditions of 4 samples for a segment of 3"):
        pipeline.replay(conditions, segment.slice(0, 3), PARAMS)


def test_a_prompt_that_leaves_no_room_is_named_with_what_would_fit(pipeline):
    with pytest.raises(ConfigError, match=r"prompt 1 of the batch has \d+ tokens.*context of 512.*max_new_tokens to"):
        pipeline.encode({"text": Texts(texts=["hi", "long" * 123])}, PARAMS)


def test_chat_templates_are_applied_as_the_tokenizer_does(pipeline, folder, tmp_path):
    tokenizer = pipeline.bundle.tokenizer

    def prompt(pipeline) -> str:
        (tokens,) = pipeline.encode({"text": Texts(texts=["hi"])}, PARAMS)["prompt"].unpack("tokens")
        return tokenizer.decode(tokens.tolist())

    assert prompt(pipeline) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    closed = own(pipeline, system_prompt="be brief", enable_thinking=False)
    assert prompt(closed) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert prompt(own(pipeline, chat_template=False)) == "hi"
    base = str(save_text_model(qwen3(), tmp_path, chat_template=None))
    assert prompt(Qwen3Pipeline(Qwen3Bundle(base))) == "hi"
    with pytest.raises(ConfigError, match=r"has no template.*set chat_template: false"):
        Qwen3Pipeline(Qwen3Bundle(base), chat_template=True)
    with pytest.raises(ConfigError, match="do nothing without a chat template"):
        Qwen3Pipeline(Qwen3Bundle(base), system_prompt="be brief")


def test_decoded_texts_hold_no_special_tokens(pipeline):
    ids = pipeline.bundle.tokenizer("42<|im_end|>")["input_ids"]
    segment = TextSegment.pack(tokens=[torch.tensor(ids), torch.tensor(ids[:1])])
    assert pipeline.decode(segment).texts == ["42", "4"]
