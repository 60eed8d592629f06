"""`jaxgrpo methods`: all that a config can name is in it, once, with a page that is there."""

from __future__ import annotations

import collections
import json

from jaxgrpo.advantages.registry import recipes
from jaxgrpo.cli import methods
from jaxgrpo.cli.main import main
from jaxgrpo.core.scores import OF_ANSWERS, SCORES


def test_everything_is_listed_once_and_has_a_page(repository):
    entries = list(methods.methods())
    counts = collections.Counter(entry.kind for entry in entries)
    expected = {kind: len(factories) for kind, (_, factories) in methods.KINDS.items()}
    assert counts == {**expected, "score": len(SCORES) + len(OF_ANSWERS)}
    assert len({(entry.kind, entry.name) for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.summary, entry.name
        assert (repository / "docs" / entry.page.partition("#")[0]).is_file(), entry.page


def test_sources_and_needs_are_those_of_the_parts(capsys):
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["methods"]
    by_name = {entry["name"]: entry for entry in listed if entry["kind"] == "recipe"}
    assert by_name.keys() == recipes.keys()
    assert by_name["dapo"]["sources"] == ["2503.14476"]
    assert by_name["alpha_dpg"]["needs"] == ["base_logp"]
    assert by_name["grpo"]["needs"] == []
    (clip,) = (entry for entry in listed if entry["name"] == "clip_advantage")
    assert clip["needs"] is None or clip["needs"] == []


def test_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    assert main(["methods"]) == 0
    output = capsys.readouterr().out
    assert "no_positive_resampling" in output
    assert "2402.03300" in output
