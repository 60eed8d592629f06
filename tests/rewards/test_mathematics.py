"""General mathematics: what counts as equal, and graders that never end.

Without math-verify, which is optional, the tests that need it check that the reward says so.
"""

import ast
import contextlib
import importlib.util
import json
import subprocess
import time

import pytest

from jaxgrpo.core.errors import InputError
from jaxgrpo.rewards import (
    Reward,
    RewardError,
    build,
    call_rewards,
    math_answer,
    mathematics,
    preview,
    workers,
)
from jaxgrpo.rewards.math_program import as_latex, both_signs, choice
from jaxgrpo.rewards.mathematics import NEEDED, PROGRAM
from jaxgrpo.rewards.workers import GRACE

CODEC = (lambda text: [*map(ord, text)], lambda ids: ["".join(map(chr, row)) for row in ids])
THERE = importlib.util.find_spec("math_verify") is not None


def score(completions, answers, **options):
    """The scores; where the library is missing, nothing but the error that names it."""
    if THERE:
        return math_answer(completions=completions, answer=answers, **options)
    with pytest.raises(RewardError, match="jaxgrpo\\[math\\]"):
        math_answer(completions=completions, answer=answers, **options)
    return None


COLUMN = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
CASES = [
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
    (r"\boxed{0.5}", r"\frac12", 1),
    (r"So it is $\frac{2}{4}$.", "1/2", 1),
    ("The answer is 3/6", r"$\frac{1}{2}$", 1),
    (r"\boxed{\frac{1}{3}}", "0.5", 0),
    (r"\boxed{72}", "48+24=72\n#### 72", 1),
    (r"\boxed{72}", 72, 1),
    (r"\boxed{1{,}234}", "1,234", 1),
    (r"\boxed{x = 5}", "5", 1),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{(x+1)^2}", "x^2+1", 0),
    (r"\boxed{\{3, 1, 2\}}", r"\{1,2,3\}", 1),
    (r"\boxed{(1, 2)}", "(1,2)", 1),
    (r"\boxed{(2, 1)}", "(1,2)", 0),
    (r"\boxed{2\pi}", r"2\pi", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"It is \boxed{5}. " + "No, I have forgotten one. " * 3 + r"\boxed{6}", "6", 1),
    (r"Either \boxed{5} or \boxed{6}", r"\{6, 5\}", 1),
    (r"Either \boxed{5} or \boxed{6}", "6", 0),
    (r"<think>\boxed{5}</think> \boxed{6}", "6", 1),
    (r"<think>\boxed{6}</think>", "6", 0),
    (r"<think>So it is \boxed{6}. Wait", "6", 0),
    ("no idea", "6", 0),
    ("", "6", 0),
    (r"\boxed{6}", "", None),
    (r"\boxed{6}", None, None),
    ([{"role": "assistant", "content": r"\boxed{6}"}], "6", 1),
    (r"\boxed{6}", r"First 2 and then \boxed{6}", 1),
    # A box that cannot be read, is empty or is cut off: no other number of the text.
    (r"2+4=6, so 6 cups. \boxed{?? not sure ??}", "6", 0),
    (r"So 6. \boxed{8 \blah}", "6", 0),
    (r"\boxed{> 6}", "6", 0),
    (r"\boxed{\neq 6}", "6", 0),
    (r"$6$ or 7? \boxed{}", "6", 0),
    (r"It is 6, so \boxed{7", "6", 0),
    (r"It is $x = 6$, so \boxed{\frac{1", "6", 0),
    # Boxes as models write them.
    (r"\boxed {6}, of 7", "6", 1),
    (r"\fbox{6}, of 7", "6", 1),
    (r"$\boxed{6}$, not $7$ or {8}", "6", 1),
    (r"\[ x = \boxed{6}. \]", "6", 1),
    # Tags.
    ("<answer>6</answer>", "6", 1),
    ("<think>7</think>\n<answer>\n6\n</answer> of 7", "6", 1),
    ("<answer>It is 6</answer>", "6", 1),
    ("<answer>x = 6 cups</answer>", "6", 1),
    (r"<answer>$\frac{12}{2}$</answer>", "6", 1),
    (r"\boxed{7} <answer>\boxed{6}</answer>", "6", 1),
    (r"\boxed{6} <answer></answer>", "6", 1),
    ("<answer>(1, 2)</answer>", "(1,2)", 1),
    ("<answer>x^2+1</answer>", "1 + x^2", 1),
    ("<answer>no solution</answer>", r"\text{no solution}", 1),
    (f"<answer>{COLUMN}</answer>", COLUMN.replace("pmatrix", "bmatrix"), 1),
    ("<answer>7</answer>, or 6", "6", 0),
    ("<answer>ln 6</answer>", "6", 0),
    ("<answer>2 and 3</answer>", r"\{2, 3\}", 1),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:math. the gold answer .. cannot be read")
def test_answers_are_compared_as_mathematics():
    completions, answers, expected = (list(column) for column in zip(*CASES, strict=True))
    scores = score(completions, answers)
    if THERE:
        assert scores == expected


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_grader_that_never_ends_is_killed_and_its_sample_unscored():
    logged = {}
    began = time.monotonic()
    scores = score(
        [r"\boxed{6}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{6}", r"\boxed{7}"],
        ["6"] * 4,
        time_limit=1.0,
        workers=1,
        log_metric=logged.__setitem__,
    )
    assert time.monotonic() - began < 20
    if THERE:
        assert scores == [1, None, 1, 0]
        assert logged == {"math/timed_out": 0.25, "math/crashed": 0.0, "math/unread": 0.0}


HANGING = [
    r"\boxed{9^{9^{%d}}}",
    r"\boxed{%d000000!}",
    r"\boxed{(1+x)^{%d00000}}",
    r"\boxed{\sum_{k=1}^{%d0000000}k^{k}}",
]


def batch_with_hanging(count, hanging):
    """Completions of which some hang, each in a way of its own; their gold answers and scores."""
    completions = [rf"\boxed{{{index % 97}}}" for index in range(count)]
    golds = [str(index % 89) for index in range(count)]
    scores: list[float | None] = [float(index % 97 == index % 89) for index in range(count)]
    for place in range(hanging):
        index = place * (count // hanging)
        completions[index] = HANGING[place % len(HANGING)] % (9 + place)
        scores[index] = None
    return completions, golds, scores


@pytest.mark.fault(17)
@pytest.mark.full
@pytest.mark.skipif(not THERE, reason="needs math-verify")
def test_a_batch_with_hanging_answers_ends_and_all_others_are_scored():
    """At 5 s each and a new process afterwards, 100 would take 2 workers 8 minutes."""
    completions, golds, scores = batch_with_hanging(2000, 100)
    began = time.monotonic()
    assert math_answer(completions, golds, workers=2, batch_limit=10.0) == scores
    assert time.monotonic() - began < 50
    began = time.monotonic()
    assert math_answer(completions, golds, workers=2, batch_limit=10.0) == scores
    assert time.monotonic() - began < 25


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not THERE, reason="needs math-verify")
def test_answers_that_hang_end_where_the_trainer_ignores_the_signal_of_their_timer(
    python, environment
):
    """As it does once some libraries are loaded; a child inherits what is ignored. In a process of
    its own: in one that has loaded such a library the signal comes at any time."""
    completions, golds, scores = batch_with_hanging(9, 3)
    program = (
        "import json, signal, sys, time\n"
        "from jaxgrpo.rewards import math_answer\n"
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "completions, golds = json.load(sys.stdin)\n"
        "began = time.monotonic()\n"
        "options = {'workers': 1, 'batch_limit': 1.0, 'time_limit': 1.5}\n"
        "scores = math_answer(completions, golds, **options)\n"
        "print(json.dumps([scores, time.monotonic() - began]))"
    )
    run = subprocess.run(
        [python, "-P", "-c", program],
        input=json.dumps([completions, golds]),
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    printed_scores, seconds = json.loads(run.stdout)
    assert printed_scores == scores
    assert seconds < 3 * GRACE  # which each would take


@pytest.mark.slow
@pytest.mark.skipif(not THERE, reason="needs math-verify")
def test_a_gold_answer_that_hangs_is_unread_and_tried_once():
    logged, gold = {}, "9^{9^{9^{9^{8}}}}"
    options = {"time_limit": 0.5, "workers": 1, "log_metric": logged.__setitem__}
    with pytest.warns(UserWarning, match="cannot be read as a whole in time"):
        assert math_answer(["1", "2", "3"], [gold] * 3, **options) == [None] * 3
    assert logged == {"math/timed_out": 0, "math/crashed": 0, "math/unread": 1}
    began = time.monotonic()
    numbers = [str(number) for number in range(4, 99)]
    assert math_answer(numbers, [gold] * 95, **options) == [None] * 95
    assert time.monotonic() - began < 5


def test_the_program_of_the_grader_loads_nothing_of_jax_or_of_this_package(python):
    program = (
        "import runpy, sys\nsys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print({name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    run = subprocess.run(
        [python, "-P", "-c", program, str(workers.PROGRAM), str(PROGRAM)],
        input=json.dumps([5.0, ["6", r"\boxed{6}"]]) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines()[1:] == (["1.0"] if THERE else [])
    loaded = ast.literal_eval(run.stderr.splitlines()[-1])
    assert loaded & {"jax", "jaxlib", "jaxgrpo", "numpy"} == set()
    assert ("sympy" in loaded) == THERE


@pytest.mark.slow
def test_a_batch_gets_its_shares_as_metrics():
    if THERE:
        scores, log = call_rewards(
            [Reward("math", build("math"))], ["p"], [r"\boxed{6}"], [[1]], {"answer": ["6"]}
        )
        assert scores["math"].tolist() == [1]
        assert log.numbers() == {"math/timed_out": 0, "math/crashed": 0, "math/unread": 0}
    else:
        with pytest.raises(InputError, match="math-verify, which is not installed"):
            build("math")


def test_a_missing_library_says_how_to_get_it(python, environment):
    program = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "math_verify":
            raise ModuleNotFoundError("No module named 'math_verify'", name=name)
sys.meta_path.insert(0, Hidden())
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""
    command = [python, "-c", program, str(workers.PROGRAM), str(PROGRAM)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == '{"error": "ModuleNotFoundError: No module named \'math_verify\'"}\n'
    assert "pip install" in NEEDED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 0}, r"rewards\.math: time_limit = 0: expected seconds above 0"),
        ({"time_limit": "fast"}, "time_limit = 'fast'"),
        ({"workers": 0}, "workers = 0: expected a whole number of processes"),
        ({"worker": 2}, "no option 'worker': it takes time_limit, workers, batch_limit"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("math", **options)


def test_no_completions_start_no_process():
    assert math_answer(completions=[], answer=[], time_limit=3.25) == []


def test_a_gold_number_is_no_expression_with_the_letter_e():
    texts = [r"\boxed{e-5}", r"\boxed{0.00001}", r"\boxed{2.5\cdot 10^{-7}}"]
    assert math_answer(texts, [1e-5, 1e-5, 2.5e-7]) == [0.0, 1.0, 1.0]


EQUAL = {
    "2√3": [
        r"\boxed{2√3}",
        r"\boxed{2\sqrt{3}}",
        "So it is 2√3.",
        r"$x$ holds, so it is $\sqrt{12}$",
    ],
    "√(2+√3)": [r"\boxed{\sqrt{2+\sqrt{3}}}", "sqrt(2 + sqrt(3))"],
    "∛8": [r"\boxed{\sqrt[3]{8}}", "2"],
    "10⁻⁵": ["0.00001", "10^-5", r"\boxed{10^{-5}}", "1e-5."],
    "1e-05": ["0.00001", r"\boxed{1 \times 10^{-5}}"],
    "½": ["0.5", "The answer is ½.", "1⁄2"],
    "3½": [r"\boxed{3.5}", r"\boxed{\frac{7}{2}}", "3 1/2", "It is 3½ cups."],
    "-3 1/2": ["-3.5", r"\boxed{-3\frac{1}{2}}"],
    "∞": [r"\boxed{\infty}", "It is ∞.", r"\boxed{infinity}"],
    "pi/2": [r"\boxed{\frac{\pi}{2}}", "The answer is π/2.", r"\boxed{pi/2}", "π÷2"],
    "2π": [r"\boxed{2\pi}", "2*pi", "2·π"],
    "2×3": ["6", r"\boxed{2·3}"],
    "6÷2": ["3"],
    "−5": ["-5", r"\boxed{−5}"],
    "x₁ + x₂": [r"\boxed{x_1 + x_2}"],
    "x² + 1": [r"\boxed{x^2+1}", "so it is x²+1."],
    "2 ± √3": [r"\boxed{2 \pm \sqrt{3}}"],
    "x ∈ [0, ∞)": [r"\boxed{[0, \infty)}"],
    "100 dollars": ["100", r"\boxed{100}", r"\boxed{\$100}", "It costs $100."],
    "12 cm²": ["12", r"\boxed{12\text{ cm}^2}"],
    "60 miles per hour": [r"\boxed{60}"],
    "5 million": ["5,000,000", r"\boxed{5 million}"],
    "1 000 000": ["1000000", r"\boxed{1{,}000{,}000}"],
    "$5": ["5", r"\boxed{5}"],
    "x + 2d": [r"\boxed{2d + x}"],
    "no solution": [r"\boxed{\text{No solution}}", r"\boxed{no solution}"],
    "2.5e-7": [r"\boxed{2.5\cdot 10^{-7}}", "0.00000025"],
    "73": ["So it is **73**.", "**Answer:** 73"],
    "5": [
        *("The volume is 5 m³.", "see note³: it is 5", r"\boxed{\text{5 apples}}"),
        *(r"\boxed{5~\mathrm{cm}}", r"\boxed{5°C}", r"\boxed{5^\circ F}", r"\boxed{5 USD}"),
        *(r"\boxed{\approx 5}", r"\boxed{= 5}", r"\boxed{Rs. 5}", r"\boxed{\mathbf{5}}"),
        *(r"\boxed{\bf 5}", r"\boxed{~5}"),
    ],
    r"\emptyset": [r"\boxed{\varnothing}", r"\boxed{∅}", r"\boxed{\{ \}}"],
    r"\log_2 8": [r"\boxed{3}", r"\boxed{\log_2 8}"],
    "√√16": [r"\boxed{2}", r"\boxed{\sqrt{\sqrt{16}}}"],
    r"\frac{1}{3}": [r"\boxed{0.\overline{3}}", r"It is $0.\bar{3}$.", r"\boxed{0.\dot3}"],
    r"2.3\overline{45}": [r"\boxed{\frac{129}{55}}", r"\boxed{2.3\overline{45}}"],
    r"\frac{1 \pm \sqrt{5}}{2}": [
        r"\boxed{x = \frac{1 \pm \sqrt{5}}{2}}",
        r"\boxed{\frac{1 - \sqrt{5}}{2}, \frac{1 + \sqrt{5}}{2}}",
    ],
    r"3, \sqrt{2 + \sqrt{3}}, \sqrt{2 - \sqrt{3}}": [
        *(r"\boxed{3, \sqrt{2 \pm \sqrt{3}}}", r"\boxed{\left\{3, \sqrt{2 \pm \sqrt{3}}\right\}}"),
        r"\boxed{3, \sqrt{\frac{4 \pm 2\sqrt{3}}{2}}}",
    ],
    "[-2, 7)": [r"\boxed{-2 \le x < 7}", r"\boxed{7 > x \geq -2}"],
    r"(3, \infty)": [r"\boxed{x > 3}", r"\boxed{3 < n}"],
    r"(-\infty, 1) \cup (2, \infty)": [r"\boxed{x < 1 \text{ or } x > 2}"],
    r"x \ge 1 \text{ or } x \le -1": [r"\boxed{(-\infty, -1] \cup [1, \infty)}"],
    "(-1, 1)": [r"\boxed{x > -1 \text{ and } x < 1}"],
    "0 < x < 1": [r"\boxed{x > 0, x < 1}", r"\boxed{1 > x > 0}"],
    r"60\pi": [r"\boxed{60\pi cm^2}", r"\boxed{60\pi \text{ cm}^2}", "It is 60π cm²."],
    "60π cm²": ["60π", r"\boxed{60\pi}"],
    r"\pi R^2 h": [r"\boxed{\pi h R^2}"],
    r"\frac{100}{3}\%": [r"\boxed{33\frac{1}{3}\%}", r"\boxed{\frac{100}{3} \%}"],
    r"2^{\text{nd}}": [r"\boxed{2}", r"\boxed{2nd}", r"\boxed{2^\text{nd}}"],
    "C": [
        *("Answer: C", "The answer is (C).", "The correct option is **C**.", "C", "**C)**"),
        *(r"\boxed{\text{C}}", r"\boxed{\textbf{(C) } 12}", r"\boxed{C. 12}", r"\boxed{Option C}"),
        *(
            "<answer>C) 12</answer>",
            r"The answer is A. No: \boxed{C}",
            "It is C: answer is C, not D",
        ),
    ],
    r"\text{(C)}": [r"\boxed{C}", "Final Answer: C"],
}
UNEQUAL = {
    "2√3": ["2", "3", r"\boxed{\sqrt{3}}"],
    "2": ["It is 2√3.", "2√3", "$x$ holds, so it is 2√3."],
    "10⁻⁵": ["10", "5", "0.0000101"],
    "3½": ["3", r"\boxed{1/2}"],
    "x + 2d": [r"\boxed{x + 2}"],
    "listen": [r"\boxed{silent}"],
    "2.5e-7": ["0", r"\boxed{0}", "0.0000003"],
    r"6.6 \times 10^{-34}": [r"\boxed{10^{-34}}", "0"],
    "0": [r"\boxed{0.0000001}"],
    "2.3": [r"\boxed{2.\overline{3}}"],
    "1 000 000": ["0", "1"],
    r"\frac{1}{3}": ["0.333", r"\boxed{0.\overline{34}}"],
    r"\frac{1 + \sqrt{5}}{2}": [r"\boxed{\frac{1 \pm \sqrt{5}}{2}}"],
    r"(3, \infty)": [r"\boxed{2x > 6}", r"\boxed{x \ge 3}", r"\boxed{x > y}"],  # 2x > 6 was asked
    r"\{1, 2\}": [r"\boxed{1 < x < 2}"],
    r"(-\infty, \infty)": [r"\boxed{x > -1 \text{ and } x < 1}"],
    "x > 3": [r"\boxed{y > 3}"],
    "C": [
        *("The answer is A or C.", "Answer: Cats", r"The answer is C. No: \boxed{A}", "A\nB\nC"),
        *(r"\boxed{2C}", r"\boxed{C, D}", "The answer is C/D", "The answer is not C"),
        *("C. It is not B, so it must be D.", "C or D"),
    ],
}
UNREAD = [
    *(
        "5 @ 3",
        "3)",
        "0.333...",
        "2 3",
        r"\frac{1}{0}",
        r"100 \text{ dollars and } 5 \text{ cents}",
    ),
    *(r"5\text{ hours }30\text{ minutes}", r"\le 5 \blah", "7 a.m.", True, [1, 2]),
]


@pytest.mark.parametrize(
    "piece", ["1", "0.", "{", r"\frac{1", r"\pm{", r"1\overline{", "Answer: ", "*"]
)
def test_a_text_that_repeats_itself_is_read_in_linear_time(piece):
    text = f"Answer:{piece * (40_000 // len(piece))}"
    began = time.process_time()
    assert "".join(as_latex(text).split()) == "".join(text.split())
    assert choice(text) is None
    assert both_signs(text) == text
    assert time.process_time() - began < 1


@pytest.mark.slow
@pytest.mark.parametrize(("table", "expected"), [(EQUAL, 1), (UNEQUAL, 0)], ids=["equal", "not"])
def test_gold_answers_and_completions_are_read_as_a_whole(table, expected):
    pairs = [(text, gold) for gold, texts in table.items() for text in texts]
    scores = score(*(list(column) for column in zip(*pairs, strict=True)))
    if scores is not None:
        assert [
            pair for pair, points in zip(pairs, scores, strict=True) if points != expected
        ] == []


def test_a_gold_answer_that_is_read_in_part_is_not_scored_and_named(monkeypatch):
    monkeypatch.setattr(mathematics, "_named", set())
    logged = {}
    if not THERE:
        return
    golds = [*UNREAD, None]
    texts = [rf"\boxed{{{gold}}}" for gold in golds]
    with pytest.warns(UserWarning, match="cannot be read as a whole") as warned:
        scores = math_answer(texts, golds, log_metric=logged.__setitem__)
    assert scores == [None] * len(golds)
    assert logged["math/unread"] == len(UNREAD) / len(golds)
    assert len(warned) == mathematics.UNREAD_NAMED
    assert "the gold answer '5 @ 3' cannot be read as a whole" in str(warned[0].message)


def test_a_preview_shows_how_gold_answers_are_read(monkeypatch):
    monkeypatch.setattr(mathematics, "_named", set())
    rewards = [Reward("right", build("gsm8k_answer"))]
    rewards += [Reward("math", build("math"))] if THERE else []
    for gold, expected in {"3 1/2": "7/2", "2√3": "2*sqrt(3)", "3)": "nothing"}.items():
        is_unread = THERE and expected == "nothing"
        unread = pytest.warns(UserWarning, match=r"the gold answer '3\)' cannot be read as a whole")
        with unread if is_unread else contextlib.nullcontext():
            shown = preview(rewards, {"prompt": "p", "answer": gold}, *CODEC)
        if THERE:
            assert shown["math"].reading == expected
    assert preview(rewards, {"prompt": "p", "answer": 1.5}, *CODEC)["right"][3] == "3/2"
