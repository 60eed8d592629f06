"""Rollouts in files: the format of docs/rollouts.md, written and read. One file holds one step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors

from jaxgrpo.core import types
from jaxgrpo.core.errors import InputError, refuse_all, refusing, suggest
from jaxgrpo.core.records import SUPPORT
from jaxgrpo.core.types import Rollouts
from jaxgrpo.data.storage import write_atomically
from jaxgrpo.models import sharding
from jaxgrpo.rollout.dialogue import FORK

FORMAT, VERSION = "jaxgrpo-rollouts", "1"

ARRAYS = {name: form for name, form in types.ARRAYS.items() if name != "step"}
"""Name in a file and of a field of `Rollouts` -> the letters of its shape, and its dtype."""

OPTIONAL = ("truncated", "row", "ordinal", "policy_version")
REWARDS, FIELDS = "rewards.", "fields."
"""What the names of a reward and of a field begin with in a file."""

LETTERS = {FIELDS + FORK: "PGT", FIELDS + SUPPORT: "PGTK"}
"""Names of fields whose shapes are fixed, int32 each."""

KINDS: dict[Any, str] = {
    np.int32: "int32, or whole numbers that fit into it",
    np.bool_: "bool, or whole numbers that are 0 or 1",
    np.float32: "float32, or other numbers",
}
"""What an array may hold that is to have a dtype."""

Arrays = dict[str, np.ndarray]


def encode(rollouts: Rollouts, step: int) -> bytes:
    """The bytes of a file. `forced_prefix` is left out: its tokens are among the completions'.

    Args:
      step: its number, counted from 1 as in metrics.jsonl.
    """
    host: Rollouts = sharding.to_host(rollouts)
    arrays = {name: getattr(host, name) for name in ARRAYS}
    arrays |= {f"{REWARDS}{name}": value for name, value in host.rewards.items()}
    arrays |= {f"{FIELDS}{name}": value for name, value in host.fields.items()}
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {"format": FORMAT, "version": VERSION, "step": str(step)}
    return _in_order(safetensors.save(contiguous, metadata))


def _in_order(content: bytes) -> bytes:
    """The same file with its metadata in order, which the library writes in a random one.

    So the same rollouts are the same bytes. A file begins with the length of its header, 8 bytes.
    """
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def save(path: str | os.PathLike[str], rollouts: Rollouts, step: int) -> None:
    """Writes a file, whole or not at all; see `encode`."""
    write_atomically(Path(path), encode(rollouts, step))


def load(
    path: str | os.PathLike[str],
    vocab_size: int | None = None,
    end_tokens: Sequence[int] = (),
    without_text: Sequence[tuple[int, int]] = (),
) -> Rollouts:
    """The rollouts of a file, as host arrays, with the defaults of docs/rollouts.md.

    Behaviour log-probs are 0 where `token_mask` is False, whatever the file has there.

    Args:
      vocab_size: of the model; None: token ids need only be 0 or more.
      end_tokens: of the model; where the file says nothing about `truncated`, a sample that
        ends at the last position with one of them is not truncated.
      without_text: as in ModelConfig; such a token may be read, but not chosen by the policy.

    Raises: InputError naming the file, each wrong array, what it holds and what is expected.
    """
    path = Path(path)
    raw_arrays, step = _read(path)
    # Each check relies on those before it.
    for check in (_wrong_names, _wrong_shapes):
        refuse_all(f"{path}:", list(check(raw_arrays)))
    arrays, problems = _cast(raw_arrays)
    refuse_all(f"{path}:", problems or list(_wrong_values(arrays, vocab_size)))
    refuse_all(f"{path}:", list(_never_drawn(arrays, without_text)))
    mask = arrays["token_mask"]
    arrays["behavior_logp"] = np.where(mask, arrays["behavior_logp"], np.float32(0))
    arrays = {**_defaults(arrays, end_tokens), **arrays}
    named: dict[str, Any] = {name: arrays[name] for name in ARRAYS}
    finished_steps: Any = np.asarray(max(0, step - 1), np.int32)
    return Rollouts(
        **named,
        rewards=_with_prefix(arrays, REWARDS),
        fields=_with_prefix(arrays, FIELDS),
        step=finished_steps,
    )


def names_in(path: str | os.PathLike[str]) -> frozenset[str]:
    """The names of a file's arrays, which are not read. Raises: InputError where it is none."""
    with _opened(Path(path)) as file:
        return frozenset(file.keys())


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file of rollouts")
    problem = f"{path} is no readable safetensors file ({{reason}}): write it again"
    with refusing(problem, SafetensorError, OSError):
        return safe_open(path, framework="numpy")


