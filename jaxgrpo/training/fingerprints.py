"""What a run was given, as short texts and numbers: its config, own code, data and models.

They tell whether two processes of a run were given the same, whether a run that is resumed reads
what it read before, and whether it is evaluated on the same questions.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxgrpo
from jaxgrpo.config import files as configs
from jaxgrpo.config.files import Config
from jaxgrpo.config.keys import INPUTS, EvalKeys, RunKeys, source_paths
from jaxgrpo.config.own_code import find_source, short_name, with_imports
from jaxgrpo.core.errors import InputError, differing_names, refusing
from jaxgrpo.data.prompts import PromptData, name_row
from jaxgrpo.data.storage import checksum
from jaxgrpo.data.written import without_addresses
from jaxgrpo.models.hf import adapters, folders, replacing, texts, weights
from jaxgrpo.training.inputs import Inputs

REMEDY = "give every process of a run the same config, code, data, models and releases"
OPTIONS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    *("jax_numpy_dtype_promotion", "jax_threefry_partitionable"),
)
"""Options of JAX that the environment may set and that change what is computed."""
LOCAL = ("model.path", "lora.path", "data.path", "eval.data", "run.dir", "tracking")
"""Keys, and a table, that may differ between machines: what is found there is compared instead."""


def config_facts(config: Config) -> dict[str, Any]:
    """What has to be alike before anything is set up: the config, own code and the base model.

    Files of own code and of the chat template are named without their folder, which another machine
    may have elsewhere: what is in them is compared.
    """
    files = {*config.own_files, *filter(None, [find_source(config.scorer_name)])}
    facts = configs.flat(_without_folders(configs.to_tables(config), files))
    local = tuple(f"{key}." for key in LOCAL)
    facts = {name: value for name, value in facts.items() if not f"{name}.".startswith(local)}
    facts["data.chat_template"] = Path(config.data.chat_template).name
    base = folders.fingerprint(folders.find_folder(config.model.path, config.model.revision))
    adapter = [] if config.lora.path is None else adapters.adapter_files(config.lora.path)
    model_facts = {"model.path": base, "lora.path": file_checksums(adapter)}
    return {**facts, **model_facts, "own code": file_checksums(config.own_files)}


def _without_folders(value: Any, files: Iterable[Path]) -> Any:
    """Tables of a config, or a value in them, where own code in `files` is named by FILE:NAME."""
    if isinstance(value, Mapping):
        return {name: _without_folders(entry, files) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_folders(entry, files) for entry in value]
    if isinstance(value, str):
        for file in sorted(files, key=lambda file: -len(str(file))):  # one may end as another
            value = value.replace(f"{file}:", f"{file.name}:")
    return value


def program_facts() -> dict[str, Any]:
    """What programs are made by, and all processes of a run have to make the same: jaxgrpo with its
    files, as of a clone at some commit, JAX, and OPTIONS."""
    files = sorted(Path(jaxgrpo.__file__).parent.rglob("*.py"))
    source = checksum(file.read_bytes() for file in files)
    facts = {name: str(jax.config.values.get(name)) for name in OPTIONS}
    release = f"{jaxgrpo.__version__}, {len(files)} files, crc32 {source}"
    libraries = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {"jaxgrpo": release, **libraries, **facts}


def file_checksums(files: Iterable[Path]) -> dict[str, str]:
    """Name -> checksum of files, as own code; what is missing is refused where it is loaded.

    A second file of a name gets a number.
    """
    checksums: dict[str, str] = {}
    for file in filter(Path.is_file, files):
        name, number = file.name, 1
        while name in checksums:
            number += 1
            name = f"{file.name} ({number})"
        checksums[name] = checksum([file.read_bytes()])
    return checksums


def row_facts(run_inputs: Inputs) -> dict[str, str]:
    """Which rows a run reads, to train and to evaluate on; and the rollouts that it replays."""
    prompts, held_out, replay = run_inputs.prompts, run_inputs.held_out, run_inputs.replay
    facts = {"data.path": describe_rows(prompts.rows, prompts.encoded)}
    if prompts.mixture:
        facts["data.path"] += f", mixed as {tuple(prompts.mixture)}"
    if held_out:
        facts["eval.data"] = describe_rows(held_out.rows, held_out.encoded)
    if replay:
        facts["rollouts"] = ", ".join(replay.checksums)
    return facts


def input_facts(
    run_inputs: Inputs,
    chat_template: str,
    adapter_path: str | None,
    teachers: Iterable[str],
    own_files: Iterable[Path],
) -> dict[str, Any]:
    """What a run reads and a later start of it has to read again: kind of INPUTS -> JSON value.

    Rows and prompts of a replay are left out: replay.json holds the checksums of its files.

    Args:
      chat_template, adapter_path: `data.chat_template` and `lora.path`.
      teachers: paths of the models that scores read.
      own_files: files of own code that the config names.
    """
    facts: dict[str, Any] = _model_facts(run_inputs, chat_template)
    for path in teachers:
        sums_by_name = folders.fingerprint(path).items()
        facts["base"] |= {f"{path}/{name}": sums for name, sums in sums_by_name}
    adapter = [] if adapter_path is None else adapters.adapter_files(adapter_path)
    facts["base"] |= file_checksums(adapter)
    facts["code"] = file_checksums(own_files)
    if run_inputs.replay is None:
        rows, encoded = run_inputs.prompts.rows, run_inputs.prompts.encoded
        tokens = (part for ids in encoded for part in (b"|", ids.tobytes()))
        facts |= {"rows": describe_rows(rows), "prompts": checksum(tokens)}
    return facts


def _model_facts(run_inputs: Inputs, chat_template: str) -> dict[str, dict[str, Any]]:
    """What a run reads of its model's folder: "template", "tokenizer" and "base"."""
    folder, chat = run_inputs.pretrained.folder, run_inputs.chat
    base: dict[str, Any] = folders.fingerprint(folder)
    template: dict[str, Any] = {
        name: base.pop(name) for name in list(base) if "chat_template" in name
    }
    for name in texts.CHAT_TEMPLATES:  # what is used of them is compared
        template.pop(name, None)
    template[f"data.chat_template = {chat_template}"] = _json_checksum(chat.written_template)
    tokenizer: dict[str, Any] = {
        name: base.pop(name)
        for pattern in texts.TOKENIZER_FILES
        for name in fnmatch.filter(base, pattern)
    }
    if (name := "tokenizer_config.json") in tokenizer:  # it may hold the chat template
        fields = weights.read_json(folder / name)
        tokenizer[name] = _json_checksum({**fields, "chat_template": None})
    return {"template": template, "tokenizer": tokenizer, "base": base}


