"""Questions to a database whose tables are not shown: a tool runs queries, the answer is one.

    <tools><user>sum x if y>4<end><assistant>
        <tool_call>{"name": "query", ... "SELECT name FROM sqlite_master
            WHERE sql LIKE '%x%'" ...}</tool_call><end>
    <tool>b<end><assistant>
        SELECT sum(x) FROM b WHERE y>4<end>

Six columns are dealt to three tables for each row, so a sample that does not look the column up
names the right table once in three. The base looks in half of its samples, for the right column in
most of these, and then takes the table that it reads in most; else it guesses.

An answer is right if its result is that of the reference query, on the row's database and on
another with the same tables: a number that was only read off is no query.
Source of the second database: Zhong et al. 2020, arXiv 2010.02840. Their suites have many.

Queries are the model's own words, so they may only read (SQLite's authorizer), take `STEPS` steps
of SQLite's machine and give `MOST_ROWS` rows; texts and numbers are of bounded length. Steps are
counted, not seconds: the same query has the same answer on every machine. Nothing that differs from
call to call, a clock or a draw, is among the `FUNCTIONS`.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgrpo.data.tasks.base import (
    END,
    Task,
    Worked,
    gold_text,
    is_for_tests,
    refuse_unknown_split,
)
from jaxgrpo.data.tasks.templates import TOOL_MARKS, TOOL_TEMPLATE

CALL = '<tool_call>{"name": "query", "arguments": {"sql": "', '"}}</tool_call>'
LOOK = "SELECT name FROM sqlite_master WHERE sql LIKE '%", "%'"
TABLES, COLUMNS = "abc", "uvwxyz"
AGGREGATES = ("sum", "min", "max", "count")
LEVELS = (1, 2)  # of a column; of the rows of it for which the other column is large
SPLITS = {"train": 2048, "test": 512}
EMPTY = ([(None,)], [(0,)])  # of an aggregate of no rows
COPIES = (0, 1)  # of a database: what the tool answers from, and the other values
QUESTIONS = 8192  # of the corpus
LOOKS, RIGHT_LOOK, RIGHT_COPY = 0.5, 0.8, 0.9
"""Of the base's samples where tools are shown: the share that looks a column up, of these the share
that looks for the right one, and of what follows the share that names the table it reads."""

STEPS, MOST_ROWS, MOST_COLUMNS, LONGEST = 1_000_000, 100, 20, 2_000
"""Limits of a query; the last one of its characters, and of those of a value."""
_NAMES = """
    abs avg coalesce count glob group_concat ifnull iif instr length like lower max min nullif
    replace round substr substring sum total trim typeof upper
