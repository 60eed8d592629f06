"""What devices exchange in an update, read from the program compiled for a TPU."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest
import tiny
from jax.experimental import topologies

from jaxgrpo import advantages, losses
from jaxgrpo.models import decoder, sharding
from jaxgrpo.rollout.sampler import SamplingSettings
from jaxgrpo.update import packing
from jaxgrpo.update.forward import Blueprint, opt_layout, param_layout
from jaxgrpo.update.packing import Geometry
from jaxgrpo.update.step import build_steps

pytestmark = pytest.mark.slow

VOCAB = 5120  # a size that nothing else has
MODEL = dataclasses.replace(
    tiny.UNIFORM,
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    dtype="bfloat16",
)
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
CALLS = r"(?:calls|to_apply|branch_computations|true_computation|false_computation)=\{?([^,}]*)"


def program(**sizes: int) -> str:
    """The update of a model whose head dominates, compiled for eight chips."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = sharding.make_mesh(**sizes, devices=devices)
    made = Blueprint(
        model=decoder.build(MODEL, constrain=sharding.constrain(mesh)),
        chain=advantages.build("grpo"),
        objective=losses.Objective(losses.clip(), losses.token_mean()),
        optimizer=optax.adamw(1e-3),
        geometry=Geometry(16, 8, 64, 128, sharding.num_bins(mesh), 2176),
        sampling=SamplingSettings(8, 128, 1.0, (tiny.END,), tiny.PAD, 8),
        mesh=mesh,
    )

    def on(layout, shapes, dtype=None):
        return jax.tree.map(
            lambda leaf, one: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=one),
            shapes,
            layout,
        )

    params = on(param_layout(made), made.model.shapes, jnp.float32)  # as they are trained
    opt_state = on(opt_layout(made), jax.eval_shape(made.optimizer.init, params))
    batch = packing.abstract_batch(made.geometry, ())
    names = jax.tree.map(
        lambda leaf: sharding.named(mesh, *(None, "bins", None, None)[: leaf.ndim]), batch
    )
    update = build_steps(made).update_program
    traced = update.trace(params, opt_state, {}, {}, on(names, batch))
    return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def exchanged(text: str) -> list[tuple[int, str, str]]:
    """(loops around it, kind, what is exchanged) of each collective of a compiled program."""
    bodies: dict[str, list[str]] = {}
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            bodies[head[1]] = own = []
            if line.startswith("ENTRY"):
                entry = head[1]
        elif bodies:
            own.append(line)
    depth = {entry: 0}
    left = [entry]
    while left:
        name = left.pop()
        for line in bodies.get(name, ()):
            inner = [(one, 1) for one in re.findall(r"\bbody=%?([\w.\-]+)", line)]
            inner += [
                (one.strip(" %"), 0) for called in re.findall(CALLS, line) for one in called.split()
            ]
            for one, more in inner:
                if depth.get(one, -1) < depth[name] + more:
                    depth[one] = depth[name] + more
                    left.append(one)
    found = []
    for name, around in depth.items():
        for line in bodies.get(name, ()):
            if match := re.search(rf"= (\(?[a-z0-9]+\[.*?) ({KINDS})(?:-start)?\(", line):
                found.append((around, match[2], match[1]))
    return found


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}],
    ids=str,
)
@pytest.mark.full
def test_the_head_is_gathered_once_and_its_gradient_added_up_once(sizes):
    found = exchanged(program(**sizes))
    # One loop is that over micro-batches; inside it are those over layers and chunks of tokens.
    assert max(around for around, _, _ in found) >= 2
    of_vocabulary = re.compile(rf"\b({VOCAB}|{VOCAB // sizes.get('tensor', 1)})\b")
    inside = [one for one in found if one[0] > 1 and of_vocabulary.search(one[2])]
    assert inside == []
    gathered = [one for one in found if one[1] == "all-gather" and of_vocabulary.search(one[2])]
    assert any("bf16" in shape for _, _, shape in gathered)  # in the dtype that it is read in


def test_gradients_are_added_up_over_devices_in_float32():
    found = exchanged(program(data=8))
    sums = [one for one in found if one[1] in ("all-reduce", "reduce-scatter")]
    assert any(str(VOCAB) in shape for _, _, shape in sums)
    assert not any("bf16" in shape for _, _, shape in sums)
