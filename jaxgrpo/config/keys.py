"""The keys of a config, and reading tables into them: checked values, and every problem on the way.

One frozen dataclass per table has each default in one place; `key` states the range of a value
beside it. What several keys must fulfil together is in checks.py, files and writing in files.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgrpo.config.own_code import file_of, short_name
from jaxgrpo.data.sources import FILES, is_name
from jaxgrpo.data.tasks import PREFIX

_PACKAGE = Path(__file__).resolve().parent.parent

SHIPPED = next(filter(Path.is_dir, [_PACKAGE / "configs"]), _PACKAGE.parent / "configs")
"""The configs that come with the package: inside it when installed, beside it in a checkout."""

LARGEST = 2**31 - 1
"""Of a whole number, where its key says nothing else: devices count in 32 bits."""

DEFAULT_RECIPE = "grpo"
"""The recipe if neither `recipe` nor `advantage` is given."""


class Range(NamedTuple):
    """What a key's value may be, beside its type."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    choices: tuple[str, ...] = ()
    may_be_empty: bool = False
    holds: str = "use"  # of a table: the entry that it must have

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(f'"{choice}"' for choice in self.choices)
        if self.above > -math.inf:
            return f"above {self.above:g}"
        if self.at_most < math.inf:
            return f"{self.at_least:g} to {self.at_most}"
        return f"{self.at_least:g} or more"

    def allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, str):
            return self.may_be_empty or bool(value)
        return self.at_least <= value <= self.most(value) and value > self.above

    def most(self, value: Any) -> float:
        """The largest number that may be given where `value` is."""
        is_free = self.at_most == math.inf and type(value) is int
        return LARGEST if is_free else self.at_most


