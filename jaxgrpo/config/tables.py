"""The keys of a config for type checkers: what `train(..., train={"steps": 20})` takes.

keys.py says what each key means, checks it when a program runs, and has its default. Editors read
names and types here, complete them, and mark a misspelt key. A test holds both equal. None is a
key that is left out, where its default is that nothing is set: TOML has no None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Floats = Literal["float32", "bfloat16"]
CacheDtype = Literal["auto", "float32", "bfloat16", "fp8"]
WeightDtype = Literal["auto", "int8", "fp8"]
Kernel = Literal["auto", "xla", "splash", "cudnn"]
Remat = Literal["auto", "none", "attention", "dots", "full"]
Quantity = Literal[
    "logp", "entropy", "confidence", "certainty", "collision", "rank", "effective_rank", "likeliest"
]
Branching = Literal["uniform", "surprise", "segment"]
Schedule = Literal["constant", "linear", "cosine"]
Platform = Literal["auto", "cpu", "gpu", "tpu"]
Input = Literal["rows", "template", "tokenizer", "prompts", "base", "code"]

Part = Mapping[str, Any]
"""{"use": name, option: value, ...}; the options depend on the part."""


class SourceTable(TypedDict, total=False):
    """One of the sources that data.path mixes."""

    path: str
    weight: float
    name: str | None
    subset: str | None
    split: str | None
    revision: str | None
    prompt: str | None
    answer: str | None


class ModelTable(TypedDict, total=False):
    path: str
    revision: str | None
    config: Mapping[str, Any]
    family: str | None
    ignore: Sequence[str]
    text_only: bool
    dtype: Floats
    float32_head: bool
    float32_activations: bool
    float32_attention: bool
    attention: Kernel


class LoraTable(TypedDict, total=False):
    path: str | None
    rank: int
    alpha: float
    targets: str
    use_rslora: bool


class DataTable(TypedDict, total=False):
    path: str | Sequence[SourceTable] | None
    subset: str | None
    split: str | None
    revision: str | None
    delimiter: str
    prompt: str
    answer: str
    answer_prefix: str
    max_answer_tokens: int | None
    answer_cuts: int
    system: str | None
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    template_time: str | None
    history: Literal["exact", "fork"]
    too_long: Literal["error", "drop"]
    completion: str | None


class LossTable(TypedDict, total=False):
    surrogate: Part
    reduction: Part
    kl: Part | None
    entropy: Part | None
    mismatch: Part | None
    proximal: Literal["behavior", "trainer"]
    penalties_on: Literal["all", "live"]


class ReferenceTable(TypedDict, total=False):
    reset_every: int
    reset_kl_above: float | None
    reset_patience: int
    reset_metric: str
    ema_decay: float


class ExperienceTable(TypedDict, total=False):
    share: float
    start: float
    size: int
    per_row: int
    reward: str | None
    success: float


class TreeTable(TypedDict, total=False):
    branch: Branching | None
    trees: int
    nodes: int
    continuations: int
    rounds: int
    segment: int


class AtlasTable(TypedDict, total=False):
    methods: Sequence[str]
    every: int


class ScoreTable(TypedDict, total=False):
    """What a pass of a model over the samples gives."""

    name: str
    policy: str
    policies: Mapping[str, str]
    choose_by: str
    quantity: Quantity
    prompt: str | None
    max_prompt_tokens: int | None
    temperature: float | None
    stride: int


class OptimizerTable(TypedDict, total=False):
    """Without the options of an optimizer, which depend on it: see `Overrides.optimizer`."""

    use: str
    learning_rate: float
    clip_norm: float
    warmup_steps: int
    schedule: Schedule
    state_dtype: Floats


class RolloutTable(TypedDict, total=False):
    prompts_per_step: int
    group_size: int
    max_prompt_tokens: int
    max_completion_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_completion_tokens: int
    stop_strings: Sequence[str]
    early_stop: Mapping[str, float] | None
    slots: int | None
    kv_cache_dtype: CacheDtype
    weight_dtype: WeightDtype
    overlap_rewards: bool
    segment_tokens: int | None
    prompts: Part
    interrupt: Mapping[str, Any] | None
    refill: Mapping[str, float] | None
    goals: Mapping[str, float] | None
    prefixes: Mapping[str, Any] | None
    staleness: int
    max_turns: int
    max_turn_tokens: int | None
    call_format: str
    call_timeout: float
    call_workers: int
    call_memory: float
    reply_after: int


class TrainTable(TypedDict, total=False):
    steps: int
    num_iterations: int
    minibatches: int
    seed: int
    tokens_per_micro_batch: int | None
    remat: Remat
    on_no_live_sample: Literal["step", "skip"]
    stop_after_not_finite: int
    routing: Literal["replay", "fresh"]
    router_aux_loss_coef: float
    router_bias_update_rate: float
    support: Literal["full", "replay"]


class EvalTable(TypedDict, total=False):
    data: str | None
    subset: str | None
    split: str | None
    every: int
    samples: int
    prompts: int | None
    scorer: str | None
    formats: Mapping[str, str]
    confidence: bool
    confidence_window: int
    confidence_kept: float
    kl_to_base: bool | None


class CheckpointTable(TypedDict, total=False):
    every: int
    keep: int
    keep_best: str | None


class MeshTable(TypedDict, total=False):
    data: int
    fsdp: int
    tensor: int
    context: int
    sampling_tensor: int
    platform: Platform


class PlanTable(TypedDict, total=False):
    topology: str | None
    slices: int


class TrackingTable(TypedDict, total=False):
    tensorboard: bool
    wandb: Mapping[str, Any] | None


class RunTable(TypedDict, total=False):
    dir: str
    stop_grace: float
    stuck_after: float
    peer_timeout: float
    samples_every: int
    rollouts_every: int
    allow_changes: Sequence[Input]
    report: bool
    report_every: int


class Overrides(TypedDict, total=False):
    """The tables that every call takes which changes a config."""

    model: ModelTable
    lora: LoraTable
    loss: LossTable
    reference: ReferenceTable
    experience: ExperienceTable
    tree: TreeTable
    atlas: AtlasTable
    optimizer: OptimizerTable | Part
    rollout: RolloutTable
    train: TrainTable
    eval: EvalTable
    checkpoint: CheckpointTable
    mesh: MeshTable
    plan: PlanTable
    tracking: TrackingTable
    run: RunTable
    recipe: str | Part
    scores: Sequence[ScoreTable]
    environment: str | Mapping[str, str]


class TrainOverrides(Overrides, total=False):
    """Of `jaxgrpo.train`, which has arguments of its own for rewards and advantage."""

    data: DataTable


class AskOverrides(Overrides, total=False):
    """Of `jaxgrpo.evaluate` and `jaxgrpo.probe`, which have an argument of their own for data."""

    rewards: Sequence[Part]
    advantage: Sequence[Part]
    tools: Sequence[str]


class SampleOverrides(Overrides, total=False):
    """Of `jaxgrpo.sample`."""

    data: DataTable
    rewards: Sequence[Part]
    advantage: Sequence[Part]
    tools: Sequence[str]
