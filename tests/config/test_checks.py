"""Keys that do not fit together are problems of the config: loss, reference and evaluation."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import Any

import minimal_config
import pytest
from minimal_config import MINIMAL, keys, problems, read

from jaxgrpo.config import checks, files, ranges
from jaxgrpo.core.errors import ConfigError, InputError, find


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('loss.kl={use="k2", beta=-1}', "loss.kl: k2: beta = -1"),
        ('loss.entropy={use="bonus"}', "loss.entropy: entropy bonus: missing a required argument"),
        ("loss.surrogate.hihg=1", "loss.surrogate: surrogate clip: unknown option 'hihg': did you"),
        ("loss.reduction.use=constnat", "loss.reduction: unknown reduction 'constnat': did you"),
        ("loss.penalties_on=live", 'loss.penalties_on = "live": there is no penalty; add loss.kl'),
        ("train.router_aux_loss_coef=-1", "train.router_aux_loss_coef = -1"),
        (
            'loss.kl={use="k1_in_reward"}',
            "loss.kl: k1_in_reward takes beta or target_validity, one of the two",
        ),
        ('loss.kl={use="k1_in_reward", beta=1, target_validity=0.9}', "one of the two: beta ="),
        (
            'loss.kl={use="k1_in_reward", beta=1, rewards=3}',
            "loss.kl: k1_in_reward: unknown option",
        ),
        ('loss.kl={use="k1_in_reward", target_validity=1.9}', "expected a success rate in (0, 1)"),
        (
            'loss.kl={use="k2", target_validity=0.9}',
            "loss.kl: k2: target_validity is reached by KL-control alone",
        ),
        ('rollout.prompts={use="difficulty_band", reward=1}', "reward = 1 is none of the rewards"),
        ('loss.mismatch={use="truncated"}', "loss.mismatch: unknown mismatch 'truncated': "),
        (
            'loss.mismatch={use="geometric_rejection", hihg=2}',
            "loss.mismatch: geometric_rejection: unknown option 'hihg': did",
        ),
        (
            'loss.mismatch={use="masked_importance"}',
            'holds this weight already; set loss.proximal = "trainer"',
        ),
        (
            'advantage=[{use="sum_rewards"}, {use="truncated_importance", cap=3.0}]',
            'advantage[1] = {"use": "truncated_importance", "cap": 3.0}: with loss.proximal',
        ),
        ('loss.kl={use="k1_in_reward", beta=-1}', "loss.kl: k1_in_reward: beta = -1, expected"),
        ("reference.reset_evry=3", "did you mean reference.reset_every?"),
        (
            "reference.reset_every=3",
            "reference.reset_every: there is no reference, so that",
        ),
        ("data.delimiter=tab", 'data.delimiter = "tab": expected one character, as ; or a tab'),
        ('eval.formats={ box = "[" }', 'eval.formats.box = "[": is no regular expression ('),
        ('eval.formats={ box = "a{99999999999}" }', "is no regular expression (the repetition num"),
        (
            'lora={rank=2, targets="["}',
            'lora.targets = "[": is no regular expression (unterminated character set at position',
        ),
        (
            'rewards=[{use="format", pattern="["}]',
            "rewards[0]: rewards.format: pattern = '[': is no regular expression (unterminated",
        ),
        ("eval.formats={ box = 3 }", "eval.formats.box = 3: expected a regular expression"),
        ('eval.formats={ other = "x" }', "other is the name of what fits no format; give another"),
        ("eval.formats=3", "eval.formats = 3: expected"),
        ("eval.confidence_kept=1.5", "eval.confidence_kept = 1.5: a share of the voters"),
        ("eval.confidence_kept=0", "eval.confidence_kept = 0.0: expected above 0"),
        ("eval.confidence_window=0", "eval.confidence_window = 0: expected 1 or more"),
        ("eval.kl_to_base=true", "eval.kl_to_base = true: there is nothing to evaluate on"),
        (
            "eval.confidence_kept=0.5",
            "kept = 0.5: nothing reads it without eval.confidence; set",
        ),
        (
            "eval.confidence_window=9",
            "window = 9: nothing reads it without eval.confidence; set",
        ),
        (
            "atlas.every=5",
            'atlas.every = 5: nothing reads it without atlas.methods; set that, as ["',
        ),
    ],
)
def test_a_mistake_is_one_problem_that_says_where_and_what_to_do(override, message):
    (problem,) = problems(override)
    assert message in problem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('recipe={use="passk", k=2, std="false"}', "passk: std = 'false': expected true or false"),
        ('recipe={use="grpo", weights={arithmetic="x"}}', "arithmetic = 'x': expected a number"),
        ('recipe={use="grpo", weights=1.0}', "weights = 1.0: expected a table, as { corr"),
        ('recipe={use="sign", threshold="a"}', "sign: threshold = 'a': expected a number"),
        ('recipe={use="spo", drift=["a"]}', "spo: drift = ['a']: expected a text"),
        ('advantage=[{use="sum_rewards", arithmetic="x"}]', "arithmetic = 'x': expected a number"),
        ('loss.kl={use="k2", beta="0.1"}', "penalty k2: beta = '0.1': expected a number"),
        ('loss.surrogate={use="clip", delta="3"}', "clip: delta = '3': expected a number"),
        ('loss.surrogate={use="cispo", low=true}', "cispo: low = True: expected a number"),
        ('loss.reduction={use="sequence_sum", count_empty=1}', "1: expected true or false"),
        ('loss.reduction={use="constant", length="4"}', "length = '4': expected a number"),
        ('loss.entropy={use="bonus", coefficient={a=1}}', "{'a': 1}: expected a number"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_what_it_is(override, message):
    (problem,) = problems(override)
    assert message in problem


@pytest.mark.parametrize(
    ("override", "call"),
    [
        (
            'loss.surrogate={use="off_policy_mask", threshold=0.1, then="mine.py:power"}',
            "off_policy_mask(then=...)",
        ),
        (
            'loss.surrogate={use="by_sample", field="x", otherwise={use="mine:power", k=2}}',
            "by_sample(otherwise=...)",
        ),
        (
            'advantage=[{use="per_reward", transform=[{use="mine.py:step"}]}, {use="sum_rewards"}]',
            "per_reward(transform=...)",
        ),
    ],
)
def test_own_code_inside_a_part_is_given_by_a_function(override, call):
    (problem,) = problems(override)
    assert f"takes built-in parts: write a function of yours that returns {call}" in problem


@pytest.mark.parametrize("value", [0.5, ["group"], {"use": "group"}, None])
def test_a_value_that_is_no_name_is_as_unknown_as_a_name(value):
    # What recipe = { use = "alpha_dpg", z = 0.5 } comes to; tests check types before that.
    with pytest.raises(InputError, match=r"unknown alpha_dpg z .*Known: group, running"):
        find("alpha_dpg z", value, {"group": 1, "running": 2})


def test_queries_keys_and_values_in_float32_come_from_products_in_float32():
    narrow, wide = "model.dtype=bfloat16", "model.float32_attention=true"
    (problem,) = problems(narrow, wide)
    assert problem.startswith("model.float32_attention = true: queries, keys and values come from")
    assert problem.endswith("set model.float32_activations = true too")
    cache = "rollout.kv_cache_dtype=float32"
    (problem,) = problems(narrow, "model.float32_activations=true", cache)
    assert problem.startswith('rollout.kv_cache_dtype = "float32": keys and values come in')
    read(narrow, "model.float32_activations=true", wide, cache)


@pytest.mark.parametrize("name", ["model.float32_activations", "model.float32_attention"])
def test_a_model_in_float32_has_no_wider_activations(name):
    (problem,) = problems(f"{name}=true")
    assert problem == (
        f'{name} = true: with model.dtype = "float32" these numbers are float32 without it; leave '
        'it out, or set model.dtype = "bfloat16"'
    )
    assert read("model.float32_head=true").model.float32_head
    read(f"{name}=false")


@pytest.mark.parametrize("key", ["train.router_aux_loss_coef", "train.router_bias_update_rate"])
def test_loads_of_experts_are_those_that_are_taken_again(key):
    assert read(f"{key}=0.01").train.routing == "replay"
    (problem,) = problems(f"{key}=0.01", "train.routing=fresh")
    assert f"{key} = 0.01: reads the recorded experts" in problem
    assert 'set train.routing = "replay"' in problem
    (problem,) = problems(f"{key}=0.01", "data.completion=answer")
    assert f"{key} = 0.01: reads the experts that drew a sample" in problem


def test_weights_of_trainer_over_sampler_may_stand_where_no_ratio_holds_them_already():
    weights = 'loss.mismatch={use="masked_importance"}'
    chain = 'advantage=[{use="sum_rewards"}, {use="truncated_importance"}]'
    for part in (weights, chain):
        for name in ("reinforce", "on_policy"):
            read(part, f"loss.surrogate.use={name}")
        read(part, "loss.proximal=trainer")
        assert len(problems(part)) == 1
    surrogate = 'loss.surrogate={use="by_sample", field="new", then="reinforce", otherwise="%s"}'
    read(weights, surrogate % "on_policy")
    assert len(problems(weights, surrogate % "cispo")) == 1
    rejection = 'advantage=[{use="sum_rewards"}, {use="sequence_rejection"}]'
    read('loss.mismatch={use="geometric_rejection"}', rejection)
    read(weights, rejection, "loss.proximal=trainer")


def test_weights_of_trainer_over_sampler_stand_once():
    weights = 'loss.mismatch={use="masked_importance"}'
    for chain, place in (
        ('advantage=[{use="sum_rewards"}, {use="truncated_importance"}]', "advantage[1]"),
        ('recipe={use="alpha_dpg", off_policy=true}', "recipe"),
    ):
        (problem,) = problems(weights, chain, "loss.proximal=trainer")
        assert problem == (
            f'loss.mismatch = {{"use": "masked_importance"}}: {place} weighs by trainer over '
            "sampler too; keep one of the two"
        )


def test_a_teacher_may_be_the_reference_that_is_reset():
    every, taught = "reference.reset_every=3", "recipe=opd"
    for teacher in ('policy="reference"', 'policies={ a="reference", b="base" }'):
        read(every, taught, f'scores=[{{name="teacher_logp", {teacher}}}]')
    read(every, 'recipe={use="sdpo", teacher="reference"}')
    read(every, 'recipe={use="rlpr", scorer="reference"}')
    validity = 'loss.kl={use="k1_in_reward", target_validity=0.9}'
    read(every, validity, 'recipe={use="rlpr", scorer="reference"}')
    for kl in ((), (validity,)):
        (problem,) = problems(every, *kl, taught, 'scores=[{name="teacher_logp", policy="base"}]')
        assert problem.startswith("reference.reset_every: ")
        assert "nothing could be reset" in problem


def test_a_target_of_validity_asks_which_of_several_rewards_it_is_about():
    two = 'rewards=[{use="arithmetic"}, {use="format", pattern="a"}]'
    kl = 'loss.kl={use="k1_in_reward", target_validity=0.9%s}'
    (problem,) = problems(two, kl % "")
    assert problem.startswith("loss.kl: k1_in_reward: there are 2 rewards (arithmetic, format): ")
    read(two, kl % ', reward="format"')
    read(two, kl % ', base_rate="rate"')  # which reads no reward
    read(kl % "")


@pytest.mark.parametrize("name", ["intuitor", "opd", "l2t"])
def test_rewards_that_are_only_logged_have_weight_0_in_the_recipe_alone(name):
    """The recipe has a signal without them; metrics are of the rewards' weighted sum."""
    rewards = 'rewards=[{use="arithmetic", weight=0}]'
    (problem,) = problems(rewards, f"recipe={name}")
    assert problem.startswith("rewards: every weight is 0, and metrics and evaluations are of")
    instead = f'recipe = {{ use = "{name}", weights = {{ arithmetic = 0 }} }}'
    assert problem.endswith(instead)
    read(instead)
    (problem,) = problems(rewards, "recipe=top_entropy")  # which only chooses tokens
    assert "so there is nothing to train on" in problem
    for chain in ('advantage=[{use="sum_rewards"}, {use="sign"}]', 'recipe="mine:chain"'):
        (problem,) = problems(rewards, chain)
        assert problem.endswith("out: what samples are worth is what the chain says")


