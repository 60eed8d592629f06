"""docs/from-trl.md names every field of TRL's config, and only keys of ours that exist."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest
from minimal_config import keys, problems

from jaxgrpo import advantages, losses
from jaxgrpo.advantages import registry as chains
from jaxgrpo.config.files import make_config
from jaxgrpo.config.reading import TRL
from jaxgrpo.losses import registry as objectives
from jaxgrpo.training.loop import Run
from jaxgrpo.training.setup import Setup

OWN_FIELDS = """
    learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
    cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval
    max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
    generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
    chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
    vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
    vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta
    num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos
    vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level
    reward_weights multi_objective_aggregation scale_rewards loss_type
    mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
    entropy_coef_delta entropy_target max_tool_calling_iterations
    vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo
    use_transformers_continuous_batching transformers_continuous_batching_config
    use_transformers_paged vllm_importance_sampling_cap
"""
"""Of GRPOConfig in TRL 1.16.0, beside what it inherits."""

DECLARED_ANEW = """
    logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel
    torch_empty_cache_steps
"""
"""Fields of TrainingArguments that TRL declares again in the base class of its configs."""

TRAINER_ARGUMENTS = """
    model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes
    callbacks optimizers quantization_config peft_config tools rollout_func environment_factory
"""
KEYS = {name for name, _ in keys()}
TABLES = {name.partition(".")[0] for name in KEYS}
PARTS = (
    *(chains.parts, chains.recipes),
    *(objectives.surrogates, objectives.reductions, objectives.penalties),
)


@pytest.fixture(scope="module")
def page(repository) -> str:
    return (repository / "docs" / "from-trl.md").read_text()


def rows(page: str, section: str) -> list[list[str]]:
    """The cells of a section's tables, in the order of the page."""
    body = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (`.*) \|$", body, re.MULTILINE)
    return [line.split(" | ") for line in lines]


def first_names(page: str, section: str) -> list[str]:
    """What the first cells name; the values of one field, as "dapo" in quotes, are no names."""
    matches = [re.fullmatch(r"`(\w+)`", cells[0]) for cells in rows(page, section)]
    return [match[1] for match in matches if match]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_every_field_of_trl_has_its_row_and_no_other(page):
    named = first_names(page, "GRPOConfig")
    assert len(named) == len(set(named))
    assert set(named) == set(OWN_FIELDS.split())


def test_what_trl_declares_again_comes_first_among_the_training_arguments(page):
    named = first_names(page, "TrainingArguments")
    assert len(named) == len(set(named))
    assert set(named[:6]) == set(DECLARED_ANEW.split())


def test_every_argument_of_the_trainer_has_its_row(page):
    assert set(first_names(page, "GRPOTrainer")) == set(TRAINER_ARGUMENTS.split())


def test_the_third_column_names_our_keys_or_nothing(page):
    for section in ("GRPOConfig", "TrainingArguments"):
        for cells in rows(page, section):
            if len(cells) == 4:
                named = re.findall(r"`([^`]*)`", cells[2])
                assert named or cells[2] == "–", cells[0]
                assert set(named) <= KEYS | TABLES, cells[0]
                assert len(cells[3]) > 3, cells[0]


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("rollout.num_generations=8", "rollout.group_size"),
        ("train.per_device_train_batch_size=8", "train.tokens_per_micro_batch"),
        ("loss.beta=0.1", 'loss.kl = { use = "forward_kl_k3", beta = ... }'),
        ("loss.epsilon_high=0.1", 'loss.surrogate = { use = "clip", high = ... }'),
        ("optimizer.max_grad_norm=1.0", "optimizer.clip_norm"),
        ("optimizer.adam_beta2=0.9", "optimizer.b2"),
        ("max_completion_length=256", "rollout.max_completion_tokens"),
        ("train.output_dir=runs", "run.dir"),
        ("train.weight_decay=0.0", "optimizer.weight_decay"),
        ("rollout.steps_per_generation=2", "train.minibatches"),
    ],
)
def test_a_name_of_trls_is_refused_with_ours(override, suggestion):
    name = override.partition("=")[0]
    assert problems(override) == (f"{name}: unknown key; did you mean {suggestion}?",)


def test_names_of_trls_lead_to_keys_that_exist():
    for name, answer in TRL.items():
        named = re.findall(r"\b[a-z]+\.[a-z_0-9]+", answer.split(" = ")[0])
        options = {f"optimizer.{option}" for option in ("b1", "b2", "eps", "weight_decay")}
        assert {*named} - options <= KEYS
        first = re.split(r"[ .,]", answer)[0]
        assert first in TABLES, name


def test_every_name_with_a_key_of_ours_is_answered_with_one(page):
    for section in ("GRPOConfig", "TrainingArguments"):
        for cells in rows(page, section):
            name = re.fullmatch(r"`(\w+)`", cells[0])
            if name is not None and len(cells) == 4 and cells[2] != "–":
                assert name[1] in TRL or f"`{name[1]}`" in re.sub(r"`\w+\.", "`", cells[2])


def test_the_head_in_float32_is_a_key_of_ours_too(page):
    assert "| `cast_lm_head_to_fp32` | `False` | `model.float32_head` | same" in page


def test_every_dotted_name_is_a_key_or_an_attribute_of_a_run(page):
    attributes = {f"run.{name}" for name in (*dir(Setup), *dir(Run))}
    for name in re.findall(r"`([a-z]+\.[a-z_]+)`", page):
        if name.partition(".")[0] in TABLES:
            assert name in KEYS | attributes, name


def test_every_part_that_is_used_exists(page):
    used = re.findall(r'use = "([^"]+)"', page)
    registered = {name for table in PARTS for name in table}
    assert used
    assert {name for name in used if ".py:" not in name} <= registered


@pytest.mark.slow
def test_the_config_beside_the_scripts_is_one_and_means_what_trl_does(page, tmp_path):
    def accuracy_reward(completions, **columns):
        return [0.0] * len(completions)

    def short(completions, **columns):
        return [0.0] * len(completions)

    (text,) = blocks(page, "toml")
    (tmp_path / "train.jsonl").write_text("{}")
    changes = {"data.path": str(tmp_path / "train.jsonl")}
    config = make_config(tomllib.loads(text), changes, [accuracy_reward, short])
    chain = [dict(step) for step in tomllib.loads(text)["advantage"]]
    value, mask = advantages.evaluate(
        chain,
        {"accuracy_reward": [[1.0, 0.0, 0.0, 1.0]], "short": [[0.0, -1.0, 0.0, 0.0]]},
        truncated=[[False, False, False, True]],
    )
    # Sums 1, -0.2, 0, 1: mean 0.45 and deviation 0.640 with n - 1, of all four.
    assert value[0, 0] == pytest.approx(0.55 / (0.6403124 + 1e-4), rel=1e-5)
    assert mask.tolist() == [[True, True, True, False]]
    assert losses.build_reduction(config.loss.reduction).name == "token_mean"
    assert config.rollout.prompts_per_step * config.rollout.group_size == 8 * 32


def test_the_scripts_are_python(page):
    scripts = blocks(page, "python")
    assert len(scripts) == 2
    for script in scripts:
        ast.parse(script)