def _read(path: Path) -> tuple[Arrays, int]:
    """The arrays and the step of a file, as they are there."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
        file_format = {"format": metadata.get("format"), "version": metadata.get("version")}
        expected = {"format": FORMAT, "version": VERSION}
        if file_format != expected:
            raise InputError(
                f"{path}: its metadata say {file_format}, expected {expected}: save it with them, "
                "as save_file(arrays, path, metadata={...}), if it is such a file "
                "(docs/rollouts.md)"
            )
        step = metadata.get("step", "1")
        if not (step.isascii() and step.isdecimal() and len(step) < 10):
            raise InputError(f"{path}: metadata step = {step!r}: expected a number such as '10'")
        with refusing(f"{path}: an array cannot be read ({{kind}}: {{reason}})"):
            return {name: file.get_tensor(name) for name in file.keys()}, int(step)  # noqa: SIM118


def _wrong_names(arrays: Arrays) -> Iterator[str]:
    for name in ARRAYS:
        if name not in arrays and name not in OPTIONAL:
            letters, dtype = ARRAYS[name]
            yield f"{name}: missing; expected {np.dtype(dtype)} [{', '.join(letters)}]"
    if not _with_prefix(arrays, REWARDS):
        yield f"{REWARDS}NAME: missing; expected at least one, float32 [P, G]"
    for name in arrays:
        if name not in ARRAYS and not name.startswith((REWARDS, FIELDS)):
            hint = suggest(name, [*ARRAYS, f"{REWARDS}NAME", f"{FIELDS}NAME"])
            yield f"{name}: unknown array; {hint}"
        elif name in (REWARDS, FIELDS):
            yield f"{name}: a name is missing after the dot"


def _form(name: str) -> tuple[str, Any]:
    """The letters of an array's shape, "P*": any that begins with P; and its dtype, None: any."""
    if name in LETTERS:
        return LETTERS[name], np.int32
    if name.startswith(FIELDS):
        return "P*", None
    return ARRAYS.get(name, ("PG", np.float32))


def _wrong_shapes(arrays: Arrays) -> Iterator[str]:
    first = ("prompt_tokens", "completion_tokens")
    sizes: dict[str, int] = {}
    for name in (*first, *(name for name in arrays if name not in first)):
        shape, letters = arrays[name].shape, _form(name)[0]
        leading = letters.rstrip("*")
        fits = len(shape) >= 1 if leading != letters else len(shape) == len(letters)
        if not fits or any(n != sizes.get(c, n) for c, n in zip(leading, shape, strict=False)):
            expected = [f"{c} = {sizes[c]}" if c in sizes else c for c in leading]
            expected += ["..."] if leading != letters else []
            yield f"{name}: has shape {list(shape)}, expected [{', '.join(expected)}]"
        elif 0 in shape and name in ARRAYS:
            yield f"{name}: has shape {list(shape)}, expected no size of 0"
        else:
            sizes = {**dict(zip(leading, shape, strict=False)), **sizes}


def _cast(raw_arrays: Arrays) -> tuple[Arrays, list[str]]:
    """The arrays in the dtypes of the format, and what is wrong with those that do not fit."""
    arrays, problems = {}, []
    for name, array in raw_arrays.items():
        fixed_dtype = _form(name)[1]
        dtype: Any = _device_dtype(array.dtype) if fixed_dtype is None else fixed_dtype
        is_float = bool(jnp.issubdtype(array.dtype, np.floating))
        kinds = {np.int32: "iu", np.bool_: "biu", np.float32: "iu"}[dtype]
        if array.dtype.kind in kinds or (is_float and dtype is np.float32):
            with np.errstate(over="ignore"):
                arrays[name] = array.astype(dtype)
            if dtype is np.float32 or (arrays[name].astype(array.dtype) == array).all():
                continue
        contents = f"{array.dtype}"
        if array.dtype.kind in "iu":
            contents += f" from {array.min()} to {array.max()}"
        problems.append(f"{name}: holds {contents}, expected {KINDS[dtype]}")
    return arrays, problems


def _device_dtype(dtype: np.dtype) -> Any:
    """The dtype of a field on the devices."""
    if dtype.kind == "b":
        return np.bool_
    return np.int32 if dtype.kind in "iu" else np.float32


