"""Files of rollouts: what is written is read bit for bit, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import resuming
import tiny
from safetensors.numpy import load_file, save_file

from jaxgrpo.core.errors import InputError
from jaxgrpo.models import sharding
from jaxgrpo.training.records import rollout_files

METADATA = {"format": "jaxgrpo-rollouts", "version": "1", "step": "3"}
REQUIRED = (
    *("prompt_tokens", "prompt_mask", "completion_tokens", "token_mask", "behavior_logp"),
    "rewards.reward",
)


def rollouts(**changes):
    """Two prompts with three samples, one of which is not scored and one of which is empty."""
    drawn = tiny.rollouts(np.array([[0, 1, np.nan], [1, 0.5, -2]]))
    mask = drawn.token_mask.at[1, 2].set(False)
    logp = drawn.behavior_logp.at[1, 2].set(0)
    empty = {"token_mask": mask, "behavior_logp": logp}
    return sharding.to_host(dataclasses.replace(drawn, **empty, **changes))


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> dict[str, np.ndarray]:
    """The arrays of a file, by name."""
    file = tmp_path_factory.mktemp("whole") / "x.safetensors"
    rollout_files.save(file, rollouts(fields={"level": np.arange(2)}), 3)
    return load_file(file)


def saved(path, arrays, metadata=METADATA, without=(), **changes):
    """A file with some of its arrays replaced, or left out."""
    contents = {name: array for name, array in {**arrays, **changes}.items() if name not in without}
    save_file(
        {name: np.ascontiguousarray(array) for name, array in contents.items()}, path, metadata
    )
    return path


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    fields = {
        "level": np.arange(2, dtype=np.int32),
        "prior": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
        "known": np.ones((2, 3, 5), bool),
    }
    before = rollouts(
        fields=fields,
        rewards={"a.b": np.full((2, 3), np.nan, np.float32), "c": np.eye(2, 3, dtype=np.float32)},
        row=np.array([7, 2], np.int32),
        ordinal=np.array([40, 41], np.int32),
        policy_version=np.array([[4, 4, 3], [4, -1, 4]], np.int32),
        step=np.int32(4),
    )
    file = tmp_path / "x.safetensors"
    rollout_files.save(file, before, 5)
    resuming.assert_same_bits(before, rollout_files.load(file, tiny.VOCAB))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]
    first = file.read_bytes()
    rollout_files.save(file, rollout_files.load(file), 5)
    assert file.read_bytes() == first


def test_what_a_file_leaves_out_has_the_documented_defaults(tmp_path, arrays):
    prompts = np.array([[5, 6, 7], [5, 6, 0], [5, 6, 7]])
    tokens = np.array([[[3, 4], [3, 1], [3, 0]]] * 3)
    required = {
        "prompt_tokens": prompts,
        "prompt_mask": prompts > 0,
        "completion_tokens": tokens,
        "token_mask": tokens > 0,
        "behavior_logp": np.where(tokens > 0, -1.0, np.nan),
        "rewards.reward": np.zeros((3, 3), np.int64),
    }
    file = saved(tmp_path / "x.safetensors", required, {**METADATA, "step": "9"})
    read = rollout_files.load(file, tiny.VOCAB, end_tokens=[tiny.END])
    assert read.truncated.tolist() == [[True, False, False]] * 3
    assert rollout_files.load(file).truncated.tolist() == [[True, True, False]] * 3
    assert read.row.tolist() == [0, 1, 0]
    assert read.ordinal.tolist() == [0, 1, 2]
    assert read.policy_version.tolist() == [[-1] * 3] * 3
    assert (read.step, read.fields) == (8, {})
    np.testing.assert_array_equal(read.behavior_logp, np.where(tokens > 0, -1, 0))
    dtypes = {name: dtype for name, (_, dtype) in rollout_files.ARRAYS.items()}
    assert all(getattr(read, name).dtype == dtype for name, dtype in dtypes.items())
    assert read.rewards["reward"].dtype == np.float32
    short = saved(tmp_path / "y.safetensors", arrays, without=rollout_files.OPTIONAL)
    assert rollout_files.load(short).behavior_logp.tobytes() == arrays["behavior_logp"].tobytes()


def test_the_example_of_the_page_writes_a_file_in_pytorch(repository, tmp_path, monkeypatch):
    page = (repository / "docs" / "rollouts.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    read = rollout_files.load("step.safetensors", vocab_size=10, end_tokens=[1])
    assert read.completion_tokens.tolist() == [[[4, 1], [3, 3]], [[2, 1], [1, 0]]]
    assert read.truncated.tolist() == [[False, True], [False, False]]
    assert read.behavior_logp[1, 1].tolist() == [-1.5, 0]


def test_pytorch_reads_what_is_written_and_its_other_dtypes_are_cast(tmp_path, arrays):
    import torch
    from safetensors.torch import load_file, save_file

    file = tmp_path / "x.safetensors"
    rollout_files.save(file, rollouts(), 3)
    read = load_file(file)
    assert read["completion_tokens"].tolist() == arrays["completion_tokens"].tolist()
    wide = {name: read[name] for name in REQUIRED}
    wide = {n: a.long() if a.dtype in (torch.int32, torch.bool) else a for n, a in wide.items()}
    wide["behavior_logp"] = wide["behavior_logp"].bfloat16()
    save_file(wide, file, METADATA)
    again = rollout_files.load(file, tiny.VOCAB)
    before = rollouts()
    for name in ("prompt_mask", "completion_tokens", "token_mask"):
        assert getattr(again, name).tobytes() == getattr(before, name).tobytes()
    np.testing.assert_allclose(again.behavior_logp, before.behavior_logp, rtol=1 / 128)


def test_no_token_at_all_is_a_sample_too(tmp_path, arrays):
    none = np.zeros_like(arrays["token_mask"])
    read = rollout_files.load(saved(tmp_path / "x", arrays, without=["truncated"], token_mask=none))
    assert not read.behavior_logp.any()
    assert not read.truncated.any()


def changed(arrays, name, place, value):
    """One array with another value at a place."""
    copy = arrays[name].copy()
    copy[place] = value
    return {name: copy}


WRONG = {
    "an array is missing": (
        lambda a: {"without": ["token_mask"]},
        r"token_mask: missing; expected bool \[P, G, T\]",
    ),
    "no reward": (
        lambda a: {"without": ["rewards.reward"]},
        r"rewards\.NAME: missing; expected at least one, float32 \[P, G\]",
    ),
    "a reward without a name": (lambda a: {"rewards.": a["truncated"]}, "a name is missing after"),
    "an unknown array": (
        lambda a: {"reward.reward": a["rewards.reward"]},
        r"reward\.reward: unknown array; did you mean 'rewards\.NAME'",
    ),
    "no such format": (
        lambda a: {"metadata": {"format": "pt"}},
        r"metadata say \{'format': 'pt', 'version': None\}, expected .*save it with them",
    ),
    "another version": (lambda a: {"metadata": {**METADATA, "version": "2"}}, "'version': '2'"),
    "no number": (
        lambda a: {"metadata": {**METADATA, "step": "-1"}},
        "metadata step = '-1': expected a number",
    ),
    "samples that disagree": (
        lambda a: {"token_mask": a["token_mask"][:, :2]},
        r"token_mask: has shape \[2, 2, 5\], expected \[P = 2, G = 3, T = 5\]",
    ),
    "prompts that disagree": (
        lambda a: {"completion_tokens": a["completion_tokens"][:1]},
        r"completion_tokens: has shape \[1, 3, 5\], expected \[P = 2, G, T\]",
    ),
    "a reward per token": (
        lambda a: {"rewards.reward": a["behavior_logp"]},
        r"rewards\.reward: has shape \[2, 3, 5\], expected \[P = 2, G = 3\]",
    ),
    "a support of another size": (
        lambda a: {"fields.sample_support": a["completion_tokens"]},
        r"fields\.sample_support: has shape \[2, 3, 5\], expected \[P = 2, G = 3, T = 5, K\]",
    ),
    "a support of tokens that the model does not have": (
        lambda a: {"fields.sample_support": np.full((2, 3, 5, 4), 40)},
        r"fields\.sample_support\[0, 0, 0, 0\]: is 40, expected a token of the model, or -1 behind",
    ),
    "a support with a gap": (
        lambda a: {"fields.sample_support": np.full((2, 3, 5, 2), [-1, 3])},
        r"fields\.sample_support\[0, 0, 0, 1\]: is 3, expected a token of the model, or -1",
    ),
    "a support without the token that was drawn": (
        lambda a: {"fields.sample_support": (a["completion_tokens"][..., None] + [1, 2]) % 40},
        r"completion_tokens\[0, 0, 0\]: is \d+, expected one of fields\.sample_support there",
    ),
    "a field of another step": (
        lambda a: {"fields.level": np.zeros(3)},
        r"fields\.level: has shape \[3\], expected \[P = 2, \.\.\.\]",
    ),
    "no positions": (
        lambda a: {n: a[n][..., :0] for n in ("prompt_tokens", "prompt_mask")},
        r"prompt_tokens: has shape \[2, 0\], expected no size of 0",
    ),
    "tokens that are no whole numbers": (
        lambda a: {"completion_tokens": a["behavior_logp"]},
        "completion_tokens: holds float32, expected int32, or whole numbers that fit",
    ),
    "tokens beyond int32": (
        lambda a: changed({"row": a["row"].astype(np.int64)}, "row", 1, 2**32),
        "row: holds int64 from 0 to 4294967296, expected int32",
    ),
    "a mask of counts": (
        lambda a: {"token_mask": a["completion_tokens"]},
        "token_mask: holds int32 from 0 to .*, expected bool, or whole numbers that are 0 or 1",
    ),
    "rewards that are no numbers": (
        lambda a: {"rewards.reward": a["truncated"]},
        r"rewards\.reward: holds bool, expected float32",
    ),
    "a token that the model does not have": (
        lambda a: changed(a, "completion_tokens", (1, 2, 4), 40),
        r"completion_tokens\[1, 2, 4\]: is 40, expected 0 to 39, .*padding too",
    ),
    "padding of the loss": (
        lambda a: changed(a, "completion_tokens", (0, 0, 4), -100),
        r"completion_tokens\[0, 0, 4\]: is -100",
    ),
    "a prompt padded on the left": (
        lambda a: {"prompt_mask": a["prompt_mask"][:, ::-1]},
        r"prompt_mask\[0\]: is 000001, expected 1 or more True, then only False",
    ),
    "no prompt": (lambda a: changed(a, "prompt_mask", 1, False), r"prompt_mask\[1\]: is 000000"),
    "a log-prob that is not finite": (
        lambda a: changed(a, "behavior_logp", (1, 0, 0), -np.inf),
        r"behavior_logp\[1, 0, 0\]: is -inf, expected a finite number where token_mask is True",
    ),
    "an infinite reward": (
        lambda a: changed(a, "rewards.reward", (0, 1), np.inf),
        r"rewards\.reward\[0, 1\]: is inf, expected a finite number, or NaN",
    ),
    "a row that is none": (lambda a: changed(a, "row", 0, -1), r"row\[0\]: is -1, expected 0 or"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_by_name(case, tmp_path, arrays):
    change, message = WRONG[case]
    file = saved(tmp_path / "wrong.safetensors", arrays, **change(arrays))
    with pytest.raises(InputError, match=message) as caught:
        rollout_files.load(file, tiny.VOCAB)
    assert str(caught.value).startswith(str(file))


def test_all_that_is_wrong_with_the_values_is_said_at_once(tmp_path, arrays):
    wrong = changed(arrays, "row", 0, -1) | changed(arrays, "rewards.reward", (1, 1), -np.inf)
    with pytest.raises(InputError) as caught:
        rollout_files.load(saved(tmp_path / "x", arrays, **wrong))
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_that_is_none_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(InputError, match="there is no such file of rollouts"):
        rollout_files.load(file)
    file.write_bytes(b"12345678 not safetensors")
    with pytest.raises(InputError, match=r"x\.safetensors is no readable safetensors file"):
        rollout_files.load(file)
