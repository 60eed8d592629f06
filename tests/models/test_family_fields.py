"""One field of config.json changed at a time: the logits of transformers, or a refusal by name."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import changed_fields
import checkpoints
import jax
import numpy as np
import pytest
from quick import full_but, long_but

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.hf.families import FAMILIES, model_config

CLOSE = 2e-4  # of logits, which are of order 1


def outcome(
    name: str, fields: dict[str, Any], folder: Path, computed: dict[Any, np.ndarray]
) -> str:
    """What comes of a config.json; anything but the first three words is a fault.

    refused: with the field's name. equal: the logits are those of transformers.
    neither: transformers cannot run it, and we do not refuse it.

    Args: computed: our logits by model and weights, which most changes leave as they are.
    """
    try:
        model_config(fields, "config.json")
    except InputError as error:
        return refusal(name, error)
    except Exception as error:
        return f"ended by {error!r}"
    try:
        theirs = checkpoints.redrawn(fields, folder)
        tokens, mask = checkpoints.batch()
        checkpoints.transformers_logits(theirs, tokens, mask)
    except Exception:  # of any type: this is a config that transformers' own code does not foresee
        return "neither"
    try:
        logits = our_logits(folder, tokens, mask, computed)
    except InputError as error:
        return refusal(name, error)
    except Exception as error:
        return f"ended by {error!r}"
    apart = checkpoints.distance(theirs, folder, logits, tokens, mask, CLOSE)
    return "equal" if apart <= CLOSE else f"apart by {apart}"


def our_logits(
    folder: Path, tokens: np.ndarray, mask: np.ndarray, computed: dict[Any, np.ndarray]
) -> np.ndarray:
    model, params = jaxgrpo.load_model(folder)
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        weights.update(np.asarray(leaf).tobytes())
    key = (model.config, jax.tree.structure(params), weights.digest())
    if key not in computed:
        with jax.disable_jit():  # operations of one shape are compiled once for all changes
            computed[key] = np.asarray(jaxgrpo.logits(model, params, tokens, mask))
    return computed[key]


def refusal(name: str, error: InputError) -> str:
    return "refused" if name in str(error) else f"refused without its name: {error}"


def outcomes(
    changes: Iterable[changed_fields.Change], base: dict[str, Any], folder: Path
) -> dict[str, list[str]]:
    """Outcome -> the changes that have it, in words."""
    changes_by_outcome: dict[str, list[str]] = {}
    computed: dict[Any, np.ndarray] = {}
    for count, (name, fields) in enumerate(changes):
        result = outcome(name, fields, folder / str(count), computed)
        new = {key: value for key, value in fields.items() if base.get(key, base) != value}
        gone = [f"no {key}" for key in base if key not in fields]
        changes_by_outcome.setdefault(result, []).append(" ".join([json.dumps(new), *gone]))
    return changes_by_outcome


def check(family: str, every: int, folder: Path) -> dict[str, list[str]]:
    """Tries one change in so many; another part of them for each family. Returns the outcomes."""
    base = checkpoints.config_fields(family)
    start = sorted(FAMILIES).index(family) % every
    by_outcome = outcomes(list(changed_fields.config_changes(base))[start::every], base, folder)
    allowed = ("refused", "equal", "neither")
    assert {result: which for result, which in by_outcome.items() if result not in allowed} == {}
    print(f"{family}: transformers cannot run", *by_outcome.get("neither", []), sep="\n  ")
    return by_outcome


LEFT_BY_OTHERS = {
    **dict.fromkeys(("max_sequence_length", "seq_length", "model_max_length"), 2048),
    **dict.fromkeys(("end_token_id", "unk_token_id", "image_token_id", "im_newline_id"), 3),
    **dict.fromkeys(("use_flash_attn", "qkv_bias", "gradient_checkpointing"), True),
    "neftune_noise_alpha": 5.0,
    "dual_chunk_attention_config": {"chunk_size": 8},
    "auto_map": {"AutoModelForCausalLM": "modeling.Mine"},
}
"""Fields of published folders that no code of transformers reads."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OFF = {"mscale": 1.0, **dict.fromkeys(("mscale_all_dim", "beta_slow", "llama_4_scaling_beta"), 0.0)}
OF_DEVSTRAL = {**checkpoints.GROWING, **OFF}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", LEFT_BY_OTHERS),
        ("qwen2", LEFT_BY_OTHERS),
        ("gemma2", {"sliding_window_size": 2}),
        ("qwen3_moe", {"use_qk_norm": True, "experts_implementation": "eager"}),
        ("qwen3", {"rope_parameters": None, "rope_scaling": {**YARN, "attn_factor": 0.5}}),
        ("ministral3", {"rope_parameters": OF_DEVSTRAL}),
    ],
)
def test_fields_that_transformers_does_not_read_change_nothing(family, changes, tmp_path):
    fields = checkpoints.config_fields(family) | changes
    assert outcome("", fields, tmp_path, {}) == "equal"