@pytest.mark.parametrize("mask", ["mask_zero_variance", "mask_low_variance"])
def test_what_masks_flat_groups_compares_samples_and_may_be_refilled(mask):
    threshold = ", threshold=0.0" if mask == "mask_low_variance" else ""
    chain = f'advantage=[{{use="sum_rewards"}}, {{use="{mask}"{threshold}}}, {{use="sign"}}]'
    read(chain, "rollout.refill.factor=2")
    (problem,) = problems(chain, "rollout.group_size=1")
    assert problem.startswith(f"rollout.group_size = 1: {mask} compares the samples of a prompt")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.refill=3",), "rollout.refill = 3: expected a table"),
        (("rollout.refill={factr=3}",), "rollout.refill.factr: unknown key; expected { factor"),
        (("rollout.refill={}",), "rollout.refill = {}: expected { factor = 3.0 }"),
        (("rollout.refill={factor=0.9}",), "a finite number of 1 or more"),
        (("rollout.refill={factor=inf}",), "rollout.refill.factor = inf: expected a finite number"),
        (("rollout.refill={factor=1e400}",), "factor = inf: expected a finite number"),
        (("rollout.refill={factor=true}",), "a finite number of 1 or more"),
        (("rollout.refill.factor=2", "recipe=sign"), "sign learns from flat groups too"),
        (
            ("rollout.refill.factor=2", 'advantage=[{use="sum_rewards"}, {use="ema_baseline"}]'),
            "sum_rewards -> ema_baseline learns from flat groups too",
        ),
        (("rollout.refill.factor=2", "recipe=dro_r3"), "dro_r3 compares the groups of a batch, so"),
        (
            (
                "rollout.refill.factor=2",
                'advantage=[{use="sum_rewards"}, {use="subtract_group_mean"}, '
                '{use="mask_low_variance", drop=0.5}]',
            ),
            "mask_low_variance compares the groups of a batch",
        ),
        (
            ("rollout.refill.factor=2", "rollout.group_size=1", 'recipe="mine:chain"'),
            "with rollout.group_size = 1 every group is flat",
        ),
        (
            (
                "rollout.refill.factor=2",
                'advantage=[{use="sum_rewards"}, {use="mask_difficulty_band"}, '
                '{use="subtract_group_mean"}]',
            ),
            "mask_difficulty_band remembers all groups, and rollout.refill discards flat ones",
        ),
        (
            (
                "rollout.refill.factor=2",
                'advantage=[{use="sum_rewards"}, {use="mask_zero_variance"}, '
                '{use="alpha_dpg", z="running"}]',
            ),
            "alpha_dpg remembers all groups, and rollout.refill discards flat ones",
        ),
        (
            ("rollout.refill.factor=2", 'loss.kl={use="k1_in_reward", target_validity=0.9}'),
            "k1_in_reward remembers all groups, and rollout.refill discards flat ones",
        ),
    ],
)
def test_a_refill_that_makes_no_sense_is_refused(overrides, message):
    (problem,) = problems(*overrides)
    assert problem.startswith("rollout.refill")
    assert message in problem


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (('rollout.stop_strings="END"',), 'stop_strings = "END": expected a list of texts, ["'),
        (('rollout.stop_strings=["a", ""]',), "none of them empty"),
        (("rollout.early_stop={window=3}",), "one of confidence and percentile is needed"),
        (("rollout.early_stop={confidence=8, percentile=10, warmup=2}",), "needed, and not both"),
        (("rollout.early_stop={confidence=8, warmup=2}",), "nothing reads warmup without percent"),
        (("rollout.early_stop={percentile=0, warmup=2}",), "percentile is above 0 and below 100"),
        (("rollout.early_stop={percentile=100, warmup=2}",), "percentile is above 0 and below 100"),
        (("rollout.early_stop={percentile=10, warmup=0}",), "warmup is a whole number of 1 or"),
        (
            ("rollout.early_stop={percentile=10, warmup=4}", "rollout.group_size=4"),
            "4 samples are drawn first, and rollout.group_size = 4 leaves none",
        ),
        (
            ("rollout.early_stop={percentile=10}", "rollout.group_size=16"),
            "16 samples are drawn first, and rollout.group_size = 16 leaves none",
        ),
        (
            ("rollout.early_stop={confidence=inf}",),
            "early_stop.confidence = inf: expected a finite number",
        ),
        (("rollout.early_stop={confidence=8, k=20}",), "early_stop.k: unknown key"),
        (("rollout.early_stop={confidence=8, window=0}",), "window is a whole number of 1 or"),
        (("rollout.early_stop={confidence=8, tokens=2.5}",), "tokens is a whole number of 1 or"),
        (
            ("rollout.early_stop={percentile=10, warmup=2}", "rollout.max_completion_tokens=2048"),
            "no sample ends before it has window = 2048 tokens, and rollout.max_completion_tokens",
        ),
    ],
)
def test_what_ends_a_sample_is_refused_where_it_makes_no_sense(overrides, message):
    (problem,) = problems("rollout.max_completion_tokens=4096", *overrides)
    assert message in problem


