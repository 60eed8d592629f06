"""The model that a config names, without its weights, and how the config samples from it."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxgrpo.config import own_code
from jaxgrpo.config.keys import LoraKeys, MeshKeys, ModelKeys, RolloutKeys
from jaxgrpo.config.world import World
from jaxgrpo.core.errors import InputError, refuse_all
from jaxgrpo.core.types import GENERATOR, WEIGHTS, Learner, Params
from jaxgrpo.models import decoder, lora, sequences, sharding
from jaxgrpo.models.api import Model, ModelConfig, in_dtype
from jaxgrpo.models.hf import adapters, families, folders, texts
from jaxgrpo.models.hf.families import Family
from jaxgrpo.models.hf.weights import IN_A_COPY
from jaxgrpo.rollout.engine import SEGMENT, SEGMENT_OF_TURNS, SamplingSettings
from jaxgrpo.rollout.goals import Goals, make_goals
from jaxgrpo.rollout.stopping import EarlyStop, StopStrings, make_interruption
from jaxgrpo.training import parameters
from jaxgrpo.training.processes import process
from jaxgrpo.update.packing import Geometry


class Pretrained(NamedTuple):
    """The model that a config names, without weights, on the devices that it names."""

    path: str  # its name in the config
    mesh: Mesh
    folder: Path
    tokenizer: Any
    model: Model
    adapter_path: str | None  # `lora.path`
    attention: str = "auto"  # `model.attention`
    revision: str | None = None  # `model.revision`

    @property
    def has_fresh_adapters(self) -> bool:
        """Whether adapters begin as zero: they add nothing to the model of the folder."""
        return self.model.config.lora is not None and self.adapter_path is None

    def with_weights(self) -> Pretrained:
        """The same, with the weights of a name on the hub in its folder too."""
        return self._replace(folder=folders.find_folder(self.path, self.revision))

    def model_on(self, mesh: Mesh) -> Model:
        """The model with its activations laid out on a mesh."""
        if mesh == self.mesh:
            return self.model
        return decoder.build(self.model.config, constrain=sharding.constrain(mesh))

    def read_params(
        self, seed: int, model: Model, dtype: str | None = None, layout: Any = None
    ) -> Params:
        """The parameters that a run begins with: those of the folder and, if the model has
        adapters, those of lora.path, else drawn with train.seed.

        Args:
          seed: `train.seed`.
          model: this one, on a mesh; or its base.
          dtype: of what is trained; None: what the model computes in.
          layout: tree of shardings like the parameters; None: the default device.
        """
        if model.config.lora is None:
            return folders.read_params(self.folder, model, dtype, layout, self.adapter_path)
        if self.adapter_path is not None:
            return folders.read_adapted(self.folder, self.adapter_path, model, dtype, layout)
        adapter_layout, weight_layout = (None, None) if layout is None else lora.split(layout)

        def draw(key: Any) -> Params:
            params = lora.init(model, key)
            return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

        key = jax.random.fold_in(jax.random.key(seed, impl=GENERATOR), decoder.ADAPTER_FOLD)
        weights = folders.read_params(self.folder, lora.base_model(model), None, weight_layout)
        return lora.join(jax.jit(draw, out_shardings=adapter_layout)(key), weights)

    def save(self, learner: Learner, folder: Path, ends: Mapping[str, Any]) -> None:
        """Writes a run's policy to "model" in its folder. If it has adapters, they are merged
        there, in the dtype of the weights, and "adapter" holds them for PEFT.

        Args:
          ends: fields of generation_config.json.
        """
        model, params = self.model, learner.trainable
        if model.config.lora is not None:
            adapters.save(model, params, folder / "adapter", self.path, revision=self.revision)
            weights = learner.frozen[WEIGHTS]
            layout = jax.tree.map(lambda leaf: leaf.sharding, weights)
            merge = jax.jit(functools.partial(_merged, model), out_shardings=layout)
            model, params = lora.base_model(model), merge(lora.join(params, weights))
        folders.save_model(model, params, folder / "model", self.tokenizer, ends, base=self.folder)


def _merged(model: Model, params: Params) -> Params:
    """Of one dtype, in which a wide head (model.float32_head) was stored too."""
    return in_dtype(lora.merge(model, params), model.config.dtype)


def make_mesh(sizes: MeshKeys, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that a config asks for, on the devices that are here by default."""
    return sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor, sizes.context, devices=devices)