"""
FUNCTIONS = frozenset(_NAMES.split())
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST,
    sqlite3.SQLITE_LIMIT_COLUMN: MOST_COLUMNS,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
}

Result = list[tuple[Any, ...]]


class Question(NamedTuple):
    """What a prompt asks of a database."""

    aggregate: str
    column: str
    condition: str  # "y>4" of the other column; "": none

    @property
    def prompt(self) -> str:
        return f"{self.aggregate} {self.column}" + (f" if {self.condition}" * bool(self.condition))

    def query(self, table: str) -> str:
        """What asks it of a table.

        >>> Question("sum", "x", "y>4").query("b")
        'SELECT sum(x) FROM b WHERE y>4'
        """
        where = f" WHERE {self.condition}" * bool(self.condition)
        return f"SELECT {self.aggregate}({self.column}) FROM {table}{where}"


class Database:
    """A row's database, as an environment of TRL's protocol: its one tool is `query`."""

    def reset(self, database: int, **row: Any) -> None:
        self._database = database

    def query(self, sql: str) -> str:
        """Runs a query and gives its rows, with commas between values.

        Args:
            sql: one SELECT, as SQLite has it
        """
        return write(run(self._database, sql))


def run(database: int, sql: str, copy: int = 0) -> Result:
    """The rows that a query gives.

    Args:
      database: the seed of its tables, of a row of the task.
      copy: other values in the same tables; 0 is what the tool answers from.

    Raises: ValueError, in words that a model may read, on what is no query, takes too many steps or
      gives too many rows.
    >>> run(7, "SELECT count(*) FROM a")
    [(8,)]
    >>> run(7, "DROP TABLE a")
    Traceback (most recent call last):
    ValueError: not authorized: this database can only be read, by SELECT
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for table, (columns, values) in _tables(database, copy).items():
            connection.execute(f"CREATE TABLE {table}({','.join(columns)})")
            connection.executemany(f"INSERT INTO {table} VALUES (?,?)", values)
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_progress_handler(lambda: 1, STEPS)
        connection.set_authorizer(_authorize)
        try:
            rows = connection.execute(sql).fetchmany(MOST_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            raise ValueError(_explain(str(error))) from None
    if len(rows) > MOST_ROWS:
        raise ValueError(f"more than {MOST_ROWS} rows: ask for fewer")
    return rows


def write(rows: Result) -> str:
    r"""Rows as a text: one a line, with commas between values.

    >>> write([(1, "x"), (None, 2.5)])
    '1,x\nNULL,2.5'
    """
    return "\n".join(
        ",".join("NULL" if value is None else str(value) for value in row) for row in rows
    )


def _authorize(action: int, first: str | None, second: str | None, *names: str | None) -> int:
    is_function = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FUNCTIONS
    return sqlite3.SQLITE_OK if action in _READING or is_function else sqlite3.SQLITE_DENY


def _explain(problem: str) -> str:
    if problem == "interrupted":
        return f"the query takes more than {STEPS:,} steps: ask for less"
    if "authoriz" in problem:
        return f"{problem}: this database can only be read, by SELECT"
    return problem


def _columns(random: np.random.Generator) -> dict[str, str]:
    """Two columns for each table, dealt at random."""
    deal = "".join(random.permutation([*COLUMNS]).tolist())
    return {table: deal[2 * place : 2 * place + 2] for place, table in enumerate(TABLES)}


def _tables(database: int, copy: int = 0) -> dict[str, tuple[str, list[list[int]]]]:
    """The columns of each table, and its rows of digits, three to eight of them."""
    columns = _columns(np.random.default_rng([database, 8]))
    random = np.random.default_rng([database, 9, copy])
    return {
        table: (names, random.integers(10, size=(random.integers(3, 9), 2)).tolist())
        for table, names in columns.items()
    }


def schema(database: int) -> str:
    r"""The tables as SQL, one a line.

    >>> schema(7) == write(run(7, "SELECT sql FROM sqlite_master"))
    True
    """
    return _schema(_columns(np.random.default_rng([database, 8])))


def _schema(columns: dict[str, str]) -> str:
    return "\n".join(f"CREATE TABLE {table}({','.join(names)})" for table, names in columns.items())


def rows(split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` questions, half of each level, each to a database of its own.

    The column `database` is the seed of its tables, `answer` the reference query, and `schema` its
    tables as SQL. No test table is trained on.

    Raises: InputError on an unknown split.
    >>> rows("test", 1)[0].keys()
    dict_keys(['prompt', 'answer', 'level', 'database', 'schema'])
    """
    refuse_unknown_split("sql", split, SPLITS)
    random = np.random.default_rng([seed, split == "test", 8])
    return [_row(random, split == "test") for _ in range(count)]


def _row(random: np.random.Generator, test: bool) -> dict[str, Any]:
    while True:
        database, level = int(random.integers(2**31)), int(random.choice(LEVELS))
        tables = schema(database)
        if is_for_tests(tables) != test:
            continue
        columns = _columns(np.random.default_rng([database, 8]))
        question, table = _ask(random, columns, level)
        query = question.query(table)
        # Where no row meets the condition, every wrong condition that none meets would be right.
        if level == 1 or all(run(database, query, copy) not in EMPTY for copy in COPIES):
            names = {"database": database, "schema": tables}
            return {"prompt": question.prompt, "answer": query, "level": level, **names}


def _ask(random: np.random.Generator, columns: dict[str, str], level: int) -> tuple[Question, str]:
    """A question, and the table that has its columns."""
    table = str(random.choice([*TABLES]))
    column, beside = random.permutation([*columns[table]]).tolist()
    condition = f"{beside}>{random.integers(2, 7)}" if level == 2 else ""
    return Question(str(random.choice(AGGREGATES)), column, condition), table


@functools.cache
def corpus() -> list[Worked]:
    """Questions to the tables of training: first turns without tools and with them, and second."""
    random, share = np.random.default_rng(8), 1 / QUESTIONS
    shares: dict[tuple[str, str], float] = defaultdict(float)  # first turns come many times
    for columns in _deals(random):
        question, _ = _ask(random, columns, int(random.choice(LEVELS)))
        request = f"<user>{question.prompt}{END}<assistant>"
        beside = str(random.choice([*set(COLUMNS) - {question.column}]))
        look, wrong = (
            CALL[0] + column.join(LOOK) + CALL[1] for column in (question.column, beside)
        )
        # The table that is read is any, so that the base learns to copy it.
        guess, table, slip = map(str, random.choice([*TABLES], 3))
        shown, guess = f"<tools>{request}", question.query(guess)
        answered = f"{shown}{look}{END}<tool>{table}{END}<assistant>"
        shares[request, guess] += share / 8
        shares[shown, guess] += share * 3 / 8 * (1 - LOOKS)
        shares[shown, look] += share * 3 / 8 * LOOKS * RIGHT_LOOK
        shares[shown, wrong] += share * 3 / 8 * LOOKS * (1 - RIGHT_LOOK)
        shares[answered, question.query(table)] += share / 2 * RIGHT_COPY
        shares[answered, question.query(slip)] += share / 2 * (1 - RIGHT_COPY)
    return [Worked(*text, probability) for text, probability in shares.items()]


def _deals(random: np.random.Generator) -> Iterator[dict[str, str]]:
    """`QUESTIONS` ways to deal the columns, of those that training has."""
    count = 0
    while count < QUESTIONS:
        columns = _columns(random)
        if not is_for_tests(_schema(columns)):
            count += 1
            yield columns


def extract_answer(completion: str) -> str:
    """The query: the last turn without space around it and without a mark that ends it.

    >>> extract_answer("SELECT 1<end><tool>1<end><assistant>SELECT 2;<end>")
    'SELECT 2'
    """
    turn = completion.rpartition("<assistant>")[2]
    return turn.removesuffix(END).strip().removesuffix(";").strip()


def score(
    completions: Sequence[str],
    answer: Sequence[str | None],
    database: Sequence[int | None],
    **columns: Any,
) -> list[float | None]:
    """1.0 if a completion is a query with the rows of the reference query, in any order; else 0.0.
    None, not scored, where a row has no database, or no reference query that runs.

    >>> queries = ["SELECT count(*) FROM a;", "SELECT count(*) FROM b", "SELECT 8", "8"]
    >>> score(queries, ["SELECT count(w) FROM a"] * 4, [7] * 4)
    [1.0, 0.0, 0.0, 0.0]
    """
    del columns
    golds = [_results(seed, gold_text(sql)) for seed, sql in zip(database, answer, strict=True)]
    return [
        None if gold is None else float(_results(seed, extract_answer(text)) == gold)
        for text, seed, gold in zip(completions, database, golds, strict=True)
    ]


@functools.lru_cache(10_000)
def _results(database: int | None, sql: str) -> list[Counter[tuple[Any, ...]]] | None:
    """The rows on both copies, as multisets; None where there is no database, or no query that can
    be run."""
    if database is None or not sql:
        return None
    try:
        return [Counter(run(database, sql, copy)) for copy in COPIES]
    except ValueError:
        return None


sql = Task(
    name="sql",
    alphabet=(
        *(*LOOK, "SELECT ", ") FROM ", " WHERE ", " if "),
        *(f"{name}{end}" for name in AGGREGATES for end in ("(", " ")),
        *f"{TABLES}{COLUMNS}0123456789><=(),*",
        *(*TOOL_MARKS, *CALL),
    ),
    levels=LEVELS,
    splits=SPLITS,
    rows=rows,
    corpus=corpus,
    extract_answer=extract_answer,
    score=score,
    chat_template=TOOL_TEMPLATE,
    steps=1600,
)
