"""Reading the tables of a config into checked values, and every problem found on the way.

The keys are in keys.py. What several of them must fulfil together is in checks.py, files and
writing in files.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import math
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxgrpo.config.keys import (
    DEFAULT_RECIPE,
    HINTS,
    KEYS,
    SECTIONS,
    Part,
    RewardKeys,
    ScoreKeys,
)
from jaxgrpo.config.ranges import KINDS, LARGEST, Range, expected_value, kind_for
from jaxgrpo.core.errors import without_passwords

_ADAPTIVE = 'loss.entropy = { use = "adaptive", target = ... }'
TRL = {
    "num_generations": "rollout.group_size",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_completion_length": "rollout.max_completion_tokens",
    "generation_batch_size": "rollout.prompts_per_step",
    "gradient_accumulation_steps": "rollout.prompts_per_step",
    "per_device_train_batch_size": "train.tokens_per_micro_batch",
    "gradient_checkpointing": "train.remat",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "data_seed": "train.seed",
    "beta": 'loss.kl = { use = "forward_kl_k3", beta = ... }',
    "epsilon": 'loss.surrogate = { use = "clip", low = ... }',
    "epsilon_high": 'loss.surrogate = { use = "clip", high = ... }',
    "delta": 'loss.surrogate = { use = "clip", delta = ... }',
    "importance_sampling_level": 'loss.surrogate = { use = "gspo" }',
    "loss_type": "loss.surrogate and loss.reduction",
    "entropy_coef": 'loss.entropy = { use = "bonus", coefficient = ... }',
    "vllm_importance_sampling_correction": "loss.mismatch",
    "sync_ref_model": "reference.reset_every",
    "ref_model_sync_steps": "reference.reset_every",
    "scale_rewards": 'recipe = { use = "like_trl", scale_rewards = ... }',
    "multi_objective_aggregation": 'recipe = { use = "like_trl" } with this option',
    "mask_truncated_completions": 'advantage, with the part { use = "mask_truncated" }',
    "reward_funcs": 'rewards = [{ use = "..." }] or, from Python, rewards=[...]',
    "reward_weights": 'rewards = [{ use = "...", weight = ... }]',
    "model_name_or_path": "model.path",
    "model_init_kwargs": "model.dtype",
    "bf16": 'model.dtype = "bfloat16"',
    "cast_lm_head_to_fp32": "model.float32_head",
    "dataset_name": "data.path",
    "train_dataset": "data.path or, from Python, dataset=rows",
    "eval_dataset": "eval.data",
    "num_generations_eval": "eval.samples",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.data",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "optim": "optimizer.use",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.clip_norm",
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "adam_epsilon": "optimizer.eps",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "metric_for_best_model": "checkpoint.keep_best",
    "load_best_model_at_end": "checkpoint.keep_best",
    "output_dir": "run.dir",
    "log_completions": "run.samples_every",
    "report_to": "tracking.wandb",
    "use_cpu": 'mesh.platform = "cpu"',
    "deepspeed": "mesh.fsdp",
    "fsdp": "mesh.fsdp",
    "steps_per_generation": "train.minibatches",
    "use_transformers_continuous_batching": "rollout.slots",
    "max_tool_calling_iterations": "rollout.max_turns",
    "vllm_tensor_parallel_size": "mesh.sampling_tensor",
    "vllm_importance_sampling_mode": "loss.mismatch",
    "vllm_importance_sampling_clip_max": "loss.mismatch",
    "vllm_importance_sampling_clip_min": "loss.mismatch",
    "use_bias_correction_kl": 'loss.kl = { use = "reverse_kl_off_policy", beta = ... }',
    "top_entropy_quantile": 'advantage, with the part { use = "keep_top_entropy", share = ... }',
    "use_adaptive_entropy": _ADAPTIVE,
    "entropy_coef_min": _ADAPTIVE,
    "entropy_coef_max": _ADAPTIVE,
    "entropy_coef_delta": _ADAPTIVE,
    "entropy_target": _ADAPTIVE,
    "off_policy_mask_threshold": 'loss.surrogate = { use = "off_policy_mask", threshold = ... }',
    "sapo_temperature_neg": 'loss.surrogate = { use = "sapo", tau_negative = ... }',
    "sapo_temperature_pos": 'loss.surrogate = { use = "sapo", tau_positive = ... }',
    "vespo_k_pos": 'loss.surrogate = { use = "vespo", k_positive = ... }',
    "vespo_k_neg": 'loss.surrogate = { use = "vespo", k_negative = ... }',
    "vespo_lambda_pos": 'loss.surrogate = { use = "vespo", lambda_positive = ... }',
    "vespo_lambda_neg": 'loss.surrogate = { use = "vespo", lambda_negative = ... }',
    "weight_decay": "optimizer.weight_decay",
    "optim_args": "optimizer",
    "run_name": "tracking.wandb",
    "save_strategy": "checkpoint.every",
    "peft_config": "lora.rank",
    "environment_factory": "environment",
}
"""What TRL and transformers call keys -> what to write: the key, perhaps with a value."""

ARGUMENTS = {
    "rewards": "rewards=[...]",
    "recipe": "advantage=chain(...)",
    "advantage": "advantage=chain(...)",
    "tools": "tools=[...]",
    "environment": "environment_factory=...",
}
"""Keys of a config -> the arguments of `jaxgrpo.train` that take Python objects in their place."""

Values = dict[str, Any]
"""Values that are right by themselves, under their full names: {"rollout.group_size": 8, ...}."""


def read(raw: Mapping[str, Any], values: Values) -> Iterator[str]:
    """Reads a whole config: the right ones of its values into `values`, with every default.

    Yields: the problems of the others.
    """
    # None, which Python alone can give, is as if the key were left out.
    tables = {name: value for name, value in raw.items() if value is not None or name not in HINTS}
    yield from _rename_tables(tables)
    for section, cls in SECTIONS.items():
        table = tables.get(section, {})
        if isinstance(table, Mapping):
            yield from _read_keys(cls, table, f"{section}.", values)
        else:
            first_key = dataclasses.fields(cls)[0].name
            example = f"[{section}], as {section} = {{ {first_key} = ... }}"
            yield f"{section} = {show(table)}: expected a table, {example}"
    if tables.get("rewards", []) == [] and tables.get("environment"):  # which may give one
        values["rewards"] = ()
    elif "rewards" in tables:
        read_reward = functools.partial(_read_entry, RewardKeys)
        yield from _read_list("rewards", tables["rewards"], read_reward, values)
    else:
        yield 'rewards: missing; give at least one, rewards = [{ use = "..." }]'
    values |= {"scores": (), "tools": (), "environment": None}
    if tables.get("scores"):
        read_score = functools.partial(_read_entry, ScoreKeys)
        yield from _read_list("scores", tables["scores"], read_score, values, holds="name")
    if "tools" in tables:
        yield from _read_value("tools", tables["tools"], tuple[str, ...], Range(), values)
    if "environment" in tables:
        yield from _read_environment(tables["environment"], values)
    if "advantage" in tables:
        yield from _read_list("advantage", tables["advantage"], _read_part, values)
    if "recipe" in tables or "advantage" not in tables:
        recipe = tables.get("recipe", DEFAULT_RECIPE)
        kind = dict if isinstance(recipe, Mapping) else str
        yield from _read_value("recipe", recipe, kind, Range(), values)


def make(cls: Any, values: Values, path: str) -> Any:
    """The table of a config, RolloutKeys or another, from values under the names that begin so."""
    names = (field.name for field in dataclasses.fields(cls))
    return cls(**{name: values[path + name] for name in names})


def _read_keys(cls: Any, table: Mapping[str, Any], path: str, values: Values) -> Iterator[str]:
    """Reads one table. What is no key becomes an option if the table takes any."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    has_options = fields.pop("options", None)
    unknown = {name: value for name, value in table.items() if name not in fields}
    likely_keys = set()
    if has_options:
        values[f"{path}options"], unknown = unknown, {}
    for name in unknown:
        near = TRL.get(name) or _nearest_key(str(name), path, list(fields))
        likely_keys.add(near and near.split()[0])
        hint = f"did you mean {near}?" if near else f"the keys here are {', '.join(fields)}"
        yield f"{path}{name}: unknown key; {hint}"
    for name, field in fields.items():
        where, limits = path + name, field.metadata["range"]
        default_factory: Any = field.default_factory
        has_table = default_factory is not dataclasses.MISSING
        default: Any = default_factory() if has_table else field.default
        if name in table and not (table[name] is None and default is None):  # None: not set
            value = table[name]
            if isinstance(value, Mapping) and has_table:
                value = {**default, **value}  # options alone: of the default part
            yield from _read_value(where, value, hints[name], limits, values)
        elif default is not dataclasses.MISSING:
            values[where] = default
        elif where not in likely_keys:  # a key that is merely misspelt is one problem, not two
            yield f"{where}: missing; expected {expected_value(hints[name], limits)}"


