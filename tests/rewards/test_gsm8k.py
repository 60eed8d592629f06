"""The final number of a solution: where it is looked for, how it may be written."""

import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from jaxgrpo.rewards import gsm8k_answer
from jaxgrpo.rewards.builtin import final_number, gold_number

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"

PLACES = {
    # Behind a mark.
    "#### 72": "72",
    "48+24=72\n#### 72 clips": "72",
    "####72": "72",
    "The answer is 72.": "72",
    "the final ANSWER was 72": "72",
    "Answer: 72": "72",
    "answer = 72": "72",
    "**Answer:** 72": "72",
    "**Answer**: **72** clips": "72",
    "Answer:\n\n72": "72",
    "A: 72": "72",
    "**A:** 72 clips for 2 kids": "72",
    "A:\n72": "72",
    r"\boxed{72}": "72",
    r"So $\boxed{ 72 }$, as 70 + 2.": "72",
    r"\fbox{72}": "72",
    r"\boxed{\text{72 clips}}": "72",
    r"\boxed{72": "72",
    r"The answer is: \(72\), since 6 times 12": "72",
    r"\fbox{72}, as 70 + 2": "72",
    "<answer>72</answer>, since 6 times 12": "72",
    "<answer>\n72 clips\n</answer> for 2 kids": "72",
    "<answer>She sold 70 clips\nand 2 more, so 72</answer>, not 73": "72",
    "<answer>72": "72",
    # Headings of Markdown are no marks.
    "#### Step 1: May\n48\n#### **Step 2**: all\n48+24 makes 72.": "72",
    "### Solution\n#### 2. Add both\n48+24 makes 72.": "72",
    "#### Part 2: all\n48+24 makes 72\n#### Final answer": "72",
    "#### 72. That is all": "72",
    # The last mark with a number counts.
    "#### 71\n#### 72": "72",
    r"\boxed{71} or \boxed{72}": "72",
    r"#### 71, no: the answer is 72 for 3 days": "72",
    "Answer: 72\nI checked 5 times. ####": "72",
    "A: 72\n\nQ: What is 5?": "72",
    # JSON.
    '{"answer": 72, "confidence": 0.9}': "72",
    '```json\n{"steps": ["48/2 = 24"], "final_answer": "72 clips", "days": 2}\n```': "72",
    "{'answer':'72','days':2}": "72",
    # A calculation behind a mark: its result.
    "The answer is 6 * 12 = 72.": "72",
    "The answer is 48/2 + 48 = 72 clips": "72",
    r"\boxed{x = 72}": "72",
    r"The answer is $6 \times 12 = 72$ clips.": "72",
    "#### 6 x 12 = 72 (in 2 months)": "72",
    "A: 48/2 = 24 clips in May.\nThen 48+24=72 clips.": "72",
    # Words behind a mark: the line's last number.
    "The answer is the sum of 70 and 2, so 72": "72",
    "A: 70 on Monday,\nthen 2, so 72": "72",
    "The answer is 72 - that is 6 dozen": "72",
    # Displayed on lines of its own.
    "The answer is:\n\\[\n72\n\\]\nShe sells 9 eggs at $2 each.": "72",
    "The answer is:\n$$\n72\n$$\nShe sells 9 eggs at $2 each.": "72",
    "**Answer:**\n\n```\n72 clips\n```\nfor 2 days": "72",
    "Answer:\n\\[\n\\begin{aligned}\nx &= 70 + 2 \\\\\n&= 72\n\\end{aligned}\n\\]\nfor 2": "72",
    "Answer:\n```python\nprint(70 + 2)\n```\nIt prints 72": "72",
    "Answer:\n$$\n- 72\n$$\nfor 2 days": "-72",
    # A minus with a space behind it: a sign where nothing is subtracted from.
    r"\boxed{- 72}": "-72",
    r"\boxed{- \frac{1}{2}}": "-1/2",
    r"\boxed{x = - 72}": "-72",
    "The answer is $- 72$": "-72",
    "Answer: \u2212 72": "-72",
    "**Answer:** - 72 for 2 days": "-72",
    "- 72": "-72",
    "74 - 2 = 72": "72",
    "Answer: 74 \u2013 2 = 72": "72",
    "Answer: 74 - 72": "72",
    "$74$ - 72": "72",
    "Answer:\n- 72 clips": "72",
    "It takes 70\u201372 days": "72",
    # An exponent is no answer.
    "The area is 72 m^2.": "72",
    "Answer: The area is 72 cm^{2}": "72",
    r"\boxed{\text{Area } 72\text{ cm}^2}": "72",
    "72 m s^{-12}": "72",
    r"Answer: 72^\circ for 2 days": "72",
    "x^2 = 72": "72",
    "2^72": "72",
    # No mark: the last number.
    "48+24 makes 72": "72",
    "<<48+24=72>>72": "72",
    "Option A: 3. So 72.": "72",
    "- 5 apples\n- 72 pears": "72",
    "the answers are many; 72": "72",
    "71,72": "72",
    # Thoughts are not read.
    "<think>#### 5</think>72": "72",
    "<think>72": None,
    "\n<think>\nThe answer is 72. Wait": None,
    "<think>71</think>\n<think>72": None,
    "The tag <think> is 72 pixels wide": "72",
    "a thought that the template opened</think>72": "72",
    "<think>#### 72</think>": None,
    # None at all.
    "": None,
    "I don't know": None,
    "seventy-two": None,
    "####": None,
    "1/0": None,
    r"\boxed{}": None,
}

