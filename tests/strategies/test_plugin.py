"""A user's own strategy: found by its path on server and nodes, bundled with the app; mistakes in a line."""

import importlib
import io
import json
import math
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.cli.build import build_fab_from_disk
from support import json_of, models_sent, rows_of, run

from pina_flwr import server
from pina_flwr.config import SERVER_OPTIMIZERS, ConfigError, RunConfig, parse, to_dict
from pina_flwr.runner.app import find_app, stage
from pina_flwr.strategies import strategy_class
from pina_flwr.strategies.ifca import IFCA
from pina_flwr.traits import TRAITS, Traits, traits_of

Make = Callable[..., RunConfig]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "strategies.md"
HEAD = """
from pina_flwr.strategies.clustered import ClusteredTraining
from pina_flwr.traits import Traits
"""


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return code


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes a module where it can be imported; forgotten afterwards."""
    folder, before = tmp_path / "modules", set(sys.modules)
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(name: str, code: str) -> None:
        (folder / f"{name}.py").write_text(textwrap.dedent(code), encoding="utf-8")
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    traits_of.cache_clear()


def mistake(strategy: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        parse({"strategy": strategy} | options)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_the_page_has_all_strategies_and_server_optimisers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert {name for name in (*TRAITS, *SERVER_OPTIMIZERS) if f"`{name}`" not in rows} == set()


class TestExample:
    """The one in docs/strategies.md."""

    def test_is_short(self) -> None:
        assert len([line for line in example().splitlines() if line.strip()]) <= 20

    @pytest.mark.usefixtures("bare")
    def test_runs_as_it_says(self, config: Make, modules: Callable[[str, str], None]) -> None:
        """Without noise: as IFCA does, but for the factor 1/√t on each round's step."""
        modules("cooling", example())
        options = {"epsilon": math.inf, "diagnostics": False, "clip_norm": 100.0, "sampling_rate": 1.0}
        plain = config(strategy="ifca", **options)
        expected = models_sent(run(plain, 2), 2)
        c = config(strategy="cooling:Cooling", **options)
        network = run(c, 2)
        assert strategy_class(c.strategy).traits == c.traits == Traits(start="random", rule="count")
        np.testing.assert_allclose(models_sent(network, 2), expected, rtol=1e-3, atol=1e-5)
        for t, row in enumerate(rows_of(c), start=1):
            factors = np.array(row.weights) * t**0.5
            shares = np.divide(1, factors, out=np.zeros(4), where=factors > 0)
            assert shares.sum() == pytest.approx(1, abs=1e-6)  # of all users, by cluster
        assert json_of(c, "summary.json")["strategy"] == "cooling:Cooling"

    @pytest.mark.usefixtures("bare")
    def test_has_the_guarantee_of_any_other(self, config: Make, modules: Callable[[str, str], None]) -> None:
        modules("cooling", example())
        found = []
        for strategy in ("cooling:Cooling", "pina-ri"):
            c = config(strategy=strategy, diagnostics=False, sampling_rate=1.0, secure_sum="secagg+")
            run(c)
            found.append(json_of(c, "summary.json"))
        for key in ("epsilon", "delta", "noise_multiplier", "caveats"):
            assert found[0][key] == found[1][key]
        assert 7.9 < found[0]["epsilon"]["recipient"] <= 8


@pytest.mark.usefixtures("bare")
def test_traits_decide_what_leaves_a_user(config: Make, modules: Callable[[str, str], None]) -> None:
    modules(
        "greedy",
        HEAD
        + """
class Clear(ClusteredTraining):
    traits = Traits(start="shared", one_model=True, rule="none", in_the_clear=True)

class Local(ClusteredTraining):
    traits = Traits(start="shared", one_model=True, rule="none", local_noise=True)
""",
    )
    assert mistake("greedy:Clear").startswith("secure-sum = 'secagg+': strategy 'greedy:Clear' needs every")
    clear = config(strategy="greedy:Clear", epsilon=math.inf, secure_sum="none")
    assert run(clear).trained("raw-update")
    assert "No secure sum, no central DP" in json_of(clear, "summary.json")["caveats"][0]
    local = config(strategy="greedy:Local", epsilon=8.0)
    network = run(local)
    assert network.trained("local-update")
    assert not network.trained("update")
    epsilon = json_of(local, "summary.json")["epsilon"]
    assert epsilon["recipient"] == epsilon["server"] <= 8