def refuse_changed_base(
    run_inputs: Inputs, chat_template: str, old_inputs: Mapping[str, Any]
) -> None:
    """Refuses to write a trained model whose folder would get files of another base.

    Args:
      chat_template: `data.chat_template`.
      old_inputs: `input_facts` of the run at its start.

    Raises: InputError that names what is missing or differs.
    """
    changed = set[str]()
    for kind, new in _model_facts(run_inputs, chat_template).items():
        names = differing_names(old_inputs[kind], new)
        changed |= {name for name in names if name in new or _is_file_of_base(name)}
    if changed:
        where = f"model.path = {run_inputs.pretrained.path}: {', '.join(sorted(changed))}"
        raise InputError(
            f"{where} changed since the run began, and files of the base go into the trained "
            "model: put them back"
        )


def _is_file_of_base(name: str) -> bool:
    """Whether a name of `input_facts` is a file of the base: those of teachers have their path, and
    adapters have names of their own."""
    is_template = name.startswith(f"{replacing.TEMPLATES}/")
    return is_template or not ("/" in name or name in (adapters.CONFIG, adapters.WEIGHTS))


def refuse_changes(
    keys: RunKeys,
    paths: Mapping[str, Any],
    old_inputs: Mapping[str, Any],
    new_inputs: Mapping[str, Any],
) -> None:
    """Refuses to continue a run that reads something else, unless run.allow_changes says so.

    Args:
      paths: "data.path" and "model.path" of the config.
      old_inputs, new_inputs: `input_facts` of the run at its newest checkpoint, and at this start.

    Raises: InputError that names all that differ.
    """
    shared_kinds = [kind for kind in INPUTS if kind in old_inputs and kind in new_inputs]
    changed = [kind for kind in shared_kinds if old_inputs[kind] != new_inputs[kind]]
    if {"rows", "template", "tokenizer"}.intersection(changed):  # these make the prompts
        changed = [kind for kind in changed if kind != "prompts"]
    refused = [kind for kind in changed if kind not in keys.allow_changes]
    if refused:
        lines = "".join(
            f"\n  {kind}: {_change(paths, kind, old_inputs, new_inputs)}" for kind in refused
        )
        allowed = json.dumps([*keys.allow_changes, *refused])
        raise InputError(
            f"{keys.dir}: the run reads something else than at its newest checkpoint:{lines}"
            "\nput it back, or set run.dir to another folder; to continue with the change, add "
            f"--set run.allow_changes='{allowed}'"
        )


def _change(
    paths: Mapping[str, Any],
    kind: str,
    old_inputs: Mapping[str, Any],
    new_inputs: Mapping[str, Any],
) -> str:
    """What changed, for a message."""
    old, new = old_inputs[kind], new_inputs[kind]
    if kind == "rows":
        path = ", ".join(source_paths(paths["data.path"])) or None
        where = f"data.path = {path}, unless given from Python"
        return f"{old} -> {new}, in their order ({where})"
    if kind == "prompts":
        return (
            "other tokens for the same rows, template and tokenizer: another version of "
            "transformers or tokenizers, tools that are described in other words, or a template "
            "that draws at random"
        )
    where = f" in model.path = {paths['model.path']}" if kind in ("tokenizer", "base") else ""
    return f"{', '.join(differing_names(old, new))}{where}"


