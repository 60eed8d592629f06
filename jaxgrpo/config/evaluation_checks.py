"""What the keys of evaluation must fulfil together, checked as config_checks.py says."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxgrpo.config.reading import Values, show


def check(values: Values) -> Iterator[str]:
    """All problems of what is evaluated and how."""
    for check_some in (_data, _best, _formats, _kept, _second_pass):
        yield from check_some(values)


def _data(values: Values) -> Iterator[str]:
    if values.get("eval.every") and "eval.data" in values and values["eval.data"] is None:
        yield (
            f"eval.every = {values['eval.every']}: there is nothing to evaluate on; name "
            'eval.data, as "task:arithmetic:test", or leave eval.every out'
        )


def _best(values: Values) -> Iterator[str]:
    best = values.get("checkpoint.keep_best")
    if best is None:
        return
    if not best.startswith("eval/"):
        yield f'checkpoint.keep_best = {show(best)}: expected "eval/NAME", as "eval/accuracy"'
    if not values.get("eval.every", 1):
        yield (
            f"checkpoint.keep_best = {show(best)}: nothing is evaluated between the start and the "
            "end; set eval.data and eval.every"
        )


def _formats(values: Values) -> Iterator[str]:
    from jaxgrpo.config.keys import OTHER_FORMAT

    for name, pattern in values.get("eval.formats", {}).items():
        where = f"eval.formats.{name} = {show(pattern)}"
        if name == OTHER_FORMAT:
            yield f"{where}: {OTHER_FORMAT} is the name of what fits no format; give another name"
        if not isinstance(pattern, str):
            yield f"{where}: expected a regular expression as a text"
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"{where}: is no regular expression: {error}"


def _kept(values: Values) -> Iterator[str]:
    kept = values.get("eval.confidence_kept", 1.0)
    if kept > 1:
        yield f"eval.confidence_kept = {kept:g}: a share of the voters; set it to 1 (all) or less"


def _second_pass(values: Values) -> Iterator[str]:
    for name in ("eval.confidence", "eval.kl_to_base"):
        if values.get(name) and "eval.data" in values and values["eval.data"] is None:
            yield f"{name} = true: there is nothing to evaluate on; name eval.data, or leave it out"