class TestMistakes:
    @pytest.mark.parametrize(
        "path", ["nowhere", "a b:C", ":C", "m:", "m:C:D", "m:C.D", "../m:C", "m:C()", "1m:C", ".m:C", "é:C"]
    )
    def test_what_is_neither_a_name_nor_a_path(self, path: str) -> None:
        found = mistake(path)
        assert found.startswith(f"strategy = {path!r}: must be one of pina, pina-ri, fedavg,")
        assert found.endswith("bulyan, or a class of your own such as my_package.my_module:MyStrategy")

    def test_a_module_that_is_not_there(self) -> None:
        assert mistake("nowhere:Mine") == (
            "strategy = 'nowhere:Mine': nowhere can't be imported here (ModuleNotFoundError: No module named "
            "'nowhere')"
        )

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
            ("import sys; sys.exit(3)", "SystemExit: 3"),
            ("raise GeneratorExit('gone')", "GeneratorExit: gone"),
            ("def __getattr__(name):\n    raise ValueError(name)", "ValueError: "),
            ("1 / 0", "ZeroDivisionError: division by zero"),
            ("def f(:", "SyntaxError: invalid syntax"),
            ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
            (
                HEAD + "class C(ClusteredTraining):\n    traits = Traits(start='nowhere')",
                "ValueError: start = 'nowhere': must be one of stage1, random, shared",
            ),
            (
                HEAD + "class C(ClusteredTraining):\n    traits = Traits(in_the_clear=True)",
                "ValueError: in_the_clear: must have one_model, rule = 'none' and no local_noise",
            ),
            (
                HEAD + "class C(ClusteredTraining):\n    traits = Traits(start='stage1', local_noise=True)",
                "ValueError: local_noise: goes with no secure sums, of which start = 'stage1' may have some",
            ),
        ],
    )
    def test_a_module_that_raises(self, modules: Callable[[str, str], None], code: str, reason: str) -> None:
        modules("broken", code)
        found = mistake("broken:C")
        assert found.startswith(f"strategy = 'broken:C': broken can't be imported here ({reason}")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Other", "module mine has no Other"),
            ("number", "must be a subclass of pina_flwr.strategies.clustered.ClusteredTraining"),
            ("Stranger", "must be a subclass of pina_flwr.strategies.clustered.ClusteredTraining"),
            ("Dict", "Dict.traits must be a pina_flwr.traits.Traits"),
            ("Half", "Half is abstract; must define step"),
            ("Rule", "rule = 'median' must be empty or one of count, paper, paper-no-zeroing, energy, none"),
        ],
    )
    def test_what_is_no_strategy(self, modules: Callable[[str, str], None], name: str, message: str) -> None:
        modules(
            "mine",
            HEAD
            + """
import abc
number = 3
class Stranger: ...
class Dict(ClusteredTraining):
    traits = {"start": "random"}
class Half(ClusteredTraining):
    @abc.abstractmethod
    def step(self): ...
class Rule(ClusteredTraining):
    traits = Traits(rule="median")
""",
        )
        assert mistake(f"mine:{name}") == f"strategy = 'mine:{name}': {message}"

    def test_one_that_is_there_by_its_path(self) -> None:
        assert strategy_class("pina_flwr.strategies.ifca:IFCA") is IFCA
        assert parse({"strategy": "pina_flwr.strategies.ifca:IFCA"}).local_updates

    def test_ends_a_run_with_one_line(self, config: Make, flwr_log: pytest.LogCaptureFixture) -> None:
        options = to_dict(config()) | {"strategy": "no_such_module:Mine"}
        with pytest.raises(ConfigError):
            server.main(None, options, 1)  # type: ignore[arg-type]
        (line,) = [record.getMessage() for record in flwr_log.records if record.levelname == "ERROR"]
        assert line.startswith("error: strategy = 'no_such_module:Mine': ")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """This app, as somebody has it who put a module of his own beside pyproject.toml."""
    folder = tmp_path / "my app"
    stage(ROOT, folder)
    (folder / "cooling.py").write_text(example(), encoding="utf-8")
    return folder


def test_it_travels_in_the_bundle(app: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as bundle:
        assert "cooling.py" in bundle.namelist()


def test_the_command_finds_it_in_the_folder_of_the_app(app: Path) -> None:
    assert str(app) not in sys.path
    assert find_app(app) == app
    assert sys.path.count(str(app)) == 1
    find_app(app)
    assert sys.path.count(str(app)) == 1


RUN = """
import sys
from pina_flwr.cli import main
sys.argv = ["pina", "run", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_a_whole_run_of_flower(app: Path, tmp_path: Path) -> None:
    """`pina run`, which starts `flwr run`, from another folder than the app's."""
    output, size = tmp_path / "run", "num-users=14 images-per-user=5 sampling-rate=1.0 t-tr=1 local-epochs=1"
    options = ["strategy=cooling:Cooling", f"{size} noise-cohort-size=0 secure-sum=trusted diagnostics=false"]
    where = ["--app", str(app), "--output", str(output), "--nodes", "2"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *where, "-c", options[0], "-c", options[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert (summary["strategy"], summary["trained"]) == ("cooling:Cooling", True)
