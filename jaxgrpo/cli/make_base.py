"""`jaxgrpo make-base`: a small base model for a generated task, by supervised learning.

The loss is the next-token cross entropy of the solutions (the prompt's own tokens are not
learned), over draws from the task's corpus. All steps of a dispatch are one jitted program.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxgrpo.config.ranges import LARGEST_SEED
from jaxgrpo.core.errors import InputError
from jaxgrpo.core.types import GENERATOR, Params
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import Task, character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.api import Model, ModelConfig
from jaxgrpo.models.hf import families, folders
from jaxgrpo.models.hf.rope import FULL, SLIDING
from jaxgrpo.models.logprobs import token_logprobs
from jaxgrpo.models.sequences import call_alone

Progress = Callable[[int, int, float], None]
"""(steps done, steps in all, mean loss of the last dispatch)"""

STEPS_PER_DISPATCH = 20

_GEMMA = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
    "query_pre_attn_scalar": 16,  # the size of a head, as in Gemma 3's of 1B
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True}
_SIZES = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}
_HYBRID = {
    "full_attention_interval": 2,
    **_SIZES,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
}
_SHARED = {
    "num_experts": 4,
    **_EXPERTS,
    **_HYBRID,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 37),
}
_CLAMPED = {"num_experts_per_tok": 2, "intermediate_size": 38}
_LATENTS = {
    **_EXPERTS,
    "n_routed_experts": 4,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("num_key_value_heads", "q_lora_rank", "head_dim")),
    "qk_rope_head_dim": 8,
    "moe_intermediate_size": 36,
    "n_shared_experts": 1,
}
SMALL: dict[str, dict[str, Any]] = {
    "gemma2": {**_GEMMA, "sliding_window": 8},
    "gemma3_text": {
        **_GEMMA,
        "sliding_window": 8,  # a problem with its solution has up to 30 tokens
        "sliding_window_pattern": 2,  # one layer with the window, one without
        "rope_parameters": {SLIDING: _ROPE, FULL: {**_ROPE, "rope_theta": 1e6}},  # as Gemma 3's
    },
    "arcee": {"hidden_act": "relu2"},
    "ministral3": {
        "rope_parameters": {
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
            **_ROPE,
        }
    },
    "olmo3": {"rope_parameters": {SLIDING: _ROPE, FULL: _ROPE}},
    "qwen3_5_text": {**_HYBRID, "intermediate_size": 188},
    "olmo_hybrid": {**_SIZES, "intermediate_size": 196},
    "qwen3_5_moe_text": _SHARED,
    "qwen3_next": _SHARED,
    "qwen3_moe": {"num_experts": 4, **_EXPERTS, "moe_intermediate_size": 48},
    "olmoe": {"num_experts": 4, **_EXPERTS, "intermediate_size": 48},
    "deepseek_v2": _LATENTS,
    "deepseek_v3": _LATENTS,
    "glm4_moe_lite": _LATENTS,
    "glm4_moe": {"n_routed_experts": 4, **_EXPERTS, "moe_intermediate_size": 38},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "shared_intermediate_size": 192,
        "layer_types": [FULL] * 2,
        "position_embedding_type": "rope",
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 5, **_CLAMPED, "sliding_window": 8},
}
"""Family -> what config.json of its base model says beside the sizes."""


class Corpus(NamedTuple):
    """Every text of a corpus once, as tokens."""

    tokens: np.ndarray  # [N, L] int32, prompt, solution, end, padding
    learned: np.ndarray  # [N, L] bool, True on solution and end
    probability: np.ndarray  # [N] float64


def make_base(
    out: str | Path,
    task: str | Task = "arithmetic",
    *,
    family: str = "qwen3",
    seed: int = 0,
    steps: int | None = None,
    batch: int = 64,
    learning_rate: float | None = None,
    hidden_size: int = 64,
    num_layers: int = 2,
    progress: Progress = lambda step, steps, loss: None,
) -> dict[str, Any]:
    """Trains a base model for `task` and saves it as a Hugging Face folder with its tokenizer.

    AdamW with linear warm-up over a tenth of the steps, then cosine to zero, on one device. The
    same arguments give the same weights on the same machine. `family` is a name in FAMILIES.

    Args:
      out: the folder to write; made where it does not exist.
      task: a generated one's name, or one of your own.
      seed: of the initial weights and of the draws from the corpus.
      steps, learning_rate: None: the task's; twice the steps without normed queries and keys.
      batch: texts per step.
      progress: called after each dispatch, from the calling thread.

    Returns: path, task, seed, steps, parameters, loss (mean of the last tenth of the steps),
    loss_floor (the corpus's own entropy, which no model can beat) and seconds.

    Raises: InputError on an unknown task or family, or fewer than 1 step, text, layer, ...
    """
    started = time.monotonic()
    _refuse_numbers(seed, steps=steps, batch=batch)
    generated = tasks.find(task) if isinstance(task, str) else task
    folders.refuse_unless_ours(Path(out))
    tokenizer = character_tokenizer(generated.alphabet, generated.chat_template)
    corpus = encode(generated.corpus(), tokenizer)
    config = base_config(len(tokenizer), hidden_size, num_layers, family)
    steps = steps or generated.steps * (2 if config.query_key_norm == "none" else 1)
    model = decoder.build(config, remat="none")
    params, losses = _train(
        model, corpus, seed, steps, batch, learning_rate or generated.learning_rate, progress
    )
    folders.save_model(model, params, out, tokenizer=tokenizer)
    return {"path": str(out), "task": generated.name, "seed": seed, "steps": steps} | {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "loss": float(losses[-max(1, steps // 10) :].mean()),
        "loss_floor": entropy(corpus),
        "seconds": time.monotonic() - started,
    }


def _refuse_numbers(seed: int, **numbers: int | None) -> None:
    """Raises: InputError where a number is below 1, or no seed can be this one."""
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"make-base: seed = {seed}: give 0 to {LARGEST_SEED}")
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InputError(f"make-base: {name} = {value}: give 1 or more")


def base_config(
    vocab_size: int, hidden_size: int = 64, num_layers: int = 2, family: str = "qwen3"
) -> ModelConfig:
    """A small model of a family: heads of 16, two of them sharing keys, tied embeddings.

    Everything else is as the family has it, or as SMALL says.
    """
    heads = max(2, hidden_size // 32 * 2)
    sizes = ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=16,
        tie_embeddings=True,
    )
    fields = {**families.plain_fields(sizes), **SMALL.get(family, {})}
    return families.model_config(fields, "the base model")


def encode(texts: list[tasks.Worked], tokenizer: Any) -> Corpus:
    """The texts as right-padded tokens, each solution closed by the end token."""
    prompts = tokenizer([text.prompt for text in texts])["input_ids"]
    solutions = tokenizer([text.solution for text in texts])["input_ids"]
    length = max(map(len, prompts)) + max(map(len, solutions)) + 1
    tokens = np.full((len(texts), length), tokenizer.pad_token_id, np.int32)
    learned = np.zeros(tokens.shape, bool)
    for row, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
        end = len(prompt) + len(solution) + 1
        tokens[row, :end] = [*prompt, *solution, tokenizer.eos_token_id]
        learned[row, len(prompt) : end] = True
    return Corpus(tokens, learned, np.array([text.probability for text in texts]))


def entropy(corpus: Corpus) -> float:
    """Mean nats per learned token of the corpus, given the prompt and what came before.

    sum_prompt P(prompt) H(solution | prompt) / E[learned tokens]
    """
    behind = np.maximum.accumulate(corpus.learned, axis=1)  # solutions and the padding after them
    prompts = np.where(behind, -1, corpus.tokens)

    def probability(texts: np.ndarray) -> np.ndarray:
        """Of each text together with all that are the same, [N]."""
        _, group = np.unique(texts, axis=0, return_inverse=True)
        return np.bincount(group.ravel(), corpus.probability)[group.ravel()]

    conditional = probability(corpus.tokens) / probability(prompts)
    nats = -(corpus.probability * np.log(conditional)).sum()
    return float(nats / (corpus.probability * corpus.learned.sum(1)).sum())


def _train(
    model: Model,
    corpus: Corpus,
    seed: int,
    steps: int,
    batch: int,
    learning_rate: float,
    progress: Progress,
) -> tuple[Params, np.ndarray]:
    """Parameters after `steps` steps, and the loss of each step [steps]."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps=max(1, steps // 10), decay_steps=max(2, steps)
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )
    params = jax.jit(model.init)(jax.random.key(seed, impl=GENERATOR))
    carry = (params, jax.jit(optimizer.init)(params))
    dispatch = jax.jit(functools.partial(_dispatch, model, optimizer), donate_argnums=0)
    tokens, learned = jnp.asarray(corpus.tokens), jnp.asarray(corpus.learned)
    random = np.random.default_rng(seed)
    losses = np.empty(0)
    for begin in range(0, steps, STEPS_PER_DISPATCH):
        count = min(STEPS_PER_DISPATCH, steps - begin)
        drawn = random.choice(len(tokens), (STEPS_PER_DISPATCH, batch), p=corpus.probability)
        carry, loss = dispatch(carry, tokens, learned, drawn, count)
        losses = np.append(losses, loss[:count])
        progress(len(losses), steps, float(losses[begin:].mean()))
    return carry[0], losses


