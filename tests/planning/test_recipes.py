"""Every shipped config that names a topology, compiled for it, and what must hold of it then."""

from __future__ import annotations

from pathlib import Path

import compiled_programs
import pytest
from planned import NEEDS_CUDA
from quick import LONG

from jaxgrpo.config import files
from jaxgrpo.planning import plan, programs, topologies

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(
    file.stem for file in CONFIGS.glob("*.toml") if files.load(str(file)).plan.topology is not None
)


def recipe(name: str):
    """A parameter that is left out where there is no compiler for it."""
    on_gpus = str(files.load(name).plan.topology).startswith(topologies.GPUS)
    return pytest.param(name, marks=NEEDS_CUDA if on_gpus else ())


def test_there_are_recipes_for_slices_of_several_chips_and_for_gpus():
    chips = {str(files.load(name).plan.topology).split(":")[0] for name in RECIPES}
    assert {"v5e", "v5p", "v6e", "h100"} <= chips


@pytest.mark.fault(2)
@pytest.mark.parametrize("name", [*map(recipe, RECIPES)])
def test_a_recipe_fits_by_formula(name):
    """Within what the remedies of a plan would accept."""
    read = files.load(name)
    chips = topologies.topology(str(read.plan.topology), read.plan.slices)
    parts = plan.memory_parts(programs.build_run(read, chips.devices))
    assert plan.peak_bytes(parts) <= chips.chip.memory, parts


SMALL = (
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=256",
    "model.config.intermediate_size=768",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    f"model.config.vocab_size={1187 * 16}",  # of as many blocks as Qwen3's
    "rollout.prompts_per_step=8",
    "rollout.max_prompt_tokens=128",
    "rollout.max_completion_tokens=256",
)
"""Overrides with which a recipe compiles in a third of the time."""


@pytest.mark.fault(2)
@pytest.mark.full
def test_a_small_recipe_compiles_and_divides_what_it_should(tmp_path):
    compiled = compiled_programs.compiled("qwen3_0p6b_v5e", tmp_path, *SMALL)
    assert set(compiled.texts) == {"sync", "prefill", "decode", "update"}
    blueprint = compiled.plan.run.blueprint
    assert blueprint.kernel.name == "splash"
    assert compiled_programs.problems(compiled) == []
    size = f"f32[{blueprint.geometry.tokens},{blueprint.model.config.vocab_size}]"
    body = f"  ROOT %p = {size}{{1,0}} parameter(0)"
    logits = f"HloModule m\n\nENTRY %m (p: {size}) -> {size} {{\n{body}\n}}\n"
    assert compiled_programs.full_logits(compiled._replace(texts={"update": logits}))


FULL = {
    *(("qwen3_0p6b_v5e", program) for program in programs.NAMES if program != "update"),
    ("qwen3_30b_a3b_v5p", "decode"),
    ("qwen3_5_9b_lora_v6e", "decode"),
}
"""Recipes and programs that `make test-all` compiles: all together take most of an hour."""
ELSEWHERE = {("qwen3_0p6b_v5e", "update")}
"""What test_compiled_updates.py compiles and asks the same of."""


def compilation(name: str, program: str):
    """A parameter for a program of a recipe."""
    marks = [pytest.mark.full] if (name, program) in FULL else [*LONG]
    return pytest.param(name, program, marks=[*marks, *recipe(name).marks])


@pytest.mark.parametrize(
    ("name", "program"),
    [
        compilation(name, program)
        for name in RECIPES
        for program in programs.NAMES
        if (name, program) not in ELSEWHERE
    ],
)
def test_a_recipe_compiles_and_divides_what_it_should(name, program, tmp_path):
    """One program at a time: compiling takes minutes for each."""
    compiled = compiled_programs.compiled(name, tmp_path, names=(program,))
    assert compiled.plan.problem == ""
    assert compiled_programs.problems(compiled) == []
