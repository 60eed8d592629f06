"""What evaluations are compared with: the base on the same questions, on any way of resuming."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small_run

from jaxgrpo.config import files as configs
from jaxgrpo.core.errors import InputError
from jaxgrpo.data.prompts import PromptData
from jaxgrpo.evaluation.evaluate import Evaluation
from jaxgrpo.models.hf import folders
from jaxgrpo.training import loop
from jaxgrpo.training.fingerprints import evaluation_facts
from jaxgrpo.training.processes import process
from jaxgrpo.training.records.folder import RunFolder
from jaxgrpo.training.records.reading import evaluation_metrics, read_metrics
from jaxgrpo.training.setup import setup
from jaxgrpo.training.stored_policy import evaluator_for_run, find_base

EVAL = {"eval.data": "task:arithmetic:test", "eval.prompts": 8, "eval.samples": 4}


def train(folder, steps: int, resume: str | None = None, **changes: Any) -> loop.Run:
    config = small_run.config(folder, **{"train.steps": steps, **changes})
    return loop.train(config, resume=resume)


@pytest.mark.full
def test_an_evaluation_that_begins_or_changes_on_resume_is_compared_with_the_base(tmp_path, capsys):
    straight = train(tmp_path / "s", 3, **EVAL)
    base = evaluation_metrics(straight.metrics[0])
    train(tmp_path / "r", 2)
    run = train(tmp_path / "r", 3, "auto", **EVAL)
    assert run.summary["base"] == base  # and not the evaluation after step 2 or 3
    assert run.summary["trained"] == straight.summary["trained"]
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3]
    assert evaluation_metrics(run.metrics[0]) == base
    assert (
        "evaluation until step 2: the base's was not saved; the base is evaluated again"
        in printed(capsys)
    )

    fewer = {**EVAL, "eval.samples": 2}
    again = train(tmp_path / "r", 3, "auto", **fewer)
    first, last = again.metrics[0], again.metrics[-1]
    assert "evaluation until step 3: eval.samples changed; the base is evaluated" in printed(capsys)
    assert again.summary["base"] == evaluation_metrics(first)
    assert again.summary["trained"] == evaluation_metrics(last)
    assert "pass@4" not in evaluation_metrics(first)
    assert first["eval_until_3/pass@4"] == base["pass@4"]
    assert last["eval_until_3/pass@4"] == straight.summary["trained"]["pass@4"]
    assert first["eval/accuracy"] == base["accuracy"]  # greedy, of the same prompts


@pytest.mark.full
def test_a_run_that_ends_sooner_than_it_began_with_is_evaluated_where_it_ends(
    tmp_path, monkeypatch, capsys
):
    keys = {**EVAL, "eval.every": 5, "checkpoint.keep_best": "eval/mean_length"}
    straight = train(tmp_path / "s", 2, **keys)
    with monkeypatch.context() as patch:
        patch.setattr(process, "stop_requested", lambda step: step == 2)
        with pytest.raises(process.StopRequested):
            train(tmp_path / "r", 9, **keys)
    capsys.readouterr()
    run = train(tmp_path / "r", 2, "auto", **keys)
    assert "evaluated at step 2" in printed(capsys)
    assert small_run.metrics(run.path) == small_run.metrics(straight.path)
    for name in ("base", "trained", "best", "parameter_hash"):
        assert run.summary[name] == straight.summary[name], name
    assert "2 of 2 steps" in (run.export(tmp_path / "best", "best") / "README.md").read_text()
    train(tmp_path / "r", 2, "auto", **keys)
    output = printed(capsys)
    assert "evaluated at" not in output
    assert "is not what this run wrote" not in output


@pytest.mark.full
def test_an_evaluation_that_a_signal_ends_is_made_by_the_next_start(tmp_path, monkeypatch, capsys):
    keys = {**EVAL, "eval.every": 1, "checkpoint.keep_best": "eval/mean_length"}
    keys |= {"checkpoint.every": 50, "checkpoint.keep": 1}
    straight = train(tmp_path / "s", 3, **keys)
    for stop in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(process, "stop_requested", lambda number, at=stop: number == at)
            with pytest.raises(process.StopRequested, match=f"after step {stop} of 3, saved in"):
                train(tmp_path / "r", 3, "auto", **keys)
        *earlier, last = small_run.metrics(tmp_path / "r")
        assert last["step"] == stop
        assert not evaluation_metrics(last)
        assert all(map(evaluation_metrics, earlier))
        assert f"step {stop} is evaluated when the run goes on" in printed(capsys)
    run = train(tmp_path / "r", 3, "auto", **keys)
    assert small_run.metrics(run.path) == small_run.metrics(straight.path)
    for name in ("base", "trained", "best", "parameter_hash"):
        assert run.summary[name] == straight.summary[name], name
    assert "of 3 steps" in (run.export(tmp_path / "best", "best") / "README.md").read_text()
    capsys.readouterr()
    train(tmp_path / "r", 3, "auto", **keys)
    output = printed(capsys)
    assert "evaluated at" not in output
    assert "is not what this run wrote" not in output


@pytest.mark.full
def test_a_signal_ends_an_evaluation_before_the_first_step_of_a_start(tmp_path, monkeypatch):
    """Of the base, and one that an earlier start owes: they may take longer than run.stop_grace."""
    keys = {**EVAL, "eval.every": 1, "checkpoint.every": 50}
    straight = train(tmp_path / "s", 2, **keys)
    for stop, saved in ((0, "no step yet"), (1, "saved in"), (1, "holds step 1")):
        with monkeypatch.context() as patch:
            patch.setattr(process, "stop_requested", lambda number, at=stop: number == at)
            message = f"stopped after step {stop} of 2.*{saved}.*go on with"
            with pytest.raises(process.StopRequested, match=message):
                train(tmp_path / "r", 2, "auto", **keys)
    run = train(tmp_path / "r", 2, "auto", **keys)
    assert small_run.metrics(run.path) == small_run.metrics(straight.path)
    for name in ("base", "trained", "parameter_hash"):
        assert run.summary[name] == straight.summary[name], name


@pytest.mark.full
def test_a_step_in_whose_evaluation_the_scorer_fails_is_saved_and_evaluated_later(tmp_path):
    scorer, mark = tmp_path / "judge.py", tmp_path / "broken"
    scorer.write_text(
        "import os\n\n\n"
        "def longer(completions, trainer_state, **columns):\n"
        f"    if trainer_state.global_step == 2 and os.path.exists({str(mark)!r}):\n"
        "        raise OSError('no grader')\n"
        "    return [float(len(text) > 4) for text in completions]\n"
    )
    keys = {**EVAL, "eval.scorer": f"{scorer}:longer", "eval.every": 2, "checkpoint.every": 50}
    straight = train(tmp_path / "s", 3, **keys)
    mark.touch()
    for begun in (1, 2):  # the second start comes to it before its first step
        with pytest.raises(
            process.RewardFailed, match=r"(?s)no grader.*holds step 2; mend"
        ) as failed:
            train(tmp_path / "r", 3, "auto", **keys)
        assert "the run ended in step 2" in str(failed.value), begun
    *_, last = small_run.metrics(tmp_path / "r")
    assert (last["step"], evaluation_metrics(last)) == (2, {})
    mark.unlink()
    run = train(tmp_path / "r", 3, "auto", **keys)
    assert small_run.metrics(run.path) == small_run.metrics(straight.path)
    for name in ("base", "trained", "parameter_hash"):
        assert run.summary[name] == straight.summary[name], name


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_further_change_of_questions_at_a_step_keeps_the_numbers_of_the_change_before(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_metrics(0, {"eval/accuracy": 0.5})
        run.write_metrics(2, {"reward": 0.2, "eval/accuracy": 0.7})
        prefixes = [run.replace_evaluations(2, {0: {"eval/accuracy": 0.25}}) for _ in range(2)]
        run.add_evaluation(2, {"eval/accuracy": 0.375})
        prefixes += [run.replace_evaluations(2, {0: {"eval/accuracy": 0.125}}) for _ in range(2)]
        prefixes.append(run.replace_evaluations(2, {0: {"eval/accuracy": 0.0625}}))
    assert prefixes == [f"eval_until_{name}/" for name in ("2", "2", "2_2", "2", "2_3")]
    assert read_metrics(tmp_path) == [
        {
            "step": 0,
            "eval/accuracy": 0.0625,
            "eval_until_2/accuracy": 0.5,
            "eval_until_2_2/accuracy": 0.25,
            "eval_until_2_3/accuracy": 0.125,
        },
        {
            "step": 2,
            "eval_until_2/accuracy": 0.7,
            "eval_until_2_2/accuracy": 0.375,
            "reward": 0.2,
        },
    ]


@pytest.mark.full
@pytest.mark.slow
def test_the_best_step_by_another_metric_is_forgotten_and_by_the_same_one_kept(tmp_path, capsys):
    every = {**EVAL, "eval.every": 1}
    length = {**every, "checkpoint.keep_best": "eval/mean_length"}
    train(tmp_path / "r", 2, **length)
    run = train(tmp_path / "r", 3, "auto", **length)
    lengths = [line["eval/mean_length"] for line in run.metrics[1:]]
    assert run.summary["best"] == {"step": 1 + np.argmax(lengths), "eval/mean_length": max(lengths)}
    capsys.readouterr()
    run = train(tmp_path / "r", 4, "auto", **{**every, "checkpoint.keep_best": "eval/truncated"})
    assert "was the best by eval/mean_length: it is kept no longer" in printed(capsys)
    # A length is always above a share: compared with it no step would be the best any more.
    assert run.summary["best"] == {"step": 4, "eval/truncated": run.metrics[-1]["eval/truncated"]}
    assert "4 of 4 steps" in (run.export(tmp_path / "best", "best") / "README.md").read_text()


@pytest.mark.full
def test_a_step_whose_evaluation_fails_otherwise_is_saved_too(tmp_path):
    """As where memory is not there for the second pass."""
    unread: Any = None
    failed: list[int] = []

    def evaluator(run):
        def evaluate(params, key, step, **options):
            if step == 2 and not failed:
                failed.append(step)
                raise MemoryError("a second pass")
            ends = {"accuracy/low": 0.4, "accuracy/high": 0.6}
            return Evaluation({"accuracy": 0.5, **ends}, unread, unread)

        return evaluate

    keys = {**EVAL, "eval.every": 2, "checkpoint.every": 50, "train.steps": 3}
    config = small_run.config(tmp_path / "r", **keys)
    with pytest.raises(MemoryError, match="a second pass") as raised:
        loop.take(config, evaluator)
    (note,) = raised.value.__notes__
    assert note.startswith(f"the evaluation of step 2 failed; {tmp_path / 'r'} holds step 2; go on")
    run = loop.take(config, evaluator, resume=True)
    measured = [line["step"] for line in run.metrics if "eval/accuracy" in line]
    assert measured == [0, 2, 3]


@pytest.mark.full
def test_an_evaluation_without_the_metric_of_the_best_step_is_none_of_the_best(tmp_path):
    """As the accuracy of a format that no sample has after some step."""
    unread: Any = None

    def evaluator(run):
        def evaluate(params, key, step, **options):
            values = {"accuracy": 0.5, "accuracy/low": 0.4, "accuracy/high": 0.6}
            values |= {} if step == 3 else {"format/sum/accuracy": step / 8}
            return Evaluation(values, unread, unread)

        return evaluate

    keys = {**EVAL, "eval.every": 1, "checkpoint.keep_best": "eval/format/sum/accuracy"}
    run = loop.take(small_run.config(tmp_path / "r", **{"train.steps": 3, **keys}), evaluator)
    assert run.summary["best"] == {"step": 2, "eval/format/sum/accuracy": 0.25}
    keys["checkpoint.keep_best"] = "eval/acuracy"
    config = small_run.config(tmp_path / "r", **{"train.steps": 4, **keys})
    with pytest.raises(InputError, match=r"did you mean .eval/accuracy"):
        loop.take(config, evaluator, resume=True)
    assert run.metrics[-1]["step"] == 3


@pytest.mark.full
@pytest.mark.parametrize("name", ["format/sum/accuracy", "format/other/accuracy", "brier"])
def test_the_evaluation_of_the_base_may_lack_the_metric_of_the_best_step(name, tmp_path):
    """As where it writes no sum, or nothing else, or states no confidence."""
    unread: Any = None

    def evaluator(run):
        def evaluate(params, key, step, **options):
            values = {"accuracy": 0.5, "accuracy/low": 0.4, "accuracy/high": 0.6}
            return Evaluation(values | ({} if step == 0 else {name: step / 8}), unread, unread)

        return evaluate

    keys = {**EVAL, "eval.every": 1, "eval.formats": {"sum": "[+]"}, "train.steps": 2}
    keys["checkpoint.keep_best"] = f"eval/{name}"
    keys |= {"reference.reset_patience": 1, "reference.reset_metric": f"eval/{name}"}
    keys["loss.kl"] = {"use": "k2", "beta": 0.01}
    run = loop.take(small_run.config(tmp_path / "r", **keys), evaluator)
    assert run.summary["best"] == {"step": 2, f"eval/{name}": 0.25}


def test_what_is_asked_is_told_apart_by_rows_scorer_and_samples_and_not_by_the_name_of_a_file(
    tmp_path,
):
    scorer = tmp_path / "judge.py"
    scorer.write_text("def right(completions, **columns):\n    return [1.0] * len(completions)\n")

    def facts(row: Any = "1+1=", **changes: Any) -> dict[str, Any]:
        data = PromptData([{"prompt": row}] * 3, [np.array([1, 2])] * 3, 0)
        keys = {"eval.data": "task:arithmetic:test", "eval.scorer": f"{scorer}:right", **changes}
        config = small_run.config(tmp_path / "r", **keys)
        judged = config.eval, config.scorer_name, config.measures_kl_to_base
        return evaluation_facts(*judged, data)

    first = facts()
    assert facts(**{"eval.data": "task:arithmetic:train", "eval.every": 2}) == first
    assert differing(first, facts("1+2=")) == {"eval.data"}
    assert differing(first, facts(**{"eval.prompts": 2})) == {"eval.data"}
    assert differing(first, facts(**{"eval.samples": 2})) == {"eval.samples"}
    scorer.write_text(scorer.read_text().replace("1.0", "0.0"))
    assert differing(first, facts()) == {"eval.scorer"}


def test_the_kl_to_the_base_is_measured_unless_the_config_holds_the_model(tmp_path):
    def measures(**changes: Any) -> bool:
        tables = small_run.tables(tmp_path / "r", **changes)
        tables["eval"].pop("kl_to_base")
        return configs.from_dict(tables).measures_kl_to_base

    assert measures(**EVAL)
    assert not measures()  # nothing is evaluated
    assert not measures(**EVAL, **{"model.config": {"model_type": "qwen3"}})
    explicit = {**EVAL, "model.config": {"model_type": "qwen3"}, "eval.kl_to_base": True}
    assert small_run.config(tmp_path / "r", **explicit).measures_kl_to_base
    assert not small_run.config(tmp_path / "r", **EVAL).measures_kl_to_base  # says false


@pytest.mark.full
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["all", "adapters"])
def test_the_base_is_counted_and_under_adapters_it_is_the_weights_in_memory(tmp_path, lora):
    changes = {**EVAL, "eval.kl_to_base": True, **lora}
    run = setup(small_run.config(tmp_path / "r", **changes))
    base = find_base(run)
    params = base.read()
    in_memory = {id(leaf) for leaf in jax.tree.leaves(run.learner.frozen)}
    sizes = [leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(params)]
    assert run.memory.copies == 0  # on a CPU it is read for each evaluation
    assert (run.memory.evaluation > sum(sizes)) != bool(lora)
    assert all((id(leaf) in in_memory) == bool(lora) for leaf in jax.tree.leaves(params))
    stored = folders.read_params(Path(small_run.base()), base.model)
    jax.tree.map(np.testing.assert_array_equal, params, stored)


@pytest.mark.full
@pytest.mark.slow
def test_a_base_that_is_read_from_disk_is_in_memory_during_evaluations_only(tmp_path):
    run = setup(small_run.config(tmp_path / "r", **EVAL, **{"eval.kl_to_base": True}))
    base_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(run.learner.trainable))
    evaluate, params = evaluator_for_run(run), run.sync(run.learner)

    def in_memory() -> int:
        gc.collect()
        return sum(leaf.nbytes for leaf in jax.live_arrays())

    before = in_memory()
    metrics = [evaluate(params, run.stream.key, 0).metrics for _ in range(2)]
    assert in_memory() - before < base_bytes / 2
    assert abs(metrics[0]["kl_to_base"]) < 1e-6
    assert metrics[0] == metrics[1]


def differing(left: dict[str, Any], right: dict[str, Any]) -> set[str]:
    return {name for name in left | right if left.get(name) != right.get(name)}
