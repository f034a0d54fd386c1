"""`pina privacy` as users see it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from pina_flwr.cli import app as pina


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(pina, ["privacy", *arguments])


def epsilon_of(output: str, who: str) -> float:
    return float(re.search(rf"{who}\s*│\s*([\d.,]+)", output)[1].replace(",", ""))  # type: ignore[index]


def test_shows_noise_adversaries_curve_and_caveats():
    result = invoke("-c", "epsilon=3")
    assert result.exit_code == 0
    assert 2.9 < epsilon_of(result.stdout, "model recipients") <= 3
    assert epsilon_of(result.stdout, "the server") > 3
    for text in ("skellam, b = 20", "round of stage 2", "10,000 users", "semi-honest", "RDP (Skellam"):
        assert text in " ".join(result.stdout.split())
    assert "PLD" not in result.stdout


def test_given_noise_gives_epsilon_and_more_noise_less():
    some, more = (epsilon_of(invoke("-c", f"noise-multiplier={z}").stdout, "the server") for z in (1.0, 2.0))
    assert more < some


def test_the_tighter_accountant_is_named_for_what_it_is():
    output = " ".join(invoke("--tighter").stdout.split())
    assert "for comparison and not guaranteed" in output
    recipients = re.search(r"model recipients │ ([\d.]+) │ ([\d.]+)", output)
    assert recipients is not None
    assert float(recipients[2]) < float(recipients[1])


def test_local_sketches_have_an_adversary_of_their_own():
    assert "reader of one sketch" in invoke("-c", "stage1=sketch").stdout
    paper = invoke("-c", "stage1=sketch sketch=paper sketch-size=4").stdout
    assert re.search(r"reader of one sketch\s*│\s*∞", paper)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-c", "epsilon=inf"], "epsilon = inf: no noise is added"),
        (["-c", "num-users=0"], "num-users = 0"),
        (["-c", "user-column=writer_id num-users=0 rotations=1"], "num-users = 0: must be given here"),
        (["-c", "epsilon=nan"], "epsilon = nan: must be a finite number"),
        (["-c", "bits=8"], "bits = 8: too small"),
        (["-c", "delta=1.5"], "delta = 1.5"),
        (["-c", "mechanism=laplace"], "mechanism = 'laplace': must be one of"),
        (["-c", "dropout-tolerance=0.7 colluding-share=0.4"], "must add up"),
        (["--curve", "/none/curve.csv"], "--curve"),
    ],
)
def test_mistakes_are_one_line(arguments, error):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert error in result.stderr


def test_what_is_slow_to_import_is_not_imported():
    code = (
        "import sys; from pina_flwr.cli import app\n"
        "app(['privacy', '-c', 't-tr=1000'], standalone_mode=False)\n"
        "assert not {'torch', 'opacus', 'transformers', 'ray', 'dp_accounting.pld'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
