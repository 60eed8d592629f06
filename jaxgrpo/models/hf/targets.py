"""PEFT's names of what is adapted, target_modules and target_parameters, and of ours in LINEAR.

A module of transformers may hold several of our maps. Those of experts are parameters of one module
in transformers 5, `experts.gate_up_proj`, and modules of each expert in 4, `experts.0.gate_proj`.
PEFT takes the second names for the first, and with them those of dense layers and shared experts
that end so: in models with experts these are written as parameters too, which it leaves alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxgrpo.core.errors import InputError, pattern_problem
from jaxgrpo.data import limits
from jaxgrpo.models import decoder, lora
from jaxgrpo.models.api import (
    EXPERT_MAPS,
    LINEAR,
    ExpertsKind,
    LayerKind,
    LoraConfig,
    Model,
    ModelConfig,
)
from jaxgrpo.models.hf import families, mapping, wrapped
from jaxgrpo.models.hf.families import Family
from jaxgrpo.models.hf.fields import Fields, is_number
from jaxgrpo.models.hf.mapping import EXPERT_PARAMETERS, experts_module

ALL_LINEAR = "all-linear"
SECONDS = 10.0  # for a regular expression of modules' names and one of them


def adapted(
    target_modules: Any,
    base: ModelConfig,
    fields: Fields,
    parameters: Sequence[str] = (),
    by_expert: bool | None = None,
) -> tuple[str, ...]:
    """The names in LINEAR that PEFT's targets adapt; what is wrong becomes a problem of `fields`.

    Args:
      parameters: target_parameters.
      by_expert: whether modules of single experts are what target_modules names, as the tensors
        of a folder say; None: it may name experts in either way.
    """
    family = families.find_family(base.family, "target_modules")
    modules: Any = [] if target_modules is None and parameters else target_modules
    excluded: Any = fields.nullable("exclude_modules", "anything", None) or []
    pairs = {"target_modules": modules, "exclude_modules": excluded}
    are_right = [_are_targets(fields, name, value) for name, value in pairs.items()]
    if not all(are_right):
        return ()
    names: list[str] = []
    for hf_module, maps in hf_modules(family).items():
        layers = [i for i, kind in enumerate(base.kinds) if kind.has(maps[0])]

        def is_matched(i: int, name: str, hf_module: str = hf_module) -> bool:
            spelled = _spelled(base.text_only, f"model.layers.{i}.{hf_module}")
            if any(_is_parameter(full, name, parameters) for full in spelled):
                return True  # PEFT excludes modules, and no target_parameters
            return any(_names(full, name, family, modules, by_expert) for full in spelled) and (
                not any(_matches(excluded, full) for full in spelled)
            )

        by_map = {name: [i for i in layers if is_matched(i, name)] for name in maps}
        some = [name for name in maps if by_map[name]]
        odd = next((by_map[name] for name in some if len(by_map[name]) < len(layers)), None)
        if odd is not None:
            fields.refuse("target_modules", f"has {hf_module} in layers {odd} only: adapt all")
        elif some and len(some) < len(maps):
            fields.refuse("target_modules", f"has a part of {hf_module} only: adapt all of it")
        else:
            names += some
    unadapted = _unadapted(decoder.build(lora.base_config(base)), family)
    _refuse_unknown(modules, excluded, family, unadapted, fields, parameters)
    if not names and not fields.problems:
        fields.refuse("target_modules", f"matches none of {', '.join(sorted(hf_modules(family)))}")
    return tuple(names)


def _are_targets(fields: Fields, name: str, value: Any) -> bool:
    """Whether a field has the form of target_modules; if not, that is a problem of `fields`."""
    is_list = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    problem = pattern_problem(value) if isinstance(value, str) else None
    if problem or not (is_list or isinstance(value, str)):
        fields.refuse(name, problem or "expected a text or a list of texts")
        return False
    return True


def hf_modules(family: Family) -> dict[str, list[str]]:
    """transformers' module in a layer, or parameter of all experts -> names in LINEAR it holds."""
    fused = {name: hf_module for hf_module, names in family.fused.items() for name in names}
    modules = {**family.modules, **fused}
    if family.experts:
        modules |= {
            name: f"{experts_module(family, name)}.{parameter}"
            for parameter, maps in EXPERT_PARAMETERS.items()
            for name in maps
        }
    by_module: dict[str, list[str]] = {}
    for name in LINEAR:
        if name in modules:
            by_module.setdefault(modules[name], []).append(name)
    return by_module


