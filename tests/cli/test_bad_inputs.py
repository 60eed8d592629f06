"""What a user may give by mistake, or to break it: each is refused in words, not by a traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import minimal_config
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxgrpo import advantages, losses
from jaxgrpo.cli import main as cli
from jaxgrpo.cli.make_base import base_config
from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Stream
from jaxgrpo.data import tasks
from jaxgrpo.data.prompts import load_rows
from jaxgrpo.data.sources import Source
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.losses import Tokens
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import folders
from jaxgrpo.planning import preview
from jaxgrpo.rewards.calling import call_rewards
from jaxgrpo.rewards.protocol import Reward, numbers
from jaxgrpo.rollout.judging import make_selector
from jaxgrpo.rollout.selection import sequential
from jaxgrpo.training import pretrained
from jaxgrpo.training.checkpoints import Checkpoints
from jaxgrpo.training.records.folder import RunFolder, refuse_unusable

pytestmark = pytest.mark.fault(20)

DIGITS = "1" + "0" * 5000  # more than Python reads or writes
DEEP = "[" * 100_000


class SavedModel(NamedTuple):
    """A model folder to spoil, and what was read from it while it was whole."""

    folder: Path  # a copy of its own
    model: Any
    tokenizer: Any

    def edit(self, name: str, **fields: Any) -> None:
        """Changes fields of one of its JSON files."""
        file = self.folder / name
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**before, **fields}))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> SavedModel:
    folder = tmp_path_factory.mktemp("models") / "whole"
    tokenizer = character_tokenizer(tasks.find("arithmetic").alphabet)
    model = decoder.build(base_config(len(tokenizer), 32, 1))
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), model.shapes)
    folders.save_model(model, params, folder, tokenizer)
    return SavedModel(folder, model, folders.read_tokenizer(folder))


@pytest.fixture
def saved(pristine, tmp_path) -> SavedModel:
    shutil.copytree(pristine.folder, tmp_path / "model")
    return pristine._replace(folder=tmp_path / "model")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 40,
    **dict.fromkeys(("short_factor", "long_factor"), [1.0] * 8),
}

Case = tuple[Callable[[SavedModel, Path], Any], str]
"""(what is done to a whole folder and an empty one, a pattern of the message)"""


def key(override: str, message: str) -> Case:
    return lambda saved, home: minimal_config.read(override), message


def toml(text: str, message: str) -> Case:
    def read(saved: SavedModel, home: Path) -> None:
        (home / "run.toml").write_text(text, "latin-1")
        files.load(home / "run.toml")

    return read, message


def config_json(message: str, text: str | None = None, **fields: Any) -> Case:
    def read(saved: SavedModel, home: Path) -> None:
        saved.edit("config.json", **fields)
        if text is not None:
            saved.write("config.json", text)
        folders.read_config(saved.folder)

    return read, message


def end_tokens(text: str, message: str) -> Case:
    def read(saved: SavedModel, home: Path) -> None:
        saved.write("generation_config.json", text)
        folders.read_end_tokens(saved.folder, saved.tokenizer, saved.model.config.vocab_size)

    return read, message


def shards(text: str, message: str) -> Case:
    def read(saved: SavedModel, home: Path) -> None:
        (saved.folder / "model.safetensors").unlink()
        saved.write("model.safetensors.index.json", text)
        folders.read_params(saved.folder, saved.model)

    return read, message


def weights(dtype: str, message: str) -> Case:
    def read(saved: SavedModel, home: Path) -> None:
        file = saved.folder / "model.safetensors"
        save_file({name: tensor.astype(dtype) for name, tensor in load_file(file).items()}, file)
        folders.read_params(saved.folder, saved.model)

    return read, message


def model(message: str, edit: Callable[[SavedModel], Any], **rollout: int) -> Case:
    def read(saved: SavedModel, home: Path) -> None:
        edit(saved)
        changes = [f"rollout.{name}={value}" for name, value in rollout.items()]
        config = minimal_config.read(f"model.path={saved.folder}", *changes)
        mesh = pretrained.make_mesh(config.mesh)
        start = config.model, config.lora, config.rollout, config.train.remat
        base = pretrained.find_model(*start, mesh)
        pretrained.sampling_settings(config.rollout, base)

    return read, message


def run_dir(make: Callable[[Path], Path], message: str) -> Case:
    return lambda saved, home: refuse_unusable(make(home)), message


def row(line: str, message: str) -> Case:
    def read(saved: SavedModel, home: Path) -> None:
        (home / "rows.jsonl").write_text(f"{line}\n")
        load_rows(Source(str(home / "rows.jsonl")), "prompt", "answer")

    return read, message


def reward(value: Any, message: str) -> Case:
    return lambda saved, home: numbers("own", [value], 1), message


def step(function: Callable[..., Any], message: str) -> Case:
    function.__name__ = "own"

    def trace(saved: SavedModel, home: Path) -> None:
        transform = advantages.chain(advantages.sum_rewards(), advantages.transform(function))
        jax.jit(lambda rewards: advantages.evaluate(transform, rewards))(jnp.eye(2))

    return trace, message


def surrogate(saved: SavedModel, home: Path) -> None:
    def user_surrogate(tokens: Tokens) -> Any:
        return (tokens.logp if tokens.mask.any() else tokens.advantage), {}

    unit = jnp.ones((1, 2))
    loss = lambda mask: losses.policy_loss(  # noqa: E731
        losses.Surrogate("own", user_surrogate), "token_mean", unit, unit, unit, mask
    )
    jax.jit(loss)(unit > 0)


def select(returned: Any, message: str) -> Case:
    def run(saved: SavedModel, home: Path) -> None:
        policy = sequential()._replace(name="own", select=lambda state, cursor, n: returned)
        chooser = make_selector(policy, [np.ones(3, np.int32)] * 8, 4, 8, seed=0)
        zero = np.zeros((), np.int32)
        chooser(Stream(cursor=zero, key=np.zeros(2, np.uint32), prompt_policy_state={}), 0)

    return run, message


def checkpoint_file(saved: SavedModel, home: Path) -> None:
    (home / "9").touch()
    Checkpoints(home)


def file_in(home: Path) -> Path:
    (home / "file").touch()
    return home / "file"


def notes_in(home: Path) -> Path:
    (home / "thesis.tex").touch()
    return home


def branching(signal, rollouts):
    return signal if signal.value.max() > 0 else None


def to_numpy(signal, rollouts):
    return np.asarray(signal.value)


def undeclared_attribute(signal, rollouts):
    return rollouts.token_entropy


def undeclared_entry(signal, rollouts):
    return rollouts.fields["token_entropy"]


def not_given(signal, rollouts):
    return rollouts.token_mask.sum()


CASES: dict[str, Case] = {
    # Keys of a config
    "seed of 65 bits": key(f"train.seed={2**64}", "train.seed = 1844.*expected 0 to 4294967295"),
    "seed of 33 bits": key(f"train.seed={2**32}", "train.seed = 4294967296: expected 0 to"),
    "1e11 prompts": key("rollout.prompts_per_step=100000000000", "expected at most 2147483647"),
    "1e11 steps": key("train.steps=100000000000", "train.steps = .*expected at most 2147483647"),
    "1e10 tokens": key("rollout.max_completion_tokens=10000000000", "expected at most 2147483"),
    "a count as a float": key("rollout.group_size=1e11", "expected a whole number"),
    "a rate of 400 digits": key(f"optimizer.learning_rate=1{'0' * 400}", "a finite number"),
    "a rate of 5000 digits": key(f"optimizer.learning_rate={DIGITS}", "expected a number"),
    "weight_decay -5": key("optimizer.weight_decay=-5", "weight_decay = -5: expected 0 or more"),
    "weight_decay nan": key("optimizer.weight_decay=nan", "weight_decay = nan: expected a fin"),
    "weight_decay much": key("optimizer.weight_decay=much", "'much': expected a number, as 0.0001"),
    "b1 1.5": key("optimizer.b1=1.5", "optimizer.b1 = 1.5: expected 0 or more, and below 1"),
    "weight_decay true": key("optimizer.weight_decay=true", "= True: expected a number, as 0"),
    "temperature 1e-9": key("rollout.temperature=1e-9", "temperature = 1e-09: expected 1e-06 to"),
    "1e12 seconds": key("run.stuck_after=1e12", "stuck_after = 1.*: expected 0 to 1000000000"),
    "1e12 seconds for a call": key("rollout.call_timeout=1e12", "expected above 0, 1e.09 at most"),
    "nan as eps": key('recipe={use="grpo", eps=nan}', "recipe.eps = nan: expected a finite number"),
    "a negative eps": key('recipe={use="grpo", eps=-1}', "eps = -1, expected 0 or more"),
    "true as a bound": key('loss.surrogate={use="clip", low=true}', "low = True: expected a numb"),
    "nan deep in a table": key(
        "data.chat_template_kwargs={a=[{b=nan}]}", r"kwargs.a\[0\].b = nan: expected a finite"
    ),
    "weight 0": key('rewards=[{use="arithmetic", weight=0}]', "every weight is 0, so there is"),
    "all weights 0": key(
        'rewards=[{use="arithmetic", weight=0}, {use="format", pattern="a", weight=0.0}]',
        "every weight is 0",
    ),
    "an infinite weight": key('rewards=[{use="arithmetic", weight=inf}]', "a finite number"),
    "a text as eps": key('recipe={use="grpo", eps="a"}', "eps = 'a': expected a number"),
    "a list as eps": key('recipe={use="grpo", eps=[1]}', r"eps = \[1\]: expected a number"),
    "a text as a bound": key(
        'loss.surrogate={use="clip", low="a"}', "low = 'a': expected a number"
    ),
    "NUL in run.dir": key('run.dir="a\\u0000b"', "run.dir = .*character 1 is NUL, which no path"),
    "half a character in run.dir": key("run.dir=a\udcff", "1 is half of a surrogate pair: write"),
    "half a character deep": key('recipe={use="gr\udcff"}', r"recipe.use = .*surrogate pair"),
    "a path of 5000": key(f"data.path={'x' * 5000}.jsonl", "there is no such file"),
    "no such home": key("data.path=~nobody-here/rows.jsonl", "there is no such file"),
    "TOML of 5000 digits": toml(f"x = {DIGITS}", "not TOML: Exceeds the limit"),
    "TOML too deep": toml(f"x = {DEEP}", "not TOML: "),
    "TOML in latin-1": toml('x = "é"', "not TOML: .*utf-8"),
    # config.json of a model
    "a list as config.json": config_json("config.json holds a JSON list, expected an ob", "[1]"),
    "config.json too deep": config_json("is not JSON .lists or objects in one another", DEEP),
    "config.json of 5000 digits": config_json("is not JSON .Exceeds", f'{{"a": {DIGITS}}}'),
    "a name twice": config_json("'a' stands twice: only one of", '{"a": 1, "a": 2}'),
    "a list as vocab_size": config_json(r"vocab_size = \[29\]: expected a whole", vocab_size=[29]),
    "a text as hidden_size": config_json("hidden_size = '32': expected a", hidden_size="32"),
    "half a layer": config_json("num_hidden_layers = 1.5: expected", num_hidden_layers=1.5),
    "true heads": config_json("num_attention_heads = True: exp", num_attention_heads=True),
    "a list as head_dim": config_json(r"head_dim = \[8\]: expected", head_dim=[8]),
    "no positions": config_json("max_position_embeddings = 0: exp", max_position_embeddings=0),
    "a negative eps of a norm": config_json("rms_norm_eps = -1: expected a", rms_norm_eps=-1),
    "a text for true": config_json("tie_word_embeddings = 'no'", tie_word_embeddings="no"),
    "a list as rope": config_json("rope_parameters = .*an object", rope_parameters=["default"]),
    "a text as base": config_json("rope_theta = 'x'", rope_parameters={"rope_theta": "x"}),
    "a list as activation": config_json(r"hidden_act = \['silu'\]", hidden_act=["silu"]),
    "lists as layer types": config_json("layer_types = .*a list of te", layer_types=[["full"]]),
    "a list as dtype": config_json(r"dtype = \['float32'\]: expected", dtype=["float32"]),
    # Tokens and weights of a model
    "a list as generation config": end_tokens("[1]", "generation_config.json holds a JSON list"),
    "an end token twice": end_tokens('{"eos_token_id": 1, "eos_token_id": 2}', "stands twice"),
    "an end token beyond": end_tokens('{"eos_token_id": 999}', "end token 999, expected .* from 0"),
    "a negative end token": end_tokens('{"eos_token_id": [1, -1]}', "end token -1, expected"),
    "a text as end token": end_tokens('{"eos_token_id": "</s>"}', "the end token '</s>', expected"),
    "true as end token": end_tokens('{"eos_token_id": true}', "the end token True, expected"),
    "half an end token": end_tokens('{"eos_token_id": 1.5}', "the end token 1.5, expected"),
    "1e9 tokens": model(
        "are 1000000016 tokens, but .* max_position_embeddings = 32768: make them shorter",
        lambda saved: None,
        max_completion_tokens=10**9,
    ),
    "more tokens than positions": model(
        "max_position_embeddings = 40: make",
        lambda saved: saved.edit("config.json", max_position_embeddings=40),
    ),
    "more tokens than the rope is built for": model(
        "max_prompt_tokens = 16 and max_completion_tokens = 32: 48 tokens, but .* up to 40: beyond",
        lambda saved: saved.edit("config.json", rope_parameters=LONGROPE),
    ),
    "int8 weights": weights("int8", "holds I8, expected float32, bfloat16, float16, float64"),
    "an index without a map": shards("{}", "index.json has no weight_map"),
    "a list as index": shards("[]", "index.json holds a JSON list"),
    "a list as map": shards('{"weight_map": ["a"]}', "has no weight_map, .*found"),
    "a number as shard": shards('{"weight_map": {"a": 3}}', "a is in 3, expected the name of"),
    "a shard elsewhere": shards('{"weight_map": {"a": "../b.safetensors"}}', "nothing outside"),
    "a shard from the root": shards('{"weight_map": {"a": "/b.safetensors"}}', "nothing outside"),
    "half an index": shards('{"weight_map"', "index.json is not JSON"),
    # Where a run goes
    "a file as run.dir": run_dir(file_in, "is a file: give a folder"),
    "run.dir under a file": run_dir(
        lambda home: file_in(home) / "a" / "b", "is under .*file, which"
    ),
    "a long name": run_dir(lambda home: home / "a" / ("x" * 300), "longer than the system allows"),
    "a long path": run_dir(lambda home: home / "/".join(["x" * 99] * 50), "longer than the sys"),
    "a foreign folder": run_dir(notes_in, r"is not empty \(it holds thesis.tex\)"),
    "a file among checkpoints": (checkpoint_file, "9 is a file where the folder of a step belongs"),
    # Data and rewards
    "a column twice": row('{"prompt": "a", "prompt": "b"}', "line 1: not JSON .*stands twice"),
    "a row of 5000 digits": row(f'{{"prompt": {DIGITS}}}', "line 1: not JSON .Exceeds"),
    "a row too deep": row(DEEP, "line 1: not JSON .lists or objects in one another"),
    "half a character in a prompt": row(
        '{"prompt": "a\\ud800", "answer": ""}', r"line 1: prompt 'a\\ud800': character 1 is half"
    ),
    "half a character in an answer": row(
        '{"prompt": "a", "answer": "\\udfff"}', "line 1: answer .*character 0 is half of"
    ),
    "half a character in a message": row(
        '{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": ""}', r"prompt\[0\] .*half"
    ),
    "a reward of 400 digits": reward(10**400, "returned 10+….*: give a number from"),
    "a reward of 5000 digits": reward(10**5000, "returned an int that cannot be written"),
    "a logged number of 400 digits": (
        lambda saved, home: call_rewards([Reward("own", log_much)], ["a"], ["b"], [[1]], {}),
        "log_metric.'size', 10+",
    ),
    # Own parts
    "an if in a step": step(
        branching, r"own \(.*test_bad_inputs.py:branching, line .*write jnp.where"
    ),
    "NumPy in a step": step(to_numpy, "own .*gives a traced array to NumPy.*use jax.numpy"),
    "an undeclared field": step(undeclared_attribute, "'token_entropy', which it does not declare"),
    "an undeclared entry": step(undeclared_entry, r"_replace\(needs=frozenset\(\{'token_entropy'"),
    "an attribute not given": step(not_given, "own .*reads token_mask, which was not given"),
    "an if in a surrogate": (surrogate, r"surrogate own \(.*line .*write jnp.where"),
    "a list from select": select([0, 1, 2, 3], "select of own returned a list, expected 4 ord"),
    "too few from select": select(np.arange(3), r"returned int64 \[3\], expected 4 ordinals"),
    "floats from select": select(np.arange(4.0), r"returned float64 \[4\], expected 4 ordinals"),
    "negative from select": select(np.arange(4) - 1, "returned ordinals from -1 to 2"),
}


def log_much(completions, log_metric):
    log_metric("size", 10**400)
    return [0.0]


@pytest.mark.parametrize(("do", "message"), CASES.values(), ids=CASES)
def test_a_bad_input_is_refused_in_words(do, message, saved, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(InputError, match=message) as caught:
        do(saved, home)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "{file}"], r"init .*file: no folder can be made there \(.*file is a file\)"),
        (["init", "{file}/a"], r"no folder can be made there \(.*file is a file\)"),
        (["advantages", "grpo", "--rewards", "1,0", "--option", "eps=a"], "eps = 'a': expected a"),
        (["advantages", "{own}:wrong", "--rewards", "1,0"], "'depth', which it does not declare"),
        (["train", "{file}"], "error: .*"),
    ],
)
def test_a_command_ends_with_a_sentence_and_code_2(arguments, message, tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "import jaxgrpo\n\n\ndef wrong():\n    return jaxgrpo.transform(lambda s, r: r.depth)\n"
    )
    (tmp_path / "file").write_text("{")
    names = {"file": tmp_path / "file", "own": tmp_path / "own.py"}
    assert cli.main([argument.format(**names) for argument in arguments]) == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert re.search(message, errors)


def test_a_folder_that_is_no_step_of_ours_is_left_alone(tmp_path):
    (tmp_path / "0009").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": np.ones(2)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1]
    assert (tmp_path / "0009").is_dir()


def test_a_run_whose_folder_cannot_be_is_refused_by_the_dry_run_too(tmp_path):
    file_in(tmp_path)
    run_config = minimal_config.read(f"run.dir={tmp_path / 'file' / 'run'}")
    for refuse in (preview.dry_run, lambda config: RunFolder(config.run.dir)):
        with pytest.raises(InputError, match=r"is under .*, which is a file: give a folder"):
            refuse(run_config)
