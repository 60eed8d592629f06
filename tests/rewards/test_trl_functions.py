"""Functions written for TRL run unchanged, by the name of their module.

TRL is not needed: a package with functions of the same names and kinds stands in for it. Where TRL
is installed, the same tests also call its own.
"""

import importlib.util
import sys

import numpy as np
import pytest

from jaxgrpo.config import own_code
from jaxgrpo.rewards import Reward, RewardError, build, call_rewards, callable_name, check
from jaxgrpo.rewards.protocol import option_names

PACKAGES = ["trl_like", *(["trl"] if importlib.util.find_spec("trl") else [])]

LAZY = """
import importlib

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(importlib.import_module("trl_like.functions"), name)
"""

FUNCTIONS = """
import re
from collections.abc import Callable


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [float(text.startswith("<think>") and "</think>" in text) for text in contents]


def accuracy_reward(
    completions: list[list[dict[str, str]]],
    solution: list[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs,
) -> list[float | None]:
    boxes = [re.findall(r"boxed{(.*?)}", completion[0]["content"]) for completion in completions]
    if log_extra:
        log_extra("solution", list(solution))
    return [
        float(box == [gold]) if gold else None for box, gold in zip(boxes, solution, strict=True)
    ]


class _Overlong:
    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, longest, cache):
        self.longest, self.cache = longest, cache

    def __call__(self, completion_ids, **kwargs):
        over = [len(ids) - self.longest + self.cache for ids in completion_ids]
        return [-min(max(n, 0) / self.cache, 1) for n in over]


def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    return _Overlong(max_completion_len, soft_punish_cache)
"""

PROMPTS = [[{"role": "user", "content": "1+1"}]] * 3
TEXTS = ["<think>1+1=2</think>$\\boxed{2}$", r"$\boxed{3}$", "<think>2"]
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in TEXTS]
IDS = [[1, 2, 3, 4], [2], [1, 2]]
COLUMNS = {"solution": ["2", "2", ""]}


@pytest.fixture(params=PACKAGES)
def load(request, tmp_path, monkeypatch):
    folder = tmp_path / "trl_like"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "rewards.py").write_text(LAZY)
    (folder / "functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: own_code.load(f"{request.param}.rewards:{name}")
    for name in [name for name in sys.modules if name.startswith("trl_like")]:
        del sys.modules[name]


def call(**functions):
    rewards = [Reward(*pair) for pair in functions.items()]
    return call_rewards(rewards, PROMPTS, COMPLETIONS, IDS, COLUMNS)


def test_a_function_on_messages_is_called_as_trl_calls_it(load):
    scores, _ = call(think=build(load("think_format_reward")))
    np.testing.assert_array_equal(scores["think"], [1, 0, 0])


def test_a_function_that_logs_and_skips_samples_does_so_here(load):
    scores, log = call(right=load("accuracy_reward"))
    if importlib.util.find_spec("math_verify") or "trl_like" in load("accuracy_reward").__module__:
        np.testing.assert_array_equal(scores["right"], [1, 0, np.nan])
        assert log.extra["solution"] == ["2", "2", ""]


def test_an_object_that_a_factory_made_keeps_its_name(load):
    overlong = load("get_soft_overlong_punishment")(3, 2)
    assert callable_name(overlong) == "soft_overlong_punishment_reward"
    np.testing.assert_array_equal(call(overlong=overlong)[0]["overlong"], [-1, 0, -0.5])


def test_what_the_trainer_passes_is_no_option_and_a_missing_column_is_named(load):
    right = load("accuracy_reward")
    check("right", right, ["solution"])
    assert option_names(right) == []
    with pytest.raises(RewardError, match="asks for 'solution', which does not exist"):
        check("right", right, ["answer"])


def test_a_name_that_is_not_there_is_refused_in_a_lazy_package_too(load):
    with pytest.raises(ValueError, match="has no 'think_formt_reward'"):
        load("think_formt_reward")