def key(default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """A key with its default (none: the key must be given) and its range."""
    computed = isinstance(default, dict)  # a fresh one for every config
    given: Any = {"default_factory": default.copy} if computed else {"default": default}
    return dataclasses.field(**given, metadata={"range": Range(**limits)})


Part = dict[str, Any]
"""A part by name and its options, {"use": ..., option: value, ...}. Its name is a built-in key,
"path/file.py:function" or "package.module:function"."""


def options_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a part, without its name."""
    return {name: value for name, value in part.items() if name != "use"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardKeys:
    """A reward, its weight in the sum and its name in metrics and rows."""

    use: str = key()
    weight: float = key(1.0)
    name: str | None = key(None)  # None: the name in `use`
    on_error: str = key("raise", choices=("raise", "unscored"))  # what follows if it raises
    timeout: float | None = key(None, above=0)  # seconds for one batch; beyond it as if it raised
    flip: float = key(0.0, at_least=0, at_most=0.5)  # label noise: the share of 0/1 rewards that
    # is flipped, in training only
    options: dict[str, Any] = key({})

    @property
    def title(self) -> str:
        """Its name in metrics, rows and weights."""
        return self.name or short_name(self.use)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelKeys:
    path: str = key()  # a model folder as transformers writes it, or owner/name on the hub
    revision: str | None = key(None)  # of the hub: a branch, tag or commit; None: its main branch
    dtype: str = key("float32", choices=("float32", "bfloat16"))  # of the forward pass; the
    # weights that are trained are float32
    float32_head: bool = key(False)  # last norm, output head and logits, in sampling too


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataKeys:
    path: str | None = key(None)  # a file, folder, owner/name on the hub, or "task:NAME:SPLIT";
    # None: rows are given from Python
    subset: str | None = key(None)  # of a data set of the hub that has several
    split: str | None = key(None)  # of a folder or of the hub; None: the only one
    revision: str | None = key(None)  # of the hub: a branch, tag or commit
    delimiter: str = key(",")  # of a CSV file, one character; of eval.data too
    prompt: str = key("prompt")  # column of the prompt, or a template "{column} and text"
    answer: str = key("answer", may_be_empty=True)  # column of the answer; "": none
    system: str | None = key(None)  # text of a system message in front of every prompt
    chat_template: str = key("auto")  # "auto": the tokenizer's if it has one; "none"; a file
    chat_template_kwargs: Mapping[str, Any] = key({})  # variables of the template
    too_long: str = key("error", choices=("error", "drop"))  # beyond rollout.max_prompt_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossKeys:
    surrogate: Part = key({"use": "clip"})
    reduction: Part = key({"use": "token_mean"})
    kl: Part | None = key(None)  # None: no penalty and no reference policy
    entropy: Part | None = key(None)  # None: neither bonus nor control
    mismatch: Part | None = key(None)  # of sampler and trainer: weights, or what is dropped
    proximal: str = key("behavior", choices=("behavior", "trainer"))
    penalties_on: str = key("all", choices=("all", "live"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceKeys:
    """When the reference becomes the policy of the moment, with fresh optimizer moments."""

    reset_every: int = key(0, at_least=0)  # steps since the last reset; 0: never for this reason
    reset_kl_above: float | None = key(None, above=0)  # nats per token, of a step's metric kl
    reset_patience: int = key(0, at_least=0)  # evaluations without a new best; 0: off
    reset_metric: str = key("eval/accuracy")  # which evaluation patience is about


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerKeys:
    use: str = key("adamw")  # any optax factory; other entries of the table are its options
    learning_rate: float = key(at_least=0)
    clip_norm: float = key(1.0, at_least=0)  # global gradient norm; 0: off
    warmup_steps: int = key(0, at_least=0)
    schedule: str = key("constant", choices=("constant", "linear", "cosine"))
    options: dict[str, Any] = key({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutKeys:
    prompts_per_step: int = key(at_least=1)
    group_size: int = key(at_least=1)  # samples per prompt
    max_prompt_tokens: int = key(at_least=1)
    max_completion_tokens: int = key(at_least=1)
    temperature: float = key(1.0, above=0)
    top_k: int = key(0, at_least=0)  # sample from the top_k likeliest tokens; 0: from all
    top_p: float = key(1.0, above=0)  # sample from the likeliest tokens of this probability
    min_p: float = key(0.0, at_least=0)  # and of at least this share of the likeliest's probability
    min_completion_tokens: int = key(0, at_least=0)  # no end token is drawn before
    stop_strings: tuple[str, ...] = key(())  # a sample ends with the token that completes one
    early_stop: Mapping[str, float] | None = key(None)  # { confidence = 8.0 }: as EarlyStop
    slots: int | None = key(None, at_least=1)  # samples decoded at once; None: what fits
    overlap_rewards: bool = key(True)  # judge groups that have ended while others decode
    segment_tokens: int = key(16, at_least=1)  # decoded between two looks at what has ended
    prompts: Part = key({"use": "sequential"})  # the policy that chooses what is sampled next
    refill: Mapping[str, float] | None = key(None)  # { factor = 3.0 }, groups generated at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainKeys:
    steps: int = key(at_least=1)
    seed: int = key(0, at_least=0, at_most=2**32 - 1)  # JAX reads 32 bits: 2**32 would draw as 0
    tokens_per_micro_batch: int | None = key(None, at_least=1)  # per bin; None: `tokens_of`
    remat: str = key("auto", choices=("auto", "none", "attention", "dots", "full"))
    stop_after_not_finite: int = key(10, at_least=0)  # steps in a row; 0: never


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalKeys:
    data: str | None = key(None)  # as data.path; None: no evaluation
    subset: str | None = key(None)  # None: data.subset if eval.data is data.path
    split: str | None = key(None)  # of a folder or of the hub; None: the only one
    every: int = key(0, at_least=0)  # steps; 0: at the start and the end only
    samples: int = key(16, at_least=1)  # per prompt, for pass@k
    prompts: int | None = key(None, at_least=1)  # None: all
    scorer: str | None = key(None)  # judges success, > 0.5; None: the first reward
    formats: Mapping[str, str] = key({})  # name -> regular expression, the first found counts
    confidence: bool = key(False)  # of tokens, for weighted votes: a second pass over the samples
    confidence_window: int = key(2048, at_least=1)  # tokens; DeepConf, arXiv 2508.15260
    confidence_kept: float = key(0.9, above=0)  # share of the voters, the most confident
    kl_to_base: bool = key(False)  # a second pass, and the base's parameters in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
    every: int = key(50, at_least=1)  # steps
    keep: int = key(2, at_least=1)  # the latest so many stay
    keep_best: str | None = key(None)  # a metric of evaluation, as "eval/accuracy"; None: none


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshKeys:
    data: int = key(0, at_least=0)  # 0: the devices that the other axes leave
    fsdp: int = key(1, at_least=1)
    tensor: int = key(1, at_least=1)
    context: int = key(1, at_least=1)
    platform: str = key("auto", choices=("auto", "cpu", "gpu", "tpu"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackingKeys:
    tensorboard: bool = key(True)  # event files in the run folder
    wandb: dict[str, Any] | None = key(None, holds="project")  # options of wandb.init


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunKeys:
    dir: str = key()  # relative to where the command is started
    stop_grace: float = key(300.0, above=0)  # seconds from a stop signal to the end, saved or not
    stuck_after: float = key(3600.0, at_least=0)  # seconds without progress that end it; 0: never
    samples_every: int = key(10, at_least=0)  # steps between files of samples; 0: only the first's
    report: bool = key(True)  # false: none, until `jaxgrpo report` is asked for one
    report_every: int = key(10, at_least=0)  # at most 1% of the time goes into it; 0: at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole config, read and checked. Nothing changes it afterwards; the core never sees it.

    Paths of inputs and of own code are absolute; built-in tasks and names on the hub stay.
    """

    model: ModelKeys
    data: DataKeys
    rewards: tuple[RewardKeys, ...] = key()
    recipe: str | Part | None = key(None)  # a chain by name; exactly one of these two is set
    advantage: tuple[Part, ...] | None = key(None)
    loss: LossKeys
    reference: ReferenceKeys
    optimizer: OptimizerKeys
    rollout: RolloutKeys
    train: TrainKeys
    eval: EvalKeys
    checkpoint: CheckpointKeys
    mesh: MeshKeys
    tracking: TrackingKeys
    run: RunKeys
    source: Path | None = dataclasses.field(default=None, compare=False)  # the file it came from

    @property
    def folder(self) -> Path:
        """Where relative paths of inputs begin."""
        return folder_of(self.source)

    def resolve(self, path: str) -> str:
        """A path of an input, absolute; "task:..." and names on the hub as they are."""
        return str(self.folder / path) if is_path(path, self.folder) else path

    @property
    def method(self) -> Part | None:
        """The recipe as a part, {"use": name, **options}."""
        return {"use": self.recipe} if isinstance(self.recipe, str) else self.recipe

    @property
    def own_files(self) -> tuple[Path, ...]:
        """The files of own code that it names, each once."""
        loss = self.loss
        parts = [*(self.advantage or ()), loss.surrogate, loss.reduction, self.rollout.prompts]
        parts += [part for part in (loss.kl, loss.entropy, loss.mismatch, self.method) if part]
        names = [reward.use for reward in self.rewards] + [part["use"] for part in parts]
        return tuple(dict.fromkeys(Path(file) for name in names if (file := file_of(name))))


def is_path(value: str, folder: Path) -> bool:
    """Whether the name of an input means a local path, and no task or name on the hub.

    A name of the form owner/name is a path if one is there; a model folder that is yet to be
    made is written ./owner/name.
    """
    if value.startswith(PREFIX):
        return False
    # Not Path's own methods: they raise on paths that are too long and on unknown homes.
    local = Path(value).suffix in FILES or os.path.exists(folder / os.path.expanduser(value))
    return local or not is_name(value)


def folder_of(source: Path | None) -> Path:
    """Where the paths in a config begin: beside its file, or here for none and for shipped ones."""
    return Path.cwd() if source is None or source.parent == SHIPPED else source.parent


OTHER_FORMAT = "other"
"""The format of a text that no named one fits."""

HINTS: dict[str, Any] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if name != "source"
}
SECTIONS: dict[str, Any] = {
    name: hint for name, hint in HINTS.items() if dataclasses.is_dataclass(hint)
}
KEYS: dict[str, dataclasses.Field] = {
    f"{section}.{field.name}": field
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if field.name != "options"
}
"""The keys of all tables by their full names."""

KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: 'a text in quotes, "..."',
    dict: 'a table, {{ {holds} = "..." }}',
    Mapping: "a table, {{ name = value }}",
    tuple: 'a list of texts, ["..."], none of them empty',
}

Values = dict[str, Any]
"""Values that are right by themselves, under their full names: {"rollout.group_size": 8, ...}."""


def read(raw: Mapping[str, Any], values: Values) -> Iterator[str]:
    """Reads a whole config: the right ones of its values into `values`, with every default.

    Yields: the problems of the others.
    """
    tables = dict(raw)
    yield from _rename_tables(tables)
    for section, cls in SECTIONS.items():
        table = tables.get(section, {})
        if isinstance(table, Mapping):
            yield from _read_keys(cls, table, f"{section}.", values)
        else:
            yield f"{section} = {show(table)}: expected a table, [{section}]"
    if "rewards" in tables:
        yield from _read_list("rewards", tables["rewards"], _read_reward, values)
    else:
        yield 'rewards: missing; give at least one, rewards = [{ use = "..." }]'
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
    meant = set()
    if has_options:
        values[f"{path}options"], unknown = unknown, {}
    for name in unknown:
        meant.add(near := _nearest_key(name, path, list(fields)))
        hint = f"did you mean {near}?" if near else f"the keys here are {', '.join(fields)}"
        yield f"{path}{name}: unknown key; {hint}"
    for name, field in fields.items():
        where, limits = path + name, field.metadata["range"]
        computed: Any = field.default_factory
        has_table = computed is not dataclasses.MISSING
        default: Any = computed() if has_table else field.default
        if name in table:
            value = table[name]
            if isinstance(value, Mapping) and has_table:
                value = {**default, **value}  # options alone: of the default part
            yield from _read_value(where, value, hints[name], limits, values)
        elif default is not dataclasses.MISSING:
            values[where] = default
        elif where not in meant:  # a key that is merely misspelt is one problem, not two
            yield f"{where}: missing; expected {_expected(hints[name], limits)}"


