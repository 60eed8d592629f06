"""Which dtypes of model and sampler go together."""

from __future__ import annotations

from collections.abc import Iterator

from jaxgrpo.config.reading import Values


def check(values: Values) -> Iterator[str]:
    """Dtypes that are wider than what they are to hold, or that everything has already."""
    if values.get("model.dtype") == "float32":
        for name in ("model.float32_activations", "model.float32_attention"):
            if values.get(name):
                yield (
                    f'{name} = true: with model.dtype = "float32" these numbers are float32 '
                    'without it; leave it out, or set model.dtype = "bfloat16"'
                )
    if values.get("model.dtype") != "bfloat16":
        return
    is_wide = values.get("model.float32_attention")
    if values.get("rollout.kv_cache_dtype") == "float32" and not is_wide:
        yield (
            'rollout.kv_cache_dtype = "float32": keys and values come in model.dtype = "bfloat16", '
            "so that a wider cache would take twice the memory and change no sample; leave it out"
        )
    if is_wide and not values.get("model.float32_activations"):
        yield (
            "model.float32_attention = true: queries, keys and values come from products in "
            'model.dtype = "bfloat16"; set model.float32_activations = true too'
        )