NO_PARAMETERS: dict[str, Any] = {"rope_parameters": None}
NULLS: list[tuple[str, dict[str, Any], float]] = [
    ("olmo_hybrid", {**NO_PARAMETERS, "rope_theta": None}, 0.0),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "default"}, "rope_theta": None}, 0.0),
    ("olmo_hybrid", {**NO_PARAMETERS, "rope_theta": 33.0}, 1.0),
    ("olmo_hybrid", NO_PARAMETERS, 1.0),
    ("glm4", {**NO_PARAMETERS, "rope_theta": 33.0, "partial_rotary_factor": None}, 1.0),
    ("glm4", {**NO_PARAMETERS, "rope_theta": 33.0}, 0.5),
]
"""A null beside rope_parameters is no default; and the share of a head that turns with it."""


@pytest.mark.parametrize(("family", "changes", "share"), NULLS)
def test_a_null_beside_the_parameters_of_positions_is_no_default(family, changes, share):
    """OLMo-core writes a theta of null for models without positions, and no rope_parameters."""
    config = model_config(checkpoints.config_fields(family) | changes, "config.json")
    ropes = {kind.rope for kind in config.attention}
    assert {0.0 if rope is None else rope.share for rope in ropes} == {share}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "share"), NULLS)
def test_models_with_such_a_null_compute_what_transformers_does(family, changes, share, tmp_path):
    del share
    fields = checkpoints.config_fields(family) | changes
    assert outcome("", fields, tmp_path, {}) == "equal"


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.full),
        "phi3",
        pytest.param("olmo2", marks=pytest.mark.full),
    ],
)
def test_without_their_number_there_are_as_many_kv_heads_as_heads(family, tmp_path):
    fields = checkpoints.config_fields(family)
    del fields["num_key_value_heads"]
    assert outcome("", fields, tmp_path, {}) == "equal"


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3"])
def test_phi3_has_the_two_types_of_positions_that_transformers_allows_it(kind):
    scaling = {"rope_parameters": None, "rope_scaling": {**YARN, "rope_type": kind}}
    fields = checkpoints.config_fields("phi3") | scaling
    with pytest.raises(InputError, match=f"'{kind}' is not built; known are default, longrope"):
        model_config(fields, "config.json")


@pytest.mark.full
@pytest.mark.parametrize("changes", [{"linear_key_head_dim": 4}, {"linear_value_head_dim": 32}])
def test_filters_that_transformers_has_cut_into_equal_parts_are_read_as_they_were_meant(
    changes, tmp_path
):
    """As it saves them where keys and values have other widths."""
    fields = checkpoints.config_fields("olmo_hybrid") | changes
    assert outcome("", fields, tmp_path, {}) == "equal"


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_field_that_is_left_out_is_what_transformers_assumes(family):
    """Beside the sizes that transformers assumes, or a small model's where we refuse these; without
    layer_types, which would hide what they follow from, where they may be left out."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[family]
    architecture = {"architectures": [FAMILIES[family].architecture]}

    def read(fields: dict[str, Any]) -> Any:
        with contextlib.suppress(InputError):
            return model_config(fields | architecture, "config.json")

    def all_fields(config: Any) -> dict[str, Any]:
        return json.loads(json.dumps(config.to_dict()))

    bases = [all_fields(config_class()), all_fields(checkpoints.transformers_config(family))]
    bases = [{**fields, "layer_types": None} for fields in bases] + bases
    base, compared = next(fields for fields in bases if read(fields)), 0
    for name in base:
        fields = {key: value for key, value in base.items() if key != name}
        ours = read(fields)
        if ours is not None:
            try:
                filled = all_fields(config_class.from_dict(copy.deepcopy(fields)))
            except StrictDataclassError:  # of layers that we do not read, as Mamba's
                continue
            assert read(filled) == ours, name
            compared += 1
    assert compared > 10


DIFFERENT = ("cohere2", "ernie4_5", "exaone4", "gemma2", "olmo3", "phi3")
"""For `make test` some fields of some families; the next test tries all of theirs, of all."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    full_but(("gemma2", "phi3"), DIFFERENT),
)
def test_some_fields_are_computed_as_by_transformers_or_refused_by_name(family, tmp_path):
    assert {"equal", "refused"} & check(family, 72, tmp_path).keys()


@pytest.mark.parametrize("every", long_but([16], [1, 16]))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_field_is_computed_as_by_transformers_or_refused_by_name(family, every, tmp_path):
    """One change in sixteen, others for each family, or all of them."""
    by_outcome = check(family, every, tmp_path)
    # So many configs are really compared, and few are those that transformers cannot run.
    assert len(by_outcome["equal"]) > 40 // every
    assert len(by_outcome.get("neither", [])) < len(by_outcome["equal"])
