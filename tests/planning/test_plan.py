"""A plan beside the run that it is of: its learner, the arguments of its programs, its memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import compiled_programs
import huggingface_hub
import jax
import numpy as np
import planned
import pytest
from quick import full_but

from jaxgrpo.cli import make_base
from jaxgrpo.config import files
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import Learner
from jaxgrpo.planning import plan, programs, topologies
from jaxgrpo.planning.programs import Program, Run
from jaxgrpo.training import memory, setup
from jaxgrpo.update import step

METHODS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "bfloat16": {"model.dtype": "bfloat16", "train.tokens_per_micro_batch": 64},
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
    "adapters in bfloat16": {"lora": {"rank": 4, "alpha": 8.0}, "model.dtype": "bfloat16"},
    "reference": {"loss": {"kl": {"use": "k2", "beta": 0.1}}, "model.dtype": "bfloat16"},
    "adafactor": {"optimizer": {"use": "adafactor", "learning_rate": 1e-3}},
    "muon": {"optimizer": {"use": "muon", "learning_rate": 1e-3}},
    "minibatches": {"train.minibatches": 2},
}
MESHES: dict[str, dict[str, int]] = {
    "data 4": {"data": 4},
    "fsdp 2, tensor 2": {"fsdp": 2, "tensor": 2},
    "fsdp 4": {"fsdp": 4},
    "context 2": {"fsdp": 2, "context": 2},
    "sampled on tensor 2": {"fsdp": 4, "sampling_tensor": 2},
}


@functools.cache
def base() -> str:
    """A model of two heads of keys with a tokenizer."""
    path = Path(tempfile.mkdtemp(prefix="jaxgrpo-test-base-")) / "base"
    make_base.make_base(path, steps=1, batch=8, hidden_size=64)
    return str(path)


def run_and_plan(method: str, mesh: str) -> tuple[setup.Setup, Run]:
    """A real run on four CPU devices, and its plan."""
    small = {"rollout.max_prompt_tokens": 8, "rollout.max_completion_tokens": 24}
    defaults = {"model": {"path": base()}, "mesh": MESHES[mesh], "rollout.slots": 8}
    config = planned.config(**defaults, **small, **METHODS[method])
    real = setup.setup(config)
    return real, programs.build_run(config, local_topology().devices)


def local_topology() -> topologies.Topology:
    """The CPU devices of the tests."""
    chip = topologies.CHIPS["v5e"]._replace(name="cpu")
    return topologies.Topology("cpu", chip, 1, tuple(jax.devices()))


def described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """place -> shape and dtype of each array, whether it is there or not; names as they are."""
    leaves = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): ((), leaf)
        if isinstance(leaf, str)
        else (np.shape(leaf), str(leaf.dtype))
        for path, leaf in leaves
    }


def assert_alike(abstract: Any, real: Any, placed: bool = True) -> None:
    """Shapes, dtypes and, of arrays on devices, shardings."""
    assert described(abstract) == described(real)
    for (path, actual), expected in zip(
        jax.tree.leaves_with_path(abstract), jax.tree.leaves(real), strict=True
    ):
        if placed and isinstance(expected, jax.Array):
            where = jax.tree_util.keystr(path), actual.sharding, expected.sharding
            assert actual.sharding.is_equivalent_to(expected.sharding, expected.ndim), where


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "mesh"),
    [
        (next(iter(METHODS)), "fsdp 2, tensor 2"),
        *(
            pytest.param(method, "fsdp 2, tensor 2", marks=pytest.mark.full)
            for method in [*METHODS][1:]
        ),
        *(pytest.param("reference", mesh, marks=pytest.mark.full) for mesh in MESHES),
    ],
)
def test_the_learner_of_a_plan_is_that_of_the_run(method, mesh):
    real, run = run_and_plan(method, mesh)
    assert run.blueprint.geometry == real.blueprint.geometry
    assert run.blueprint.sampling.slots == real.blueprint.sampling.slots
    for name in ("step", "trainable", "frozen", "opt_state", "objective_state"):
        assert_alike(getattr(run.learner, name), getattr(real.learner, name))
    assert real.learner.frozen.keys() == run.learner.frozen.keys()


def called(real: setup.Setup, learner: Learner) -> dict[str, tuple[Any, ...]]:
    """What the programs of a real step are given first."""
    calls: dict[str, tuple[Any, ...]] = {}

    def noting(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls.setdefault(name, jax.tree.map(describe, arguments))
            return function(*arguments)

        return call

    built = real.engine.programs
    counted = built._replace(**{name: noting(name, getattr(built, name)) for name in SAMPLING})
    real.engine.programs = counted
    params = real.sync(learner)
    calls["sync"] = jax.tree.map(describe, (learner,))
    _, collected = real.collect(params, 0, real.stream)
    rollouts = collected.rollouts
    preparer = real.prepare.__self__  # type: ignore[attr-defined]
    preparer.score = noting("score", preparer.score)
    learner, prepared = real.prepare(learner, rollouts)
    program = noting("update", real.steps.update_program)
    step._update(program, None, real.blueprint.objective.anchors, learner, prepared.batches)
    return calls


SAMPLING = ("prefill", "decode")


def describe(leaf: Any) -> Any:
    """What is told of an argument after it has been overwritten."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


