"""A reward of 1 for a solution whose boxed answer equals the reference, as an expression."""

from __future__ import annotations

import logging
from abc import abstractmethod

from unirl.reward.card import ScorerCard
from unirl.reward.local.texts.bounded import BoundedFunction, OverBudgetError
from unirl.reward.local.texts.text_rules import AnswerScorer
from unirl.types.bounds import PositiveInt, bounded
from unirl.types.errors import ContractError

logger = logging.getLogger(__name__)

MEMORY_BYTES = 4 * 1024**3
"""Address space of the process that computes; most of it is never touched."""


@bounded("scorer")
class MathScorer(AnswerScorer):
    """Compares answers by a function of two strings in its own process; subclasses name the function.

    cpu_s: CPU seconds that one comparison may take. One that takes more, or too much memory, is not equal: 0, with a
    warning that names the sample's text. A reference that holds no answer raises ContractError.
    """

    def __init__(self, *, cpu_s: PositiveInt, name: str, answer_key: str, batch_size: PositiveInt) -> None:
        super().__init__(name=name, answer_key=answer_key, batch_size=batch_size)
        self._equals = BoundedFunction(
            f"unirl.reward.local.texts.math_equality.{self.function()}", cpu_s=cpu_s, memory_bytes=MEMORY_BYTES
        )

    @staticmethod
    @abstractmethod
    def function() -> str:
        """Name in `math_equality` of a function of text and reference that answers "1" or "0"."""

    def score_answer(self, text: str, answer: str) -> float:
        """1 or 0."""
        try:
            return float(self._equals(text, answer))
        except OverBudgetError as error:
            logger.warning(
                "scorer %s: no comparison with %r, so 0: %s; text ...%r", self.name, answer, error, text[-80:]
            )
            return 0.0
        except ValueError as error:
            raise ContractError(f"scorer {self.name}: {error}") from error

    def close(self) -> None:
        """End the process that computes."""
        self._equals.close()


class BoxedMathScorer(MathScorer):
    r"""1 where the text's answer equals the reference, else 0; a text without an answer gets 0.

    The answer is what the last balanced \boxed{} holds, after its last "="; else what follows "####". Equal means: the
    same string without layout, the same fraction, the same expression to sympy, or values within 1e-9; a LaTeX beyond
    fractions, roots, powers and functions is compared as a string. `math_verify` understands more.
    """

    card = ScorerCard(
        name="math_boxed",
        summary="does the boxed answer equal the reference, to sympy",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        source="MATH, arXiv 2103.03874",
    )

    def __init__(
        self,
        *,
        cpu_s: PositiveInt = 5,
        answer_key: str = "answer",
        name: str = "math_boxed",
        batch_size: PositiveInt = 64,
    ) -> None:
        super().__init__(cpu_s=cpu_s, name=name, answer_key=answer_key, batch_size=batch_size)

    @staticmethod
    def function() -> str:
        return "boxed_equals"
