"""What the pages say of each method beside what `jaxgrpo check` finds, and what explains it."""

from __future__ import annotations

import jax
import pytest

from docs import make_checks
from docs.make_losses import OF_OTHERS
from jaxgrpo.advantages import registry as recipes
from jaxgrpo.experiments.check.laws import LAWS, broken, check_laws
from jaxgrpo.experiments.check.method import read_method
from jaxgrpo.losses import registry

UNIT, SIZE, SCALE = "unit scale", "group size", "scale invariance"
SHIFT, APART = "shift invariance", "groups apart"
OWN_MEAN = {SCALE, SIZE, UNIT}
BY_DEVIATION = {SIZE, UNIT}
RAW = {SHIFT, SCALE}
BY_BATCH = {APART, SIZE, UNIT}
UNWEIGHED = {SCALE, "stale ratio"}
FILTERED = {SHIFT, SCALE, "length", SIZE, UNIT}
REMARKS = {
    "alpha_dpg": FILTERED,
    "f_dpg": FILTERED,
    "asymmetric": {SHIFT, SCALE, UNIT},
    "sign": {SHIFT, SCALE, UNIT},
    "avspo": {SHIFT, SCALE, SIZE, UNIT},
    "conditional_sign": {SHIFT, SCALE, SIZE, UNIT},
    **dict.fromkeys(("darling", "dr_grpo", "rlcr"), OWN_MEAN),
    **dict.fromkeys(("dapo", "dvao", "grpo", "like_trl", "like_verl", "passk"), BY_DEVIATION),
    **dict.fromkeys(("ema", "reinforce"), RAW),
    **dict.fromkeys(("gdpo", "lite_ppo", "scale_rl"), BY_BATCH),
    "maxrl": {SHIFT},
    "reinforce_pp": {APART, "length", SIZE, UNIT},
    "rloo": {SCALE},
    "spo": {SCALE, APART, SIZE, UNIT},
    "ttrl": {"order of samples", SIZE, UNIT},
    "dcpo_smooth": {SHIFT, SCALE, SIZE, UNIT},
    "intuitor": {SCALE, "length", SIZE, UNIT},
    "optimal_token_baseline": OWN_MEAN,
    "top_entropy": {"length", SIZE, UNIT},
}
"""What docs/advantages.md says of recipes: the laws that they do not keep, and are not meant to."""
UNCHECKED = {
    *("dro_r3", "gigpo", "hicra", "l2t", "rank_learning", "tree_grpo", "tree_po", "tree_rl"),
    *("nover", "opd", "rlpr", "sdpo", "verifree"),
}
"""Recipes that read what the games do not have."""
OF_SURROGATES = {
    **{name: {SCALE} for name in registry.surrogates},
    **dict.fromkeys(("gvpo", "kl_cov", "on_policy", "reinforce", "vespo"), UNWEIGHED),
    "shaped_ratio": {SCALE, "stale ratio", UNIT},
    **dict.fromkeys(("mirror_descent", "topr", "gmpo", "gspo", "gspo_token"), UNWEIGHED),
    "rewards_as_labels": {"length", "stale ratio", UNIT},
}
"""What docs/losses.md says of surrogates behind `rloo`, which is not invariant to scale."""
CLIMBED = {
    "alpha_dpg": "divergence",
    "f_dpg": "divergence",
    "darling": "other",
    "maxrl": "log success",
    "passk": "pass@k",
    "optimal_token_baseline": "other",
}
"""What recipes and surrogates climb; the others the mean reward."""


@pytest.mark.full
@pytest.mark.parametrize("name", ["grpo", "sign", "maxrl"])
def test_a_recipe_breaks_the_laws_that_the_page_names(name):
    with jax.enable_x64(True):
        laws = check_laws(read_method(name))
    assert set(broken(laws)) == REMARKS[name] - {SIZE, UNIT}


@pytest.mark.parametrize(
    ("page", "marker", "end"),
    [("advantages.md", "climbs", "\n## "), ("losses.md", "surrogates climb", "<!-- ")],
)
def test_the_page_explains_each_row_that_breaks_a_law_or_climbs_no_target(
    page, marker, end, repository
):
    text = (repository / "docs" / page).read_text().partition(f"<!-- {marker} -->\n")[2]
    table, _, prose = text.partition("<!-- end -->")
    prose = prose.partition(end)[0]
    for row in table.splitlines()[2:]:
        name, climbs, *_, laws = row.strip("| ").split(" | ")
        remarks = {law for law in laws.split(", ") if law in LAWS} - {SCALE, SIZE, UNIT}
        if remarks or climbs == "other":
            assert name in prose, f"{page} does not say why {name} has {remarks or climbs}"


def assert_climbs_and_breaks(report, name, remarks):
    """As the page says. A text says why a method cannot be checked."""
    if not isinstance(report, str):
        expected = CLIMBED.get(name, "mean reward"), remarks[name]
        assert (report.climbs, set(broken(report.laws))) == expected


@pytest.mark.full
@pytest.mark.parametrize("name", recipes.recipes)
def test_every_recipe_climbs_and_breaks_what_the_page_says(name):
    report = make_checks.report_recipe(name)
    assert isinstance(report, str) == (name in UNCHECKED)
    assert_climbs_and_breaks(report, name, REMARKS)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(registry.surrogates.keys() - OF_OTHERS.keys()))
def test_every_surrogate_climbs_and_breaks_what_the_page_says(name):
    report = make_checks.report_surrogate(name)
    assert isinstance(report, str) == (name == "clip_cov")  # it draws tokens
    assert_climbs_and_breaks(report, name, OF_SURROGATES)


@pytest.mark.full
def test_the_tables_of_the_pages_are_what_the_command_finds():
    for path, text in make_checks.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: make checks"


@pytest.mark.full
def test_a_row_of_the_page_is_what_the_command_finds(repository):
    (row,) = make_checks.recipe_table(["maxrl"]).splitlines()[2:]
    assert row in (repository / "docs" / "advantages.md").read_text().splitlines()
    ((path, text),) = make_checks.pages(["check.md"]).items()
    assert path.read_text() == text, "docs/check.md is out of date: make checks"
