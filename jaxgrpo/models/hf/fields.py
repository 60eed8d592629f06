"""The fields of a config.json: each is read with its kind, and what is not read is refused.

A field changes what a model computes, or it does not. Those that do not are listed here and with
their family; any other must have been read, or be off (null, false, 0 or empty).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

MAX_LAYERS = 1000  # each is traced and named: many more would take minutes before any message
MAX_EXPERTS = 4096  # of a layer: naming the tensors of each takes seconds for so many

REQUIRED: Any = object()  # the default of a field that must be there

GENERATION_FIELDS = (
    *("temperature", "top_k", "top_p", "typical_p", "max_length", "min_length", "num_beams"),
    *("num_beam_groups", "num_return_sequences", "length_penalty", "repetition_penalty"),
    *("diversity_penalty", "remove_invalid_values", "do_sample", "early_stopping"),
)
"""How to draw from a model, which belongs to generation_config.json and is not computed here."""

GENERAL = (
    # what transformers writes for any model
    *("model_type", "architectures", "transformers_version", "name_or_path", "tokenizer_class"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("dtype", "torch_dtype", "use_cache", "cache_implementation", "attn_implementation"),
    "experts_implementation",
    *("initializer_range", "problem_type", "id2label", "label2id", "num_labels", "return_dict"),
    *("output_hidden_states", "output_attentions", "pretraining_tp", "prefix", "finetuning_task"),
    *("task_specific_params", "transformers.js_config"),
    *GENERATION_FIELDS,
    # of training: sampler and update must compute the same, so nothing is dropped at random
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"),
    *("neftune_noise_alpha", "gradient_checkpointing"),
    # of other programs and of code that comes with a checkpoint, which is not run; transformers
    # reads them for none of the families
    *("auto_map", "max_sequence_length", "seq_length", "model_max_length", "use_flash_attn"),
    *("qkv_bias", "dual_chunk_attention_config"),
)
"""Fields that do not change what a model computes."""
GENERAL_PREFIXES = ("_", "unsloth")

_PLAIN = "only plain weights are read; take the plain checkpoint"
REFUSED = {
    # by transformers, by MLX, and by compressed-tensors before it had the first
    **dict.fromkeys(("quantization_config", "quantization", "compression_config"), _PLAIN),
    "use_bidirectional_attention": "a policy reads what is before a token only",
}
"""Fields that must be off, and why."""
ON = {"is_causal": "a policy reads what is before a token only"}
"""Fields that must be on where they are given, and why."""


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def is_number(value: Any) -> bool:
    """Whether it is a finite number, as a float holds it."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _are(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "size": (_is_size, "a whole number, 1 or more"),
    "layers": (
        lambda value: _is_size(value) and value <= MAX_LAYERS,
        f"a whole number from 1 to {MAX_LAYERS:,}",
    ),
    "experts": (
        lambda value: _is_size(value) and value <= MAX_EXPERTS,
        f"a whole number from 1 to {MAX_EXPERTS:,}",
    ),
    "count": (lambda value: value == 0 or _is_size(value), "a whole number, 0 or more"),
    "token": (lambda value: type(value) is int, "a token id, a whole number"),
    "positive": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "number": (is_number, "a number"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "texts": (_are(lambda value: isinstance(value, str)), "a list of texts"),
    "counts": (_are(lambda value: value == 0 or _is_size(value)), "a list of numbers of layers"),
    "flags": (_are(lambda value: value in (0, 1)), "a list of 0 and 1"),
    "anything": (lambda value: True, "a value"),
}
"""Name -> whether a value is of that kind, and the kind in words."""


class Fields:
    """What a config.json holds; `problems` collects what is wrong with it.

    Fields that the user says to ignore (`model.ignore`) are as good as absent, but none that is
    read may be.

    Reading a field that is of another kind, or missing, gives a stand-in and a problem.
    """

    def __init__(
        self, content: Mapping[str, Any], file: str = "config.json", ignored: Collection[str] = ()
    ):
        self.content: Mapping[str, Any] = content
        self.file: str = file
        self.ignored: Collection[str] = ignored
        self.problems: list[str] = []
        self._read: set[str] = set()

    def take(self, name: str, kind: str, default: Any = REQUIRED) -> Any:
        """The field, or its default where it is absent or null; None for one that must be there."""
        value = self.nullable(name, kind, default)
        return default if value is None and default is not REQUIRED else value

    def nullable(self, name: str, kind: str, default: Any = REQUIRED) -> Any:
        """The field, its default where it is absent, None where it is null."""
        self._read.add(name)
        if name not in self.content:
            if default is REQUIRED:
                self.problems.append(f"{name}: missing")
                return None
            return default
        value, (is_right, words) = self.content[name], KINDS[kind]
        if value is None:
            if default is REQUIRED:
                self.refuse(name, f"expected {words}")
            return None
        if not is_right(value):
            self.refuse(name, f"expected {words}")
            return None if default is REQUIRED else default
        return value

    def choice(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
        """What `choices` has for the field's text."""
        value = self.take(name, "text", default)
        if value not in choices:
            self.refuse(name, f"known are {', '.join(choices)}")
            return choices[default]
        return choices[value]

    def check_quantised(self, expected: Mapping[str, Any], words: str) -> None:
        """Refuses quantised weights but of one kind, which quant_method must name, as transformers
        asks too; other fields of `expected` may be left out.

        Args:
          words: what is read, for the message.
        """
        settings = self.take("quantization_config", "object", {})
        if settings and "quant_method" not in settings:
            why = f"without a quant_method; of quantised weights only {words} is read"
            self.refuse("quantization_config", why)
        elif any(settings.get(name, value) != value for name, value in expected.items()):
            self.refuse("quantization_config", f"of quantised weights only {words} is read")

    def refuse(self, name: str, why: str) -> None:
        self.problems.append(f"{name} = {self.content.get(name)!r}: {why}")

    def refuse_unread(self, harmless: Collection[str]) -> None:
        """A problem for each field not read, unless it is off or known to change nothing."""
        for name in sorted(self._read.intersection(self.ignored)):
            self.problems.append(f"model.ignore has {name}, which is read: leave it out there")
        for name, value in self.content.items():
            if name in self.ignored:
                continue
            if name in ON and value is not True:
                self.refuse(name, ON[name])
            if name in self._read or name in ON or name in harmless or not value:
                continue
            if name in REFUSED:
                self.refuse(name, REFUSED[name])
            elif name.endswith("_id") and type(value) is int:
                continue  # a token, whatever it is for
            elif name not in GENERAL and not name.startswith(GENERAL_PREFIXES):
                is_model = not self.file.startswith("adapter")
                noun = "model" if is_model else "adapter"
                why = f"not built, and it may change what the {noun} computes; take another {noun}"
                remedy = f', or set model.ignore = ["{name}"] if it changes nothing'
                self.refuse(name, why + (remedy if is_model else ""))
