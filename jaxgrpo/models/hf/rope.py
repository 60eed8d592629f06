"""Rotary positions as config.json gives them: the types of transformers, as a `Rope`.

transformers 5 has `rope_parameters`, for all layers or for each type of layer; before it
`rope_theta` and `rope_scaling` were two fields. Formulas: modeling_rope_utils.py of
transformers 5.23; sources with each of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.models.api import Rope
from jaxgrpo.models.hf.fields import Fields

FULL: str = "full_attention"
SLIDING: str = "sliding_attention"
"""The types of layers in config.json."""
LOCAL_THETA = "rope_local_base_freq"
"""Theta of the layers of type SLIDING in Gemma 3's config.json, before transformers 5."""


class Turn(NamedTuple):
    """A Rope, and the longest sequence for which its angles are those."""

    rope: Rope | None
    limit: int | None = None


class _Sizes(NamedTuple):
    head_dim: int
    max_positions: int


OFF_AT_0 = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Parameters of yarn that are as good as absent where they are 0 (Devstral 2)."""
SHARE = "partial_rotary_factor"
BETA, MAX_POSITIONS = "llama_4_scaling_beta", "max_position_embeddings"

_Make = Callable[[Rope, int, Mapping[str, Any], _Sizes], Turn]
Types = Mapping[str, tuple[_Make, Mapping[str, bool]]]


def read_turn(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    theta: float = 1e4,
    partial: bool = False,
    original: int | None = None,
    share: float = 1.0,
    ignored: Collection[str] = (),
    types: Types | None = None,
    nullable: bool = False,
) -> Turn:
    """The one Rope of a model.

    Args:
      theta: where config.json gives none.
      partial: whether the family turns a share of each head (`partial_rotary_factor`).
      original: the length of training where the field beside rope_parameters does not give it;
        None: what rope_parameters has.
      share: of each head, where config.json gives none. Where it gives null, all of it turns.
      ignored: parameters that change nothing.
      types: other than TYPES.
      nullable: whether nothing turns where theta is null.
    """
    flat = fields.take("rope_theta", "positive", theta)
    share = fields.nullable(SHARE, "positive", share) or 1.0
    original = fields.take("original_max_position_embeddings", "size", original)
    name, parameters = _read_parameters(fields)
    if nullable and parameters.get("rope_theta", fields.content.get("rope_theta", theta)) is None:
        return Turn(None)
    parameters = {key: value for key, value in parameters.items() if key not in ignored}
    parameters = {"rope_theta": flat, SHARE: share, **parameters}
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    sizes = _Sizes(head_dim, max_positions)
    return _turn(fields, name, parameters, sizes, partial, types or TYPES)


def read_turns_by_type(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    thetas: Mapping[str, float],
    local: str | None = None,
) -> dict[str, Turn]:
    """The Rope of each type of layer; scaling without a type is that of FULL.

    Args:
      thetas: of each type, where config.json gives none. `rope_theta` is that of FULL.
      local: the field that gives theta of SLIDING.
    """
    by_type: dict[str, Any] = {kind: {} for kind in thetas}
    parameters = fields.take("rope_parameters", "object", {})
    for kind, table in parameters.items():
        if kind not in by_type or not isinstance(table, dict | None):
            expected = f"expected an object for each of {', '.join(by_type)}"
            fields.refuse("rope_parameters", expected)
            continue
        by_type[kind] |= table or {}
        # transformers 5.23 looks for it above the types of layer, and so never finds it.
        if by_type[kind].get("truncate", True) is not True:
            fields.refuse("rope_parameters", "truncate must be true where layers have types")
    scaling = fields.take("rope_scaling", "object", {})
    if "type" in scaling and "rope_type" not in scaling:
        fields.refuse("rope_scaling", "name the type rope_type, which transformers reads here")
    by_type[FULL] |= scaling
    if scaling.get("truncate", True) is not True:
        fields.refuse("rope_scaling", "truncate must be true where layers have types")
    flat = {FULL: fields.take("rope_theta", "positive", thetas[FULL])}
    flat[SLIDING] = fields.take(local, "positive", thetas[SLIDING]) if local else thetas[SLIDING]
    sizes = _Sizes(head_dim, max_positions)
    source = dict.fromkeys(by_type, "rope_parameters")
    if scaling:
        source[FULL] = "rope_scaling"
    return {
        kind: _turn(fields, source[kind], {"rope_theta": flat[kind], **table}, sizes)
        for kind, table in by_type.items()
    }


def tables(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a config.json's rope by the type of layer; "": one for all layers.

    Only the names of types make several: an object under another name is a parameter.
    """
    parameters = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    if parameters.keys() & {FULL, SLIDING}:
        return {name: value for name, value in parameters.items() if value}
    return {"": parameters}