SOON = [("bfloat16", "sampled on tensor 2")]
"""A mesh of its own for sampling; the others in `make test-reliability`."""
LATER = [
    ("reference", "fsdp 4"),
    ("all weights", "fsdp 2, tensor 2"),
    ("adapters in bfloat16", "fsdp 2, tensor 2"),
    ("adapters", "data 4"),
]
COMPILED = [*SOON, *(pytest.param(case, marks=pytest.mark.full) for case in LATER)]


@pytest.fixture(scope="module", params=COMPILED, ids=[*map(", ".join, SOON + LATER)])
def compiled_step(request) -> tuple[Run, dict[str, Program], dict[str, Any]]:
    """A plan's run and its programs, and what those of a real step were given."""
    real, run = run_and_plan(*request.param)
    compiled = {program.name: program for program in programs.compiled(run)}
    return run, compiled, called(real, real.learner)


@pytest.mark.fault(1)
@pytest.mark.slow
def test_the_programs_of_a_plan_are_given_what_those_of_a_step_are(compiled_step):
    _, compiled, calls = compiled_step
    assert set(calls) - set(compiled) <= {"sync"}  # where the sampler reads what is trained
    assert set(compiled) <= set(calls)
    for name, program in compiled.items():
        expected = calls[name]
        if name == "sync":
            assert_alike(program.arguments[0].trainable, expected[0].trainable)
            continue
        assert len(program.arguments) == len(expected), name
        for abstract, real in zip(program.arguments, expected, strict=True):
            if isinstance(abstract, bool | str) or hasattr(abstract, "num_prompts"):
                assert abstract == real  # static
            else:
                assert_alike(abstract, real)


@pytest.mark.fault(3)
@pytest.mark.slow
def test_what_is_donated_is_written_over_and_scoring_is_there_where_it_is_needed(compiled_step):
    run, compiled, _ = compiled_step
    for program in compiled.values():
        aliased = program.compiled.memory_analysis().alias_size_in_bytes
        assert aliased >= program.donated, program.name
    assert compiled["update"].donated > 0 < compiled["decode"].donated
    needs = run.blueprint.chain.needs | run.blueprint.objective.needs
    assert ("score" in compiled) == ("reference_logp" in needs)