def _wrong_values(arrays: Arrays, vocab_size: int | None) -> Iterator[str]:
    mask = arrays["prompt_mask"]
    length = mask.sum(-1)
    is_right_padded = (mask == (np.arange(mask.shape[1]) < length[:, None])).all(-1) & (length > 0)
    if not is_right_padded.all():
        place = int(np.argmin(is_right_padded))
        yield (
            f"prompt_mask[{place}]: is {_mask_text(mask[place])}, expected 1 or more True, then "
            "only False: prompts are padded on the right"
        )
    highest = np.inf if vocab_size is None else vocab_size - 1
    allowed = "0 or more" if vocab_size is None else f"0 to {highest}, the model's tokens"
    for name in ("prompt_tokens", "completion_tokens", "row", "ordinal"):
        if name not in arrays:
            continue
        is_token = name.endswith("tokens")
        wrong = (arrays[name] < 0) | (is_token & (arrays[name] > highest))
        expected = f"{allowed} (padding too)" if is_token else "0 or more"
        yield from _first(name, arrays[name], wrong, expected)
    logp = arrays["behavior_logp"]
    wrong = arrays["token_mask"] & ~np.isfinite(logp)
    yield from _first("behavior_logp", logp, wrong, "a finite number where token_mask is True")
    if (fork := arrays.get(FIELDS + FORK)) is not None:
        rise = np.diff(fork, axis=-1, prepend=0)
        wrong = (rise < 0) | (rise > 1) | ((rise > 0) & arrays["token_mask"])
        expected = "that of the token before, or 1 more where token_mask is False"
        yield from _first(FIELDS + FORK, fork, wrong, expected)
    if (support := arrays.get(FIELDS + SUPPORT)) is not None:
        wrong = (support < -1) | (support > highest)
        wrong |= (support >= 0) & (np.minimum.accumulate(support, axis=-1) < 0)
        expected = "a token of the model, or -1 behind the last"
        yield from _first(FIELDS + SUPPORT, support, wrong, expected)
        is_drawn = (support == arrays["completion_tokens"][..., None]).any(-1)
        wrong = arrays["token_mask"] & (support[..., 0] >= 0) & ~is_drawn
        expected = f"one of {FIELDS}{SUPPORT} there, which it was drawn among"
        yield from _first("completion_tokens", arrays["completion_tokens"], wrong, expected)
    for name in arrays:
        if name.startswith(REWARDS):
            wrong = np.isinf(arrays[name])
            yield from _first(name, arrays[name], wrong, "a finite number, or NaN: not scored")


def _never_drawn(arrays: Arrays, without_text: Sequence[tuple[int, int]]) -> Iterator[str]:
    tokens = arrays["completion_tokens"]
    wrong = np.zeros(tokens.shape, bool)
    for begin, end in without_text:
        wrong |= (begin <= tokens) & (tokens < end)
    yield from _first(
        "completion_tokens",
        tokens,
        wrong & arrays["token_mask"],
        "a token that the tokenizer has text for, as the model gives others no probability: set "
        "token_mask to False there, or leave the sample out",
    )


def _first(name: str, array: np.ndarray, wrong: np.ndarray, expected: str) -> Iterator[str]:
    """A problem for the first value that is wrong, if one is."""
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0].tolist())
        yield f"{name}{list(place)}: is {array[place]}, expected {expected}"


def _mask_text(mask: np.ndarray) -> str:
    """A mask as 0 and 1, cut if it is long."""
    return "".join(str(int(bit)) for bit in mask[:40]) + ("..." if len(mask) > 40 else "")


def _defaults(arrays: Arrays, end_tokens: Sequence[int]) -> Arrays:
    """Of the arrays that a file may lack, as docs/rollouts.md says."""
    mask, last = arrays["token_mask"], arrays["completion_tokens"][..., -1]
    ends = np.isin(last, np.asarray(end_tokens, np.int32))
    prompts = [
        row[:length].tobytes()
        for row, length in zip(arrays["prompt_tokens"], arrays["prompt_mask"].sum(-1), strict=True)
    ]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return {
        "truncated": mask[..., -1] & ~ends,
        "row": np.array([numbers[prompt] for prompt in prompts], np.int32),
        "ordinal": np.arange(len(prompts), dtype=np.int32),
        "policy_version": np.full(mask.shape[:2], -1, np.int32),
    }


def _with_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """The arrays whose names begin so, under the rest of their names."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix) and name != prefix
    }