def usable_mesh(console: Console, keys: MeshKeys, user_keys: Collection[str]) -> MeshKeys:
    """`mesh` of a run's config, or where no such mesh can be made of the devices of this machine
    its defaults, which take all of them; a line says so.

    Args:
      user_keys: full names of keys that the user has set; sizes of the mesh among them stay.

    Raises: InputError as `process.start`.
    """
    default = MeshKeys(platform=keys.platform)
    sets_sizes = any(f"mesh.{name}" in user_keys for name in vars(keys) if name != "platform")
    if keys == default or sets_sizes:
        return keys
    process.start(keys.platform)
    try:
        sharding.sampling_mesh(make_mesh(keys), keys.sampling_tensor)
    except InputError:
        sizes, count = vars(keys), jax.device_count()
        changes = {name: size for name, size in vars(default).items() if size != sizes[name]}
        words = ", ".join(f"{name} {sizes[name]}" for name in changes)
        overrides = " ".join(f"mesh.{name}={size}" for name, size in changes.items())
        text = f"the run's mesh ({words}) does not fit {count} device{'s' * (count > 1)}: "
        if process.is_main():
            console.print(f"{text}used with --set {overrides}", soft_wrap=True)
        return default
    return keys


def find_model(
    keys: ModelKeys,
    lora_keys: LoraKeys,
    rollout: RolloutKeys,
    remat: str,
    mesh: Mesh,
    fetch_weights: bool = True,
) -> Pretrained:
    """The model of a config, on a mesh.

    Args:
      keys, lora_keys, rollout, remat: `model`, `lora`, `rollout` and `train.remat` of the config.
      fetch_weights: as in `find_config`.

    Raises: InputError where there is no such model, a file of it cannot be read, it holds an
    adapter that is not `lora.path`, or it has no positions for prompt and completion.
    """
    folder, stored = find_config(keys, fetch_weights)
    folders.refuse_adapter(folder, lora_keys.path)
    texts.refuse_unreadable(folder)
    check_length(rollout, keys.path, stored)
    tokenizer, size = folders.read_tokenizer(folder), stored.vocab_size
    ends = folders.read_end_tokens(folder, tokenizer, size)
    without_text = folders.tokens_without_text(tokenizer, ends, size)
    model_config = parameters.model_config_for_run(keys, lora_keys, stored, without_text)
    saved = decoder.choose_remat(remat, mesh.devices.flat[0].platform)
    model = decoder.build(model_config, constrain=sharding.constrain(mesh), remat=saved)
    return Pretrained(
        keys.path, mesh, folder, tokenizer, model, lora_keys.path, keys.attention, keys.revision
    )


def find_config(keys: ModelKeys, fetch_weights: bool = True) -> tuple[Path, ModelConfig]:
    """The folder of a config's model, and what its config.json says; a family of one's own is
    registered.

    Args:
      fetch_weights: whether to fetch them too, if the model is on the hub or in a bucket. They are
        in any case where the names of their tensors are needed and no index lists them.

    Raises: InputError where there is no such model or family, or `model.config` is another model's.
    """
    _refuse_unwritten(keys.path)
    folder = folders.find_folder(keys.path, keys.revision, fetch_weights)
    family = own_family(keys.family)
    fetch = functools.partial(folders.find_folder, keys.path, keys.revision)
    stored = folders.read_config(folder, family, keys.ignore, keys.text_only, fetch)
    if keys.config:
        user_config = families.model_config(
            keys.config, "model.config", family, keys.ignore, keys.text_only
        )
        names = [field.name for field in dataclasses.fields(user_config)]
        differences = [
            f"{name} = {getattr(user_config, name)!r}, there {getattr(stored, name)!r}"
            for name in names
            if name not in families.RUN_FIELDS
            and getattr(user_config, name) != getattr(stored, name)
        ]
        refuse_all(f"model.config is not what the config.json of {keys.path} says:", differences)
    return folder, stored


def _refuse_unwritten(path: str) -> None:
    """Raises: InputError where a path is of the model of a run that has not written it."""
    folder, run = Path(path), Path(path).parent
    if folder.name != "model" or folder.exists() or not (run / "config.toml").is_file():
        return
    raise InputError(
        f"{path}: the run has written no model, which it does when it ends: let it end, or write "
        f"the model of a checkpoint, jaxgrpo export {shlex.quote(str(run))} OUT, and give OUT"
    )


def own_family(name: str | None) -> Family | None:
    """The family of one's own that `model.family` names."""
    return None if name is None else own_code.load(name, expected=Family, kind="family")