def test_a_run_that_reads_no_log_probs_has_no_scoring_and_one_of_a_reference_has():
    assert not planned.run().blueprint.scored
    assert planned.run(loss={"kl": {"use": "k2", "beta": 0.1}}).blueprint.scored == {
        "reference_logp"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"path": "some/model"}}, "folder here and not in the hub's cache"),
        ({"mesh": {"fsdp": 3}}, r"mesh: data 1 x fsdp 3 .* = 3 devices, but there are 4"),
        ({"mesh": {"tensor": 4}}, r"(?s)does not divide.*kv_heads.* 2 is not divisible by 4"),
        ({"rollout.prompts_per_step": 3}, r"rollout.prompts_per_step = 3: must be a multiple of 2"),
        (
            {"rollout.max_completion_tokens": 4096},
            r"max_completion_tokens = 4096 are 4160 tokens.*max_position_embeddings = 4096",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        planned.run(**changes)


def planned_for_chips(**changes: Any) -> plan.Plan:
    chips = topologies.topology("v5e:2x2")
    return plan.plan(planned.run(**changes), chips, ("update",))


def temporaries(run_plan: plan.Plan, name: str) -> int:
    return next(program.temporaries for program in run_plan.planned if program.name == name)


@pytest.mark.full
def test_twice_the_prompts_or_tokens_take_more_activations():
    """A micro-batch has at most a quarter of a step's tokens, so it grows with the prompts."""
    once = planned_for_chips()
    prompts = planned_for_chips(**{"rollout.prompts_per_step": 16})
    longer = planned_for_chips(**{"rollout.max_completion_tokens": 256})
    for more in (prompts, longer):
        assert more.parts["activations"] >= 1.6 * once.parts["activations"]
        assert temporaries(more, "update") > 1.2 * temporaries(once, "update")


@pytest.mark.full
def test_whole_logits_are_found(tmp_path, monkeypatch):
    """The assertion of recipes on a program that has what it forbids."""
    sizes = {"rollout.max_completion_tokens": 256, "model.attention": "xla"}
    values = planned.tables(**sizes)
    chips = {"topology": "v5e:2x2", "names": ("update",)}
    monkeypatch.setattr(memory, "CHUNKS", (256,))
    chunked = compiled_programs.compiled(values, tmp_path / "a", **chips)
    assert compiled_programs.full_logits(chunked) == []
    monkeypatch.setattr(memory, "CHUNKS", (1 << 20,))
    unchunked = compiled_programs.compiled(values, tmp_path / "b", **chips)
    assert any(
        "holds the logits" in problem for problem in compiled_programs.full_logits(unchunked)
    )
    assert temporaries(unchunked.plan, "update") > temporaries(chunked.plan, "update")


GROWTH = """
import dataclasses, json, sys, threading, time
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
import planned
from jaxgrpo.planning import programs

run = planned.run(devices=jax.devices()[:1], mesh={}, **json.loads(sys.argv[2]))
(made,) = programs.compiled(run, ("update",))
predicted = made.compiled.memory_analysis().temp_size_in_bytes

def anonymous():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return 1024 * int(lines["RssAnon"].split()[0])

def real(leaf):
    # Written, so that the pages are there. Of tokens 0 is one, of weights 1 will do.
    whole = np.zeros if np.issubdtype(leaf.dtype, np.integer) else np.ones
    return jax.device_put(whole(leaf.shape, leaf.dtype), leaf.sharding)

*rest, batch = jax.tree.map(real, made.arguments)
batch = dataclasses.replace(batch, num_live=np.int32(1))  # each of them takes as much
jax.block_until_ready((rest, batch))
before = anonymous()
most, over = [before], threading.Event()

def watch():
    while not over.wait(0.02):
        most[0] = max(most[0], anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
jax.block_until_ready(made.compiled(*rest, batch))
over.set()
watcher.join()
print(json.dumps({"predicted": predicted, "growth": most[0] - before}))
"""


@pytest.mark.full
def test_an_update_takes_the_memory_that_is_predicted(python, environment, tmp_path):
    """Of temporaries that are more than 2 GB, in a process of its own."""
    deep = planned.QWEN3 | {"num_hidden_layers": 8}
    changes = {
        "model": {"path": "none", "dtype": "float32", "config": deep},
        "train.remat": "none",
        "train.tokens_per_micro_batch": 16384,
        "rollout.prompts_per_step": 32,
        "rollout.max_completion_tokens": 1024,
    }
    file = tmp_path / "growth.py"
    file.write_text(GROWTH)
    support = str(Path(planned.__file__).parent)
    process = subprocess.run(
        [python, str(file), support, json.dumps(changes)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=560,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    numbers = json.loads(process.stdout.splitlines()[-1])
    print(numbers, file=sys.stderr)
    assert numbers["predicted"] >= 2 * 2**30
    assert numbers["growth"] == pytest.approx(numbers["predicted"], rel=0.25)


@pytest.mark.slow
def test_a_model_of_the_hub_is_planned_by_what_its_cache_holds(tmp_path, monkeypatch):
    keys = files.load("quickstart", ("model.path=mine/small",)).model
    lora = files.load("quickstart").lora
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="no folder here and not in the hub's cache"):
        programs.read_model_config(keys, lora)
    cache = tmp_path / "models--mine--small"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "abc").mkdir(parents=True)
    shutil.copy(Path(base()) / "config.json", cache / "snapshots" / "abc")
    expected = programs.read_model_config(dataclasses.replace(keys, path=base()), lora)
    assert programs.read_model_config(keys, lora) == expected


GEMMA3 = {
    **{name: value for name, value in planned.QWEN3.items() if name != "hidden_act"},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 8,  # a period of six, and two
    "sliding_window": 16,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}


LOW_BIT_LORA = {"lora": {"rank": 4, "alpha": 8.0}, "rollout.weight_dtype": "int8"}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", full_but([{"fsdp": 2}], [{"fsdp": 2}, {"data": 2}]), ids=str)
@pytest.mark.parametrize(
    "changes",
    full_but(
        [{}, LOW_BIT_LORA],
        [
            {},
            {"lora": {"rank": 4, "alpha": 8.0}},
            {"rollout.weight_dtype": "int8"},
            LOW_BIT_LORA,
        ],
    ),
    ids=str,
)
def test_what_a_sync_gives_lies_beside_a_copy_that_the_sampler_makes_of_it(changes, mesh):
    """On a GPU, where adapters are merged to sample: as the formula counts them."""
    model = {"path": "none/here", "dtype": "bfloat16", "config": GEMMA3}
    devices = topologies.stand_ins("h100:1x2", 1)
    run = planned.run(devices=devices, model=model, mesh=mesh, **changes)
    blueprint, engine = run.blueprint, run.engine.programs
    sampled = jax.eval_shape(engine.split, programs.sampler_params(run))
    sampled_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sampled))
    decode = Program("decode", None, 0.0, (), 0)
    left = plan._beside(run, decode) - memory.on_device(run.learner)
    assert plan._beside(run, decode._replace(name="update")) == memory.on_device(run.learner)
    # Frozen weights that nothing has merged or moved are read where they lie.
    outside = {"embed", "final_norm"} if "lora" in changes and "data" in mesh else set()
    outside = set() if "rollout.weight_dtype" in changes else outside
    read = memory.on_device([run.learner.frozen["weights"][name] for name in outside])
    settings = blueprint.samples_on, blueprint.sampling.weight_dtype
    counted = memory.weights_to_sample(blueprint.model, blueprint.mesh, *settings)
    assert sampled_bytes - read + left == counted
    assert (left > 0) == (bool(changes) and ("fsdp" in mesh or [*changes] == ["lora"]))


MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def test_the_rest_of_a_step_s_samples_lies_beside_its_update():
    devices = topologies.stand_ins("h100:1x2", 1)
    model = {"path": "none/here", "dtype": "bfloat16", "config": MOE}
    changes: dict[str, Any] = {"model": model, "mesh": {"fsdp": 2}}
    run = planned.run(devices=devices, **changes)
    geometry, objective, mesh = run.blueprint.geometry, run.blueprint.objective, run.blueprint.mesh
    batch = memory.update_arguments(geometry, objective, mesh, run.learner)[-1]
    # Three layers, each with two numbers of two bytes for each token, on one of two devices.
    recorded = 3 * 2 * 2 * math.prod(geometry[:2]) * geometry.max_completion_tokens // 2
    assert memory.beside_update(geometry, batch) == recorded
    in_four = geometry._replace(minibatches=4)
    assert memory.beside_update(in_four, batch) == 3 * memory.on_device(batch) + recorded
    update = Program("update", None, 0.0, (batch,), 0)
    assert plan._beside(run, update) == memory.on_device(run.learner) + recorded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "mesh", "bases"),
    [
        ({}, {"fsdp": 2}, 1),
        pytest.param(  # which is the frozen weights
            *({"lora": {"rank": 4, "alpha": 8.0}}, {"data": 2}, 0), marks=pytest.mark.full
        ),
        ({"loss.kl": {"use": "k2", "beta": 0.1}}, {"fsdp": 2, "sampling_tensor": 2}, 1),
    ],
    ids=str,
)
def test_the_base_of_evaluations_lies_beside_every_program(changes, mesh, bases):
    model = {"path": "none/here", "dtype": "bfloat16", "config": GEMMA3}
    changes = changes | {"eval": {"data": "task:arithmetic:test"}, "model": model, "mesh": mesh}
    devices, update = topologies.stand_ins("h100:1x2", 1), Program("update", None, 0.0, (), 0)
    for measures_kl in (False, True):
        changed: dict[str, Any] = changes | {"eval.kl_to_base": measures_kl}
        run = planned.run(devices=devices, **changed)
        base_bytes = memory.parameters(run.blueprint.model, run.blueprint.samples_on)
        beside = plan._beside(run, update) - memory.on_device(run.learner)
        assert beside == (bases * base_bytes if measures_kl else 0)
