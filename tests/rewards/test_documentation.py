"""What docs/rewards.md and the docstrings show does what they say."""

import re

import numpy as np
import pytest

from jaxgrpo import rewards
from jaxgrpo.config.keys import RewardKeys
from jaxgrpo.rewards.protocol import PASSED, option_names


@pytest.fixture(scope="module")
def text(repository):
    return (repository / "docs" / "rewards.md").read_text()


def test_the_functions_shown_take_the_protocol(text):
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    for block in blocks[:2]:
        exec(block, names)
    for name in ("short_and_right", "judged"):
        rewards.check(name, names[name], ["answer"])
    short = rewards.Reward("short", names["short_and_right"])
    scores, _ = rewards.call_rewards([short], ["p"], ["so 72"], [[1]], {"answer": ["72"]})
    np.testing.assert_array_equal(scores["short"], [1])


def test_every_key_keyword_reward_and_option_is_described(text):
    for name in RewardKeys.__dataclass_fields__.keys() - {"options"}:
        assert f"| `{name}` |" in text
    for keyword in PASSED:
        assert f"`{keyword}" in text
    for field in rewards.TrainerState.__dataclass_fields__:
        assert f"`{field}`" in text
    for name, function in rewards.rewards.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        for option in option_names(function):
            assert f"`{option}" in row