def test_what_ends_a_sample_is_read_and_written():
    assert read().rollout.stop_strings == ()
    stops = 'rollout.stop_strings=["a", "b"]', "rollout.early_stop={confidence=8, window=4}"
    config = read(*stops)
    again = files.from_dict(tomllib.loads(files.to_toml(config)))
    assert again.rollout.stop_strings == config.rollout.stop_strings == ("a", "b")
    assert again.rollout.early_stop == {"confidence": 8, "window": 4}
    assert files.resume_difference(config, again) == []


@pytest.mark.parametrize(
    "part", ["mask_low_variance={threshold=0.1}", "mask_low_variance={drop=0.0}", "whiten_batch={}"]
)
def test_parts_that_judge_each_group_by_itself_may_be_refilled(part):
    use, options = part.split("=", 1)
    options = "".join(f", {option}" for option in options[1:-1].split(",") if option)
    steps = f'{{use="sum_rewards"}}, {{use="subtract_group_mean"}}, {{use="{use}"{options}}}'
    read("rollout.refill.factor=2", f"advantage=[{steps}]")
    read("rollout.refill.factor=2", "recipe={use='dro_r3', drop=0.0}")
    read("rollout.refill.factor=2", 'loss.kl={use="k1_in_reward", beta=0.1}')


