"""The task sql: results computed without SQLite, queries that are held, what its base writes."""

from __future__ import annotations

import re
import sqlite3
import time
from typing import Any

import numpy as np
import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.data.chat import Chat
from jaxgrpo.data.tasks import load, sql
from jaxgrpo.data.tasks.base import END, UNKNOWN, character_tokenizer
from jaxgrpo.data.tasks.templates import TOOL_TEMPLATE
from jaxgrpo.environments.calls import hermes
from jaxgrpo.environments.history import History, check
from jaxgrpo.environments.partners import make_kind

QUERY = re.compile(r"SELECT (\w+)\((\w)\) FROM (\w)(?: WHERE (\w)>(\d))?")
TOKENIZER = character_tokenizer(sql.sql.alphabet)
STOPS = frozenset([TOKENIZER.vocab[END]])


def computed(database, query, copy):
    """The result of a reference query, from the rows of its table alone."""
    ((aggregate, column, table, beside, bound),) = QUERY.findall(query)
    names = dict(re.findall(r"CREATE TABLE (\w)\((\w,\w)\)", sql.schema(database)))[table]
    rows = [
        dict(zip(names.split(","), row, strict=True))
        for row in sql.run(database, f"SELECT * FROM {table}", copy)
    ]
    values = [row[column] for row in rows if not beside or row[beside] > int(bound)]
    return {"sum": sum, "min": min, "max": max, "count": len}[aggregate](values)


def test_reference_queries_give_what_their_tables_hold():
    rows = load("task:sql:test", 200)
    for row in rows:
        for copy in sql.COPIES:
            result = sql.run(row["database"], row["answer"], copy)
            assert result == [(computed(row["database"], row["answer"], copy),)]
    assert {row["level"] for row in rows} == {1, 2}
    assert {row["prompt"].split()[0] for row in rows} == set(sql.AGGREGATES)
    assert all(row["schema"] == sql.schema(row["database"]) for row in rows)


def test_no_table_of_a_test_row_is_trained_on():
    train, test = ({row["schema"] for row in load(f"task:sql:{s}", 300)} for s in sql.SPLITS)
    assert train
    assert test
    assert not train & test
    deals = {sql._schema(columns) for columns in sql._deals(np.random.default_rng(8))}
    assert not deals & test
    assert deals & train
    with pytest.raises(InputError, match="sql has no split 'dev'"):
        sql.rows("dev", 3)


def judge(row, *queries):
    count = len(queries)
    return sql.score(queries, answer=[row["answer"]] * count, database=[row["database"]] * count)


def test_a_query_is_right_by_its_rows_in_any_form_and_order():
    row = {"answer": "SELECT u FROM a WHERE u>3", "database": 3}
    names = re.findall(r"(\w)\((\w),(\w)\)", sql.schema(3))
    table, column, beside = names[0]
    row["answer"] = f"SELECT {column} FROM {table} WHERE {beside}>3"
    same = [
        row["answer"] + ";",
        f" select {column} from {table} where {beside} >= 4 order by {column} desc {END}",
        f"SELECT {column}+0.0 FROM {table} WHERE NOT {beside}<4",
    ]
    same.append(f"{sql.CALL[0]}SELECT 1{sql.CALL[1]}<tool>1<assistant>{row['answer']}")
    assert judge(row, *same) == [1.0] * 4
    differing = [
        f"SELECT DISTINCT {column} FROM {table} WHERE {beside}>3 LIMIT 1",
        f"SELECT {column}, {beside} FROM {table} WHERE {beside}>3",
        f"SELECT {column} FROM {names[1][0]} WHERE {beside}>3",
        "",
        "no query",
    ]
    assert judge(row, *differing) == [0.0] * 5


def test_rows_without_a_database_or_a_reference_query_that_runs_are_not_scored():
    """Queries that do not run were right there, and rows of other sources raised."""
    golds: Any = ["SELECT count(*) FROM nowhere", "", None, "#### 72", 72.0, "SELECT 1"]
    assert sql.score(["no query"] * 6, golds, [3, 3, 3, 3, 3, None]) == [None] * 6
    assert sql.score(["", "SELECT 1"], ["SELECT 1"] * 2, [3, 3]) == [0.0, 1.0]


def test_a_result_that_was_read_off_is_no_query():
    for row in load("task:sql:test", 40):
        ((value,),) = sql.run(row["database"], row["answer"])
        ((second,),) = sql.run(row["database"], row["answer"], copy=1)
        if value != second:
            assert judge(row, f"SELECT {value}", row["answer"]) == [0.0, 1.0]


