"""The program of a training step does not grow with depth: layers are scanned over their pattern.

The update is the one that `setup` builds for a config, as `jaxgrpo train` runs it, from a folder
whose config.json is that of the family.
"""

from __future__ import annotations

import jax
import pytest
import small_run

from benchmarks.depth import NARROW
from benchmarks.programs import instructions
from jaxgrpo.data import tasks
from jaxgrpo.data.tasks.base import character_tokenizer
from jaxgrpo.models import decoder
from jaxgrpo.models.hf import families, folders
from jaxgrpo.training import memory
from jaxgrpo.training.setup import setup

MOST = 0.02


@pytest.fixture
def lowered(tmp_path):
    def lower(family: str, layers: int, remat: str):
        """The update of a run that trains so many layers."""
        folder = tmp_path / f"{family}-{layers}"
        if not folder.exists():
            tokenizer = character_tokenizer(tasks.find("arithmetic").alphabet)
            fields = {"model_type": family, **NARROW, "num_hidden_layers": layers}
            fields["vocab_size"] = len(tokenizer)
            model = decoder.build(families.model_config(fields, "the test's config.json"))
            params = jax.jit(model.init)(jax.random.key(0))
            folders.save_model(model, params, folder, tokenizer=tokenizer)
        changes = {"model.path": str(folder), "train.remat": remat}
        run = setup(small_run.config(tmp_path / "run", **changes))
        assert run.inputs.pretrained.model.config.num_layers == layers
        return run.steps.update_program.lower(
            *memory.update_arguments(
                run.blueprint.geometry, run.blueprint.objective, run.blueprint.mesh, run.learner
            )
        )

    return lower


def growth(lowered, family: str, few: int, many: int, remat: str = "full") -> float:
    """Instructions of the optimised programs, many layers over few."""
    before, after = (
        instructions(lowered(family, layers, remat).compile()) for layers in (few, many)
    )
    assert before > 2000  # the whole step
    return after / before


@pytest.mark.full
def test_an_update_of_48_layers_has_the_instructions_of_one_of_4(lowered):
    assert growth(lowered, "llama", 4, 48) == pytest.approx(1, abs=MOST)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "few", "many"),
    [
        *(("qwen3", 4, 48), ("qwen2", 4, 48), ("granite", 4, 48), ("olmo2", 4, 48)),
        # A loop over one period is no loop to XLA.
        *(("gemma3_text", 12, 48), ("olmo3", 8, 48)),
    ],
)
def test_updates_of_all_kinds_of_patterns_do_not_grow(lowered, family, few, many):
    assert growth(lowered, family, few, many) == pytest.approx(1, abs=MOST)


@pytest.mark.full
def test_without_recomputation_only_models_of_few_layers_are_unrolled(lowered):
    few = decoder.UNROLLED + 1
    assert growth(lowered, "llama", few, 48, "none") == pytest.approx(1, abs=MOST)


@pytest.mark.full
def test_unrolled_layers_show_in_the_program(lowered):
    few, more = (lowered("llama", n, "none").as_text().count("\n") for n in (4, decoder.UNROLLED))
    assert more > 1.2 * few  # or the tests above would show nothing