def test_a_refill_is_read_written_and_may_not_change_on_the_way():
    assert read().rollout.refill is None
    config = read("rollout.refill.factor=3", "recipe=dapo")
    again = files.from_dict(tomllib.loads(files.to_toml(config)))
    assert again.rollout.refill == config.rollout.refill == {"factor": 3}
    assert files.resume_difference(read("recipe=dapo"), config) == [
        "rollout.refill.factor: not set -> 3"
    ]


def test_formats_keep_their_order_and_survive_being_written():
    formats = {"tags": "<answer>", "code": "```.*def", "number": r"^\d+$"}
    evaluation = {"data": "task:arithmetic:test", "formats": formats, "confidence": True}
    config = files.from_dict({**tomllib.loads(MINIMAL), "eval": evaluation})
    assert list(config.eval.formats.items()) == list(formats.items())
    again = files.from_dict(tomllib.loads(files.to_toml(config)))
    assert list(again.eval.formats.items()) == list(formats.items())
    assert again.eval == config.eval


@pytest.mark.slow
def test_messages_name_keys_that_exist(repository):
    """A remedy by a key that no config has leads nowhere."""
    names, mentioned = {name for name, _ in keys()}, set()
    key = re.compile(r"(?<![\w.])(?:rollout|train|eval|checkpoint|reference)\.[a-z_]*[a-z]\b")
    for file in (repository / "jaxgrpo").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = (node for node in nodes if isinstance(node, ast.Constant))
        mentioned |= {
            name
            for node in texts
            if isinstance(node.value, str) and id(node) not in docstrings
            for name in key.findall(node.value)
        }
    assert len(mentioned) > 40
    assert mentioned - names == set()


