"""PEFT's adapter folders, adapter_config.json and adapter_model.safetensors, both ways.

PEFT names a tensor base_model.model.MODULE.lora_A.weight, where MODULE is that of transformers:
lora_A is [rank, inputs] and lora_B [outputs, rank]. A field of adapter_config.json is read, changes
nothing, or must be off, as those of config.json.

PEFT adapts a module that keeps several of our linear maps as one tensor (Phi-3's qkv_proj) with
one A for all of them, and so do we (`ModelConfig.fused`). So it is with the parameters of all
experts of a layer (`mapping.EXPERT_PARAMETERS`). Adapters of single experts, as transformers 4 had
them, are read as PEFT converts them (`hf.expert_adapters`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxgrpo.core.errors import InputError, refuse_all, without_passwords
from jaxgrpo.core.types import Params
from jaxgrpo.data import storage
from jaxgrpo.data.storage import Place
from jaxgrpo.models import lora
from jaxgrpo.models.api import LoraConfig, Model, ModelConfig
from jaxgrpo.models.hf import (
    expert_adapters,
    families,
    mapping,
    replacing,
    targets,
    weights,
    wrapped,
)
from jaxgrpo.models.hf.families import Family
from jaxgrpo.models.hf.fields import Fields
from jaxgrpo.models.hf.mapping import Entry

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
CONTENTS = replacing.Contents(
    "an adapter", re.compile(f"{re.escape(CONFIG)}|{re.escape(WEIGHTS)}"), CONFIG, (WEIGHTS,)
)

INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin that draw A and B and leave the weights as they are."""

PREFIX = "base_model.model."
LIBRARY = {"parent_library": "transformers"}
IN_TEXT = r"(.*[.])?language_model[.](model[.])?layers[.][0-9]+[.]"
"""The modules of layers of a wrapped model's text part, by each of `wrapped.SPELLINGS`."""

HARMLESS = (
    # where it comes from, and how training began
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
    *("inference_mode", "megatron_core"),
    # of training: sampler and update must compute the same, so nothing is dropped at random
    "lora_dropout",
    # of what is off, which is refused by a field of its own
    *("qalora_group_size", "runtime_config"),
    # of how training began, as "eva" among INITS
    "eva_config",
)
"""Fields of adapter_config.json that do not change what a stored adapter computes."""


def read_config(path: str | os.PathLike[str], base: ModelConfig) -> LoraConfig:
    """The LoraConfig of an adapter folder, for a model of this config.

    Raises: InputError naming every field that is missing or asks for what is not built, and where
      the adapter is stored as a pickle only.
    """
    source = storage.local(path, "lora.path") / CONFIG
    if not source.is_file():
        of_hub = "; of the hub none is fetched: `hf download NAME --local-dir DIR`, and give DIR"
        raise InputError(
            f"{source} does not exist: give the folder of an adapter that PEFT wrote"
            + of_hub * (not source.parent.is_dir())
        )
    if not weights_file(path).is_file() and (source.parent / PICKLE).is_file():
        raise InputError(
            f"{source.parent} has its adapter only as {PICKLE}, a pickle, which can run any code "
            f"and is not read: convert it to {WEIGHTS} (save_pretrained of PEFT writes it)"
        )
    fields = Fields(weights.read_json(source, "copy the adapter again"), CONFIG)
    fields.choice("peft_type", {"LORA": "LORA"}, "LORA")
    fields.choice("bias", {"none": "none"}, "none")
    if fields.nullable("init_lora_weights", "anything", True) not in INITS:
        why = "it may change the weights of the base too; take an adapter that PEFT has converted"
        fields.refuse("init_lora_weights", why)
    if fields.nullable("layers_to_transform", "anything", None) not in (None, []):  # 0 is a layer
        fields.refuse("layers_to_transform", "not built; adapt all layers")
    rank, alpha = fields.take("r", "size") or 1, fields.take("lora_alpha", "positive") or 1.0
    rslora = fields.take("use_rslora", "flag", False)
    target_modules = fields.nullable("target_modules", "anything")
    by_expert = expert_adapters.are_stored(weights_file(path))
    parameters = fields.nullable("target_parameters", "texts", []) or []
    names = targets.adapted(target_modules, base, fields, parameters, by_expert)
    settings = LoraConfig(rank=rank, alpha=float(alpha), targets="|".join(names), use_rslora=rslora)
    settings = targets.with_ranks(settings, names, base, fields, by_expert)
    fields.refuse_unread(HARMLESS)
    refuse_all(f"{source} is not an adapter that can be built:", fields.problems)
    return settings


def weights_file(path: str | os.PathLike[str]) -> Path:
    return storage.local(path, "lora.path") / WEIGHTS