def older_fields(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """What the field rope_parameters says, in fields of transformers 4, which does not read it.

    Args:
      config_json: the fields of a config.json, whose other fields say the same or nothing.
    """
    parameters = config_json.get("rope_parameters") or {}
    table = parameters.get(FULL, parameters) or {}
    scaling = {name: value for name, value in table.items() if name not in ("type", "rope_type")}
    older = {name: scaling.pop(name) for name in ("rope_theta",) if name in scaling}
    if (share := scaling.pop(SHARE, None)) is not None:
        older[SHARE] = share  # also 1: of some classes 4 assumes less
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "longrope":  # as Phi3Config has it, which takes no other names
        original = scaling.pop("original_max_position_embeddings", None)
        older |= {"original_max_position_embeddings": original} if original else {}
        older["rope_scaling"] = {"type": kind, **scaling}
    elif kind != "default":
        older["rope_scaling"] = {"rope_type": kind, **scaling}
    local = (parameters.get(SLIDING) or {}).get("rope_theta")
    if config_json.get("model_type") == "gemma3_text" and local is not None:
        older[LOCAL_THETA] = local
    return {name: value for name, value in older.items() if config_json.get(name) is None}


def _read_parameters(fields: Fields) -> tuple[str, dict[str, Any]]:
    """The field that gives the parameters, and its object."""
    scaling = fields.take("rope_scaling", "object", {})
    parameters = fields.take("rope_parameters", "object", {})
    return ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)


def _odd_values(
    kind: str, keys: Mapping[str, bool], parameters: Mapping[str, Any], values: Mapping[str, Any]
) -> list[str]:
    """What is wrong with the parameters of a rope type.

    Args:
      keys: those of the type, and whether it needs them.
      values: the parameters as they are read.
    """
    known_keys = {"rope_type", "type", "rope_theta", SHARE, *keys}
    # Any type may have the first; transformers computes with attention_factor, never the second.
    ignored = {"original_max_position_embeddings", "attn_factor"}
    unknown = sorted(set(parameters) - known_keys - ignored)
    problems = [f"{key} is not built for the rope type {kind!r}" for key in unknown]
    problems += [
        f"{key} = {value!r}" + (": expected a number above 0, at most 1" if key == SHARE else "")
        for key, value in values.items()
        if key in known_keys and not _fits(key, value)
    ]
    needed = ["rope_theta", *(key for key in keys if keys[key])]
    return problems + [f"{key} is missing" for key in needed if key not in values]


def _turn(
    fields: Fields,
    name: str,
    parameters: Mapping[str, Any],
    sizes: _Sizes,
    partial: bool = False,
    types: Types | None = None,
) -> Turn:
    types = types or TYPES
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # as early Phi-3 folders have it
    if not isinstance(kind, str) or kind not in types:
        fields.refuse(name, f"the rope_type {kind!r} is not built; known are {', '.join(types)}")
        return Turn(Rope())
    make_turn, keys = types[kind]
    is_off = lambda k, v: v is None or (k in OFF_AT_0 and v == 0)  # noqa: E731
    values = {SHARE: 1.0}
    values |= {k: v for k, v in parameters.items() if not is_off(k, v)}
    if "truncate" in parameters and parameters["truncate"] is None:
        values["truncate"] = False  # as transformers has it, though without the key it is true
    odd = _odd_values(kind, keys, parameters, values)
    for problem in odd:
        fields.refuse(name, problem)
    share = values[SHARE]
    if _fits(SHARE, share) and share != 1 and not partial:
        fields.refuse(
            name, "partial_rotary_factor: this family turns whole heads; take another model"
        )
    if odd:
        return Turn(Rope())
    rope = Rope(float(values["rope_theta"]), float(share))
    turned = int(sizes.head_dim * share)
    if turned < 2 or turned % 2 or turned > sizes.head_dim:
        fields.refuse(
            name,
            f"turns {turned} of head_dim, hidden_size / num_attention_heads or qk_rope_head_dim, "
            f"= {sizes.head_dim}: expected an even number",
        )
        return Turn(rope)
    undefined = _undefined(kind, turned, values)
    for problem in undefined:
        fields.refuse(name, problem)
    turn = None if undefined else _finite_turn(make_turn, rope, turned, values, sizes)
    if turn is None and not undefined:
        where = f"with rope_theta = {rope.theta:g} and {sizes.max_positions} positions"
        why = "it gives angles or factors that float32 cannot hold: take usual numbers"
        fields.refuse(name, f"{where} {why}")
    return turn or Turn(rope)


