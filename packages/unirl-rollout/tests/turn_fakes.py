"""What tests of turns share: a codec of talks, and an engine that writes what a script says."""

import torch
from text_fakes import NumberCodec

from unirl.rollout.engine.begun_texts import BegunTexts
from unirl.rollout.engine.versions import mark_versions
from unirl.rollout.text_checks import prompt_conditions
from unirl.types.conditions import Bridge
from unirl.types.episodes import EPISODE
from unirl.types.errors import RefusedError
from unirl.types.rollout import RolloutResp
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import SegmentStatus, TextSegment

STOP, SAYS = 9, 8
Script = dict[tuple[int, ...], list[int]]
"""What is read -> what is written; an empty list: the engine refuses it."""
PARAMS = ARSamplingParams(temperature=1.0, max_new_tokens=3, seed=5)


class TalkingCodec(NumberCodec):
    """A message is its numbers behind an 8; a turn of the model follows at once."""

    context_length = 40
    reads_images_in_turns = False
    media_tokens: frozenset[int] = frozenset()
    vocabulary = {"<tool_call>": 6, "</tool_call>": 7}

    def __init__(self):
        self.tools = self.system_prompt = None

    def bridge(self, messages):
        return Bridge([token for message in messages for token in (SAYS, *map(int, message.content.split()))])

    def text_of(self, tokens):
        return " ".join(map(str, tokens))

    def offer_tools(self, schemas):
        self.tools = schemas

    def set_system_prompt(self, text):
        self.system_prompt = text


class ScriptedEngine:
    """Writes what a script has for what it reads; notes every request."""

    def __init__(self, codec, script):
        self.codec, self.script, self.asked = codec, script, []

    def generate(self, req, policy=None):
        self.asked.append(req)
        conditions = prompt_conditions(req, self.codec)
        written = [self.script[tuple(row.tolist())] for row in conditions["prompt"].unpack("tokens")]
        if not any(written):
            raise RefusedError("no media for any")
        ends = [_end(row) for row in written]
        segment = TextSegment.pack(
            tokens=[torch.tensor(row, dtype=torch.long) for row in written],
            log_probs=[-torch.arange(1.0, len(row) + 1) for row in written],
            status=torch.tensor(ends),
            params=req.sampling_params,
        )
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=self.codec.decode(segment))
        if not all(written):
            failed = {EPISODE: {"end": "failed", "reason": "no media"}}
            track.metadata = [failed if not row else None for row in written]
        return RolloutResp(tracks={"text": track.replace(policy_versions=torch.full((req.batch_size,), 4))})

    def check_prompts(self, req):
        self.codec.encode(req.primitives, req.sampling_params)

    def announce_to(self, listener):
        """Never called: turns announce whole episodes."""

    def abort(self):
        """Nothing runs."""

    def sleep(self):
        """Nothing to free."""

    def wake_up(self):
        """Nothing to load."""

    def shutdown(self):
        """Nothing to stop."""


def _end(row):
    if not row:
        return SegmentStatus.FAILED
    return SegmentStatus.COMPLETED if row[-1] == STOP else SegmentStatus.TRUNCATED


def rows(track, name):
    return [row.tolist() for row in track.segment.unpack(name)]


class CutEngine(ScriptedEngine):
    """As ScriptedEngine, which its owner's `abort` ends in call number `cut_at` after `num_tokens` tokens of each row,
    or of the next turn if that was none. Continues what was begun; `version` is what it says of its policy."""

    def __init__(self, codec, script):
        super().__init__(codec, script)
        self.cut_at, self.num_tokens, self.version, self.owner = None, 0, 4, None

    def generate(self, req, policy=None):
        number = len(self.asked)
        self.asked.append(req)
        conditions = prompt_conditions(req, self.codec)
        own = BegunTexts.of(req, ())
        prompts = [row.tolist() for row in conditions["prompt"].unpack("tokens")]
        whole = [self.script[tuple(prompts[row])] for row in own.rows]
        ends = [len(row) for row in whole]
        if number == self.cut_at and self.owner is not None:
            self.owner.abort()
            ends = [min(len(row), begun + self.num_tokens) for row, begun in zip(whole, own.lengths, strict=True)]
        log_probs = [-torch.arange(1.0, len(row) + 1) for row in whole]
        bounds = list(zip(own.lengths, ends, strict=True))
        more = TextSegment.pack(
            tokens=[torch.tensor(row[a:b], dtype=torch.long) for row, (a, b) in zip(whole, bounds, strict=True)],
            log_probs=[row[a:b] for row, (a, b) in zip(log_probs, bounds, strict=True)],
            status=torch.tensor(
                [
                    _end(row) if b == len(row) else SegmentStatus.ABORTED
                    for row, (_, b) in zip(whole, bounds, strict=True)
                ]
            ),
            params=req.sampling_params,
        )
        segment = own.whole(more, self.version)
        track = req.make_root_track(conditions=conditions, segment=segment, decoded=self.codec.decode(segment))
        return RolloutResp(tracks={"text": mark_versions(track, self.version)})
