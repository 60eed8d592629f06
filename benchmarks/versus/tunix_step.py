"""Tunix's training step, as its GRPO learner has its trainer compile it, from shapes alone.

Its own model, loss and trainer; what is written here is only what its `RLCluster` and `GRPOLearner`
do between them, which need arrays and a rollout engine: the loss is handed to the trainer with the
same arguments, and the step is jitted with the same donation.

Settings are those of its GRPO examples on GSM8K (examples/rl/grpo/gsm8k: run_qwen3_8b.sh and
configs/qwen3.yaml): AdamW with b2 = 0.99, weight decay 0.1 and clipping at 0.1, remat_config=3
(`RematConfig.DECODER`), splash attention (use_flash_attention, in blocks of 256), and what its
trainer does besides: gradients are accumulated by optax.MultiSteps, in the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgrpo.models.api import ModelConfig
from jaxgrpo.training import memory

PACKAGE = "tunix"
VERSION = "google-tunix"
B2, DECAY, CLIP_NORM, EPSILON, BLOCK = 0.99, 0.1, 0.1, 0.2, 256
"""Of configs/qwen3.yaml; BLOCK is that of splash attention."""


class Sizes(NamedTuple):
    """Of an update."""

    rows: int  # sequences of one call, over all devices
    prompt: int  # tokens, padded
    completion: int
    calls: int  # whose gradients are accumulated


class Traced(NamedTuple):
    """One call of the step."""

    program: Any  # of jax.jit's trace
    argument_bytes: int  # bytes of its arguments on each device


def device_mesh(devices: Any, fsdp: int, tensor: int) -> Mesh:
    """Its mesh, with the names of its examples."""
    return Mesh(np.asarray(devices).reshape(fsdp, tensor), ("fsdp", "tp"))


def trace(
    config: ModelConfig,
    mesh: Mesh,
    sizes: Sizes,
    param_dtype: str,
    compute_dtype: str,
    learning_rate: float,
) -> Traced:
    """Traces the training step for devices that need not be here.

    Args:
      param_dtype, compute_dtype: dtypes of what is trained and of the forward pass.
    """
    from flax import nnx
    from tunix.rl.common import TrainExample  # pyright: ignore[reportMissingImports]

    with on(mesh):
        trainer, model, optimizer = _abstract(
            config, sizes, param_dtype, compute_dtype, learning_rate
        )
        for part in (model, optimizer):
            nnx.update(
                part, _placed(nnx.state(part), nnx.get_partition_spec(nnx.state(part)), mesh)
            )
        rows, example = sizes.rows, {}
        sides = {"prompt": sizes.prompt, "completion": sizes.completion}
        for side, width in sides.items():
            example[f"{side}_ids"] = _rows(mesh, jnp.int32, rows, width)
            example[f"{side}_mask"] = _rows(mesh, jnp.bool_, rows, width)
        example["advantages"] = _rows(mesh, jnp.float32, rows)
        # Without a reference (beta = 0) and with one pass over a batch it computes neither.
        batch = TrainExample(ref_per_token_logps=None, old_per_token_logps=None, **example)
        # As in `PeftTrainer.jit_train_and_eval_step`.
        step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
        arguments = nnx.state(model), nnx.state(optimizer), batch
        return Traced(step.trace(model, optimizer, batch).traced, memory.on_device(arguments))


@contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Within, JAX says that the mesh's devices are those that are here.

    Tunix drops its sharding constraints where `jax.devices()` names a CPU, and finds the mesh by
    the `with` that JAX calls deprecated.
    """
    with mock.patch.object(jax, "devices", return_value=list(mesh.devices.flat)), mesh:
        yield


def _abstract(
    config: ModelConfig, sizes: Sizes, param_dtype: str, compute_dtype: str, learning_rate: float
) -> tuple[Any, Any, Any]:
    """Its trainer, and its model and optimizer as shapes."""
    import optax
    from flax import nnx
    from tunix.models.qwen3.model import Qwen3  # pyright: ignore[reportMissingImports]
    from tunix.rl import function_registry  # pyright: ignore[reportMissingImports]
    from tunix.rl.grpo.grpo_learner import GRPOConfig  # pyright: ignore[reportMissingImports]
    from tunix.rl.rl_cluster import RLTrainingConfig  # pyright: ignore[reportMissingImports]
    from tunix.rl.trainer import Trainer  # pyright: ignore[reportMissingImports]

    adamw = optax.adamw(learning_rate, b1=0.9, b2=B2, weight_decay=DECAY)
    chain = optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw)
    training = RLTrainingConfig(
        eval_every_n_steps=10,
        actor_optimizer=chain,
        mini_batch_size=sizes.calls * sizes.rows,
        train_micro_batch_size=sizes.rows,
    )
    trainers: list[Any] = []

    def make() -> tuple[Any, Any]:
        model = Qwen3(_model_config(config, param_dtype, compute_dtype), rngs=nnx.Rngs(0))
        trainer = Trainer(model, chain, training, custom_checkpoint_metadata_fn=dict)
        trainers.append(trainer)
        return trainer.model, trainer.optimizer

    model, optimizer = nnx.eval_shape(make)
    trainer = trainers[0]
    grpo = GRPOConfig(beta=0.0, epsilon=EPSILON)
    grpo.temperature = 1.0
    loss = function_registry.get_policy_loss_fn(grpo.policy_loss_fn)
    # As in `GRPOLearner.__init__`.
    trainer.with_loss_fn(
        lambda model, train_example, algo_config: loss(
            model, train_example, algo_config=grpo, pad_id=0, eos_id=1
        ),
        has_aux=True,
    )
    trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": grpo})
    return trainer, model, optimizer


def _model_config(config: ModelConfig, param_dtype: str, compute_dtype: str) -> Any:
    """Its configuration of the same model."""
    from tunix.models.qwen3.model import ModelConfig as Theirs  # pyright: ignore[reportMissingImports]
    from tunix.models.qwen3.model import RematConfig  # pyright: ignore[reportMissingImports]

    rope = config.attention[0].rope
    assert rope is not None, "Qwen3 turns queries and keys"
    return Theirs(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        rope_theta=round(rope.theta),
        norm_eps=config.rms_norm_eps,
        use_tied_embedding=config.tie_embeddings,
        remat_config=RematConfig.DECODER,
        dtype=jnp.dtype(compute_dtype),
        param_dtype=jnp.dtype(param_dtype),
        use_flash_attention=True,
        flash_attention_block_size=BLOCK,
    )


def _placed(state: Any, specs: Any, mesh: Mesh) -> Any:
    """Shapes with the layouts that its model declares."""

    def lay_out(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        layout = NamedSharding(mesh, spec if isinstance(spec, PartitionSpec) else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)

    return jax.tree.map(lay_out, state, specs)


def _rows(mesh: Mesh, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Of a batch, divided over "fsdp" as its `sharding_utils.shard_input` does."""
    layout = NamedSharding(mesh, PartitionSpec("fsdp"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)