def show(value: Any) -> str:
    """A value as written in the file, cut if it is long."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except ValueError:  # Python writes out numbers of at most some 4,000 digits
        return "(a number of thousands of digits)"
    text = text.encode("utf-8", "backslashreplace").decode()  # halves of a surrogate pair
    return text if len(text) <= 60 else text[:57] + "..."


def _rename_tables(tables: dict[str, Any]) -> Iterator[str]:
    """Reports unknown tables, and gives a misspelt one the name that was meant as well."""
    for name in [name for name in tables if name not in HINTS]:
        near = difflib.get_close_matches(name, HINTS, n=1)
        homes = near or [key for key in KEYS if key.endswith(f".{name}")]
        hint = f"did you mean {' or '.join(homes)}?" if homes else f"there are {', '.join(HINTS)}"
        yield f"{name}: unknown key; {hint}"
        if near:
            tables.setdefault(near[0], tables[name])


def _read_value(where: str, value: Any, hint: Any, limits: Range, values: Values) -> Iterator[str]:
    kind = _kind(hint)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < sys.float_info.max else math.inf
    if kind is tuple:
        yield from _read_texts(where, value, values)
    elif kind is Mapping and isinstance(value, Mapping):
        values[where] = dict(value)
    elif type(value) is not kind:
        yield f"{where} = {show(value)}: expected {KINDS[kind].format(holds=limits.holds)}"
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


def _read_texts(where: str, value: Any, values: Values) -> Iterator[str]:
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) and one for one in value):
        values[where] = tuple(value)
    else:
        yield f"{where} = {show(value)}: expected {KINDS[tuple]}"


def _read_part(where: str, value: Part, values: Values, holds: str = "use") -> Iterator[str]:
    if holds not in value:
        lacks = "names no part" if holds == "use" else f"has no {holds}"
        yield f'{where} = {show(value)}: {lacks}; add {holds} = "..."'
    elif not isinstance(value[holds], str) or not value[holds]:
        yield f"{where}.{holds} = {show(value[holds])}: expected {KINDS[str]}"
    else:
        values[where] = dict(value)


def _read_reward(where: str, entry: Any, values: Values) -> Iterator[str]:
    found: Values = {}
    problems = list(_read_keys(RewardKeys, entry, f"{where}.", found))
    if not problems:
        values[where] = make(RewardKeys, found, f"{where}.")
    yield from problems


def _read_list(
    where: str, entries: Any, read_entry: Callable[..., Iterator[str]], values: Values
) -> Iterator[str]:
    """A list of tables; each right one is also a value of its own, "advantage[0]", ..."""
    right = isinstance(entries, (list, tuple)) and all(isinstance(one, Mapping) for one in entries)
    if not right or not entries:
        expected = f'a list of tables, {where} = [{{ use = "..." }}]'
        yield f"{where} = {show(entries)}: expected {expected}"
        return
    named = {f"{where}[{index}]": entry for index, entry in enumerate(entries)}
    for name, entry in named.items():
        yield from read_entry(name, entry, values)
    if named.keys() <= values.keys():
        values[where] = tuple(values[name] for name in named)


def _nearest_key(name: str, path: str, fields: list[str]) -> str | None:
    """The full name of the key that was probably meant: one of this table, or of another one."""
    if near := difflib.get_close_matches(name, fields, n=1):
        return path + near[0]
    homes = {key.rpartition(".")[2]: key for key in reversed(KEYS)}  # the first one counts
    near = difflib.get_close_matches(name, homes, n=1, cutoff=0.75)
    return homes[near[0]] if near else None


def _kind(hint: Any) -> type:
    """int, float, str, dict, Mapping or tuple: the type of a hint, which may be optional."""
    if isinstance(hint, types.UnionType):
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    return typing.get_origin(hint) or hint


def _expected(hint: Any, limits: Range) -> str:
    if limits.choices:
        return str(limits)
    text = KINDS[_kind(hint)].format(holds=limits.holds)
    return text if limits == Range() else f"{text}, {limits}"
