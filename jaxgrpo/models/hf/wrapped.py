"""Models whose text part is one of several, as in Gemma 3, Mistral Small 3 and Qwen3.5.

Their config.json has the fields of the text model under `text_config`, and the files have its
tensors beside those of images, under names that begin with a prefix. `model.text_only` trains that
part alone; everything else is carried through an export as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError
from jaxgrpo.models.api import Model
from jaxgrpo.models.hf import mapping
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.mapping import Entry, Names

TEXT = "text_config"
TIED = "tie_word_embeddings"
HEAD = "lm_head.weight"
"""The end of the name of the head's tensor."""
FURTHER = "eh_proj.weight"
"""What a layer that predicts a further token has beside others: GLM-4.5 and DeepSeek number it
behind the model's layers, and transformers does not read it."""


class Wrapper(NamedTuple):
    """A class of transformers with a text model in it."""

    architecture: str
    model_type: str  # of its text, where text_config names none or the class's
    tied: bool  # whether the head is, where config.json does not say so beside text_config
    text: Mapping[str, Any] = MappingProxyType({})
    """What transformers assumes of fields that text_config may leave out"""


_GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, TIED: True}

WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", True, _GEMMA3),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", True),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5_text", False),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", False),
}
"""model_type of config.json -> the class."""