def _dispatch(
    model: Model,
    optimizer: optax.GradientTransformation,
    carry: tuple[Params, Any],
    tokens: Array,
    learned: Array,
    drawn: Array,
    count: Array,
) -> tuple[tuple[Params, Any], Array]:
    """The first `count` of the drawn batches, one step each; returns the losses as well.

    Shapes: tokens, learned [N, L]; drawn [steps, batch], rows of them; losses [steps].
    """

    def step(i: Array, carry: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
        params, opt_state, losses = carry
        loss, gradient = jax.value_and_grad(functools.partial(_loss, model))(
            params, tokens[drawn[i]], learned[drawn[i]]
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.at[i].set(loss)

    losses = jnp.zeros(drawn.shape[0], jnp.float32)
    params, opt_state, losses = jax.lax.fori_loop(0, count, step, (*carry, losses))
    return (params, opt_state), losses


def _loss(model: Model, params: Params, tokens: Array, learned: Array) -> Array:
    """Mean cross entropy per learned token, in nats. Shapes: tokens, learned [batch, L]."""
    inputs, targets, learned = tokens[:, :-1], tokens[:, 1:], learned[:, 1:]
    position = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    # Padding is at the end, where no learned position can see it.
    caller = call_alone(position, jnp.ones(inputs.shape, bool))
    hidden, _ = model.apply(params, inputs, position, caller, None)
    unembed = functools.partial(model.unembed, params)
    logp, _ = token_logprobs(unembed, hidden, targets)
    return -jnp.where(learned, logp, 0).sum() / learned.sum()