WRITINGS = {
    "1,234": "1234",
    "1,234,567 people": "1234567",
    "1234.00": "1234",
    "1{,}234": "1234",
    r"1\,234": "1234",
    "1\u202f234": "1234",
    "0072": "72",
    "72.": "72",
    "72.50": "72.5",
    ".5": "0.5",
    "No.5": "5",
    "+5": "5",
    "-5": "-5",
    "\u22125": "-5",
    "\u20125": "-5",
    "\u20135": "-5",
    "x = -5": "-5",
    "(-5)": "-5",
    "10-5": "5",
    "7 - 5": "5",
    "$18": "18",
    r"\$18": "18",
    r"$\$18$": "18",
    "$ 18 per day": "18",
    "-$18": "-18",
    "$-18": "-18",
    "£1,000": "1000",
    "18€": "18",
    "50%": "50",
    r"50\%": "50",
    "15kg": "15",
    "20 minutes": "20",
    "3/4": "0.75",
    "3 / 4": "0.75",
    r"\frac{3}{4}": "0.75",
    r"\dfrac34": "0.75",
    r"-\frac{3}{4}": "-0.75",
    r"\frac{-3}{4}": "-0.75",
    r"\frac{1,500}{3}": "500",
    r"\frac{1{,}500}{3}": "500",
    r"\frac{4.5}{3}": "1.5",
    r"\frac{.5}{2}": "0.25",
    r"\frac{\$90}{5}": "18",
    r"\tfrac{1}{-2}": "-0.5",
    r"\frac{-1}{-2}": "0.5",
    r"\frac{3}4": "0.75",
    r"\frac{3}{0.0}": None,
    "4.5/3": "1.5",
    "3/1.5": "2",
    "2 1/2 hours": "2.5",
    r"2\frac{1}{2}": "2.5",
    r"\left(5\right)": "5",
    "9" * 101: None,
    "9" * 100: "9" * 100,
}


@pytest.mark.parametrize(("text", "number"), PLACES.items())
def test_the_final_number_is_found(text, number):
    assert final_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(("text", "number"), WRITINGS.items())
@pytest.mark.parametrize("around", ["{}", "#### {}", "It is {}", "The answer is {}."])
def test_a_number_is_read_however_it_is_written(text, number, around):
    assert final_number(around.format(text)) == (None if number is None else Fraction(number))


@pytest.mark.parametrize("gold", [GOLD, "72", "72.0", " 72 ", "$72", 72, 72.0, "#### 72"])
@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("#### 72", 1.0),
        ("The answer is $72.00.", 1.0),
        ([{"role": "assistant", "content": r"\boxed{144/2}"}], 1.0),
        ("#### 73", 0.0),
        ("#### -72", 0.0),
        ("#### 7.2", 0.0),
        ("#### 720", 0.0),
        ("", 0.0),
        ("no idea", 0.0),
    ],
)
def test_a_completion_is_right_iff_its_number_is_the_gold_one(completion, score, gold):
    assert gsm8k_answer(completions=[completion], answer=[gold]) == [score]


@pytest.mark.parametrize("gold", ["", "Paris", None, True, float("nan"), float("inf"), ["72"]])
def test_without_a_gold_number_a_sample_is_not_scored(gold):
    assert gsm8k_answer(completions=["#### 72"], answer=[gold]) == [None]


def test_numbers_are_compared_exactly():
    assert gsm8k_answer(completions=["0.333", "1/3", "0.1"], answer=["1/3", "2/6", 0.1]) == [
        0,
        1,
        1,
    ]
    assert gold_number(1e22) == 10**22


def test_other_columns_are_taken_and_lists_of_two_lengths_refused():
    assert gsm8k_answer(completions=["#### 1"], answer=["1"], level=[3], prompts=["p"]) == [1.0]
    with pytest.raises(ValueError, match="shorter"):
        gsm8k_answer(completions=["#### 1"], answer=[])


HOSTILE = [
    "####",
    "#### 1. ",
    "<answer>",
    "9",
    "answer is ",
    r"\boxed{",
    "*",
    "1,",
    r"\frac{1",
    "-",
    " ",
    "$",
    "1 1 ",
    "1/",
    "- ",
    "m^2",
    "m^{",
    "$$\n",
    r"\frac{1.5,",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_no_text_takes_long(piece):
    began = time.monotonic()
    final_number(piece * (40_000 // len(piece)))
    assert time.monotonic() - began < 2


def test_gold_numbers_of_any_width_and_size_are_read_as_written():
    golds = [np.float32(0.1), np.float16(0.1), Decimal("1E+2"), 1e-5, 1e16]
    texts = ["#### 0.1", "#### 0.1", "#### 100", "#### 0.00001", "#### 10000000000000000"]
    assert gsm8k_answer(texts, golds) == [1.0] * 5
    assert gold_number(10**400) == 10**400  # no float holds it
