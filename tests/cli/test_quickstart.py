"""The shipped example learns; without information in the reward it does not."""

import re

import pytest
import quickstart
import small_run

pytestmark = pytest.mark.slow


def test_the_quickstart_lifts_greedy_accuracy_within_its_time(shipped):
    _, _, summary, seconds = shipped
    assert 0.3 <= summary["base"]["accuracy"] <= 0.65
    assert summary["trained"]["accuracy"] >= 0.85
    assert seconds <= quickstart.LIMIT


def test_the_base_is_bimodal_and_training_makes_groups_agree_on_success(shipped):
    _, _, summary, _ = shipped
    base, trained = summary["base"], summary["trained"]
    assert base["accuracy/level_1"] > 0.9 > 0.3 > base["accuracy/level_2"]
    assert base["pass@1"] < base["pass@4"] < base["pass@16"]
    # Were success equally likely everywhere, groups of 8 would agree far less often.
    p = base["pass@1"]
    assert base["flat_groups"] > 10 * (p**8 + (1 - p) ** 8)
    assert trained["flat_groups"] > base["flat_groups"]


def test_the_table_at_the_end_has_the_numbers_of_the_summary(shipped):
    folder, output, summary, _ = shipped
    for name in ["accuracy", "pass@1", "pass@4", "pass@16", "flat_groups"]:
        [row] = re.findall(rf"^.*\b{re.escape(name)} .*$", output, re.MULTILINE)[-1:]
        numbers = [float(number) for number in re.findall(r"\d\.\d{3}", row)]
        wanted = [summary["base"][name], summary["trained"][name]]
        assert numbers == pytest.approx(wanted, abs=5e-4)
    assert (folder / "runs" / "quickstart" / "model" / "model.safetensors").exists()
    assert f"{summary['time/tokens_per_second']:,.0f}" in output


def test_lines_of_steps_lead_with_reward_and_end_with_loss(shipped):
    _, output, _, _ = shipped
    lines = re.findall(r"^ +\d+ reward .*$", output, re.MULTILINE)
    assert len(lines) == 60
    order = [lines[-1].index(word) for word in ("reward", "accuracy", "live", "gradient", "loss")]
    assert order == sorted(order)
    assert all(len(line) <= 80 for line in lines)


def control(python, shipped, tmp_path, reward):
    base = shipped[0] / "runs" / "base"
    _, summary, _ = quickstart.run(
        python,
        tmp_path,
        *("train", "quickstart", "--set", f"model.path={base}", "train.steps=40"),
        *(f'rewards=[{{use="{small_run.__file__}:{reward}"}}]', "eval.scorer=arithmetic"),
    )
    return summary["trained"]["accuracy"] - summary["base"]["accuracy"]


def test_a_coin_flip_for_a_reward_teaches_nothing(python, shipped, tmp_path):
    assert control(python, shipped, tmp_path, "coin") < 0.15


def test_a_negated_reward_makes_it_worse(python, shipped, tmp_path):
    assert control(python, shipped, tmp_path, "negated") < 0


@pytest.mark.full
def test_another_seed_learns_too(python, tmp_path):
    _, summary, _ = quickstart.run(python, tmp_path, "quickstart", "--set", "train.seed=1")
    assert summary["trained"]["accuracy"] >= 0.80
