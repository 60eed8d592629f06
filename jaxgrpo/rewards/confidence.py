"""The confidence that a completion states, between tags."""

from __future__ import annotations

import re
from typing import Any

from jaxgrpo.rewards.texts import text_of

_STATED = re.compile(r"<confidence>(.*?)</confidence>", re.DOTALL)


def stated_confidence(completion: Any) -> float | None:
    """What stands between the last pair of <confidence> tags, where it is a number in [0, 1].

    None: it states none, or one that cannot be read ("high", "80%", 7). That is not 0, which would
    be a good confidence for a wrong answer. An earlier pair does not stand in for the last.

    Args:
      completion: a text, or messages.

    Source: the form is that of Damani et al. 2025, arXiv 2507.16806.

    >>> stated_confidence("<answer>7</answer><confidence> 0.8 </confidence>")
    0.8
    >>> stated_confidence("<confidence>1</confidence> no: <confidence>unsure</confidence>")
    """
    stated = _STATED.findall(text_of(completion))
    try:
        confidence = float(stated[-1]) if stated else -1.0
    except ValueError:
        return None
    return confidence if 0 <= confidence <= 1 else None