def describe_rows(
    rows: Sequence[Mapping[str, Any]], encoded: Sequence[np.ndarray] | None = None
) -> str:
    """Number and checksum of rows, in their order, and of their prompts' tokens, if given."""
    tokens = [b""] * len(rows) if encoded is None else (ids.tobytes() for ids in encoded)
    contents = (_row_bytes(row, name_row(rows, place)) for place, row in enumerate(rows))
    parts = (part for pair in zip(contents, tokens, strict=True) for part in pair)
    return f"{len(rows)} rows, crc32 {checksum(parts)}"


def evaluation_facts(
    keys: EvalKeys, scorer_name: str, measures_kl: bool, held_out: PromptData
) -> dict[str, Any]:
    """What evaluations ask and how they judge: numbers of other questions cannot be compared.

    The rows and not the name of the file; the scorer and its code; samples and the other keys of
    `eval` that act on a number.

    Args:
      scorer_name: what judges, as the config names it.
      measures_kl: whether the KL to the base is measured.
    """
    table = configs.flat({"eval": configs.as_toml(keys)})
    excluded_keys = ("data", "subset", "split", "prompts", "scorer", "every")
    decisive_keys = {
        name: value
        for name, value in table.items()
        if name.removeprefix("eval.") not in excluded_keys
    }
    return {
        **decisive_keys,
        "eval.kl_to_base": measures_kl,
        "eval.data": describe_rows(held_out.rows[: keys.prompts], held_out.encoded[: keys.prompts]),
        "eval.scorer": [short_name(scorer_name), *code_checksums([scorer_name]).values()],
    }


def code_checksums(names: Iterable[str]) -> dict[str, str]:
    """`file_checksums` of own code by its names in a config, and of what it imports."""
    return file_checksums(with_imports(filter(None, map(find_source, names))))


def _json_checksum(value: Any) -> str:
    return checksum([json.dumps(value).encode()])


def _row_bytes(row: Mapping[str, Any], where: str) -> bytes:
    """A row as bytes, the same in every process. Raises: InputError where it cannot be written."""
    with refusing(
        f"{where}: a value cannot be written ({{kind}}: {{reason}}): take it out of the data"
    ):
        try:
            return json.dumps(row, default=_json_value).encode()
        except TypeError:  # a key within it is no text
            return without_addresses(repr(row)).encode("utf-8", "backslashreplace")


def _json_value(value: Any) -> Any:
    """A value that JSON does not know: an array, an image, a date."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "tobytes"):
        return checksum([value.tobytes()])
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return without_addresses(repr(value))


def refuse_unless_alike(facts: Callable[[], Mapping[str, Any]], remedy: str = REMEDY) -> None:
    """Raises: InputError, in every process, naming the first fact that one of them has otherwise.

    Called by all processes; of a single one nothing is asked.

    Args:
      facts: returns name -> JSON value, as this process finds it.
      remedy: what to do.
    """
    if jax.process_count() == 1:
        return
    from jaxgrpo.rollout.exchange import gather_json

    try:
        local_facts = dict(facts())
    except InputError as error:  # raised by one alone it would leave the others waiting
        local_facts = {"problem": str(error)}
    all_facts = gather_json(local_facts)
    main_facts = all_facts[0]
    for number, process_facts in enumerate(all_facts):
        if names := differing_names(main_facts, process_facts):
            main_value, process_value = (
                side.get(names[0], "nothing") for side in (main_facts, process_facts)
            )
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise InputError(
                f"{names[0]}: process {number} has {process_value}, process 0 has "
                f"{main_value}{more}: {remedy}"
            )


def refuse_other_start(
    facts: Callable[[], Mapping[str, Any]], teachers: Iterable[str], scorer_name: str
) -> None:
    """Refuses processes that would not compute the same; of a single one nothing is asked.

    Called by all processes of a run as soon as they have joined.

    Args:
      facts: gives `config_facts`.
      teachers, scorer_name: of the config.

    Raises: InputError, in every process, where one has another release, config, code or model.
    """

    def all_facts() -> dict[str, Any]:
        models = {f"scores: {path}": folders.fingerprint(path) for path in teachers}
        scorer = {"code of eval.scorer": code_checksums([scorer_name])}
        return {**program_facts(), **facts(), **models, **scorer}

    refuse_unless_alike(all_facts)


def refuse_other_rows(run_inputs: Inputs) -> None:
    """Raises: InputError, in every process, where one reads other rows."""
    refuse_unless_alike(lambda: row_facts(run_inputs))