HARMLESS = (
    *("text_config", "vision_config", "mm_tokens_per_image", "multimodal_projector_bias"),
    *("projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
    *("image_token_index", "boi_token_index", "eoi_token_index", "tie_word_embeddings"),
)
"""Fields beside text_config that do not change what the model computes of text."""


def full_architecture(model_type: str) -> str | None:
    """The class that a text model's folder may name where its config.json was made of text_config.

    >>> full_architecture("qwen3_5_text")
    'Qwen3_5ForConditionalGeneration'
    """
    wrapper = WRAPPERS.get(model_type.removesuffix("_text"))
    return None if wrapper is None else wrapper.architecture


def find_wrapper(config_json: Mapping[str, Any]) -> Wrapper | None:
    """The class that a config.json names; None: it is none of WRAPPERS, or no text."""
    name = config_json.get("model_type")
    return WRAPPERS.get(name) if isinstance(name, str) else None


def is_wrapped(config_json: Mapping[str, Any]) -> bool:
    return isinstance(config_json.get(TEXT), dict)


def text_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model, of a config.json that may wrap it.

    Fields of the whole model are beside `text_config`, and count before those in it: whether the
    head is tied also where it is left out there, by what transformers assumes of the class.
    """
    if not is_wrapped(config_json):
        return dict(config_json)
    wrapper = find_wrapper(config_json)
    text = {**(wrapper.text if wrapper else {}), **config_json[TEXT]}
    if wrapper and text.get("model_type") in (None, config_json["model_type"]):
        text["model_type"] = wrapper.model_type
    text.pop("architectures", None)
    text |= {TIED: wrapper.tied} if wrapper else {}
    common = ("dtype", "torch_dtype", TIED)
    return text | {name: config_json[name] for name in common if config_json.get(name) is not None}


def generation_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that count without a generation_config.json: those beside `text_config`, and in
    it those that are absent or null beside it, as in transformers."""
    full = {name: value for name, value in config_json.items() if value is not None}
    return text_fields(config_json) | full


def resolve_tied(config_json: Mapping[str, Any], has_head: Callable[[], bool]) -> dict[str, Any]:
    """The fields of a config.json in which it is in doubt whether the head is tied: a head in the
    files counts, as in transformers. Others are as they are.

    In doubt it is where `text_config` says something else than the field beside it, or than the
    class where that field is left out, unless the field says that it is not tied. transformers 5
    assumes that Mistral 3's class is tied and its text is not, and writes both into folders of
    Mistral Small 3 and Ministral 3. It assumes that Qwen3.5's class is not tied, and would draw
    the head that a tied text's files lack: here it is tied, and an export says so.

    Args:
      has_head: whether the files have one.
    """
    fields = dict(config_json)
    wrapper = find_wrapper(fields)
    if wrapper is None or not is_wrapped(fields) or fields.get(TIED) is False:
        return fields
    full, text = fields.get(TIED), fields[TEXT].get(TIED)
    full = wrapper.tied if full is None else full
    text = wrapper.text.get(TIED, False) if text is None else text
    if isinstance(full, bool) and isinstance(text, bool) and full is not text:
        fields[TIED] = not has_head()
    return fields


def problems(config_json: Mapping[str, Any], ignored: Collection[str]) -> list[str]:
    """What is wrong with the fields beside `text_config`."""
    wrapper = find_wrapper(config_json)
    if wrapper is None:
        model_types = ", ".join(WRAPPERS)
        name = config_json.get("model_type")
        return [f"model_type = {name!r}: text models are read from {model_types} only"]
    fields = Fields(config_json, ignored=ignored)
    architectures = fields.take("architectures", "texts", [wrapper.architecture])
    if architectures != [wrapper.architecture]:
        fields.refuse("architectures", f"only {wrapper.architecture} is built")
    text = text_fields(config_json)
    repeated = [name for name, value in config_json.items() if text.get(name) == value]
    fields.refuse_unread((*HARMLESS, *repeated))
    return fields.problems


class Spelling(NamedTuple):
    """How files write the names of a text model's tensors."""

    body: str = "model."  # for "model."
    head: str = ""  # before the other names

    def name(self, name: str) -> str:
        """
        >>> SPELLINGS[1].name("model.norm.weight"), SPELLINGS[1].name("lm_head.weight")
        ('language_model.model.norm.weight', 'language_model.lm_head.weight')
        """
        is_body = name.startswith("model.")
        return self.body + name.removeprefix("model.") if is_body else self.head + name


SPELLINGS = (
    Spelling("model.language_model."),  # as the modules of transformers are called
    Spelling("language_model.model.", "language_model."),  # before 4.52, and on the hub
)
"""Of wrapped models."""
OF_MODULES = (*SPELLINGS, Spelling())
"""How adapters of wrapped models name modules: the last as those of the text alone, which is what
AutoModelForCausalLM of transformers takes out of a Qwen3.5."""


class Stored(NamedTuple):
    """The tensors of a folder: those of each leaf, by their names in the files, and the others."""

    entries: list[list[Entry]]
    tied_head: tuple[str, str] | None
    """The head's tensor and the embedding's, which a tied model's files may hold as both"""
    carried: tuple[str, ...] = ()  # read by nothing, and kept in an export


def find_tensors(files: Collection[str], model: Model, family: Names, source: str) -> Stored:
    """Where a model's tensors are.

    Args:
      files: names of the tensors of a folder; none: those that we write without a base.
      source: the folder, for messages.

    Raises: InputError where a wrapped model has no text model under a name that is known.
    """
    config, entries = model.config, mapping.entries(model, family)
    spelling, carried = Spelling(), tuple(family.carried)
    if config.text_only:
        spelling = _spelling(files, source)
        text = spelling.body, spelling.head + family.modules["head"]
        unread = tuple(name for name in files if not name.startswith(text))
    else:
        # So transformers saves the text model alone that it read from a full one's files.
        if any(name.startswith(SPELLINGS[0].body) for name in files):
            spelling = SPELLINGS[0]
        carried += tuple(name.removesuffix(FURTHER) for name in files if name.endswith(FURTHER))
        unread = tuple(name for name in files if carried and name.startswith(carried))
    head, embed = (spelling.name(f"{family.modules[name]}.weight") for name in ("head", "embed"))
    tied_head = (head, embed) if config.tie_embeddings else None
    # A tied model may be stored with the head only (`safetensors.torch.save_model` leaves that).
    renamed = {embed: head} if tied_head and head in files and embed not in files else {}

    def stored(entry: Entry) -> Entry:
        name = spelling.name(entry.name)
        for part, alias in family.aliases.items():
            written = name.replace(part, alias)
            name = written if name not in files and written in files else name
        return entry._replace(name=renamed.get(name, name))

    return Stored([[*map(stored, leaf)] for leaf in entries], tied_head, unread)


def _spelling(files: Collection[str], source: str) -> Spelling:
    for spelling in SPELLINGS:
        if any(name.startswith(spelling.body) for name in files):
            return spelling
    bodies = " or ".join(f"{spelling.body}*" for spelling in SPELLINGS)
    raise InputError(f"{source}: no tensor is called {bodies}: give a folder with the text model")
