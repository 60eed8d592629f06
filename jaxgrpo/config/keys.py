"""The keys of a config: one frozen dataclass per table, with each default in one place.

`key` (ranges.py) states the range of a value beside it. reading.py reads tables into them,
checks.py says what several must fulfil together, files.py reads and writes files.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgrpo.config.own_code import find_source, references, short_name, with_imports
from jaxgrpo.config.ranges import HEAT, LARGEST_SEED, LONGEST, key
from jaxgrpo.core.scores import POLICIES, QUANTITIES, STRIDE
from jaxgrpo.data.sources import FILES, is_name
from jaxgrpo.data.storage import is_url
from jaxgrpo.data.tasks import PREFIX

_PACKAGE = Path(__file__).resolve().parent.parent

SHIPPED = next(filter(Path.is_dir, [_PACKAGE / "configs"]), _PACKAGE.parent / "configs")
"""The configs that come with the package: inside it when installed, beside it in a checkout."""

DEFAULT_RECIPE = "grpo"
"""The recipe if neither `recipe` nor `advantage` is given."""


Part = dict[str, Any]
"""A part by name and its options, {"use": ..., option: value, ...}. Its name is a built-in key,
"path/file.py:function" or "package.module:function"."""


def part_options(part: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a part, without its name."""
    return {name: value for name, value in part.items() if name != "use"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardKeys:
    """A reward, its weight in the sum and its name in metrics and rows."""

    use: str = key()
    weight: float = key(1.0)
    name: str | None = key(None)  # None: the name in `use`
    on_error: str = key("raise", choices=("raise", "unscored"))  # what follows if it raises
    timeout: float | None = key(None, above=0, at_most=LONGEST)  # seconds for one batch; beyond it
    # as if it raised
    flip: float = key(0.0, at_least=0, at_most=0.5)  # share of 0/1 rewards flipped in training
    options: dict[str, Any] = key({})

    @property
    def title(self) -> str:
        """Its name in metrics, rows and weights."""
        return self.name or short_name(self.use)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelKeys:
    path: str = key()  # a model folder as transformers writes it, or owner/name on the hub
    revision: str | None = key(None)  # of the hub: a branch, tag or commit; None: its main branch
    config: Mapping[str, Any] = key({})  # the fields of its config.json, for plans where it is not
    family: str | None = key(None)  # one's own, "path/file.py:family"; None: that of config.json
    ignore: tuple[str, ...] = key(())  # fields of its config.json that change nothing it computes
    text_only: bool = key(False)  # the text part alone of a model that has others, such as images
    dtype: str = key("float32", choices=("float32", "bfloat16"))  # of the forward pass; the
    # weights that are trained are float32
    float32_head: bool = key(False)  # last norm, output head and logits, in sampling too
    float32_activations: bool = key(False)  # residuals, norms and inputs of products, likewise
    float32_attention: bool = key(False)  # and, with these, queries, keys and values
    attention: str = key("auto", choices=("auto", "xla", "splash", "cudnn"))  # of rows and prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraKeys:
    """Adapters that are trained in place of the weights, which stay as they are in model.dtype."""

    path: str | None = key(None)  # a folder of PEFT to go on from, which says all of the following
    rank: int = key(0, at_least=0)  # 0: no adapters, all weights are trained
    alpha: float = key(32.0, above=0)  # what they add is times alpha / rank
    targets: str = key("all-linear")  # regular expression of modules' names in transformers
    use_rslora: bool = key(False)  # times alpha / sqrt(rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartKeys:
    """One of the sources that data.path mixes; of keys that are None, data's count."""

    path: str = key()
    weight: float = key(1.0, above=0)  # how often it is drawn from, compared with the others'
    name: str | None = key(None)  # in metrics and samples; None: as its path
    subset: str | None = key(None)
    split: str | None = key(None)
    revision: str | None = key(None)
    prompt: str | None = key(None)
    answer: str | None = key(None, may_be_empty=True)

    @property
    def title(self) -> str:
        """Its name in metrics and samples: of a path the file's or folder's, of a task its own."""
        if self.path.startswith(PREFIX):
            return self.name or self.path.partition("?")[0].split(":")[-2]
        return self.name or Path(self.path).stem


def source_paths(path: str | tuple[PartKeys, ...] | None) -> tuple[str, ...]:
    """What data.path names: no source, one or several."""
    if isinstance(path, tuple):
        return tuple(part.path for part in path)
    return () if path is None else (path,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataKeys:
    path: str | tuple[PartKeys, ...] | None = key(None, holds="path", entries=PartKeys)  # a file,
    # folder, owner/name on the hub, "task:NAME:SPLIT", or several; None: rows are from Python
    subset: str | None = key(None)  # of a data set of the hub that has several
    split: str | None = key(None)  # of a folder or of the hub; None: the only one
    revision: str | None = key(None)  # of the hub: a branch, tag or commit
    delimiter: str = key(",")  # of a CSV file, one character; of eval.data too
    prompt: str = key("prompt", may_be_empty=True)  # its column, or a template "{column} and text";
    # "": none, the environment says first what is asked
    answer: str = key("answer", may_be_empty=True)  # column of the answer; "": none
    answer_prefix: str = key("", may_be_empty=True)  # text between thought and reference answer
    max_answer_tokens: int | None = key(None, at_least=1)  # of it that are scored; None: all
    answer_cuts: int = key(4, at_least=1)  # parts of a thought behind which it is scored
    system: str | None = key(None)  # text of a system message in front of every prompt
    chat_template: str = key("auto")  # "auto": the tokenizer's if it has one; "none"; a file
    chat_template_kwargs: Mapping[str, Any] = key({})  # variables of the template
    template_time: str | None = key(None)  # that it writes; None: of the run's first start
    history: str = key("exact", choices=("exact", "fork"))  # what a turn follows: the tokens before
    # it as they are, or the conversation as the template writes it again with each reply
    too_long: str = key("error", choices=("error", "drop"))  # beyond rollout.max_prompt_tokens
    completion: str | None = key(None)  # column of texts that are trained on; None: it samples

    @property
    def paths(self) -> tuple[str, ...]:
        """What `path` names: no source, one or several."""
        return source_paths(self.path)

    @property
    def forks(self) -> bool:
        """Whether a turn may follow other tokens than those before it."""
        return self.history == "fork"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossKeys:
    surrogate: Part = key({"use": "clip"})
    reduction: Part = key({"use": "token_mean"})
    kl: Part | None = key(None)  # None: no penalty and no reference policy
    entropy: Part | None = key(None)  # None: neither bonus nor control
    mismatch: Part | None = key(None)  # of sampler and trainer: weights, or what is dropped
    proximal: str = key("behavior", choices=("behavior", "trainer"))
    penalties_on: str = key("all", choices=("all", "live"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceKeys:
    """When the reference becomes the policy of the moment, with fresh optimizer moments."""

    reset_every: int = key(0, at_least=0)  # steps since the last reset; 0: never for this reason
    reset_kl_above: float | None = key(None, above=0)  # nats per token, of a step's metric kl
    reset_patience: int = key(0, at_least=0)  # evaluations without a new best; 0: off
    reset_metric: str = key("eval/accuracy")  # which evaluation patience is about
    ema_decay: float = key(0.99, at_least=0, at_most=1)  # of the policy "ema", the mean of what
    # was trained: after each step, decay x itself + (1 - decay) x the trained policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreKeys:
    """What a pass of a model over the samples gives, for parts and losses that name it."""

    name: str = key()
    policy: str = key("trainer")  # "trainer", "reference", "base", "ema", or a model as model.path
    policies: Mapping[str, Any] = key({})  # several by name, instead of `policy`
    choose_by: str = key("teacher")  # the column that names that of a row
    quantity: str = key("logp", choices=tuple(QUANTITIES))
    prompt: str | None = key(None)  # a column that replaces the prompt, or own code that writes it
    max_prompt_tokens: int | None = key(None, at_least=1)  # of own code's; None: of rollout
    temperature: float | None = key(None, **HEAT)  # None: that of sampling
    stride: int = key(STRIDE, at_least=1)  # tokens between those with an effective rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperienceKeys:
    """Right samples of earlier steps that are trained on again."""

    share: float = key(0.0, at_least=0, at_most=0.9)  # of a step's prompts; 0: none
    start: float = key(0.35, at_least=0, at_most=1)  # success rate of a step, from which on
    size: int = key(1024, at_least=1)  # samples that are kept
    per_row: int = key(4, at_least=1)  # of them of one row
    reward: str | None = key(None)  # which says what is right; None: the weighted sum
    success: float = key(0.5)  # its lowest value that is right


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeKeys:
    """Samples of a prompt that begin with tokens of others."""

    branch: str | None = key(None, choices=("uniform", "surprise", "segment"))  # None: none do
    trees: int = key(2, at_least=1)  # chains that are drawn first
    nodes: int = key(2, at_least=1)  # that each tree branches at, in each round; not of "segment"
    continuations: int = key(1, at_least=1)  # of each of them
    rounds: int = key(1, at_least=0)
    segment: int = key(16, at_least=1)  # tokens between nodes; not of "surprise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtlasKeys:
    """Other methods, whose updates are compared with the run's."""

    methods: tuple[str, ...] = key(())  # as "sign", "dr_grpo+loss.reduction=constant"
    every: int = key(50, at_least=1)  # steps; and step 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerKeys:
    use: str = key("adamw")  # any factory of optax; other entries of the table are its options
    learning_rate: float = key(at_least=0)
    clip_norm: float = key(1.0, at_least=0)  # global gradient norm; 0: off
    warmup_steps: int = key(0, at_least=0)
    schedule: str = key("constant", choices=("constant", "linear", "cosine"))
    state_dtype: str = key("float32", choices=("float32", "bfloat16"))  # of moments between updates
    options: dict[str, Any] = key({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutKeys:
    prompts_per_step: int = key(at_least=1)
    group_size: int = key(at_least=1)  # samples per prompt
    max_prompt_tokens: int = key(at_least=1)
    max_completion_tokens: int = key(at_least=1)
    temperature: float = key(1.0, **HEAT)
    top_k: int = key(0, at_least=0)  # sample from the top_k likeliest tokens; 0: from all
    top_p: float = key(1.0, above=0)  # sample from the likeliest tokens of this probability
    min_p: float = key(0.0, at_least=0)  # and of at least this share of the likeliest's probability
    min_completion_tokens: int = key(0, at_least=0)  # no end token is drawn before
    stop_strings: tuple[str, ...] = key(())  # a sample ends with the token that completes one
    early_stop: Mapping[str, float] | None = key(None)  # { percentile = 10 }: as EarlyStop
    slots: int | None = key(None, at_least=1)  # samples decoded at once; None: what fits
    kv_cache_dtype: str = key("auto", choices=("auto", "float32", "bfloat16", "fp8"))
    weight_dtype: str = key("auto", choices=("auto", "int8", "fp8"))  # "auto": that of the model
    overlap_rewards: bool = key(True)  # those that are per_sample judge groups as they end
    segment_tokens: int | None = key(None, at_least=1)  # decoded between two looks at what has
    # ended; None: 16, or 4 where tools or environments answer turns
    prompts: Part = key({"use": "sequential"})  # the policy that chooses what is sampled next
    interrupt: Mapping[str, Any] | None = key(None)  # { after = 1000, text = "So " }: forced then
    refill: Mapping[str, float] | None = key(None)  # { factor = 3.0 }, groups generated at most
    goals: Mapping[str, float] | None = key(None)  # text that samples begin with -> its share
    prefixes: Mapping[str, Any] | None = key(None)  # { texts = [""], every = 20 }, before prompts
    staleness: int = key(0, at_least=0)  # steps between the policy that samples and the trained one
    max_turns: int = key(8, at_least=2)  # of a sample, where there are tools or environments
    max_turn_tokens: int | None = key(None, at_least=1)  # of a turn; None: all that are left
    call_format: str = key("auto")  # how a model writes calls: FORMATS, or own code
    call_timeout: float = key(30.0, above=0, at_most=LONGEST)  # seconds for a call of a tool or an
    # environment
    call_workers: int = key(0, at_least=0)  # calls that run at once in processes; 0: in threads
    call_memory: float = key(4.0, above=0)  # GiB that each of these processes may map
    reply_after: int = key(1, at_least=1)  # segments decoded between a turn's end and its reply


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainKeys:
    steps: int = key(at_least=1)
    num_iterations: int = key(1, at_least=1)  # how often the rollouts of a step are trained on
    minibatches: int = key(1, at_least=1)  # parts by prompt of each, one optimizer update each
    seed: int = key(0, at_least=0, at_most=LARGEST_SEED)
    tokens_per_micro_batch: int | None = key(None, at_least=1)  # per bin; None: `default_tokens`
    remat: str = key("auto", choices=("auto", "none", "attention", "dots", "full"))
    routing: str = key("replay", choices=("replay", "fresh"))  # of a model with experts
    router_aux_loss_coef: float = key(0.0, at_least=0)  # evens out the load of experts; 0: none
    router_bias_update_rate: float = key(0.0, at_least=0)  # of e_score_correction_bias; 0: it stays
    support: str = key("full", choices=("full", "replay"))  # tokens that log-probs are among: all,
    # or those that the sampler drew among
    on_no_live_sample: str = key("step", choices=("step", "skip"))  # by a gradient of 0; or not
    stop_after_not_finite: int = key(10, at_least=0)  # steps in a row; 0: never

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run, which the learning rate's schedule counts."""
        return self.steps * self.num_iterations * self.minibatches


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalKeys:
    data: str | None = key(None)  # as data.path; None: no evaluation
    subset: str | None = key(None)  # None: data.subset if eval.data is data.path or that is None
    split: str | None = key(None)  # of a folder or of the hub; None: the only one
    every: int = key(0, at_least=0)  # steps; 0: at the start and the end only
    samples: int = key(16, at_least=1)  # per prompt, for pass@k
    prompts: int | None = key(None, at_least=1)  # None: all
    scorer: str | None = key(None)  # judges success, > 0.5; None: the first reward
    formats: Mapping[str, str] = key({})  # name -> regular expression, the first found counts
    confidence: bool = key(False)  # of tokens, for weighted votes: a second pass over the samples
    confidence_window: int = key(2048, at_least=1)  # tokens; DeepConf, arXiv 2508.15260
    confidence_kept: float = key(0.9, above=0)  # share of the voters, the most confident
    kl_to_base: bool | None = key(None)  # a second pass, and one more copy of the parameters;
    # None: where model.path alone says what the base is


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
    every: int = key(50, at_least=1)  # steps
    keep: int = key(2, at_least=1)  # the latest so many stay
    keep_best: str | None = key(None)  # a metric of evaluation, as "eval/accuracy"; None: none


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshKeys:
    data: int = key(0, at_least=0)  # 0: the devices that the other axes leave
    fsdp: int = key(1, at_least=1)
    tensor: int = key(1, at_least=1)
    context: int = key(1, at_least=1)
    sampling_tensor: int = key(0, at_least=0)  # data takes the rest; 0: samples on the same mesh
    platform: str = key("auto", choices=("auto", "cpu", "gpu", "tpu"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanKeys:
    """The devices that a config is made for: what `jaxgrpo plan` compiles for."""

    topology: str | None = key(None)  # as "v6e:4x4", "h100:1x8"; None: --topology says it
    slices: int = key(1, at_least=1)  # of that topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackingKeys:
    tensorboard: bool = key(True)  # event files in the run folder
    wandb: dict[str, Any] | None = key(None, holds="project")  # options of wandb.init


INPUTS = ("rows", "template", "tokenizer", "prompts", "base", "code")
"""What a run reads, and a later start of it has to read again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunKeys:
    dir: str = key()  # relative to where the command is started
    stop_grace: float = key(300.0, above=0, at_most=LONGEST)  # seconds from a stop signal to the
    # end, saved or not
    stuck_after: float = key(3600.0, at_least=0, at_most=LONGEST)  # seconds without progress that
    # end it; 0: never
    peer_timeout: float = key(15.0, at_least=0, at_most=LONGEST)  # silence of another process that
    # ends it; 0: never
    samples_every: int = key(10, at_least=0)  # steps between files of samples; 0: only the first's
    rollouts_every: int = key(0, at_least=0)  # steps between files of rollouts; 0: none
    allow_changes: tuple[str, ...] = key((), choices=INPUTS)  # in what a later start reads
    report: bool = key(True)  # false: none, until `jaxgrpo report` is asked for one
    report_every: int = key(10, at_least=0)  # at most 1% of the time goes into it; 0: at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole config, read and checked. Nothing changes it afterwards; the core never sees it.

    Paths of inputs and of own code are absolute; built-in tasks and names on the hub stay.
    """

    model: ModelKeys
    lora: LoraKeys
    data: DataKeys
    rewards: tuple[RewardKeys, ...] = key()
    recipe: str | Part | None = key(None)  # a chain by name; exactly one of these two is set
    advantage: tuple[Part, ...] | None = key(None)
    scores: tuple[ScoreKeys, ...] = key(())  # beside those of every run
    tools: tuple[str, ...] = key(())  # own code that a model may call
    environment: str | Mapping[str, str] | None = key(None)  # a class, or several by name
    loss: LossKeys
    reference: ReferenceKeys
    experience: ExperienceKeys
    tree: TreeKeys
    atlas: AtlasKeys
    optimizer: OptimizerKeys
    rollout: RolloutKeys
    train: TrainKeys
    eval: EvalKeys
    checkpoint: CheckpointKeys
    mesh: MeshKeys
    plan: PlanKeys
    tracking: TrackingKeys
    run: RunKeys
    source: Path | None = dataclasses.field(default=None, compare=False)  # the file it came from

    @property
    def folder(self) -> Path:
        """Where relative paths of inputs begin."""
        return config_folder(self.source)

    def resolve(self, path: str) -> str:
        """A path of an input, absolute; "task:..." and names on the hub as they are."""
        begin = input_folder(path, self.folder)
        return path if begin is None else str(begin / path)

    def at_time(self, time: str | None) -> Config:
        """The config with the time that its chat template writes; None: it writes none."""
        return dataclasses.replace(self, data=dataclasses.replace(self.data, template_time=time))

    @property
    def method(self) -> Part | None:
        """The recipe as a part, {"use": name, **options}."""
        return {"use": self.recipe} if isinstance(self.recipe, str) else self.recipe

    @property
    def named_chain(self) -> Part | tuple[Part, ...]:
        """What says how much a sample is worth: a recipe as a part, or a list of parts."""
        assert self.method is not None or self.advantage is not None
        return self.method or self.advantage or ()

    @property
    def bases(self) -> list[str]:
        """What a run begins from: the model and the adapters, if any."""
        return [path for path in (self.model.path, self.lora.path) if path is not None]

    @property
    def environments(self) -> dict[str, str]:
        """Name of each environment -> its class; of a single one the name is ""."""
        several = self.environment
        return {"": several} if isinstance(several, str) else dict(several or {})

    @property
    def has_turns(self) -> bool:
        """Whether samples are answered."""
        return bool(self.tools or self.environment)

    @property
    def teachers(self) -> list[str]:
        """The models that scores read beside the run's own."""
        named = {name for score in self.scores for name in (score.policy, *score.policies.values())}
        return sorted(named - {*POLICIES})

    @property
    def scorer_name(self) -> str:
        """What judges evaluations: eval.scorer, else the first reward, else the environment."""
        first = self.rewards[0].use if self.rewards else "environment" * bool(self.environment)
        return self.eval.scorer or first

    @property
    def measures_kl_to_base(self) -> bool:
        """Whether evaluations measure the KL to the base: by default if model.path alone says what
        the base is, and there is something to evaluate on."""
        setting = self.eval.kl_to_base
        return bool(self.eval.data) and (not self.model.config if setting is None else setting)

    @property
    def own_files(self) -> tuple[Path, ...]:
        """The files of own code that it names, and of modules beside them that these import."""
        loss = self.loss
        parts = [*(self.advantage or ()), loss.surrogate, loss.reduction, self.rollout.prompts]
        parts += [part for part in (loss.kl, loss.entropy, loss.mismatch, self.method) if part]
        names = [reward.use for reward in self.rewards] + [part["use"] for part in parts]
        names += [name for name in (self.model.family, *(s.prompt for s in self.scores)) if name]
        names += [*self.tools, *self.environments.values(), self.rollout.call_format]
        names += [name for method in self.atlas.methods for name in references(method)]
        return with_imports(file for name in names if (file := find_source(name)))


def is_path(value: str, folder: Path) -> bool:
    """Whether the name of an input means a local path, and no task, URL or name on the hub.

    A name of the form owner/name is a path if one is there; a model folder that is yet to be
    made is written ./owner/name.
    """
    if value.startswith(PREFIX) or is_url(value):
        return False
    # Not Path's own methods: they raise on paths that are too long and on unknown homes.
    local = Path(value).suffix in FILES or os.path.exists(folder / os.path.expanduser(value))
    return local or not is_name(value)


def input_folder(value: str, folder: Path) -> Path | None:
    """Where the local path begins that the name of an input means; None: it means none. A name on
    the hub, by `is_path`, is a folder of the working directory where that has one."""
    if is_path(value, folder):
        return folder
    working = Path.cwd()
    return working if is_path(value, working) and os.path.isdir(working / value) else None


def config_folder(source: Path | None) -> Path:
    """Where the paths in a config begin: beside its file, or here for none and for shipped ones."""
    return Path.cwd() if source is None or source.parent == SHIPPED else source.parent


HINTS: dict[str, Any] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if name != "source"
}
SECTIONS: dict[str, Any] = {
    name: hint for name, hint in HINTS.items() if dataclasses.is_dataclass(hint)
}
KEYS: dict[str, dataclasses.Field[Any]] = {
    f"{section}.{field.name}": field
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if field.name != "options"
}
"""The keys of all tables by their full names."""
