"""The language of triggers, against conditions worked out by hand."""

import numpy as np
import pytest

from hookrec.conditions import COLUMNS, Condition, Judged
from hookrec.errors import AttachError

NAN = float("nan")
COLUMNS_OF_A_STEP = {
    "n_nan": np.array([0.0, 2.0, 0.0]),
    "l2": np.array([1.0, NAN, 2e4]),
    "max": np.array([3.0, 4.0, 5.0]),
    "kind": np.array(["output", "grad_output", "grad_output"], object),
    "layer": np.array(["blocks.0.fc", "blocks.1.fc", ""], object),
    "path": np.array(["", "", "x"], object),
}
SCALARS = {"loss": 8.0, "train/loss": NAN, "nought": 0.0}
EARLIER = {"loss": [100.0, 1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("n_nan > 0", [False, True, False]),
        ("kind == 'grad_output' and l2 > 1e4", [False, False, True]),
        ("not (l2 <= 1e4)", [False, True, True]),
        ("kind in ('output', 'input') or n_nan == 2", [True, True, False]),
        ("kind not in ('output',)", [False, True, True]),
        ("like(layer, 'blocks.*') and not like(layer, '*.0.*')", [False, True, False]),
        ("layer == path", [False, False, False]),
        ("layer == ''", [False, False, True]),
        ("1 < max < 5", [True, True, False]),
        ("max ** 2 - 1 == 8 and -max == +(0 - 3) and max % 2 == 1 and max / 2 == 1.5", [True, False, False]),
        ("max > 2 * loss / 4", [False, False, True]),
        ("loss > 3 * median(loss, 3)", True),
        ("loss > 3 * median(loss, 4)", True),
        ("loss == max(loss, 2) + 5 and min(loss, 3) == 1 and mean(loss, 2) == 2.5", True),
        ("loss > max(loss, 4)", False),
        ("isnan(scalar('train/loss'))", True),
        ("scalar('train/loss') != scalar('train/loss')", True),
        ("not isfinite(scalar('train/loss')) and abs(0 - loss) == 8", True),
        ("1 / nought > 1e300", True),
        ("9.0 ** 9 ** 9 > 1", True),
        ("  n_nan\n > 0 ", [False, True, False]),
        # What is not logged, or has too few values, is unknown.
        ("accuracy > 0", None),
        ("not accuracy > 0", None),
        ("accuracy > 0 and n_nan > 0", None),
        ("accuracy > 0 or n_nan > 0", [False, True, False]),
        ("loss > median(loss, 5)", None),
        ("accuracy in (1, 2)", None),
    ],
)
def test_a_condition_holds_for_records_or_for_the_step(text, wanted):
    got = Condition(text).judge(Judged(COLUMNS_OF_A_STEP, SCALARS, EARLIER))

    assert (None if got is None else got.tolist()) == wanted


@pytest.mark.parametrize(
    ("text", "position", "why"),
    [
        ("", None, "cannot be understood at its end: "),
        ("n_nan >", None, "invalid syntax"),
        ("n_nan = 0", None, "equality is =="),
        ("n_nan >", None, "cannot be understood at its end: "),
        ("n_nan > 0 and", None, "cannot be understood at its end: "),
        ("n_nans > 0", 1, "no column 'n_nans', but 'n_nan'"),
        ("l2 > 1 & n_nan > 0", 6, "write 'and'"),
        ("l2 > 1 and n_nan", 12, "a number, where a condition belongs"),
        ("l2", 1, "is a number and no condition"),
        ("kind > 'a'", 1, "texts are compared"),
        ("kind == 3", 9, "a number, where a text belongs"),
        ("l2 + kind > 3", 6, "a text, where a number belongs"),
        ("l2 is 3", 7, "== or !="),
        ("(l2 > 1) > 0", 2, "a condition, where"),
        ("l2 in 3", 7, "parentheses"),
        ("median(l2, 3) > 1", 1, "logged number"),
        ("median(loss) > 1", 1, "how many"),
        ("median(loss, 0) > 1", 14, "from 1"),
        ("median(loss, x) > 1", 14, "whole number"),
        ("median(loss, True) > 1", 14, "whole number"),
        ("like(layer, kind)", 13, "glob in quotes"),
        ("abs(1, 2) > 1", 1, "takes one value"),
        ("abs(*loss) > 1", 1, "values alone"),
        ("eval('1') > 1", 1, "eval is no function"),
        ("__import__('os').system('x') > 1", 1, "this is no function"),
        ("l2.__class__ > 1", 1, "attribute"),
        ("[x for x in y] > 1", 1, "listcomp"),
        ("lambda: 1", 1, "lambda"),
        ("(x := 3) > 1", 2, "namedexpr"),
        ("l2 > 1 if loss else 2", 1, "ifexp"),
        ("True", 1, "no true and false"),
        ("1j > l2", 1, "constant"),
        ("l2 > " + "9" * 400, 6, "too large"),
        ("l2 > \\d", 7, ""),
        ("层 == kind", 6, "a text, where a number belongs"),
        ("l2\0 > 1", None, "null"),
        ("x" * 20_000, None, "longer than"),
        ("(" * 5000 + "l2" + ")" * 5000, None, ""),
        ("not " * 3000 + "l2 > 1", None, "cannot be understood"),
    ],
)
def test_what_is_no_condition_is_refused_with_its_place_and_the_columns(text, position, why):
    with pytest.raises(AttachError) as refused:
        Condition(text)

    message = str(refused.value)
    assert why in message
    assert ", ".join(COLUMNS) in message
    if position is not None:
        assert f" at position {position}," in message


def test_a_condition_says_what_it_asks_for():
    condition = Condition("kind == 'output' and l2 > loss + median(loss, 7) + mean(loss, 3) or scalar('a b') > 1")

    assert condition.columns == {"kind", "l2"}
    assert condition.scalars == {"loss": 7, "a b": 0}


def test_a_step_without_records_has_none_for_which_a_condition_holds():
    empty = {"n_nan": np.array([]), "layer": np.array([], object)}

    assert not Condition("n_nan == 0 and like(layer, '*')").judge(Judged(empty, {}, {})).any()
