"""Scores: what passes of models over tokens that exist give, by the names that methods need.

A score is (policy, prompt, temperature, quantity). A pass runs only where a part's `needs` asks for
one of its scores, and gives all of them at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

POLICIES = ("trainer", "reference", "base", "ema")
"""Policies of a run: the trained one before the update; the base until `reference.reset_every`
makes it a lagged copy; the base; the mean of what was trained. Any other name is a model's."""

QUANTITIES = {
    "logp": "log-prob of each token",
    "entropy": "entropy of the distribution of each token",
    "confidence": "minus the mean log-prob of the likeliest tokens in each token's place",
    "certainty": "minus the mean log-prob of all tokens with text in each token's place",
    "collision": "chance that two draws in each token's place agree, the sum of squared chances",
    "rank": "number of tokens of the vocabulary that are likelier than each token",
    "effective_rank": "effective rank of the hidden states up to each `stride`-th token",
    "likeliest": "the k likeliest tokens in each token's place, and their log-probs",
}
"""Quantity -> what it is, [P, G, T] each; but "likeliest" is [P, G, T, 2, k + 1]: k token ids and
-1, then their log-probs and that of all others together. k is the reader's (`Penalty.counts`)."""


STRIDE = 40
"""Tokens between those with an effective rank, as in github.com/hf618/VERL."""


class Score(NamedTuple):
    """What a pass of a model gives for a name in `needs`."""

    shape: str
    policy: str  # of POLICIES, or the path of a model
    quantity: str  # of QUANTITIES
    prompt: str | None = None  # the column that replaces the prompt; None: none
    temperature: float | None = None  # None: that of sampling
    stride: int = STRIDE  # tokens between those with an effective rank
    count: int = 0  # k of "likeliest"
    named_by: str | None = None  # the score whose k tokens "likeliest" takes; None: its own k
    policies: tuple[str, ...] = ()
    """instead of `policy`: which of them scores a row is in the field `choice_field`"""

    @property
    def scored_by(self) -> tuple[str, ...]:
        """The policies that score, each once."""
        return tuple(dict.fromkeys(self.policies)) or (self.policy,)

    @property
    def entries(self) -> tuple[int, ...]:
        """The axes behind [P, G, T]."""
        return (2, self.count + 1) if self.quantity == "likeliest" else ()

    @property
    def is_of_batch(self) -> bool:
        """Whether the rows of an update have it: the same prompts, and one policy for all rows."""
        return self.prompt is None and not self.policies


class ScoringPass(NamedTuple):
    """A pass over samples: whose parameters, behind which prompt, at which temperature."""

    policy: str
    prompt: str | None
    temperature: float | None
    share: float = 1.0  # of the rows, about, where several policies share them


SCORES: dict[str, Score] = {
    "trainer_logp": Score("[P, G, T]", "trainer", "logp"),
    "token_entropy": Score("[P, G, T]", "trainer", "entropy"),
    "token_confidence": Score("[P, G, T]", "trainer", "confidence"),
    "self_certainty": Score("[P, G, T]", "trainer", "certainty"),
    "token_collision": Score("[P, G, T]", "trainer", "collision"),
    "token_rank": Score("[P, G, T]", "trainer", "rank"),
    "effective_rank": Score("[P, G, T]", "trainer", "effective_rank"),
    "reference_logp": Score("[P, G, T]", "reference", "logp"),
    "base_logp": Score("[P, G, T]", "base", "logp"),
    "ema_logp": Score("[P, G, T]", "ema", "logp"),
}
"""Fields that passes of a model produce in every run. A config adds its own, `[[scores]]`. Any
other need is a column of the data or a reward."""


def score_text(score: Score) -> str:
    """What a score of every run is, in a few words."""
    return f"{QUANTITIES[score.quantity]}, by the {score.policy} policy"


def passes(
    scores: Mapping[str, Score], names: Collection[str]
) -> Iterator[tuple[ScoringPass, dict[str, Score]]]:
    """The passes that give the named scores, in the same order in every process."""
    by_pass: dict[ScoringPass, dict[str, Score]] = {}
    for name in sorted(names):
        score = scores[name]
        for policy in score.scored_by:
            share = 1 / len(score.scored_by)
            key = ScoringPass(policy, score.prompt, score.temperature, share)
            by_pass.setdefault(key, {})[name] = score
    yield from by_pass.items()


def prompt_field(column: str) -> str:
    """The field [P, S'] int32 that holds the tokens of another prompt, -1 behind the last.

    >>> prompt_field("hinted")
    'prompt:hinted'
    """
    return f"prompt:{column}"


def choice_field(name: str) -> str:
    """The field [P] int32 that says which of a score's `policies` scores a row.

    >>> choice_field("teacher_logp")
    'choice:teacher_logp'
    """
    return f"choice:{name}"


def policy_field(name: str) -> str:
    """The field [..., k + 1] of an update's own pass, with its gradient: the policy's log-probs of
    the tokens of a score "likeliest", and of all others together.

    >>> policy_field("teacher_top")
    'policy:teacher_top'
    """
    return f"policy:{name}"