def test_the_full_name_of_a_key_in_quotes_is_told_its_table():
    raw = tomllib.loads(MINIMAL.replace("[model]\npath", '"train.seed" = 3\n"model.path"'))
    with pytest.raises(ConfigError) as caught:
        files.from_dict(raw)
    assert caught.value.problems == (
        "train.seed: unknown key; write it without quotes, or as train = { seed = ... }",
        "model.path: unknown key; write it without quotes, or as model = { path = ... }",
    )


def test_an_option_of_an_own_reward_may_be_called_almost_as_a_key():
    config = read('rewards=[{use="mine:score", height=2, game="go"}]')
    assert config.rewards[0].options == {"height": 2, "game": "go"}
    (problem,) = problems('rewards=[{use="mine:score", wieght=2}]')
    assert problem == "rewards[0].wieght: unknown key; did you mean weight?"


def test_a_number_where_a_name_is_expected_is_an_unknown_key():
    raw: dict[Any, Any] = {**tomllib.loads(MINIMAL), 5: 1}
    raw["train"][7] = 1
    with pytest.raises(ConfigError) as caught:
        files.from_dict(raw)
    first, second = caught.value.problems
    assert first.startswith("5: unknown key; there are model, ")
    assert second.startswith("train.7: unknown key; the keys here are steps, ")


