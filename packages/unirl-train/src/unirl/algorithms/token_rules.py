"""What algorithms on tokens need of the way that tokens are sampled. See `unirl.types.recipe`."""

from __future__ import annotations

from unirl.types.recipe import Messages, Part, Run


def tokens_can_be_replayed(own: Part, run: Run) -> Messages:
    """Tokens were drawn from the whole softmax that replay scores them under."""
    sampling = run.sampling
    for name, whole in (("top_p", 1), ("top_k", 0)):
        if sampling.get(name, whole) != whole:
            yield (
                f"sampling.{name} = {sampling.get(name)} draws from a part of the vocabulary, and replay scores under "
                f"all of it: ratios would be wrong. Set sampling.{name}: {whole} (eval.top_p is free)."
            )
    if sampling.get("temperature") == 0:
        yield "sampling.temperature = 0 is greedy: all samples of a prompt are one. Set it above 0 (1.0 is usual)."


def loss_has_its_length(own: Part, run: Run) -> Messages:
    """The constant length goes with the one aggregation that divides by it."""
    mode, horizon = own.get("loss_agg_mode", "token-mean"), own.get("horizon")
    if (horizon is None) == (mode == "seq-mean-token-sum-norm"):
        yield (
            f"{own.at}.horizon = {'null' if horizon is None else horizon} with {own.at}.loss_agg_mode = {mode}: the "
            "constant length belongs to seq-mean-token-sum-norm alone. Set horizon: ${sampling.max_new_tokens} there, "
            "and null elsewhere."
        )


def correction_is_of_tokens(own: Part, run: Run) -> Messages:
    """A correction of tokens says nothing of noise."""
    correction = own.inner.get("rollout_correction")
    if correction is not None and correction.get("noise_floor") is not None:
        yield f"{correction.at}.{TOKENS_HAVE_NO_NOISE}"


TOKENS_HAVE_NO_NOISE = "noise_floor leaves out denoising steps with little noise; tokens have none. Set it to null."

RULES = (tokens_can_be_replayed, loss_has_its_length, correction_is_of_tokens)