def _is_parameter(full: str, name: str, parameters: Sequence[str]) -> bool:
    """Whether target_parameters have a map, which is all or a part of `full` of a layer."""
    return _ends_so([*parameters], full if name in EXPERT_MAPS else f"{full}.weight")


def _names(
    full: str, name: str, family: Family, target_modules: str | list[str], by_expert: bool | None
) -> bool:
    """Whether target_modules have a map, which is all or a part of the module `full` of a layer."""
    if name not in EXPERT_MAPS:
        return _matches(target_modules, full)
    module = family.experts[name].format(0)
    place = full.rpartition(experts_module(family, name))[0]
    return (by_expert is None and _matches(target_modules, full)) or (
        by_expert is not False and _matches(target_modules, place + module)
    )


def _spelled(in_wrapper: bool, name: str) -> list[str]:
    """A module's name, and in a wrapped model the ways in which it is written."""
    spellings = wrapped.OF_MODULES if in_wrapper else (wrapped.Spelling(),)
    return [spelling.name(name) for spelling in spellings]


def _unadapted(model: Model, family: Family) -> dict[str, list[str]]:
    """A module that is none of LINEAR, by its name in a layer -> its tensors in all layers.

    Only modules that the model has are among them: a family's table has more. Of a wrapped model
    each tensor is there in each way in which its name is written.
    """
    paths = jax.tree_util.tree_leaves_with_path(model.shapes)
    names = [
        entry.name
        for (keys, _), leaf_entries in zip(paths, mapping.entries(model, family), strict=True)
        if not "/".join(str(key.key) for key in keys[:-1]).endswith(LINEAR)
        for entry in leaf_entries
    ]
    if model.config.tie_embeddings:  # it is a module all the same
        names.append(f"{family.modules['head']}.weight")
    tensors: dict[str, list[str]] = {}
    for name in sorted(names):
        hf_module = re.sub(r"^model\.layers\.\d+\.", "", name).rpartition(".")[0]
        tensors.setdefault(hf_module, []).extend(_spelled(model.config.text_only, name))
    return tensors


def _refuse_unknown(
    target_modules: str | list[str],
    excluded: str | list[str],
    family: Family,
    unadapted: Mapping[str, list[str]],
    fields: Fields,
    parameters: Sequence[str],
) -> None:
    """A problem for each target that is a module or parameter of the model but none of LINEAR.

    Args:
      unadapted: those modules, and the tensors of each.
    """
    for hf_module, tensors in unadapted.items():
        in_modules = target_modules != ALL_LINEAR and any(
            _matches(target_modules, name) and not _matches(excluded, name)
            for name in dict.fromkeys(tensor.rpartition(".")[0] for tensor in tensors)
        )
        if in_modules or any(_ends_so([*parameters], tensor) for tensor in tensors):
            field = "target_modules" if in_modules else "target_parameters"
            why = "only linear maps of layers are adapted; name these alone"
            fields.refuse(field, f"has {hf_module}: {why}")
    suffixes = [
        name if maps[0] in EXPERT_MAPS else f"{name}.weight"
        for name, maps in hf_modules(family).items()
    ]
    suffixes += [
        f"{hf_module}.{leaf}"
        for hf_module, tensors in unadapted.items()
        for leaf in dict.fromkeys(tensor.rpartition(".")[2] for tensor in tensors)
    ]
    for target in parameters:
        ends = (pair for name in suffixes for pair in ((name, target), (target, name)))
        if not any(f".{longer}".endswith(f".{end}") for longer, end in ends):
            fields.refuse("target_parameters", f"{target!r} is none of {', '.join(suffixes)}")


def _matches(target_modules: str | list[str], name: str) -> bool:
    """PEFT's rule for one module."""
    if target_modules == ALL_LINEAR:
        return True
    if isinstance(target_modules, str):
        return _within(lambda: re.fullmatch(target_modules, name), target_modules, name)
    return _ends_so(target_modules, name)