def check_length(rollout: RolloutKeys, path: str, stored: ModelConfig, answer: int = 0) -> None:
    """Refuses sequences longer than those that the model is meant for, or has positions for.

    Args:
      path: `model.path`.
      answer: tokens of the longest reference answer, with its prefix.
    """
    prompt, completion = rollout.max_prompt_tokens, rollout.max_completion_tokens
    parts = [f"rollout.max_prompt_tokens = {prompt}", f"max_completion_tokens = {completion}"]
    room = max(2, stored.longest - answer)
    prompt_room = max(1, room * prompt // (prompt + completion))
    remedy = (
        f"make them shorter, as --set rollout.max_prompt_tokens={prompt_room} "
        f"rollout.max_completion_tokens={room - prompt_room}"
    )
    if answer:
        parts.append(f"the longest answer with data.answer_prefix, {answer} tokens,")
        remedy = f"set data.max_answer_tokens, or {remedy}"
    total, terms = prompt + completion + answer, " and ".join(parts)
    if total > stored.max_positions:
        raise InputError(
            f"{terms} are {total} tokens, but the config.json of {path} says "
            f"max_position_embeddings = {stored.max_positions}: {remedy}"
        )
    sequences.check_length(stored, total, terms, remedy)


def sampling_settings(
    rollout: RolloutKeys, pretrained: Pretrained, world: World | None = None, support: str = "full"
) -> SamplingSettings:
    """How a config samples from a model.

    Args:
      world: what answers the samples.
      support: `train.support`.

    Raises: InputError where no token ends a sample.
    """
    tokenizer, size = pretrained.tokenizer, pretrained.model.config.vocab_size
    ends = folders.read_end_tokens(pretrained.folder, tokenizer, size)
    if not ends:
        raise InputError(
            f"model.path = {pretrained.path}: its tokenizer has no end token, so no sample could "
            f"end; set eos_token in tokenizer_config.json {IN_A_COPY}"
        )
    pad, strings = tokenizer.pad_token_id, rollout.stop_strings
    if pad is None or pad >= size:
        pad = ends[0]
    longest = rollout.max_completion_tokens
    settings = make_sampling_settings(
        rollout, ends, pad, StopStrings(tokenizer, strings) if strings else None
    )
    interruption = make_interruption(rollout.interrupt, tokenizer, longest)
    settings = settings._replace(
        interruption=interruption,
        attention=pretrained.attention,
        support=support_size(rollout.top_k, support, size),
    )
    settings = settings if world is None else world.sampling(settings)
    return with_segments(settings, rollout.segment_tokens)


def with_segments(settings: SamplingSettings, tokens: int | None) -> SamplingSettings:
    """The settings with segments of so many tokens; None: those that suit its turns."""
    default = SEGMENT_OF_TURNS if settings.max_turns > 1 else SEGMENT
    return settings._replace(segment_tokens=tokens or default)


def support_size(top_k: int, support: str, vocab_size: int) -> int:
    """`SamplingSettings.support`: the most tokens that one is drawn among, where `train.support`
    says that updates take them again; else 0."""
    return min(top_k, vocab_size) if support == "replay" else 0


def run_goals(rollout: RolloutKeys, tokenizer: Any, seed: int) -> Goals | None:
    """The goals that `rollout.goals` names; None: none."""
    return make_goals(rollout.goals, tokenizer, rollout.max_completion_tokens, seed)


def make_sampling_settings(
    rollout: RolloutKeys, ends: tuple[int, ...], pad: int, strings: StopStrings | None = None
) -> SamplingSettings:
    """How a config samples from a model whose tokens `ends` end a sample."""
    return SamplingSettings(
        max_completion_tokens=rollout.max_completion_tokens,
        temperature=rollout.temperature,
        stop_tokens=ends,
        pad_token=pad,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        min_completion_tokens=rollout.min_completion_tokens,
        slots=rollout.slots or 0,
        stop_strings=strings,
        early_stop=EarlyStop(**rollout.early_stop) if rollout.early_stop else None,  # pyright: ignore[reportArgumentType]
        kv_cache_dtype=rollout.kv_cache_dtype,
        weight_dtype=rollout.weight_dtype,
    )


def check_recurrent(geometry: Geometry, mesh: Mesh) -> Geometry:
    """The geometry. Raises: InputError for what states cannot be trained with."""
    if not geometry.recurs:
        return geometry
    problems = []
    if (context := mesh.shape["context"]) > 1:
        problems.append(
            f"mesh.context = {context}: a state goes from token to token; divide by mesh.fsdp or "
            "mesh.tensor instead"
        )
    if geometry.has_forks:
        problems.append(
            'data.history = "fork": a conversation that is rewritten (fields.turn:fork of files) '
            "begins inside a row, and states begin with chunks; take other files, or set it to "
            '"exact"'
        )
    refuse_all("a model with layers that recur cannot be trained so:", problems)
    return geometry
