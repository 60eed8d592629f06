"""What the keys of evaluations must fulfil together.

What a key is for stands in keys.py, what one may be by itself in ranges.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxgrpo.config.keys import EvalKeys
from jaxgrpo.config.reading import Values, show
from jaxgrpo.core.errors import pattern_problem

OTHER_FORMAT = "other"
"""The format of a text that no named one fits."""

EVERY_TEXT = "every text fits an empty pattern; write what texts of this format contain"
UNEVALUATED = "nothing is evaluated between the start and the end; set eval.data and eval.every"

READ_BY_RUNS = ("samples", "prompts", "scorer", "formats", "confidence")
"""Keys that a run reads with eval.data alone; `eval`, and `probe` some, with a call's rows too."""


def check(values: Values) -> Iterator[str]:
    """Keys that evaluations cannot go by, or that nothing reads."""
    no_data = "eval.data" in values and values["eval.data"] is None
    every, share = values.get("eval.every"), values.get("eval.confidence_kept", 1.0)
    if every and no_data:
        yield (
            f"eval.every = {every}: there is nothing to evaluate on; name eval.data, as "
            '"task:arithmetic:test", or leave eval.every out'
        )
    if best := values.get("checkpoint.keep_best"):
        where = f"checkpoint.keep_best = {show(best)}"
        if not best.startswith("eval/"):
            yield f'{where}: expected "eval/NAME", as "eval/accuracy"'
        if every == 0:
            yield f"{where}: {UNEVALUATED}"
    for name, pattern in values.get("eval.formats", {}).items():
        where = f"eval.formats.{name} = {show(pattern)}"
        if name == OTHER_FORMAT:
            yield f"{where}: {name} is the name of what fits no format; give another name"
        if problem := pattern_problem(pattern) or (EVERY_TEXT if pattern == "" else None):
            yield f"{where}: {problem}"
    if share > 1:
        yield f"eval.confidence_kept = {share:g}: a share of the voters; set it to 1 (all) or less"
    elif values.get("eval.confidence") is False:
        yield from _unweighted(values)
    for name in ("eval.kl_to_base", "eval.subset", "eval.split"):
        if (value := values.get(name)) and no_data:
            problem = "there is nothing to evaluate on; name eval.data, or leave it out"
            yield f"{name} = {show(value)}: {problem}"


def _unweighted(values: Values) -> Iterator[str]:
    """Keys of votes by confidence, where no vote has any."""
    default = vars(EvalKeys())
    for name in ("confidence_window", "confidence_kept"):
        if (value := values.get(f"eval.{name}", default[name])) != default[name]:
            problem = "nothing reads it without eval.confidence; set that to true, or leave it out"
            yield f"eval.{name} = {value:g}: {problem}"
