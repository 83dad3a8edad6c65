"""Samples that vLLM holds between the calls that make a part of them each."""

from dataclasses import replace

import torch

from unirl.rollout.engine.begun_texts import BegunTexts
from unirl.rollout.engine.served_text.call import Generate, Generations, joined, part_of, proof_of, text_segment
from unirl.rollout.engine.vllm_llm.kept_samples import KeptSamples, Row, Sample
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

CALL = Generate(
    number=7,
    prompts=[[1, 2], [3]],
    seeds=[10, 11],
    temperature=0.7,
    top_p=0.9,
    top_k=3,
    max_new_tokens=6,
    stop_token_ids=[0],
    names=["0:a", "0:b"],
)


def held(num_tokens=2):
    """Both rows of the call, held with so many tokens."""
    kept = KeptSamples()
    rows = [Row(f"7-{row}", Sample(prompt, [5] * num_tokens)) for row, prompt in enumerate(CALL.prompts)]
    assert [kept.keep(CALL, row, own) for row, own in enumerate(rows)] == [None, None] and len(kept) == 2
    return kept, rows


def going_on(num_tokens=2, **changes):
    return replace(CALL, number=8, prompts=[[*own, *[5] * num_tokens] for own in CALL.prompts], **changes)


def test_a_call_goes_on_once_with_its_samples_and_the_tokens_that_it_was_told():
    kept, rows = held()
    rows[1].sample.tokens += [6, 0]  # meanwhile, for another call
    found = kept.take(going_on(), 1)
    assert found is not None and (found.request, found.num_told, found.is_in_place) == ("7-1", 2, True)
    assert found.sample.tokens[found.num_told :] == [6, 0]
    assert kept.take(going_on(), 1) is None and len(kept) == 1


def test_other_tokens_parameters_and_names_are_not_taken_for_it():
    kept, _ = held()
    assert kept.take(going_on(1), 0) is None
    assert kept.take(going_on(temperature=0.0), 0) is None
    assert kept.take(going_on(names=["1:a", "1:b"]), 0) is None
    assert kept.take(going_on(names=[]), 0) is None
    assert kept.take(proof_of(going_on()), 0) is None
    assert len(kept) == 2 and kept.take(part_of(going_on(), range(1, 2), 9), 0) is not None


def test_a_sample_whose_keys_and_values_were_computed_again_is_not_in_place():
    kept, rows = held()
    rows[0].sample.num_preempted = 1
    found = kept.take(going_on(), 0)
    assert found is not None and found.is_begun and not found.is_in_place
    assert kept.keep(going_on(), 0, found) is None
    found.sample.tokens.append(5)
    again = kept.take(going_on(), 0)
    assert again is not None and again.is_in_place  # what it goes on with now is what it had when it was kept


def test_what_no_call_goes_on_with_is_dropped_at_the_third_push_and_what_is_replaced_at_once():
    kept, rows = held()
    assert kept.pushed() == [] and kept.pushed() == []
    other = Row("9-0", rows[0].sample)
    assert kept.keep(CALL, 0, other) == "7-0"
    assert kept.pushed() == ["7-1"] and len(kept) == 1
    assert kept.clear() == ["9-0"] and len(kept) == 0 and kept.clear() == []


def test_answers_are_joined_with_the_policy_of_each_token_and_what_went_on_in_place():
    first = Generations(4, [[1], [2, 3]], [[-0.1], [-0.2, -0.3]], ["length"] * 2)
    second = Generations(4, [[5], [6, 7]], [[-0.5], [-0.6, -0.7]], ["length"] * 2, [], [[4], [3, 4]], [1])
    whole = joined([first, second])
    assert whole.versions == [[4], [4, 4], [4], [3, 4]] and whole.in_place == [3] and whole.refusals == []
    assert joined([first, first]).versions == [] == joined([first, first]).in_place


def test_tokens_that_were_drawn_between_two_calls_keep_their_policy():
    params = ARSamplingParams(temperature=0.7, top_p=0.9, top_k=3, max_new_tokens=6)
    former = TextSegment.pack(
        tokens=[torch.tensor([5, 5]), torch.tensor([5, 5])],
        log_probs=[torch.tensor([-1.0, -1.0])] * 2,
        status=torch.full((2,), SegmentStatus.ABORTED),
        params=params,
    )
    versions = torch.tensor([3, 3, 3, 3])
    begun = BegunTexts(former, versions, [0, 1], former.unpack("tokens"))
    call = going_on(num_begun=[2, 2])
    answer = Generations(5, [[6, 0], [7, 0]], [[-0.5] * 2] * 2, ["stop"] * 2, [], [[4, 5], [5, 5]], [0])
    segment = text_segment(answer, call, params, begun)
    assert [own.tolist() for own in segment.unpack("versions")] == [[3, 3, 4, 5], [3, 3, 5, 5]]
    counts = begun.continued(2, answer.in_place)
    assert {name: own.tolist() for name, own in counts.items()} == {
        "continued_in_place": [1.0, 0.0],
        "continued_by_prefill": [0.0, 1.0],
    }
