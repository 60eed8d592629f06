"""`jaxgrpo losses`: which surrogates, penalties and reductions there are, and what one does.

jaxgrpo losses clip --ratio 0.5,1,1.5 --advantage 1,-1 --option high=0.28
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from jaxgrpo.cli.advantages import (
    describe,
    find_factories,
    first_lines,
    read_option,
    show_description,
    show_list,
)
from jaxgrpo.config import own_code
from jaxgrpo.core.errors import InputError, call, suggest
from jaxgrpo.core.metrics import finalise
from jaxgrpo.core.scores import GROUP_LOG_RATIO, OF_BATCH, OF_PASS, SCORES
from jaxgrpo.losses import Penalty, Surrogate, Tokens, registry, token_loss, with_batch_fields
from jaxgrpo.training.processes.backend import start_backend
from jaxgrpo.training.records.console import Document, show_whole, terminal_table

TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "surrogates (loss.surrogate)": registry.surrogates,
    "penalties (loss.kl)": registry.penalties,
    "entropy (loss.entropy)": registry.entropies,
    "reductions (loss.reduction)": registry.reductions,
}
RATIOS = (0.5, 0.8, 1.0, 1.2, 1.5, 6.0)
WIDEST, POINTS = 20.0, 4001
"""Ratios from 1 / WIDEST to WIDEST are searched for those without a gradient, in so many points."""
NOTHING = Surrogate("nothing", lambda tokens: (jnp.zeros_like(tokens.logp), {}), weighs=False)


class LossValues(NamedTuple):
    """What a loss makes of tokens; arrays have the shape of the tokens."""

    loss: np.ndarray
    gradient: np.ndarray  # of the sum of the losses with respect to each log-prob
    field_gradients: dict[str, np.ndarray]  # the same with respect to what the update's pass gives
    metrics: dict[str, float]


def main(
    name: str | None = None,
    ratios: str | None = None,
    advantages: str | None = None,
    options: Sequence[str] = (),
    fields: Sequence[str] = (),
    one_sequence: bool = False,
    as_json: bool = False,
) -> int | Document:
    """Lists everything, or describes one part and shows it at work. Returns the exit code."""
    console = Console(highlight=False)
    values = {"--ratio": ratios, "--advantage": advantages, "--option": options, "--field": fields}
    _refuse_unread(name, {**values, "--one-sequence": one_sequence})
    if name is None:
        tables = first_lines(TABLES)
        if not as_json:
            show_list(console, tables, "jaxgrpo losses NAME describes one and shows its pull")
        return Document(tables) if as_json else 0
    factory = find_factories("loss", name, TABLES)[0]
    about = describe(name, factory)
    if not as_json:
        show_description(console, about)
    if factory in registry.reductions.values():
        return Document(about) if as_json else 0
    option_values = dict(map(read_option, options))
    missing = _required(factory) - option_values.keys()
    if missing and not own_code.is_reference(name):
        text = " ".join(f"--option {option}=0.1" for option in sorted(missing))
        console.print(f"\njaxgrpo losses {name} {text} shows what it does", markup=False)
        return Document(about) if as_json else 0
    start_backend()
    part = _build(name, factory, option_values)
    rho, signs = _numbers("--ratio", ratios, RATIOS), _numbers("--advantage", advantages, (1, -1))
    if isinstance(part, Penalty) and advantages is None:
        signs = (1.0,)  # it reads none, as a rule
    field_values = _fields(part, fields)
    losses_by_sign = {sign: measure(part, rho, sign, field_values, one_sequence) for sign in signs}
    problems = _problems(part, rho, signs, field_values)
    flat_regions = {sign: _without_gradient(part, sign, field_values) for sign in signs}
    if as_json:
        numbers = _document(rho, losses_by_sign, flat_regions, field_values)
        return Document({**about, **numbers, "problems": problems})
    _show(console, rho, losses_by_sign, field_values)
    for sign, regions in flat_regions.items():
        if regions:
            words = " and ".join(map(_region, regions))
            console.print(f"A = {sign:g}: no gradient at ratios {words}")
    for problem in problems:
        console.print(f"warning: {problem}", markup=False, style="yellow")
    return 0


def _refuse_unread(name: str | None, values: Mapping[str, Any]) -> None:
    """Raises: InputError with the first option of `values` that the list, or a reduction, would
    ignore: these are not shown at work."""
    flag = next((flag for flag, value in values.items() if value), None)
    if flag is None:
        return
    if name is None:
        raise InputError(f"losses {flag}: give a NAME too")
    if name in registry.reductions:
        raise InputError(
            f"losses {name} {flag}: a reduction is described and not shown at work; leave {flag} "
            f"out, or take a surrogate, as jaxgrpo losses clip {flag} ..."
        )


def measure(
    part: Surrogate | Penalty,
    ratios: Sequence[float],
    advantage: float,
    fields: Mapping[str, float],
    one_sequence: bool = False,
    spoiled: bool = False,
) -> LossValues:
    """The loss of tokens by their ratios to the proximal policy, compiled as in training.

    Args:
      fields: name -> its value at every token.
      one_sequence: the ratios are of the tokens of one sequence, not of a sequence each.
      spoiled: a masked token that holds NaN follows the others of each sequence.

    Raises: InputError where own code fails or cannot be compiled.
    """
    logp = jnp.log(jnp.asarray(ratios, jnp.float32))
    logp = logp[None] if one_sequence else logp[:, None]
    mask = jnp.ones(logp.shape, bool)
    if spoiled:
        logp = jnp.pad(logp, ((0, 0), (0, 1)), constant_values=jnp.nan)
        mask = jnp.pad(mask, ((0, 0), (0, 1)))
    filled = {name: jnp.where(mask, value, jnp.nan) for name, value in fields.items()}
    pass_fields = {name: value for name, value in filled.items() if name in OF_PASS}
    slopes, (loss, metrics) = _slopes(part)(logp, pass_fields, jnp.float32(advantage), mask, filled)
    gradient, field_gradients = jax.tree.map(np.asarray, slopes)
    return LossValues(np.asarray(loss), gradient, field_gradients, finalise(metrics))


@functools.cache
def _slopes(part: Surrogate | Penalty) -> Any:
    """(log-probs, fields of the pass, ...) -> (gradients by both, (loss, metrics)), compiled."""
    surrogate, penalties = (NOTHING, [part]) if isinstance(part, Penalty) else (part, [])
    states = {penalty.name: penalty.init() for penalty in penalties if penalty.init is not None}

    def total(
        logp: Array, pass_fields: Mapping[str, Array], advantage: Array, mask: Array, fields: Any
    ) -> Any:
        tokens = Tokens(
            logp=logp,
            proximal_logp=jnp.where(mask, 0, jnp.nan),
            advantage=jnp.where(mask, advantage, jnp.nan),
            mask=mask,
            segment=mask.astype(jnp.int32),
            fields={**fields, **pass_fields},
        )
        row = jnp.arange(len(logp), dtype=jnp.int32)[:, None]  # each a group of its own
        tokens = with_batch_fields(
            surrogate.batch_fields, tokens, jnp.broadcast_to(row, logp.shape)
        )
        loss, metrics = token_loss(surrogate, penalties, tokens, states)
        return loss.sum(), (loss, metrics)

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))


def _required(factory: Callable[..., Any]) -> set[str]:
    """The options without a default."""
    parameters = inspect.signature(factory).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    return names - {"tokens"}


def _build(
    name: str, factory: Callable[..., Any], options: Mapping[str, Any]
) -> Surrogate | Penalty:
    if registry.takes_tokens(factory):
        return registry.build_surrogate({"use": factory, **options})
    part: Any = call(own_code.short_name(name), factory, options)
    if isinstance(part, Penalty):
        return registry.build_penalty(part)
    return registry.build_surrogate(part)


def _fields(part: Surrogate | Penalty, texts: Sequence[str]) -> dict[str, float]:
    """The fields that a part reads. Log-probs are 0 by default, as the proximal policy's are here,
    and entropies 1.

    Raises: InputError on one that it does not read, and where one is missing.
    """
    user_values = {}
    for text in texts:
        field, _, value = text.partition("=")
        numbers = _numbers(f"--field {field}", value, ())
        if len(numbers) > 1:
            raise InputError(f"--field {text}: expected one number, of every token")
        if field not in part.needs:
            hint = suggest(field, part.needs)
            raise InputError(f"--field {field}: {part.name} reads no such field: {hint}")
        user_values[field] = numbers[0]
    defaults = {field: 0.0 if spec.quantity == "logp" else 1.0 for field, spec in SCORES.items()}
    defaults |= dict.fromkeys(OF_PASS, 1.0) | dict.fromkeys((GROUP_LOG_RATIO, *OF_BATCH), 0.0)
    batch_fields = getattr(part, "batch_fields", ())
    defaults |= {field.name: 0.0 for field in batch_fields if not field.by_group}
    by_group = {
        field.name for field in batch_fields if field.by_group
    }  # each ratio is a group of its own
    values = {field: value for field, value in defaults.items() if field in part.needs}
    values |= user_values
    if missing := sorted(part.needs - values.keys() - by_group):
        text = " ".join(f"--field {field}=0.5" for field in missing)
        raise InputError(f"{part.name} reads columns of the data: give {text}")
    return values


def _numbers(flag: str, text: str | None, default: Sequence[float]) -> Sequence[float]:
    if text is None:
        return [*map(float, default)]
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    wrong = flag == "--ratio" and min(numbers) <= 0
    if wrong or not all(map(math.isfinite, numbers)):
        kind = "ratios above 0" if flag == "--ratio" else "numbers"
        raise InputError(f"{flag} {text}: expected {kind} with commas between, as 0.5,1,1.5")
    return numbers


def _without_gradient(
    part: Surrogate | Penalty, advantage: float, fields: Mapping[str, float]
) -> list[tuple[float | None, float | None]]:
    """The intervals of ratios at which a sequence of one token gets no gradient; None: no end."""
    grid = np.geomspace(1 / WIDEST, WIDEST, POINTS)
    loss_values = measure(part, grid.tolist(), advantage, fields)
    flat = (loss_values.gradient == 0).ravel()
    for slope in loss_values.field_gradients.values():
        flat &= (slope == 0).ravel()
    regions, place = [], 0
    for is_flat, run in itertools.groupby(flat):
        last = place + len([*run]) - 1
        if is_flat and last > place:
            low = None if place == 0 else float(grid[place])
            high = None if last == POINTS - 1 else float(grid[last])
            regions.append((low, high))
        place = last + 1
    return regions


def _region(ends: tuple[float | None, float | None]) -> str:
    """An interval in words.

    >>> _region((None, None)), _region((None, 0.8)), _region((1.2, 2.0)), _region((1.2, None))
    ('everywhere', 'to 0.8', 'from 1.2 to 2', 'from 1.2 up')
    """
    low, high = ends
    if low is None and high is None:
        return "everywhere"
    return (
        f"{'' if low is None else f'from {low:.3g} '}{'up' if high is None else f'to {high:.3g}'}"
    )


def _problems(
    part: Surrogate | Penalty,
    ratios: Sequence[float],
    signs: Sequence[float],
    fields: Mapping[str, float],
) -> list[str]:
    """What is odd: numbers that are not finite, masked tokens that count, a wrong `per_token`."""
    problems = []
    for sign in signs:
        separate = measure(part, ratios, sign, fields)
        for quantity, value in {"loss": separate.loss, "gradient": separate.gradient}.items():
            odd = np.argwhere(~np.isfinite(value))
            if len(odd):
                ratio, first = ratios[odd[0, 0]], value[tuple(odd[0])]
                problems.append(
                    f"the {quantity} at ratio {ratio:g} and A = {sign:g} is {first}: in training "
                    "it would reach the parameters"
                )
        spoiled = measure(part, ratios, sign, fields, spoiled=True)
        pairs = ((spoiled.loss, separate.loss), (spoiled.gradient, separate.gradient))
        if any(
            np.any(spoiled_row != [*separate_row, 0])
            for spoiled_rows, separate_rows in pairs
            for spoiled_row, separate_row in zip(spoiled_rows, separate_rows, strict=True)
        ):
            problems.append(
                "a masked token that holds NaN counts: loss and gradient must be 0 there, and no "
                "other token may read it; see tokens.unmasked and tokens.without_gradient"
            )
        joint = measure(part, ratios, sign, fields, one_sequence=True)
        if part.per_token and not np.allclose(joint.gradient.T, separate.gradient, rtol=1e-5):
            problems.append(
                "it says per_token = True, but the gradient of a token depends on the others of "
                "its sequence: leave per_token out"
            )
    return [*dict.fromkeys(problems)]


def _rows(
    ratios: Sequence[float], losses_by_sign: Mapping[float, LossValues]
) -> list[dict[str, float]]:
    """A row for each advantage and ratio."""
    return [
        {
            "A": sign,
            "ratio": ratio,
            "loss": float(loss_values.loss.ravel()[place]),
            "dloss/dlogp": float(loss_values.gradient.ravel()[place]),
            **{
                f"dloss/d{name}": float(gradient.ravel()[place])
                for name, gradient in loss_values.field_gradients.items()
            },
        }
        for sign, loss_values in losses_by_sign.items()
        for place, ratio in enumerate(ratios)
    ]


def _show(
    console: Console,
    ratios: Sequence[float],
    losses_by_sign: Mapping[float, LossValues],
    fields: Mapping[str, float],
) -> None:
    rows = _rows(ratios, losses_by_sign)
    cells = ([f"{value + 0:.4g}" for value in row.values()] for row in rows)
    head = list(rows[0])
    table = terminal_table([head, *cells], text=(), no_wrap=True, box=None, pad_edge=False)
    console.print()
    show_whole(console, table)
    if fields:
        values = ", ".join(f"{name} = {value:g}" for name, value in fields.items())
        console.print(f"with {values} (--field)", markup=False, soft_wrap=True)
    for sign, loss_values in losses_by_sign.items():
        for name, value in loss_values.metrics.items():
            console.print(f"A = {sign:g}: {name} = {value:.4g}", markup=False)


def _document(
    ratios: Sequence[float],
    losses_by_sign: Mapping[float, LossValues],
    flat_regions: Mapping[float, Sequence[tuple[float | None, float | None]]],
    fields: Mapping[str, float],
) -> dict[str, Any]:
    """What `_show` prints, and where there is no gradient, for --json."""
    return {
        "rows": _rows(ratios, losses_by_sign),
        "fields": fields,
        "metrics": {
            f"{sign:g}": loss_values.metrics for sign, loss_values in losses_by_sign.items()
        },
        "no_gradient": {f"{sign:g}": regions for sign, regions in flat_regions.items()},
    }
