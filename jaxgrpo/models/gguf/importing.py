"""`jaxgrpo import`: a model of a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from jaxgrpo.models import decoder
from jaxgrpo.models.gguf import configs, files, tensors, tokens
from jaxgrpo.models.hf import families, folders, replacing, texts, weights

CARD_TITLE = "# Imported with jaxgrpo"
CONTENTS = folders.CONTENTS._replace(remedy="; import --overwrite replaces it", title=CARD_TITLE)
MAX_SHARD_BYTES = 5_000_000_000  # of one file of weights, as Hugging Face's own


def import_gguf(path: str | Path, out: str | Path, overwrite: bool = False) -> dict[str, Any]:
    """Writes a model folder from a GGUF file: config.json, weights, tokenizer, chat template and
    generation_config.json. Quantised numbers become float32.

    Args:
      overwrite: replace a model there that was not imported.

    Returns: what was read, as numbers and names.

    Raises: InputError naming what is missing, unknown or not built; nothing is written then.
    """
    gguf = files.read(path)
    fields = configs.read_fields(gguf)
    family = families.find_family(fields["model_type"])
    fields["architectures"] = [family.architecture]
    model = decoder.build(families.model_config(fields, str(gguf.path)))
    sources = tensors.find_sources(gguf, model)
    fields["dtype"] = dtype = tensors.choose_dtype(sources)
    tokenizer = tokens.read(gguf, fields["max_position_embeddings"])
    refuse = functools.partial(
        replacing.refuse_unless_ours,
        contents=CONTENTS,
        overwrite=overwrite,
    )
    with replacing.replaced(Path(out), refuse) as folder:
        texts.write(folder, fields, tokens.generation_fields(gguf), tokenizer)
        replacing.write_card(folder, _card(gguf, dtype), CARD_TITLE)
        width = np.dtype(tensors.DTYPES[dtype]).itemsize
        sizes = {name: width * math.prod(source.tensor.shape) for name, source in sources.items()}
        weights.write_tensors(
            folder, sizes, lambda name: sources[name].read(dtype), MAX_SHARD_BYTES
        )
    kinds = Counter(source.tensor.kind for source in sources.values())
    return {
        "model": str(gguf.metadata.get("general.name", gguf.path.name)),
        "family": fields["model_type"],
        "parameters": sum(math.prod(source.tensor.shape) for source in sources.values()),
        "tensors": dict(kinds.most_common()),
        "dtype": dtype,
        "tokenizer": tokens.kind(gguf),
        "tokens": len(tokenizer),
        "chat_template": bool(tokenizer.chat_template),
    }


def _card(gguf: files.Gguf, dtype: str) -> str:
    """README.md of the folder: where it comes from, and under which licence."""
    name = gguf.metadata.get("general.name", gguf.path.stem)
    licence = gguf.metadata.get("general.license")
    return "\n".join(
        [
            *(["---", f"license: {licence}", "---"] if licence else []),
            f"{CARD_TITLE}: {name}",
            "",
            f"From `{gguf.path.name}`. Its numbers are written in {dtype}; those that were "
            "quantised stay as coarse as they were.",
            "",
        ]
    )
