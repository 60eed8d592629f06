"""What reads texts of a model takes time in proportion to their length, whatever they repeat."""

import time

import pytest

from jaxgrpo.environments import calls
from jaxgrpo.rewards import builtin, confidence, math_program, programs, reasoning

LENGTH = 80_000  # characters; the square of it takes several seconds
READERS = {
    "program": programs.find_program,
    "number": builtin.final_number,
    "form": lambda text: builtin.has_format([text]),
    "confidence": lambda text: confidence.confidence_format([text]),
    "tagged": reasoning.read_answer,
    "box": math_program.in_tags,
    "choice": math_program.choice,
    "hermes": calls.hermes,
    "qwen": calls.qwen_xml,
    "glm": calls.glm,
}
PIECES = (
    *("a", "ab ", " ", "\n", "-", "{", "$", "1", "1,000 ", "A or ", "answer is ", "option "),
    *("```", "```\n", " ```-", "<think>", "</think>", "<answer>", "</answer>", "<confidence>"),
    *("</confidence>", "<tool_call>", "<function=f>", "<parameter=a>", "<arg_key>", "</arg_key>"),
    *("\\boxed{", "\\frac{1}", "#### ", "A: "),
)
OPENINGS = ("", "```", "<answer>", "<tool_call>f", "\\boxed{")


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_text_that_repeats_itself_is_read_in_time(name):
    for opening in OPENINGS:
        for piece in PIECES:
            text = f"{opening}{piece * (LENGTH // len(piece))}</answer>"
            began = time.process_time()
            READERS[name](text)
            assert time.process_time() - began < 1, (opening, piece)
