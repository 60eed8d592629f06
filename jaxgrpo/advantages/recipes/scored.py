"""Recipes that read what passes of a model say of samples or of known answers.

First those without a verifier: the policy judges a known answer behind each thought, or itself.
Then those that choose or weigh tokens by the policy's distributions.
"""

from __future__ import annotations

from jaxgrpo.advantages.base import AdvantageTransform, Scheduled
from jaxgrpo.advantages.chains import chain
from jaxgrpo.advantages.group import (
    divide_by_group_std,
    subtract_group_mean,
    subtract_leave_one_out_mean,
)
from jaxgrpo.advantages.masks import mask_below_running_deviation
from jaxgrpo.advantages.reflection import answer_probability, perplexity_rank
from jaxgrpo.advantages.scored import (
    keep_top_entropy,
    score_mean,
    subtract_optimal_token_baseline,
    train_on_answers,
)
from jaxgrpo.advantages.streams import Weights, sum_rewards, sum_then


def rlpr(
    share: Scheduled = 0.5,
    decay: float = 0.99,
    scorer: str = "trainer",
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """The mean probability of a known answer's tokens as one more reward, then GRPO.

        r = clip(mean_j p(answer_j | thought) - mean_j p(answer_j), 0, 1)

    Groups that differ less than `share` of what groups did so far leave.

    Use it when there is a reference answer to each prompt, of a few words, and no verifier.

    Args:
      share, decay: as in the part `mask_below_running_deviation`.
      scorer: as in the part `answer_probability`.
      eps, ddof: as in `grpo`.

    `weights` knows the reward as "answer_probability", with weight 1 where they do not name it.
    Fields: answer_logp, masked_answer_logp and answer_mask, from the data's answers in training.
    Source: RLPR, arXiv 2506.18254, where the answer without a thought is the base model's.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"answer_logp": [[[0.0], [-30.0]]], "answer_mask": [[True]]}
    >>> fields["masked_answer_logp"] = [[-30.0]]
    >>> options = {"eps": 0.0, "ddof": 0, "weights": {"reward": 0.0}}
    >>> evaluate("rlpr", [[0.0, 0.0]], options=options, **fields)[0].tolist()
    [[1.0, -1.0]]
    """
    return chain(
        answer_probability(masked_thought=True, scorer=scorer),
        sum_rewards(**_named("answer_probability", weights)),
        mask_below_running_deviation(share, decay),
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        name="rlpr",
    )


def verifree(
    scorer: str = "trainer", answer: Scheduled = 1.0, weights: Weights | None = None
) -> AdvantageTransform:
    """The probability of the whole known answer as one more reward, then RLOO at the thought, and
    the answer itself behind it.

        r = exp(sum_j log p(answer_j | thought)), 0 where the sample came to no answer of its own
        a = r - mean of the others at the thought,  answer * r at the answer's tokens

    In expectation it is the gradient of the reward of exact match, with less noise: what the
    thought does for it, and what the answer's tokens do. An update holds thoughts with the known
    answers behind them, and nothing that samples went on with.

    Use it when answers are so short and fixed that exact match would do.

    Args:
      scorer: as in the part `answer_probability`.
      answer: weight of the answers' tokens, as in the part `train_on_answers`.

    `weights` knows the reward as "answer_probability", with weight 1 where they do not name it.
    Fields: answer_logp, answer_mask, answer_reached and answered, from the data's answers in
    training.
    Source: VeriFree, arXiv 2505.21493. The paper adds both terms of all tokens up: `sequence_sum`.
    Samples without an answer of their own, or cut, are paid 0 as in the authors' code, which pays 0
    too where the known answer has no room.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"answer_logp": [[[0.0], [-30.0]]], "answer_mask": [[True]]}
    >>> fields |= {"answered": [[[0, 1], [0, 1]]], "token_mask": [[[1, 1], [1, 1]]]}
    >>> fields["answer_reached"] = [[True, True]]
    >>> options = {"weights": {"reward": 0.0}}
    >>> evaluate("verifree", [[0.0, 0.0]], options=options, **fields)[0].round(3).tolist()
    [[[1.0, 1.0], [-1.0, 0.0]]]
    """
    return chain(
        answer_probability("product", scorer=scorer, must_reach=True),
        sum_rewards(**_named("answer_probability", weights)),
        subtract_leave_one_out_mean(),
        train_on_answers(answer, scorer),
        name="verifree",
    )


def nover(
    efficiency: Scheduled = 1.0,
    scorer: str = "trainer",
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """The place in the group by the perplexity of a known answer as one more reward, then GRPO.

        r = 1 - (better samples) / N + efficiency (worse and longer ones) / (N - 1)

    Use it when answers are long and free: places do not depend on how likely the answer is at all.

    Args:
      efficiency, scorer: as in the part `perplexity_rank`.
      eps, ddof: as in `grpo`.

    `weights` knows the reward as "perplexity_rank", with weight 1 where they do not name it.
    Fields: answer_logp, answer_mask, thought_tokens, answer_reached, from the data's answers in
    training.
    Source: NOVER, arXiv 2505.16022. There a badly formatted sample has 0 and no place; here one
    that never came to an answer of its own, or was cut.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"answer_logp": [[[-1.0], [-3.0]]], "answer_mask": [[True]]}
    >>> fields |= {"thought_tokens": [[1, 1]], "answer_reached": [[True, True]]}
    >>> options = {"eps": 0.0, "ddof": 0, "weights": {"reward": 0.0}}
    >>> evaluate("nover", [[0.0, 0.0]], options=options, **fields)[0].tolist()
    [[1.0, -1.0]]
    """
    return chain(
        perplexity_rank(efficiency, scorer),
        sum_rewards(**_named("perplexity_rank", weights)),
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        name="nover",
    )


def intuitor(
    eps: Scheduled = 1e-6, ddof: int = 1, weights: Weights | None = None
) -> AdvantageTransform:
    """How sure the policy is of its own tokens as one more reward, then GRPO.

        r = mean_t (logsumexp_v z[t, v] - mean_v z[t, v]),   z the logits over the temperature

    Use it when there is neither an answer nor a verifier. It can be climbed without getting better:
    look at an evaluation.

    Args:
      eps, ddof: as in `grpo`.

    `weights` knows the reward as "self_certainty", with weight 1 where they do not name it; the
    paper's method has no other: give the run's rewards weight 0 there, and they are only logged.
    Fields: self_certainty [P, G, T], a pass of the trained policy.
    Source: Intuitor, arXiv 2505.19590, with the policy before the step as the judge.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"self_certainty": [[[2.0], [1.0]]], "token_mask": [[[1], [1]]]}
    >>> options = {"eps": 0.0, "ddof": 0, "weights": {"reward": 0.0}}
    >>> evaluate("intuitor", [[0.0, 0.0]], options=options, **fields)[0].tolist()
    [[1.0, -1.0]]
    """
    return chain(
        score_mean("self_certainty"),
        sum_rewards(**_named("self_certainty", weights)),
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        name="intuitor",
    )


def top_entropy(
    share: Scheduled = 0.2,
    eps: Scheduled = 1e-6,
    ddof: int = 1,
    weights: Weights | None = None,
) -> AdvantageTransform:
    """Sum, then GRPO, at the tokens of the highest entropy alone.

    Use it when samples are long and most of their tokens follow from the others.

    Args:
      share: of the batch's tokens that are trained.
      eps, ddof: as in `grpo`.

    Fields: token_entropy [P, G, T], a pass of the trained policy.
    Source: Beyond the 80/20 rule, arXiv 2506.01939, whose loss is DAPO's.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = {"token_entropy": [[[2.0, 0.1], [1.0, 0.3]]], "token_mask": [[[1, 1], [1, 1]]]}
    >>> options = {"share": 0.5, "eps": 0.0, "ddof": 0}
    >>> evaluate("top_entropy", [[1.0, 0.0]], options=options, **fields)[0].tolist()
    [[[1.0, 0.0], [-1.0, 0.0]]]
    """
    return sum_then(
        "top_entropy",
        weights,
        subtract_group_mean(),
        divide_by_group_std(eps, ddof),
        keep_top_entropy(share),
    )


def optimal_token_baseline(weights: Weights | None = None) -> AdvantageTransform:
    """Sum, less a mean of the group at each token that weighs samples by their gradients so far.

    Use it when samples of a group differ much in length or certainty and gradients are noisy.

    Fields: trainer_logp and token_collision [P, G, T], one pass of the trained policy.
    Source: Optimal Token Baseline, arXiv 2602.07078; see the part
    `subtract_optimal_token_baseline`.

    >>> from jaxgrpo.advantages import evaluate
    >>> fields = dict.fromkeys(("trainer_logp", "token_collision"), [[[-1.0], [-1.0]]])
    >>> fields["token_mask"] = [[[1], [1]]]
    >>> evaluate("optimal_token_baseline", [[1.0, 0.0]], **fields)[0].tolist()
    [[[0.5], [-0.5]]]
    """
    return sum_then("optimal_token_baseline", weights, subtract_optimal_token_baseline())


def _named(stream: str, weights: Weights | None) -> Weights:
    """The weights, with 1 for a stream that they do not name; none: all count with weight 1."""
    return {} if weights is None else {stream: 1.0, **weights}
