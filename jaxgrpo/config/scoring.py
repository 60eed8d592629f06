"""The scores that a config adds: what its entries must fulfil, and how passes know them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from jaxgrpo.config.keys import ScoreKeys
from jaxgrpo.config.own_code import is_reference, short_name
from jaxgrpo.config.reading import Values, show
from jaxgrpo.core.scores import NO_SCORES, SCORES, STRIDE, Score, at_student_tokens


def make_scores(
    entries: Sequence[ScoreKeys],
    counts: Mapping[str, int] = {},
    student_named: Collection[str] = (),
) -> dict[str, Score]:
    """The scores that a method of a run may need: those of every run, and the config's.

    Args:
      counts, student_named: `Objective.counts` and `Objective.at_student_tokens` of the method.
    """
    scores = {entry.name: _score(entry) for entry in entries}
    counted = {name: score._replace(count=counts.get(name, 0)) for name, score in scores.items()}
    return SCORES | at_student_tokens(counted, counted.keys() & student_named)


def check(values: Values) -> Iterator[str]:
    """Names that stand twice or mean something else, and keys that nothing reads."""
    entries: Sequence[ScoreKeys] = values.get("scores", ())
    titles = {reward.title for reward in values.get("rewards", ())}
    names = [entry.name for entry in entries]
    prompts: dict[str, str] = {}  # of files too: a field is called as its column or function is
    for index, entry in enumerate(entries):
        where = f"scores[{index}]"
        if problem := _name_problem(entry.name, names[:index], titles):
            yield f"{where}.name = {show(entry.name)}: {problem}"
        prompt = entry.prompt or ""
        if prompts.setdefault(short_name(prompt), prompt) != prompt:
            yield (
                f"{where}.prompt = {show(prompt)}: {show(prompts[short_name(prompt)])} is called "
                f"{short_name(prompt)} too; give the function another name"
            )
        if entry.name in SCORES and _score(entry)._replace(stride=STRIDE) != (
            SCORES[entry.name]._replace(stride=STRIDE)
        ):
            built_in = SCORES[entry.name]
            yield (
                f'{where}.name = "{entry.name}": it is built in, the {built_in.quantity} by the '
                f"{built_in.policy} policy, and only its stride may be set: take another name"
            )
        if entry.policies and entry.policy != ScoreKeys(name=entry.name).policy:
            yield (
                f"{where}.policy = {show(entry.policy)}: policies names several, one for each row: "
                "leave one of the two out"
            )
        if not all(isinstance(policy, str) and policy for policy in entry.policies.values()):
            yield f'{where}.policies = {show(entry.policies)}: expected {{ name = "model" }}'
        yield from _unread(where, entry)


def _unread(where: str, entry: ScoreKeys) -> Iterator[str]:
    """Keys that nothing reads."""
    if entry.quantity == "rank" and entry.temperature is not None:
        yield (
            f"{where}.temperature = {entry.temperature:g}: a rank is the same at all of them: "
            "leave it out"
        )
    if entry.quantity != "effective_rank" and entry.stride != STRIDE:
        yield (
            f'{where}.stride = {entry.stride}: only quantity = "effective_rank" reads it, and '
            f'this is "{entry.quantity}": leave it out'
        )
    if entry.max_prompt_tokens is not None and not is_reference(entry.prompt or ""):
        prompt = "no prompt" if entry.prompt is None else f"the column {show(entry.prompt)}"
        yield (
            f"{where}.max_prompt_tokens = {entry.max_prompt_tokens}: only a prompt of your own "
            f"function reads it, and this has {prompt}: leave it out"
        )
    if entry.choose_by != ScoreKeys(name=entry.name).choose_by and not entry.policies:
        yield (
            f"{where}.choose_by = {show(entry.choose_by)}: nothing reads it without policies: set "
            "them, or leave it out"
        )


def _score(entry: ScoreKeys) -> Score:
    prompt = entry.prompt and short_name(entry.prompt)
    shape = "[P, G, T, 2, k + 1]" if entry.quantity == "likeliest" else "[P, G, T]"
    score = Score(shape, entry.policy, entry.quantity, prompt, entry.temperature, entry.stride)
    return score._replace(policies=(*entry.policies.values(),))


def _name_problem(name: str, earlier: Sequence[str], rewards: set[str]) -> str:
    """What is wrong with the name of a score; "" if nothing."""
    if not re.fullmatch(r"\w+", name):
        return 'expected letters, digits and "_", as "teacher_logp"'
    if name in earlier:
        return "it stands twice; give each a name of its own"
    if name in rewards:
        return "a reward has this name; give the score another"
    if name in NO_SCORES:
        return "this is another field of a method; take another name"
    return ""
