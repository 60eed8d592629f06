"""The public words: each is what it says after any import, and works the second time as well."""

import dataclasses
import importlib
import inspect
import pkgutil
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import small_run
import tiny
from quick import all_but

import jaxgrpo as jg


def fields(kind):
    """A data type with nothing in it."""
    return kind(**{field.name: None for field in dataclasses.fields(kind)})


def unchanged(signal, rollouts):
    return signal


def updated(signal, state, rollouts):
    return signal, state, {}


def runs(tmp_path):
    """Configs for one run after the other."""
    number = 0
    while True:
        number += 1
        yield small_run.config(tmp_path / str(number), **{"train.steps": 1})


def saved(folder):
    jg.save_model(tiny.model(), tiny.params(), folder)
    return folder


def calls(tmp_path):
    """Word -> a call of it."""
    configs, base = runs(tmp_path), small_run.base()
    rows = [{"prompt": "1+2=", "answer": "3"}]
    sizes: dict[str, Any] = {"rollout": {"max_prompt_tokens": 8, "max_completion_tokens": 8}}
    numbers, batch = jnp.ones(3), (np.ones((2, 3), int),) * 2
    return {
        "AdvantageTransform": lambda: jg.AdvantageTransform("own", lambda spec: (), updated),
        "Config": lambda: jg.Config(**vars(next(configs))),
        "ConfigError": lambda: jg.ConfigError("run.toml", ["wrong"]),
        "InputError": lambda: jg.InputError("wrong"),
        "Learner": lambda: fields(jg.Learner),
        "Max": lambda: jg.Max(value=numbers[0]).result(),
        "Mean": lambda: jg.Mean(total=numbers[0], weight=numbers[0]).result(),
        "Prompts": lambda: fields(jg.Prompts),
        "RolloutSpec": lambda: jg.RolloutSpec(1, 2, 3, 4),
        "Rollouts": lambda: tiny.rollouts(np.eye(2)),
        "Rules": lambda: jg.Rules(lambda key, row: key, lambda state, *turn: turn),
        "Run": lambda: jg.Run(tmp_path, {}, fields(jg.Learner), fields(jg.Stream)),
        "Setup": lambda: jg.Setup._make(range(len(jg.Setup._fields))),
        "Signal": lambda: jg.Signal(value=numbers, mask=numbers > 0),
        "Stream": lambda: fields(jg.Stream),
        "TrainBatch": lambda: fields(jg.TrainBatch),
        "chain": lambda: jg.chain(jg.sum_rewards()),
        "evaluate": lambda: jg.evaluate(base, data=rows, scorer="math", samples=2, **sizes)[
            "pass@1"
        ],
        "probe": lambda: jg.probe(base, data=rows, reward="math", samples=2, **sizes),
        "sample": lambda: jg.sample(base, ["1+2="], **sizes)[0]["completion"],
        "divide_by_group_std": lambda: jg.divide_by_group_std(),
        "load_model": lambda: jg.load_model(saved(tmp_path / "model")),
        "load_config": lambda: jg.load_config("quickstart"),
        "logits": lambda: jg.logits(tiny.model(), tiny.params(), *batch),
        "mask_truncated": lambda: jg.mask_truncated(),
        "mask_zero_variance": lambda: jg.mask_zero_variance(),
        "parameter_hash": lambda: jg.parameter_hash({"a": numbers}),
        "per_reward": lambda: jg.per_reward(jg.subtract_group_mean()),
        "save_model": lambda: saved(tmp_path / "model"),
        "setup": lambda: jg.setup(next(configs)).config.train,
        "sign": lambda: jg.sign(),
        "stream": lambda: jg.stream("length", lambda rollouts: rollouts.token_mask.sum(-1)),
        "subtract_group_mean": lambda: jg.subtract_group_mean(),
        "sum_rewards": lambda: jg.sum_rewards(),
        "to_tokens": lambda: jg.to_tokens(),
        "token_logp": lambda: jg.token_logp(tiny.model(), tiny.params(), *batch),
        "train": lambda: jg.train(next(configs)).summary["parameter_hash"],
        "transform": lambda: jg.transform(unchanged),
    }


WORDS = sorted(word for word in jg.__all__ if callable(getattr(jg, word)))
LONG = {"evaluate", "probe", "train"}
"""Words that sample; the tests of their commands call them too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    all_but(LONG, WORDS),
)
def test_every_public_word_can_be_called_twice(word, tmp_path):
    call = calls(tmp_path)[word]
    first, second = call(), call()
    assert type(first) is type(second)
    if isinstance(first, str | float):
        assert first == second


def test_words_stay_functions_when_modules_are_imported():
    for module in pkgutil.iter_modules(jg.__path__, "jaxgrpo."):
        if module.ispkg:
            importlib.import_module(module.name)
    for word in WORDS:
        assert not inspect.ismodule(getattr(jg, word)), word
    modules = {word for word in jg.__all__ if isinstance(getattr(jg, word), types.ModuleType)}
    assert modules.isdisjoint(WORDS)
    with pytest.raises(AttributeError, match="subtract_group_mean"):
        getattr(jg, "substract_group_mean")  # noqa: B009
