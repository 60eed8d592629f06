"""The files of a model folder beside its weights: which there are, and how they are written.

A model that was trained from a folder gets the files of that folder as they are, byte for byte.
Only what differs is changed in them: the dtype, a chat template that the config sets, end tokens,
and the names of code, which is not copied (`auto_map`).
So what reads the base, in whichever version, reads the trained model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgrpo.models.hf import replacing, weights, wrapped
from jaxgrpo.models.hf.fields import GENERATION_FIELDS

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
VOCABULARIES = ("tokenizer.json", "tokenizer.*.json", "tekken.json", "*.model")
"""Patterns of files that any tokenizer's vocabulary is read from."""
TOKENIZER_FILES = (
    *VOCABULARIES,
    TOKENIZER,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
CHAT_TEMPLATES = (TEMPLATE, "chat_template.json")
PROCESSOR_TEMPLATES = ("processor_config.json", "chat_template.json")
"""Where processors had their chat template in older releases of transformers; the first counts."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
NAMED_TEMPLATES = f"{replacing.TEMPLATES}/*.jinja"
TEXTS = (CONFIG, GENERATION, *TOKENIZER_FILES, *CHAT_TEMPLATES, *PROCESSORS, NAMED_TEMPLATES)
"""Patterns of the files of a model folder beside its weights, that act on a run."""
NAMES = "|".join(re.escape(pattern).replace(r"\*", "[^/]*") for pattern in TEXTS)
"""The regular expression of their names."""

RULES = ("normalizer", "pre_tokenizer", "decoder")
"""The parts of a tokenizer that classes of transformers have their own of."""
PROBES = (
    "it's  12345\n\n 678",
    "e\u0301 \u00c5\ufb01",
    "a_b(c)==\t\n  d1",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
)
"""Texts that common rules divide in different ways."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CHANGED = "_config.json"
"""The end of names of files that an export may change."""


def text_files(folder: Path) -> list[Path]:
    """The files of TEXTS that a folder holds."""
    files = (file for pattern in TEXTS for file in sorted(folder.glob(pattern)))
    return [file for file in files if file.is_file()]


def refuse_unreadable(folder: Path) -> None:
    """Refuses a file that `write` reads of a base, before a run and not at its end.

    Others read JSON less strictly: with a name that stands twice in an object, for example.

    Raises: InputError with the first file that is not JSON.
    """
    for file in text_files(folder):
        if file.name.endswith(_CHANGED):
            _read(file)


def processor_template(folder: Path) -> str | None:
    """The chat template that a folder has for its processor, in PROCESSOR_TEMPLATES.

    transformers gives it to the processor of images and text, and not to the tokenizer.
    """
    templates = (_read(folder / name).get("chat_template") for name in PROCESSOR_TEMPLATES)
    return next((text for text in templates if isinstance(text, str)), None)


def has_vocabulary(folder: Path, names: Mapping[str, str]) -> bool:
    """Whether a folder has a file that its tokenizer reads a vocabulary from, if it reads any.

    Without one transformers 5 builds the tokenizer all the same, with special tokens alone.

    Args:
      names: `vocab_files_names` of the tokenizer's class.
    """
    files = [name for role, name in names.items() if role != "merges_file"]
    patterns = (*files, *VOCABULARIES)
    return not files or any(any(folder.glob(pattern)) for pattern in patterns)


def tokenizer_line(folder: Path, tokenizer: Any) -> str:
    """Says that a tokenizer has other tokens than the tokenizer.json that it was read from; empty
    where it has not, or there is no such file.

    Some classes of transformers 5 take only tokens, merges and what is put around a text from it,
    and divide texts by rules of their own.
    """
    backend, file = getattr(tokenizer, "backend_tokenizer", None), folder / "tokenizer.json"
    if backend is None or not file.is_file() or not _has_other_rules(backend, file):
        return ""
    from tokenizers import Tokenizer

    full = Tokenizer.from_file(str(file))
    full.no_truncation()
    full.no_padding()
    special_tokens = {token.content for token in full.get_added_tokens_decoder().values()}
    end = getattr(tokenizer, "eos_token", None)  # what follows it may begin as a text does
    for text in (*PROBES, *([f"a{end}b"] if end in special_tokens else [])):
        ids = full.encode(text, add_special_tokens=False).ids
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            return (
                f"the tokens of {text!r} are not those of tokenizer.json: transformers divides "
                f"texts by rules of {type(tokenizer).__name__}; those of the file are taken with "
                f'"tokenizer_class": "PreTrainedTokenizerFast" in {TOKENIZER}, {weights.IN_A_COPY}'
            )
    return ""


def _has_other_rules(backend: Any, file: Path) -> bool:
    """Whether the rules of a tokenizer are written otherwise than those of a file."""
    from tokenizers import Tokenizer

    fields = json.loads(file.read_text("utf-8"))  # names may stand twice in a vocabulary
    model = fields.get("model") or {}
    if model.get("type") != "BPE":  # others cannot be without their vocabulary
        return False
    empty = {"model": {**model, "vocab": {}, "merges": []}, "added_tokens": []}
    written = Tokenizer.from_str(json.dumps({**fields, **empty}))

    def state(part: Any) -> Any:
        return None if part is None else part.__getstate__()

    return any(state(getattr(backend, name)) != state(getattr(written, name)) for name in RULES)


def end_fields(tokens: Sequence[int]) -> dict[str, Any]:
    """The fields of generation_config.json for a model that ends at `tokens`."""
    return {"eos_token_id": list(tokens) if len(tokens) > 1 else tokens[0]}


def write(
    folder: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokenizer: Any = None,
    base: Path | None = None,
) -> None:
    """Writes the files of a model, or those of `base` as far as they say something else.

    Args:
      config: all fields of config.json.
      generation: fields of generation_config.json, over those of the base or the tokenizer.
      tokenizer: of a model with a base, its chat template is written alone.
    """
    config = _drop_absent_tokens(config, config)
    if wrapped.is_wrapped(config):
        config[wrapped.TEXT] = _drop_absent_tokens(config[wrapped.TEXT], config)
    if base is None:
        _write_first(folder, config, generation, tokenizer)
        return
    for file in text_files(base):
        copy = folder / file.relative_to(base)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
        fields = _read(copy) if copy.name.endswith(_CHANGED) else {}
        if fields.pop("auto_map", None):
            _write(copy, fields)
    if _read(folder / CONFIG) != config:
        _write(folder / CONFIG, config)
    _change_generation(folder / GENERATION, config, generation)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        _write_template(folder, template)


def _write_first(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Any
) -> None:
    """Writes the files of a model without a base, for transformers 4 and 5."""
    special_tokens = ((name, getattr(tokenizer, name, None)) for name in SPECIAL_TOKENS)
    ids = _drop_absent_tokens(
        {name: token for name, token in special_tokens if token is not None}, config
    )
    ends = config.get("eos_token_id")
    if isinstance(ends, list) and ids.get("eos_token_id") in ends:
        ids["eos_token_id"] = ends  # a model may have more than its tokenizer knows
    _write(folder / CONFIG, {**config, **ids})
    _write(folder / GENERATION, {**ids, **generation})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        _write_for_older_readers(folder / TOKENIZER, tokenizer)


def _change_generation(file: Path, config: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    # Without the file transformers generates as config.json says.
    fields = wrapped.generation_fields(config)
    implied = {
        name: fields[name] for name in (*SPECIAL_TOKENS, *GENERATION_FIELDS) if name in fields
    }
    stored = _read(file) if file.exists() else implied
    changed = {**stored, **changes}
    if _ends(changed.get("eos_token_id")) == _ends(stored.get("eos_token_id")):
        changed |= {name: stored[name] for name in ("eos_token_id",) if name in stored}
    changed = _drop_absent_tokens(changed, config)
    if changed != stored:
        _write(file, changed)


def _ends(tokens: Any) -> frozenset[Any]:
    return frozenset(tokens if isinstance(tokens, list) else [tokens])


def _drop_absent_tokens(fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without pad and begin tokens that the model lacks, with which torch cannot build
    its embedding."""
    size = wrapped.text_fields(config)["vocab_size"]
    lacking = [
        name
        for name in ("bos_token_id", "pad_token_id")
        if type(fields.get(name)) is int and fields[name] >= size
    ]
    return {**fields, **dict.fromkeys(lacking)}


def _write_for_older_readers(file: Path, tokenizer: Any) -> None:
    """Says in the words of transformers 4, which 5 reads too, what 5 wrote about a tokenizer."""
    fields = _read(file)
    for name in ("is_local", "local_files_only", "backend", "auto_map"):  # of how it was read
        fields.pop(name, None)
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        fields["model_input_names"] = tokenizer.model_input_names  # 4 assumes others
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    if fields:
        _write(file, fields)


def _write_template(folder: Path, template: str) -> None:
    """Writes a chat template where the folder has its own; into TEMPLATE if it has none that
    tokenizers read."""
    file, fields = folder / TEMPLATE, _read(folder / TOKENIZER)
    stored = fields.get("chat_template")
    has_names = isinstance(stored, list)  # [{"name": "default", "template": ...}, ...]
    texts = (
        {entry["name"]: entry["template"] for entry in stored} if has_names else {"default": stored}
    )
    # Named templates in files of their own go before those of tokenizer_config.json.
    has_files = file.exists() or any((folder / replacing.TEMPLATES).glob("*.jinja"))
    first = None if has_files else texts.get("default")
    first = file.read_text("utf-8") if file.exists() else first
    if template == (first or processor_template(folder)):
        return
    for name in PROCESSOR_TEMPLATES:
        if isinstance((content := _read(folder / name)).get("chat_template"), str):
            _write(folder / name, {**content, "chat_template": template})
    if has_files or stored is None:
        file.write_text(template, "utf-8")
    if stored is not None:
        texts["default"] = template
        listed = [{"name": name, "template": text} for name, text in texts.items()]
        _write(folder / TOKENIZER, {**fields, "chat_template": listed if has_names else template})


def _read(file: Path) -> dict[str, Any]:
    return weights.read_json(file) if file.exists() else {}


def _write(file: Path, fields: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