def _finite_turn(
    make_turn: _Make, rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes
) -> Turn | None:
    """What a formula makes of a rope; None where it gives no numbers of float32."""
    try:
        with np.errstate(all="ignore"):
            turn = make_turn(rope, turned, values, sizes)
            is_right = turn.rope is not None and _is_finite(turn.rope, turned, sizes)
    except (ArithmeticError, ValueError):  # of numbers too large or too small for it
        return None
    return turn if is_right else None


def _undefined(kind: str, turned: int, values: Mapping[str, Any]) -> list[str]:
    """Why the type's formula gives nothing for values that are right by themselves."""
    problems = []
    if kind == "yarn" and values["rope_theta"] == 1:
        problems.append("rope_theta = 1: all pairs turn alike, which yarn cannot tell apart")
    if "alpha" in values and turned == 2:
        problems.append("alpha is for heads in which more than one pair turns")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            if len(values[key]) != turned // 2:
                problems.append(
                    f"{key} has {len(values[key])} numbers: expected {turned // 2}, one for each "
                    "pair that turns of head_dim, or hidden_size / num_attention_heads"
                )
        if values["original_max_position_embeddings"] == 1:
            problems.append("original_max_position_embeddings = 1: expected 2 or more")
    return problems


def _is_finite(rope: Rope, turned: int, sizes: _Sizes) -> bool:
    """Whether float32 holds every angle and factor of a rope."""
    # Without a stretch the first pair and the last turn most and least.
    pairs = np.arange(0, turned, 2) if rope.stretch else np.array([0, turned - 2])
    beta, original = rope.growth or (0.0, 1.0)
    frequency = np.float64(rope.theta) ** (-pairs / turned) * (rope.stretch or 1.0)
    angles = (frequency * sizes.max_positions).astype(np.float32)
    factors = np.array([rope.scale, original, 1 + beta], np.float32)
    is_right = np.isfinite(angles).all() and np.isfinite(factors).all() and factors.all()
    return bool(is_right and math.isfinite(rope.theta))


def _fits(key: str, value: Any) -> bool:
    if key in ("rope_type", "type"):
        return isinstance(value, str)
    if key == "truncate":
        return isinstance(value, bool)
    if key in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(_fits("factor", factor) for factor in value)
    is_number = type(value) in (int, float) and abs(value) <= (
        1 if key == SHARE else sys.float_info.max
    )
    return is_number and (value > 0 or (key == BETA and value == 0))


