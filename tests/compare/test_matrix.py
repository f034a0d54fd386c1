"""The matrix file: what it says, and one line for each mistake."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pina_flwr.compare.matrix import ROUNDS_TO, epsilon_name, read_matrix, slug
from pina_flwr.config import ConfigError

HEAD = "seeds = [1]\nepsilons = [2.0]\n"
ROW = '[[row]]\nname = "A"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "m.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_a_file_says(tmp_path):
    (tmp_path / "a.toml").write_text("t-tr = 3\noutput = 'x'\n")
    (tmp_path / "b.toml").write_text("t-tr = 4\n")
    text = """
        presets = ["a.toml", "b.toml"]
        seeds = [3, 1]
        epsilons = [8, 2.0]
        rounds-to = 0.9
        [options]
        clusters = 2
        [[row]]
        name = "FedAvg"
        strategy = "fedavg"
        [[row]]
        name = "IFCA, μ=1"
        presets = ["a.toml"]
        epsilons = [inf]
        strategy = "ifca"
    """
    matrix = read_matrix(write(tmp_path, text))
    assert (matrix.name, matrix.seeds, matrix.rounds_to) == ("m", (3, 1), 0.9)
    first, second, general = matrix.shared
    assert first.options == {"t-tr": 3, "output": "x"}
    assert (second.where, second.options) == (str(tmp_path / "b.toml"), {"t-tr": 4})
    assert general.options == {"clusters": 2}
    fedavg, ifca = matrix.rows
    assert (fedavg.name, fedavg.epsilons) == ("FedAvg", (2.0, 8.0))
    assert [layer.options for layer in fedavg.layers] == [{"strategy": "fedavg"}]
    assert (ifca.name, ifca.epsilons) == ("IFCA, μ=1", (math.inf,))
    assert [dict(layer.options) for layer in ifca.layers] == [dict(first.options), {"strategy": "ifca"}]
    assert matrix.epsilons == (2.0, 8.0, math.inf)


def test_what_may_be_left_out(tmp_path):
    matrix = read_matrix(write(tmp_path, f"seeds = [1]\n{ROW}epsilons = [2.0]"))
    assert (matrix.rounds_to, matrix.epsilons) == (ROUNDS_TO, (2.0,))
    assert [dict(layer.options) for layer in matrix.shared] == [{}]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "row: must be one or more tables, [[row]]"),
        (HEAD, "row: must be one or more tables"),
        (HEAD + '[row]\nname = "A"', "row: must be one or more tables"),
        ("row = []\n" + HEAD, "row: must be one or more tables"),
        ("epsilons = [2.0]\n" + ROW, "seeds: is missing; must be a list of whole numbers from 0, as in"),
        ("seeds = [1]\n" + ROW, "epsilons: is missing"),
        (HEAD.replace("[1]", "1") + ROW, "seeds = 1: must be a list of whole numbers"),
        (HEAD.replace("[1]", "[]") + ROW, "seeds = []: must be a list"),
        (HEAD.replace("[1]", "[1, -1]") + ROW, "seeds: -1 is in the list; must be whole numbers from 0"),
        (HEAD.replace("[1]", "[1.0]") + ROW, "seeds: 1.0 is in the list"),
        (HEAD.replace("[1]", "[true]") + ROW, "seeds: True is in the list"),
        (HEAD.replace("[1]", "[1, 2, 1]") + ROW, "seeds: 1 is in the list twice"),
        (HEAD.replace("[1]", f"[{2**63}]") + ROW, "seeds: a whole number must be within"),
        (HEAD.replace("[2.0]", "[2.0, 2]") + ROW, "epsilons: 2 is in the list twice"),
        (HEAD.replace("[2.0]", "[0]") + ROW, "epsilons: 0 is in the list; must be numbers above 0"),
        (HEAD.replace("[2.0]", "[nan]") + ROW, "epsilons: nan is in the list"),
        (HEAD.replace("[2.0]", '["2"]') + ROW, "epsilons: '2' is in the list"),
        (HEAD.replace("[2.0]", "[1e400]") + ROW, "epsilons = 1e400: is out of range"),
        ("rounds-to = 1.5\n" + HEAD + ROW, "rounds-to = 1.5: must be above 0 and at most 1"),
        ("rounds-to = 0\n" + HEAD + ROW, "rounds-to = 0: must be above 0"),
        ("rounds-to = true\n" + HEAD + ROW, "rounds-to = True: must be above 0"),
        ("rounds-to = nan\n" + HEAD + ROW, "rounds-to = nan: must be above 0"),
        ("rounds-to = {}\n" + HEAD + ROW, "rounds-to = {}: must be above 0"),
        ("rounds-to = [0.5]\n" + HEAD + ROW, "rounds-to = [0.5]: must be above 0"),
        ("a = " + "[" * 5000 + "]" * 5000, "is not valid TOML"),
        ("presets = ['~no-such-user/x.toml']\n" + HEAD + ROW, "presets = '~no-such-user/x.toml': "),
        ("options = 3\n" + HEAD + ROW, "options = 3: must be a table, [options]"),
        ("preset = []\n" + HEAD + ROW, "unknown key 'preset'; did you mean 'presets'?"),
        ("epsilon = 2.0\n" + HEAD + ROW, "unknown key 'epsilon'; did you mean 'epsilons'?"),
        ("rows = []\n" + HEAD + ROW, "unknown key 'rows'; did you mean 'row'?"),
        ("colour = 1\n" + HEAD + ROW, "unknown key 'colour'; must be one of presets, seeds,"),
        ("lora-rank = 4\n" + HEAD + ROW, "lora-rank: is an option of runs; must be under [options]"),
        ("presets = 'a.toml'\n" + HEAD + ROW, "presets = 'a.toml': must be a list of files"),
        ("presets = [1]\n" + HEAD + ROW, "presets = [1]: must be a list of files"),
        ("presets = ['no.toml']\n" + HEAD + ROW, "no.toml: No such file"),
        (HEAD + ROW + "presets = ['no.toml']", "[[row]] 1: presets:"),
        ("[options]\n" + HEAD + ROW, "[options]: seeds: must be above the first table"),
        (HEAD + "[options]\nseed = 3\n" + ROW, "[options]: seed = 3: must be left out, since seeds sets it"),
        (HEAD + ROW + "epsilon = 2.0", "[[row]] 1: epsilon = 2.0: must be left out, since epsilons sets it"),
        (HEAD + ROW + "output = 'x'", "[[row]] 1: output = 'x': must be left out, since --output sets it"),
        (HEAD + ROW + "epsilons = [-1]", "[[row]] 1: epsilons: -1 is in the list"),
        (HEAD + "[[row]]\nstrategy = 'fedavg'", "[[row]] 1: name: is missing"),
        (HEAD + "[[row]]\nname = 3", "[[row]] 1: name = 3: must be text"),
        (HEAD + "[[row]]\nname = ''", "name = '': must be text"),
        (HEAD + "[[row]]\nname = '+'", "name = '+': must be text"),
        (HEAD + "[[row]]\nname = '_a'", "name = '_a': must be text"),
        (HEAD + '[[row]]\nname = "a\\nb"', "must be text"),
        (HEAD + f"[[row]]\nname = '{'a' * 61}'", "must be text of at most 60 characters"),
        (HEAD + ROW + "[[row]]\nname = 'a+'", "[[row]] 2: name = 'a+': must differ from 'A' in letters"),
        ("seeds = = 1", "is not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_file_and_key(tmp_path, text, error):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_matrix(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert error in message
    assert "\n" not in message


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_matrix(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("FedAvg", "fedavg"), ("PINA + RI", "pina-ri"), (" É μ=1 ", "e-1"), ("a--b", "a-b"), ("☃", "")],
)
def test_folders_are_named_in_plain_letters(name, expected):
    assert slug(name) == expected


@pytest.mark.parametrize(
    ("epsilon", "expected"), [(2.0, "2"), (0.5, "0.5"), (20.0, "20"), (1e-5, "1e-05"), (math.inf, "∞")]
)
def test_epsilon_as_people_write_it(epsilon, expected):
    assert epsilon_name(epsilon) == expected