def student_field(name: str) -> str:
    """The score that names the tokens of a score "likeliest": those of the trained policy.

    >>> student_field("teacher_top")
    'student:teacher_top'
    """
    return f"student:{name}"


def at_student_tokens(scores: Mapping[str, Score], names: Collection[str]) -> dict[str, Score]:
    """The scores, of which those named say how likely the policy's likeliest tokens are, and the
    policy's own that names these, before the update and behind the row's prompt."""
    changed = dict(scores)
    for name in sorted(names):
        field, score = student_field(name), scores[name]
        changed[name] = score._replace(named_by=field)
        changed[field] = Score(score.shape, "trainer", score.quantity, count=score.count)
    return changed


OF_PASS: dict[str, str] = {"policy_entropy": "trainer", "full_kl": "reference"}
"""What a penalty may need of the update's own pass, with its gradient -> whose parameters that
reads besides the trained ones.
"""

GROUP_LOG_RATIO = "group_log_ratio"
OF_UPDATE = frozenset({GROUP_LOG_RATIO})
"""What surrogates and penalties may need of the whole update, at the parameters before it and
without gradient: the mean over a group of each sequence's log ratio to the proximal policy. See
`losses.group_log_ratio`."""

TOKEN_DRAW = "token_draw"
OF_BATCH: dict[str, str] = {
    "behavior_logp": "log-prob of each token under the distribution that it was drawn from",
    "sampled_now": "whether the parameters before the update drew a token",
    TOKEN_DRAW: "a uniform number in [0, 1) per token, a function of step, prompt and place",
}
"""What surrogates and penalties may need beside scores, columns and rewards: every run has it."""

SCORERS = ("trainer", "reference", "base")
"""The policies that may score reference answers."""


def answer_field(name: str, policy: str) -> str:
    """The name of a field of reference answers that a policy scores: its own for the trainer's.

    >>> answer_field("answer_logp", "trainer"), answer_field("answer_logp", "base")
    ('answer_logp', 'base_answer_logp')
    """
    return name if policy == "trainer" else f"{policy}_{name}"


ANSWERED = "answered"
REACHED = "answer_reached"

OF_ANSWERS: dict[str, Score] = {
    ANSWERED: Score("[P, G, T]", "", "places"),
    "answer_mask": Score("[P, J]", "", "tokens"),
    "thought_tokens": Score("[P, G]", "", "tokens"),
    REACHED: Score("[P, G]", "", "samples"),
    **{
        answer_field(name, policy): Score(shape, policy, "logp")
        for name, shape in {
            "answer_logp": "[P, G, J]",
            "masked_answer_logp": "[P, J]",
            "cut_answer_logp": "[P, G, K]",
        }.items()
        for policy in SCORERS
    },
    "answer_rank": Score("[P, G, J]", "trainer", "rank"),
}
"""Fields of the data's reference answers, for chains: a policy scores the tokens of each answer
behind the thoughts of its prompt's samples, ("masked") without a thought, and ("cut") all of them
together behind 0, 1, ..., all of the `data.answer_cuts` parts of each thought, K one more.
`REACHED` says which samples came to an answer by themselves. A chain that reads `ANSWERED` trains
the answers: they take the place of what follows each thought. See `rollout.answers` and
`update.answers`.
"""

ANSWERS_OF_POLICIES = frozenset(("answer_mask", "thought_tokens", "answer_logp", "answer_rank"))
"""Those of them that prompt policies may need too, scored by the parameters that sampled."""

OF_SAMPLES: dict[str, str] = {
    "answer_tokens": "[P, G], tokens of each sample's own answer",
    "tree": "[P, G], the tree that each sample is a leaf of (set tree.branch)",
    "ancestors": "[P, G, D], the nodes on each sample's path (set tree.branch)",
    "token_depth": "[P, G, T], which of these nodes a token belongs to (set tree.branch)",
    "turn": "[P, G, T], the turn that a token belongs to (set tools or environment)",
    "turn_reward": "[P, G, K], what the environment gave for each turn (set environment)",
    "state_hash": "[P, G, K], what was said before each turn (set tools or environment)",
    "turn_truncated": "[P, G, K], whether its limit stopped a turn (set tools or environment)",
    "version": "[P, G, T], the step whose parameters drew a token (set tools or environment)",
    "token_value": "[P, G, T], a critic's estimate at each token",
    "replayed": "[P, G], which samples are of earlier steps (set experience.share)",
    "prefix": "[P], the text that each prompt begins with (set rollout.prefixes)",
    "drift": "[P], how far the policy has moved on each row's last completion",
}
"""Fields that go with the samples or the policy, and that no pass makes.

Who runs a chain on rollouts of their own (`advantages.compute`, `advantages.evaluate`) brings them.
"""

NO_SCORES = {*OF_ANSWERS, *OF_BATCH, *OF_PASS, *OF_SAMPLES, *OF_UPDATE}
"""Names that mean something else than a score."""