def _plain(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
    return Turn(rope)


def _linear(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
    """Positions are divided by a factor. Source: Chen et al. 2023, arXiv 2306.15595."""
    return Turn(rope._replace(stretch=(1 / values["factor"],) * (turned // 2)))


def _dynamic(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
    """Plain up to the length of training; beyond it theta, and so each angle, depends on the length
    of the sequence so far, which a policy that is sampled and scored cannot have."""
    return Turn(rope, sizes.max_positions)


def _stretched_base(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
    """`_dynamic` with the one theta of a fixed alpha, where there is one (Hunyuan)."""
    if "alpha" not in values:
        return _dynamic(rope, turned, values, sizes)
    return Turn(rope._replace(theta=rope.theta * values["alpha"] ** (turned / (turned - 2))))


def _growing(make_turn: _Make) -> _Make:
    """With queries that grow with their position (Ministral 3)."""

    def make(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
        growth = (float(values[BETA]), float(values["original_max_position_embeddings"]))
        return make_turn(rope._replace(growth=growth), turned, values, sizes)

    return make


def _llama3(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
    """Long waves are stretched by a factor, short ones kept, those between in part.

    Source: Llama 3.1, arXiv 2407.21783.
    """
    wave = 2 * math.pi / _frequency(rope, turned)
    original = values.get("original_max_position_embeddings", sizes.max_positions)
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if high > low:
        kept_share = np.clip((original / wave - low) / (high - low), 0, 1)
    else:  # nothing lies between
        kept_share = np.where(wave > original / low, 0.0, 1.0)
    return Turn(_stretched(rope, kept_share + (1 - kept_share) / values["factor"]))


def _yarn(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
    """Waves that turn often within the length of training are kept, slow ones stretched, those
    between on a ramp; queries and keys are scaled. Source: Peng et al. 2023, arXiv 2309.00071."""
    original = values.get("original_max_position_embeddings", sizes.max_positions)
    factor = values["factor"]

    def find_pair(turns: float) -> float:
        """The pair that turns so often."""
        return turned * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = find_pair(values.get("beta_fast", 32)), find_pair(values.get("beta_slow", 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    high += 0.001 if high == low else 0
    kept_share = 1 - np.clip((np.arange(turned // 2) - low) / (high - low), 0, 1)
    rope = _stretched(rope, kept_share + (1 - kept_share) / factor)
    return Turn(rope._replace(scale=_yarn_scale(values, factor)))


def _yarn_scale(values: Mapping[str, Any], factor: float) -> float:
    if "attention_factor" in values:
        return float(values["attention_factor"])

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "mscale" in values and "mscale_all_dim" in values:
        return scale(values["mscale"]) / scale(values["mscale_all_dim"])
    return scale(1.0)


def _longrope(rope: Rope, turned: int, values: Mapping[str, Any], sizes: _Sizes) -> Turn:
    """A factor of its own for each pair, up to the length of training; beyond it transformers takes
    other factors, for all positions. Source: Ding et al. 2024, arXiv 2402.13753."""
    original = values["original_max_position_embeddings"]
    factor = values.get("factor", sizes.max_positions / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    rope = _stretched(rope, 1 / np.asarray(values["short_factor"], float))
    return Turn(rope._replace(scale=float(values.get("attention_factor", scale))), original)


def _stretched(rope: Rope, stretch: np.ndarray) -> Rope:
    return rope._replace(stretch=tuple(stretch.tolist()))


def _frequency(rope: Rope, turned: int) -> np.ndarray:
    return np.float64(rope.theta) ** (-np.arange(0, turned, 2) / turned)


TYPES: Types = {
    "default": (_plain, {}),
    "linear": (_linear, {"factor": True}),
    "dynamic": (_dynamic, {"factor": True}),
    "llama3": (
        _llama3,
        {
            **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), True),
            "original_max_position_embeddings": False,
        },
    ),
    "yarn": (
        _yarn,
        {
            "factor": True,
            **dict.fromkeys(("original_max_position_embeddings", "attention_factor"), False),
            **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), False),
            "truncate": False,
        },
    ),
    "longrope": (
        _longrope,
        {
            **dict.fromkeys(("short_factor", "long_factor"), True),
            "original_max_position_embeddings": True,
            **dict.fromkeys(("factor", "attention_factor"), False),
        },
    ),
}
"""Type -> (what it makes of a plain Rope, its parameters and whether each must be given)."""

_UNREAD = dict.fromkeys(("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), False)
WITH_ALPHA: Types = {**TYPES, "dynamic": (_stretched_base, {"factor": True, **_UNREAD})}
GROWING: Types = {
    kind: (
        _growing(make_turn),
        {**keys, BETA: True, "original_max_position_embeddings": True, MAX_POSITIONS: False},
    )
    for kind, (make_turn, keys) in TYPES.items()
}