def adapter_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of an adapter folder that act on what it computes."""
    return [storage.local(path, "lora.path") / name for name in (CONFIG, WEIGHTS)]


def targets_from_peft(target_modules: str | list[str], base: ModelConfig) -> str:
    """`LoraConfig.targets` for PEFT's target_modules: a regular expression that the whole name of a
    module of transformers must match, "all-linear", or a list of names or their last parts.

    Experts are named as in transformers 5, `experts.gate_up_proj` and `experts.down_proj`, or by
    the modules of each, as in 4.

    Raises: InputError where it matches no linear map, something else, or only some layers.
    """
    fields = Fields({"target_modules": target_modules}, "the config")
    names = targets.adapted(target_modules, base, fields)
    refuse_all("these adapters cannot be built:", fields.problems)
    return "|".join(names)


def read_params(
    path: str | os.PathLike[str], model: Model, dtype: str | None = None, shardings: Any = None
) -> Params:
    """The adapters of a folder, in the layout of `model`, whose config has them.

    Args:
      dtype: of the result; None: what the model computes in.
      shardings: tree of shardings like the adapters; None: this process's default device.

    Raises: InputError naming tensors that are missing, unknown, of another shape or not finite.
    """
    folder = storage.local(path, "lora.path")
    family = families.find_family(model.config.family, str(folder))
    with weights.agreed(folder, shardings), weights.opened(folder, WEIGHTS) as opened:
        files = expert_adapters.joined(opened, family.experts)
        shapes, entries = _parts(model, family, files)
        weights.check(folder, files, entries, config_file=CONFIG)
        return weights.read_leaves(folder, files, shapes, entries, dtype, shardings)


def save(
    model: Model,
    adapters: Params,
    path: str | os.PathLike[str],
    base: str | None = None,
    revision: str | None = None,
) -> None:
    """Writes an adapter folder that `peft.PeftModel.from_pretrained` reads, whole or not at all.

    Every process calls it; process 0 writes. An adapter that we wrote is replaced.

    Args:
      adapters: the first of `lora.split`, in the dtype that they are stored in.
      base: path of the base, or its name on the hub, which PEFT looks up.
      revision: of a base on the hub: a branch, tag or commit.

    Raises: InputError if `path` holds anything but an adapter of ours, or PEFT has no such adapter.
    """
    family = families.find_family(model.config.family, "adapters.save")
    fields = _fields(model.config, family, base, revision)
    _, entries = _parts(model, family)
    tensors = mapping.by_tensor(jax.tree.leaves(adapters), entries)
    is_writer = jax.process_index() == 0
    target = Path(os.path.expanduser(path)).absolute()
    out = replacing.replaced(target, refuse_unless_ours)
    with out if is_writer else contextlib.nullcontext() as folder:
        arrays = {name: weights.gathered(parts) for name, parts in tensors.items()}
        if folder is not None:
            (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
            weights.write_file(arrays, folder / WEIGHTS, folder / CONFIG)
            replacing.write_card(folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jaxgrpo adapters.save")


def refuse_unless_ours(path: Place, bases: Iterable[str | Path] = ()) -> None:
    """Raises: InputError where an adapter may not be written, as for a model."""
    replacing.refuse_unless_ours(path, CONTENTS, bases)


def _parts(
    model: Model, family: Family, files: Collection[str] = ()
) -> tuple[Params, list[list[Entry]]]:
    """The shapes of a model's adapters, and the tensors of each leaf by PEFT's names.

    Args:
      files: names of the tensors of a folder, where there is one.
    """
    config = model.config
    if config.lora is None:
        raise InputError("this model has no adapters: build it with ModelConfig.lora")
    refuse_all("PEFT has no such adapters:", _fusion_problems(config, family))
    shapes, _ = lora.split(model.shapes)
    entries = mapping.entries(model._replace(shapes=shapes), family)
    # Of a wrapped model PEFT writes what its modules are called, today or before 4.52, or those of
    # its text alone.
    spellings = wrapped.OF_MODULES if config.text_only else (wrapped.Spelling(),)
    first = entries[0][0].name
    read = (spelling for spelling in spellings if PREFIX + spelling.name(first) in files)
    spelling = next(read, spellings[0])
    return shapes, [
        [entry._replace(name=PREFIX + spelling.name(entry.name)) for entry in leaf_entries]
        for leaf_entries in entries
    ]


def _fields(
    config: ModelConfig, family: Family, base: str | None, revision: str | None
) -> dict[str, Any]:
    """adapter_config.json of a model with adapters."""
    assert config.lora is not None  # as `_parts` refuses
    settings = config.lora
    hf_modules, parameters = targets.to_peft(config.adapted, config.kinds, family)
    target_modules: Any = targets.shortened(hf_modules, family)
    full = wrapped.find_wrapper(json.loads(config.source or "{}"))
    if config.text_only and hf_modules:  # other parts have modules of the same names
        target_modules = IN_TEXT + "({})".format("|".join(map(re.escape, sorted(hf_modules))))
    alpha = float(settings.alpha)
    return {
        "peft_type": "LORA",
        # By "CAUSAL_LM" PEFT would load the text alone, whose modules have other names.
        "task_type": None if full else "CAUSAL_LM",
        "auto_mapping": full and {"base_model_class": full.architecture, **LIBRARY},
        "base_model_name_or_path": base and without_passwords(base),
        "revision": revision,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": settings.use_rslora,
        "target_modules": target_modules,
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        **targets.patterns(settings, {**hf_modules, **parameters}),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _fusion_problems(config: ModelConfig, family: Family) -> list[str]:
    """Why adapters are none of the family's: each of its modules has one adapter or none."""
    assert config.lora is not None  # as `_parts` refuses
    problems = []
    parameters = {name: maps for name, maps in mapping.EXPERT_PARAMETERS.items() if family.experts}
    for hf_module, names in {**family.fused, **parameters}.items():
        adapted = [name for name in names if name in config.adapted]
        is_built = hf_module in parameters or names in config.fused
        if adapted and not is_built:
            problems.append(
                f"{', '.join(adapted)} in {hf_module}, which is one map in family "
                f"{family.model_type}: adapt {', '.join(names)}, with ModelConfig.fused"
            )
    return problems
