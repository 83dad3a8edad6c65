"""An engine process whose language model is two pushed numbers, to test pools of text engines with real processes that
start in seconds.

A step writes one token for each sample of all its calls. Files in the folder `control` of its options steer it: the
process that removes `die` is killed in its current call; while `hold` exists, samples stop at two tokens, and each
process that gets there makes a file named by its process id.
"""

import os
import time
from pathlib import Path

import torch
from pushed_pair import PushedPair, die_where

from unirl.rollout.engine.child.messages import MessageCodec
from unirl.rollout.engine.child.server import main
from unirl.rollout.engine.served_text.call import Generate, Generations
from unirl.rollout.engine.vllm_llm.messages import Ready

CODEC = MessageCodec("Numbers", Ready, Generate, Generations)
VOCABULARY, CONTEXT, HELD = 11, 64, 2


class Writer:
    """One sample, token by token."""

    def __init__(self, call, row, weights):
        self.call, self.prompt, self.weights = call, call.prompts[row], weights
        self.budget = call.budget(row)
        self.generator = torch.Generator().manual_seed(call.seeds[row])
        self.tokens, self.log_probs, self.reason = [], [], None

    def write(self):
        """The next token."""
        begun = self.call.max_new_tokens - self.budget
        place, tokens = begun + len(self.tokens), torch.arange(VOCABULARY)
        last = [*self.prompt, *self.tokens][-1]
        logits = self.weights["a"] * torch.sin(3.0 * last + tokens) + self.weights["b"] * torch.cos(tokens**2 + place)
        log_probs = (logits / (self.call.temperature or 1.0)).log_softmax(-1)
        token = int(log_probs.argmax())
        if self.call.temperature:
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.generator))
        self.tokens.append(token)
        self.log_probs.append(float(log_probs[token]))
        ends = token in self.call.stop_token_ids
        self.reason = "stop" if ends else "length" if len(self.tokens) == self.budget else None


class NumberHost:
    """Writes with the last pushed numbers."""

    def __init__(self, start, aborts):
        torch.set_num_threads(1)
        self._options, self._aborts = start.engine_args, aborts
        self._pair = PushedPair(1.0, 1.0, start.policy_version)
        self._running = 0
        self._control = Path(self._options["control"])

    def ready(self):
        return Ready(
            version="1.0",
            torch_version=torch.__version__,
            dtype="torch.float32",
            vocab_size=VOCABULARY,
            context_length=CONTEXT,
            max_running=self._options["max_running"],
            num_tensors=2,
        )

    def answer(self, message):
        if isinstance(message, Generate):
            return self._generate(message)
        assert not self._running
        return self._pair.answer(message)

    def _generate(self, call):
        self._running += 1
        # The trainer gives it no more than it writes at once, except if one call is larger.
        assert self._running * len(call.prompts) <= self._options["max_running"] or self._running == 1
        writers = [Writer(call, row, self._pair.weights) for row in range(len(call.prompts))]
        while any(writer.reason is None for writer in writers) and call.number not in self._aborts:
            for writer in writers:
                if writer.reason is None and not (call.temperature and self._is_held(writer)):
                    writer.write()
            if call.temperature and len(writers[0].tokens) > 1:
                die_where((self._control / "die").unlink)
            time.sleep(self._options["seconds_per_step"])
            yield
        self._running -= 1
        return Generations(
            self._pair.policy_version,
            [writer.tokens for writer in writers],
            [writer.log_probs for writer in writers],
            [writer.reason or "abort" for writer in writers],
        )

    def _is_held(self, writer):
        if len(writer.tokens) < HELD or not (self._control / "hold").exists():
            return False
        (self._control / str(os.getpid())).touch()
        return True


if __name__ == "__main__":
    main(CODEC, NumberHost)