def show(value: Any) -> str:
    """A value as written in the file, cut if it is long."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # Python writes out numbers of at most some 4,000 digits
        return "(a number of thousands of digits)"
    text = text.encode("utf-8", "backslashreplace").decode()  # halves of a surrogate pair
    return text if len(text) <= 60 else text[:57] + "..."


def _read_environment(value: Any, values: Values) -> Iterator[str]:
    """Reads the class of an environment, or those of several by their names."""
    entries = value if isinstance(value, Mapping) else {"": value}
    for name, entry in entries.items():
        if not isinstance(entry, str) or not entry:
            where = f"environment.{name}" if name else "environment"
            yield (
                f'{where} = {show(entry)}: expected a class, "mine.py:Env", or several by name, '
                f'{{ game = "mine.py:Game" }}{_python_hint(where, entry)}'
            )
    values["environment"] = dict(value) if isinstance(value, Mapping) else value


def _python_hint(where: str, value: Any) -> str:
    """What to do with objects of Python that stand in a config; "" where there are none."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    parts = [[*entry.values()] if isinstance(entry, Mapping) else [entry] for entry in entries]
    name = where.replace(".", "[").partition("[")[0]
    if name not in ARGUMENTS or not any(map(callable, itertools.chain(*parts))):
        return ""
    return f"; objects of Python are given beside the config, train(config, {ARGUMENTS[name]})"