RECURSIVE = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM r) SELECT {} FROM r"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("ATTACH '{file}' AS y", "can only be read"),
        ("ATTACH ':memory:' AS y", "can only be read"),
        ("VACUUM INTO '{file}'", "can only be read"),
        ("PRAGMA table_info(a)", "can only be read"),
        ("SELECT * FROM pragma_table_info('a')", "can only be read"),
        ("SELECT load_extension('{file}')", "not authorized to use function"),
        ("INSERT INTO a VALUES (1,2)", "can only be read"),
        ("UPDATE a SET u=1", "can only be read|no such column"),
        ("DELETE FROM a", "can only be read"),
        ("DROP TABLE a", "can only be read"),
        ("CREATE TEMP TABLE t(x)", "can only be read"),
        ("BEGIN", "can only be read"),
        ("SELECT random()", "not authorized to use function"),
        ("SELECT current_timestamp", "not authorized to use function"),
        ("SELECT date('now')", "not authorized to use function"),
        ("SELECT zeroblob(1000000000)", "not authorized to use function"),
        ("SELECT printf('%1000000000d',1)", "not authorized to use function"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        (RECURSIVE.format("count(*)"), "takes more than 1,000,000 steps"),
        (RECURSIVE.format("i"), "more than 100 rows"),
        ("SELECT count(*) FROM a,a b,a c,a d,a e,a f,a g,a h,a i,a j", "more than 1,000,000 steps"),
        ("SELECT group_concat(sql) FROM sqlite_master,a,a b,a c,a d,a e", "too big|steps"),
        (f"SELECT {','.join('1' * 30)}", "too many columns"),
        ("SELECT " + "(" * 900 + "1" + ")" * 900, "overflow|too large|depth"),
        (f"SELECT '{'x' * 3000}'", "too big|too large"),
        ("SELECT 1; DROP TABLE a", "one statement at a time"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT 1\0", "null character"),
        ("hello", "syntax error"),
    ],
)
def test_a_hostile_query_gets_an_error_text(query, message, tmp_path):
    file = tmp_path / "out"
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):
        sql.run(7, query.replace("{file}", str(file)))
    assert time.monotonic() - began < 5
    assert not file.exists()
    assert judge({"answer": "SELECT 1", "database": 7}, query) == [0.0]
    assert sql.run(7, "SELECT count(*) FROM a") == [(8,)]


def test_every_function_that_is_allowed_is_one_of_sqlite_and_gives_the_same_twice():
    with sqlite3.connect(":memory:") as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM pragma_function_list")}
    assert {*sql.FUNCTIONS} <= names


def test_the_environment_answers_a_look_and_an_error():
    partner = make_kind(sql.Database, {}, (), lambda: hermes, 5.0, "environment").make()
    assert partner.open({"database": 7, "answer": "x", "level": 1}, 0) is None
    for table, *columns in re.findall(r"(\w)\((\w),(\w)\)", sql.schema(7)):
        for column in columns:
            answer = partner.answer(sql.CALL[0] + column.join(sql.LOOK) + sql.CALL[1])
            assert [message["content"] for message in answer.messages] == [table]
    answer = partner.answer(sql.CALL[0] + "DROP TABLE a" + sql.CALL[1])
    assert "can only be read" in answer.messages[0]["content"]
    assert partner.reward() is None


def test_the_corpus_is_what_the_chat_template_writes():
    (schema,) = [
        tool.schema
        for tool in make_kind(sql.Database, {}, (), lambda: hermes, 5.0, "environment").tools
    ]
    chat = Chat(TOKENIZER, TOOL_TEMPLATE, "its template", None, {}, tools=(schema,))
    check(History(chat, STOPS), has_tools=True, forks=False)
    for text in sql.corpus()[:200]:
        (question,) = re.findall(r"<user>(.*?)<end>", text.prompt)
        messages = [{"role": "user", "content": question}]
        if "<tool>" in text.prompt:
            ((look, reply),) = re.findall(r'"sql": "(.*?)"}}.*<tool>(.*?)<end>', text.prompt)
            function = {"name": "query", "arguments": {"sql": look}}
            call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
            messages += [call, {"role": "tool", "content": reply}]
        tools = [schema] if "<tools>" in text.prompt else None
        options = {"chat_template": TOOL_TEMPLATE, "tokenize": False, "tools": tools}
        render = TOKENIZER.apply_chat_template
        assert render(messages, add_generation_prompt=True, **options) == text.prompt
        assert UNKNOWN not in TOKENIZER.decode(TOKENIZER(text.prompt + text.solution)["input_ids"])


def test_shares_are_as_stated():
    texts = sql.corpus()
    assert sum(text.probability for text in texts) == pytest.approx(1)
    first = [text for text in texts if re.match(r"<tools>[^>]*<user>", text.prompt)]
    first = [text for text in first if "<tool>" not in text.prompt]
    total = sum(text.probability for text in first)
    looks = [text for text in first if text.solution.startswith("<tool_call>")]
    assert sum(text.probability for text in looks) / total == pytest.approx(sql.LOOKS)
    right = sum(
        text.probability for text in looks if f"%{text.prompt.split()[1][0]}%" in text.solution
    )
    assert right / total / sql.LOOKS == pytest.approx(sql.RIGHT_LOOK, abs=0.01)
