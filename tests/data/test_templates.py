"""Prompts made of columns."""

from __future__ import annotations

import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.prompts import fill, is_template, placeholders


def test_braces_tell_a_template_from_a_column():
    assert [is_template(text) for text in ("question", "{question}", "a}", "my column")] == [
        *(False, True, True, False)
    ]


def test_columns_of_any_name_are_filled_in_and_doubled_braces_stay_as_one():
    template = "{{x}} {a b}, {n:2}!{a b} {{{n:2}}}"
    assert placeholders(template) == ["a b", "n:2"]
    assert fill(template, {"a b": "{y}", "n:2": 3}) == "{x} {y}, 3!{y} {3}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Say {question", "brace at character 4 has no partner"),
        ("Say question}", "brace at character 12 has no partner"),
        ("Say {}", "brace at character 4 names no column"),
        ("Say {{question}}", "names no column, so all prompts would be the same"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused_with_the_place(template, message):
    with pytest.raises(InputError, match=message):
        placeholders(template)