def _rename_tables(tables: dict[str, Any]) -> Iterator[str]:
    """Reports unknown tables, and gives a misspelt one the name that was meant as well."""
    for name in [name for name in tables if name not in HINTS]:
        if name in KEYS:  # a name in quotes, or from Python
            table, _, key = name.partition(".")
            yield f"{name}: unknown key; write it without quotes, or as {table} = {{ {key} = ... }}"
            if isinstance(entries := tables.get(table, {}), Mapping):
                tables[table] = {key: tables[name], **entries}
            continue
        near = difflib.get_close_matches(str(name), HINTS, n=1)  # Python may give a number
        homes = near or [key for key in KEYS if key.endswith(f".{name}")]
        homes = [TRL[name]] if name in TRL else homes
        hint = f"did you mean {' or '.join(homes)}?" if homes else f"there are {', '.join(HINTS)}"
        yield f"{name}: unknown key; {hint}"
        if near:
            tables.setdefault(near[0], tables[name])


def _read_value(where: str, value: Any, hint: Any, limits: Range, values: Values) -> Iterator[str]:
    kind = kind_for(hint)
    if limits.entries and isinstance(value, (list, tuple)):
        read_entry = functools.partial(_read_entry, limits.entries)
        yield from _read_list(where, value, read_entry, values, limits.holds)
        return
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < sys.float_info.max else math.inf
    if kind is tuple:
        yield from _read_texts(where, value, limits, values)
    elif kind is Mapping and isinstance(value, Mapping):
        values[where] = dict(value)
    elif type(value) is not kind:
        expected = KINDS[kind].format(holds=limits.holds)
        yield f"{where} = {show(value)}: expected {expected}{_python_hint(where, value)}"
    elif kind is float and not math.isfinite(value):
        yield f"{where} = {value}: expected a finite number"
    elif kind is dict:
        yield from _read_part(where, value, values, limits.holds)
    elif not limits.allows(value):
        expected = "some text" if value == "" and not limits.choices else limits
        if limits.at_most == math.inf and isinstance(value, int) and value > LARGEST:
            expected = f"at most {LARGEST}"
        yield f"{where} = {show(value)}: expected {expected}"
    else:
        values[where] = value


