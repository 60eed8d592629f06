"""Rewards, fields and lengths as the command line writes them: arrays of the shapes that are known.

`jaxgrpo advantages NAME --rewards 1,0,0,0 --field truncated=0,0,0,1 --lengths 3,2,4,1`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.core.errors import InputError


class Given(NamedTuple):
    """What a field holds that parts read."""

    shape: str
    kind: type
    meaning: str


PER_TOKEN = "[P, G, T]"
FIELDS: dict[str, Given] = {
    "truncated": Given("[P, G]", bool, "whether the length limit cut the sample"),
    "token_mask": Given(PER_TOKEN, bool, "whether the policy chose the token"),
    "completion_tokens": Given(PER_TOKEN, int, "the tokens"),
    "behavior_logp": Given(PER_TOKEN, float, "log-prob under the policy that sampled"),
    "trainer_logp": Given(PER_TOKEN, float, "log-prob as the trainer computes it"),
    "reference_logp": Given(PER_TOKEN, float, "log-prob under the reference policy"),
    "base_logp": Given(PER_TOKEN, float, "log-prob under the original policy"),
    "token_entropy": Given(PER_TOKEN, float, "entropy of the policy at the token"),
    "token_value": Given(PER_TOKEN, float, "estimated return from the token on"),
    "planning": Given(PER_TOKEN, bool, "whether the token plans"),
    "token_depth": Given(PER_TOKEN, int, "depth of the tree's node that the token belongs to"),
    "answer_logp": Given("[P, G, J]", float, "log-probs of the reference answer's tokens"),
    "answer_mask": Given("[P, J]", bool, "which of the answer's tokens there are"),
    "masked_answer_logp": Given("[P, J]", float, "log-probs of the answer without reasoning"),
    "rubric": Given("[P, G]", float, "1 where the sample meets the rubric, else 0"),
    "classes": Given("[P, G]", float, "id of the kind of answer"),
    "tree": Given("[P, G]", int, "id of the tree that the sample is a leaf of"),
    "ancestors": Given("[P, G, D]", int, "ids of its nodes, root first, -1 for none"),
    "row": Given("[P]", int, "row of the prompt in the data set"),
    "ordinal": Given("[P]", int, "place of the prompt in the run"),
    "step": Given("[]", int, "the training step"),
}
"""What parts read beside rewards; `types.FIELDS` says which of them a run scores by itself."""


def groups(what: str, texts: Sequence[str], default: str | None = None) -> dict[str, list[Any]]:
    """Named groups of numbers from "1,0,nan" and "name=1,0,nan": name -> list of groups.

    >>> groups("--rewards", ["1,0", "0,0"], default="reward")
    {'reward': [[1.0, 0.0], [0.0, 0.0]]}
    """
    named: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, written = text.rpartition("=")
        if not equals and default is None:
            raise InputError(f"{what} {text}: expected name=value,value,...")
        try:
            numbers = [float(word) for word in written.split(",")]
        except ValueError:
            raise InputError(
                f"{what} {text}: expected numbers with commas between, as 1,0,0.5,nan (nan: not"
                " scored), with name= before them where there are several"
            ) from None
        named.setdefault(name or default or "", []).append(numbers)
    for how, sizes in {
        "groups": {name: len(rows) for name, rows in named.items()},
        "samples": {text: text.count(",") + 1 for text in texts},
    }.items():
        if len(set(sizes.values())) > 1:
            each = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise InputError(f"{what}: {how} differ in number ({each}); fill up with nan")
    return named


def read_fields(texts: Sequence[str], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Fields from "name=0,1,1,0", one list per group or one for all, or "name=[[...]]" in JSON."""
    lists = [text for text in texts if not text.partition("=")[2].lstrip().startswith("[")]
    values: dict[str, Any] = {}
    for text in lists:
        for name, rows in groups("--field", [text]).items():
            values.setdefault(name, []).extend(rows)
    for name, rows in values.items():
        known = FIELDS[name].shape if name in FIELDS else "[P]?" if shape[1] > 1 else "[P, G]"
        if known == "[P]" and len(rows) == 1:
            rows = [[number] for number in rows[0]]
        rows = rows * shape[0] if len(rows) == 1 else rows
        alone = known.startswith("[P]") and all(len(row) == 1 for row in rows)
        values[name] = [row[0] for row in rows] if alone else rows
    for text in set(texts) - set(lists):
        name, _, written = text.partition("=")
        try:
            values[name] = json.loads(written)
        except json.JSONDecodeError as error:
            raise InputError(f"--field {text}: not JSON: {error}") from None
    return {name: _field(name, value, shape) for name, value in values.items()}


def _field(name: str, value: Any, shape: tuple[int, int]) -> np.ndarray:
    """The array of a field, of the dtype and sizes that are known of it."""
    sizes = {"P": shape[0], "G": shape[1]}
    known = FIELDS.get(name)
    try:
        array = np.array(value, float)
    except ValueError:
        raise InputError(f"--field {name}: its lists differ in length") from None
    if known and known.kind is not float:
        with np.errstate(invalid="ignore"):
            whole = array.astype(known.kind)
        odd = array[whole != array]
        if odd.size:
            wanted = "true or false" if known.kind is bool else "whole numbers"
            raise InputError(f"--field {name} = {odd.flat[0]:g}: expected {wanted}")
        array = whole
    letters = known.shape.strip("[]").split(", ") if known else ["P", "G"][: array.ndim]
    if name == "step":
        return array.reshape(-1)[0]
    wrong = known is not None and array.ndim != len(letters)
    for letter, size in zip(letters, array.shape, strict=False):
        wrong |= sizes.get(letter, size) != size
    if wrong:
        wanted = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
        raise InputError(f"--field {name} has shape {array.shape}, expected [{wanted}]")
    return array


def token_mask(texts: Sequence[str], shape: tuple[int, int]) -> np.ndarray:
    """[P, G, T], True at the tokens of each sample, from "3,2,4,1": how many it has."""
    length = read_fields([f"lengths={text}" for text in texts], shape)["lengths"]
    length = np.broadcast_to(length.reshape(shape[0], -1), shape)
    return np.arange(max(int(length.max()), 1)) < length[..., None]