def _ends_so(targets: list[str], name: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _within(match: Callable[[], Any], pattern: str, name: str) -> bool:
    try:
        return limits.within(SECONDS, match) is not None
    except limits.TimedOut:
        raise InputError(
            f"target_modules = {pattern!r}: it takes more than {SECONDS:g} s to match "
            f"{name}: list the modules' names"
        ) from None


def with_ranks(
    settings: LoraConfig,
    names: Sequence[str],
    base: ModelConfig,
    fields: Fields,
    by_expert: bool,
) -> LoraConfig:
    """The settings with the ranks and alphas that PEFT's rank_pattern and alpha_pattern say.

    Of adapters of single experts those of gate and up become one of twice the rank, whose scale is
    theirs, as PEFT joins them (but with rsLoRA, where its scale would be another).

    Args:
      names: those in LINEAR that are adapted.
    """
    patterns = [fields.take(f"{name}_pattern", "object", {}) for name in ("rank", "alpha")]
    is_odd = False
    for field, table in zip(("rank_pattern", "alpha_pattern"), patterns, strict=True):
        right = all(is_number(v) and v > 0 for v in table.values())
        fits = field == "alpha_pattern" or all(type(v) is int for v in table.values())
        if by_expert and table:
            fields.refuse(field, "not built beside adapters of single experts")
        elif not (right and fits) or any(map(pattern_problem, table)):
            fields.refuse(field, "expected regular expressions with numbers above 0")
        else:
            continue
        is_odd = True
    if is_odd:
        return settings
    rank, alpha = settings.rank, settings.alpha
    ranks = []
    for hf_module, maps in hf_modules(families.find_family(base.family)).items():
        layers = [i for i, kind in enumerate(base.kinds) if kind.has(maps[0])]
        full = [_spelled(base.text_only, f"model.layers.{i}.{hf_module}") for i in layers]
        pairs = {
            (_looked_up(patterns[0], n, rank), _looked_up(patterns[1], n, alpha)) for n in full
        }
        if maps[0] == EXPERT_MAPS[0] and by_expert:
            pairs = {(2 * rank, alpha * (2**0.5 if settings.use_rslora else 2))}
        if len(pairs) > 1:
            fields.refuse("rank_pattern", f"{hf_module} has several, by layer: give it one")
        pair = pairs.pop() if pairs else (rank, alpha)
        if pair != (rank, alpha):
            ranks += [(name, pair[0], float(pair[1])) for name in maps if name in names]
    return dataclasses.replace(settings, ranks=tuple(ranks))


def _looked_up(patterns: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    """PEFT's rule: the first pattern that the end of a name matches, of a parameter or a module.

    Args:
      names: of one module, in each way in which it is written.
    """
    for pattern, value in patterns.items():
        ends = rf"(.*\.)?({pattern})$"
        for full in (*names, *(f"{name}.weight" for name in names)):
            if _within(lambda full=full, ends=ends: re.match(ends, full), pattern, full):
                return value
    return default


def to_peft(
    adapted_maps: Collection[str], kinds: Sequence[LayerKind], family: Family
) -> tuple[dict[str, str], dict[str, str]]:
    """(target_modules, target_parameters) of adapters: each with a name in LINEAR.

    Args:
      adapted_maps: the names in LINEAR that have adapters.
      kinds: of the model's layers.
    """
    has_experts = any(isinstance(kind.feed, ExpertsKind) for kind in kinds)
    modules: dict[str, str] = {}
    parameters: dict[str, str] = {}
    for hf_module, maps in hf_modules(family).items():
        name = next((name for name in maps if name in adapted_maps), None)
        if name is None:
            continue
        if name in EXPERT_MAPS:
            parameters[hf_module] = name
        elif has_experts and name.startswith(("feed_forward/", "experts/shared/")):
            parameters[f"{hf_module}.weight"] = name
        else:
            modules[hf_module] = name
    return modules, parameters


def shortened(modules: Collection[str], family: Family) -> list[str]:
    """The modules by the last parts of their names, if no other module's name ends so."""
    endings = [name.rpartition(".")[2] for name in modules]
    all_endings = [name.rpartition(".")[2] for name in {*family.modules.values(), *modules}]
    is_clear = all(all_endings.count(name) == 1 for name in endings)
    return sorted(endings if is_clear else modules)


def patterns(settings: LoraConfig, targets: Mapping[str, str]) -> dict[str, Any]:
    """rank_pattern and alpha_pattern of what has another rank or alpha; {}: nothing has.

    Args:
      targets: PEFT's name of each, with ours.
    """
    table = {name: (rank, alpha) for name, rank, alpha in settings.ranks}
    pairs = {re.escape(hf): table[name] for hf, name in targets.items() if name in table}
    if not pairs:
        return {}
    ranks, alphas = ({hf: pair[k] for hf, pair in pairs.items()} for k in (0, 1))
    return {"rank_pattern": ranks, "alpha_pattern": alphas}