def _read_texts(where: str, value: Any, limits: Range, values: Values) -> Iterator[str]:
    are_texts = isinstance(value, (list, tuple)) and all(
        isinstance(text, str) and text for text in value
    )
    if not are_texts:
        yield f"{where} = {show(value)}: expected {KINDS[tuple]}{_python_hint(where, value)}"
    elif limits.choices and (odd := [text for text in value if text not in limits.choices]):
        yield f"{where} = {show(value)}: {show(odd[0])} is not {limits}"
    else:
        values[where] = tuple(value)


def _read_part(where: str, value: Part, values: Values, holds: str = "use") -> Iterator[str]:
    if holds not in value:
        lacks = "names no part" if holds == "use" else f"has no {holds}"
        yield f'{where} = {show(value)}: {lacks}; add {holds} = "..."'
    elif not isinstance(value[holds], str) or not value[holds]:
        hint = _python_hint(where, value[holds])
        yield f"{where}.{holds} = {show(value[holds])}: expected {KINDS[str]}{hint}"
    else:
        values[where] = dict(value)


def _read_entry(cls: Any, where: str, entry: Any, values: Values) -> Iterator[str]:
    """A table of a list, with the keys of a dataclass."""
    entry_values: Values = {}
    problems = list(_read_keys(cls, entry, f"{where}.", entry_values))
    if not problems:
        values[where] = make(cls, entry_values, f"{where}.")
    yield from problems


def _read_list(
    where: str,
    entries: Any,
    read_entry: Callable[..., Iterator[str]],
    values: Values,
    holds: str = "use",
) -> Iterator[str]:
    """A list of tables; each right one is also a value of its own, "advantage[0]", ..."""
    are_tables = isinstance(entries, (list, tuple)) and all(
        isinstance(entry, Mapping) for entry in entries
    )
    if not are_tables or not entries:
        expected = f'a list of tables, {where} = [{{ {holds} = "..." }}]'
        yield f"{where} = {show(entries)}: expected {expected}{_python_hint(where, entries)}"
        return
    named_entries = {f"{where}[{index}]": entry for index, entry in enumerate(entries)}
    for name, entry in named_entries.items():
        yield from read_entry(name, entry, values)
    if named_entries.keys() <= values.keys():
        values[where] = tuple(values[name] for name in named_entries)


def _nearest_key(name: str, path: str, fields: list[str]) -> str | None:
    """The full name of the key that was probably meant: one of this table, or of another one."""
    if near := difflib.get_close_matches(name, fields, n=1):
        return path + near[0]
    homes = {key.rpartition(".")[2]: key for key in reversed(KEYS)}  # the first one counts
    near = difflib.get_close_matches(name, homes, n=1, cutoff=0.75)
    return homes[near[0]] if near else None


def printed_entry(text: str) -> str:
    """A value of `files.entries` without the passwords of its URLs; JSON as before.

    >>> printed_entry('["https://me:secret@host/d", "a:b@c"]'), printed_entry("0.1")
    ('["https://me:...@host/d", "a:b@c"]', '0.1')
    """

    def hide(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(hide, value))
        return without_passwords(value) if isinstance(value, str) else value

    return json.dumps(hide(json.loads(text)), ensure_ascii=False) if "://" in text else text
