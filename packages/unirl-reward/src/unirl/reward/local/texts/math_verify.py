"""A reward of 1 for a solution whose answer math-verify finds equal to the reference."""

from __future__ import annotations

import importlib.util

from unirl.reward.card import ScorerCard
from unirl.reward.local.texts.math_boxed import MathScorer
from unirl.types.bounds import PositiveInt


class MathVerifyScorer(MathScorer):
    r"""1 where `math_verify.verify(parse("\boxed{reference}"), parse(text))` holds, else 0. Needs the extra `math`.

    A reference that has its own \boxed{} or $ is parsed as it stands. math-verify's own time limits, which work
    in the main thread alone, are replaced by `cpu_s`.
    Raises ImportError without math-verify.
    """

    card = ScorerCard(
        name="math_verify",
        summary="does the answer equal the reference, to math-verify",
        media=("text",),
        needs="metadata answer",
        low=0,
        high=1,
        typical="0 or 1",
        extra="math",
        source="math-verify of Hugging Face",
    )

    def __init__(
        self,
        *,
        cpu_s: PositiveInt = 10,
        answer_key: str = "answer",
        name: str = "math_verify",
        batch_size: PositiveInt = 64,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(f"scorer {name} needs math-verify. Install it with: pip install 'unirl-reward[math]'")
        super().__init__(cpu_s=cpu_s, name=name, answer_key=answer_key, batch_size=batch_size)

    @staticmethod
    def function() -> str:
        return "verified"
