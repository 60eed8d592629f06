"""What a config may ask of an evaluation: each problem with its place and remedy."""

from __future__ import annotations

import tomllib

import pytest

from jaxgrpo.config import files
from jaxgrpo.core.errors import ConfigError

LEAST = {
    "model": {"path": "base"},
    "data": {"path": "task:arithmetic:train"},
    "rewards": [{"use": "arithmetic"}],
    "optimizer": {"learning_rate": 1e-3},
    "rollout": {
        "prompts_per_step": 8,
        "group_size": 4,
        "max_prompt_tokens": 8,
        "max_completion_tokens": 24,
    },
    "train": {"steps": 3},
    "run": {"dir": "runs/r"},
}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('eval.formats={ box = "[" }', 'eval.formats.box = "[": is no regular expression: '),
        ("eval.formats={ box = 3 }", "eval.formats.box = 3: expected a regular expression"),
        ('eval.formats={ other = "x" }', "other is the name of what fits no format; give another"),
        ("eval.formats=3", "eval.formats = 3: expected"),
        ("eval.confidence_kept=1.5", "eval.confidence_kept = 1.5: a share of the voters"),
        ("eval.confidence_kept=0", "eval.confidence_kept = 0.0: expected above 0"),
        ("eval.confidence_window=0", "eval.confidence_window = 0: expected 1 or more"),
        ("eval.kl_to_base=true", "eval.kl_to_base = true: there is nothing to evaluate on"),
        ("eval.confidence=true", "eval.confidence = true: there is nothing to evaluate on"),
    ],
)
def test_each_problem_says_where_what_and_what_to_do(override, message):
    with pytest.raises(ConfigError) as caught:
        files.from_dict(LEAST, [override])
    (problem,) = caught.value.problems
    assert message in problem


def test_formats_keep_their_order_and_survive_being_written():
    formats = {"tags": "<answer>", "code": "```.*def", "number": r"^\d+$"}
    asked = {"data": "task:arithmetic:test", "formats": formats, "confidence": True}
    read = files.from_dict({**LEAST, "eval": asked})
    assert list(read.eval.formats.items()) == list(formats.items())
    again = files.from_dict(tomllib.loads(files.to_toml(read)))
    assert list(again.eval.formats.items()) == list(formats.items())
    assert again.eval == read.eval