def test_what_a_run_has_stored_is_read_without_the_files_that_it_names(tmp_path, monkeypatch):
    """They may be on the machine that trained; who needs them looks for them."""
    names = ("rows.jsonl", "held_out.jsonl", "mine.py", "chat.jinja")
    rows, held_out, code, template = mentioned = [tmp_path / name for name in names]
    for file in mentioned:
        file.write_text("")
    tables = minimal_config.tables(
        data={"path": str(rows), "chat_template": str(template)},
        eval={"data": str(held_out), "scorer": f"{code}:judge"},
        rewards=[{"use": f"{code}:reward"}],
        advantage=[{"use": f"{code}:part"}],
        tracking={"wandb": {"project": "mine"}},
    )
    stored = files.to_toml(files.from_dict(tables))
    for file in mentioned:
        file.unlink()
    for module in (checks, ranges):
        monkeypatch.setattr(module, "installed", lambda name: False)
    with pytest.raises(ConfigError) as refusal:
        files.from_dict(tables)
    assert len(refusal.value.problems) == 7
    assert files.to_toml(files.from_text(stored, "run")) == stored
    wrong = stored.replace("[rollout]", "[rollout]\nslot = 3")
    with pytest.raises(ConfigError, match=r"rollout\.slot"):
        files.from_text(wrong, "run")
