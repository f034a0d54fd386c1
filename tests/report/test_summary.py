"""summary.json, the terminal table, and a closing sentence that is true in every case."""

import io
import json
import math
import os

import pytest
from rich.console import Console

from pina_flwr.config import STRATEGIES, ConfigError
from pina_flwr.report import summary as module
from pina_flwr.report.metrics_log import RoundRow
from pina_flwr.report.summary import (
    NAMES,
    Epsilons,
    NoiseMultipliers,
    Summary,
    known_as,
    print_summary,
    read_summary,
    sentence,
    write_summary,
)

NOISE_OFF = {
    "epsilon": Epsilons(recipient=None, server=None, sketch=None),
    "noise_multiplier": NoiseMultipliers(stage1=None, stage2=0.0),
}


def summary_of(**changes):
    values = {
        "strategy": "pina",
        "accuracy": 0.912,
        "worst_cluster_accuracy": 0.88,
        "clustering_accuracy": 0.991,
        "ari": 0.975,
        "rounds": 28,
        "seconds": 75.25,
        "epsilon": Epsilons(recipient=8.0, server=91.234, sketch=0.0),
        "delta": 232**-1.1,
        "noise_cohort_size": 10_000,
        "cohort": 49.88,
        "users": 232,
        "seed": 1,
        "dataset": "digits",
        "backbone": "tiny-vit",
        "clusters": 4,
        "groups": 4,
        "noise_multiplier": NoiseMultipliers(stage1=1.5, stage2=0.9),
    }
    return Summary(**(values | changes))


def printed(summary, rows=(), folder="runs/latest", width=120):
    console = Console(file=io.StringIO(), width=width)
    print_summary(console, summary, rows, folder)
    return console.file.getvalue()


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_summary_comes_back_as_written(tmp_path):
    summary = summary_of(
        caveats=["ε covers one run"],
        epsilon_as_paper_counts={"recipient": 4.2, "sketch": None},
        dropped_rounds=2,
        accuracy=None,
        groups=None,
    )
    path = write_summary(tmp_path / "new" / "folder", summary)
    assert path == tmp_path / "new" / "folder" / "summary.json"
    assert read_summary(path.parent) == summary


def test_keys_of_summary_json(tmp_path):
    values = json.loads(write_summary(tmp_path, summary_of()).read_text())
    promised = (
        "strategy accuracy worst_cluster_accuracy clustering_accuracy ari rounds seconds epsilon delta "
        "noise_cohort_size cohort users"
    )
    assert list(values)[:12] == promised.split()
    assert values["epsilon"] == {"recipient": 8.0, "server": 91.234, "sketch": 0.0}
    assert values["noise_multiplier"] == {"stage1": 1.5, "stage2": 0.9}


def test_not_finite_is_null(tmp_path):
    epsilon = Epsilons(recipient=math.inf, server=math.nan, sketch=None)
    text = write_summary(tmp_path, summary_of(epsilon=epsilon, accuracy=math.nan)).read_text()
    values = json.loads(text, parse_constant=refuse_constant)
    assert values["epsilon"] == {"recipient": None, "server": None, "sketch": None}
    assert values["accuracy"] is None


def test_summary_json_is_for_people_too(tmp_path):
    summary = summary_of(caveats=["ε covers |K| users"], dataset="caf\udce9")
    text = write_summary(tmp_path, summary).read_text(encoding="utf-8")
    assert "ε covers" in text
    assert read_summary(tmp_path) == summary


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_summary(tmp_path, summary_of())

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_summary(tmp_path, summary_of(seed=2))
    assert read_summary(tmp_path) == summary_of()
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_new_file_is_synced_before_it_takes_the_name(tmp_path, monkeypatch):
    write_summary(tmp_path, summary_of())
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(read_summary(tmp_path).seed), fsync(fd)))
    write_summary(tmp_path, summary_of(seed=2))
    assert seen == [1]
    assert read_summary(tmp_path).seed == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"epsilon": null}', '{"epsilon": {"server": 1}}']
)
def test_a_bad_file_is_named(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ConfigError, match=r"summary\.json: must be"):
        read_summary(tmp_path)


def change(folder, **fields):
    """Write a summary and set some fields of the file."""
    path = write_summary(folder, summary_of())
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"accuracy": "x"}, "accuracy = 'x': must be a finite number"),
        ({"seconds": None}, "seconds = None: must be a finite number"),
        ({"seconds": math.inf}, "seconds = inf: must be a finite number"),
        ({"rounds": 2.5}, r"rounds = 2\.5: must be a whole number"),
        ({"seed": True}, "seed = True: must be a whole number"),
        ({"strategy": 1}, "strategy = 1: must be a string"),
        ({"trained": 1}, "trained: must be true or false"),
        ({"caveats": None}, "caveats: must be a list"),
        ({"caveats": [1]}, "caveats = 1: must be a string"),
        ({"epsilon": 8.0}, "must hold the fields of Epsilons"),
        ({"epsilon": {"recipient": "8", "server": None, "sketch": None}}, "recipient = '8': must be"),
        ({"epsilon_as_paper_counts": [1]}, "epsilon_as_paper_counts: must be a table"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(tmp_path, fields, error):
    change(tmp_path, **fields)
    with pytest.raises(ConfigError, match=rf"summary\.json: must be .*{error}"):
        read_summary(tmp_path)


def test_a_file_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "summary.json").write_text(100_000 * "[" + 100_000 * "]")
    with pytest.raises(ConfigError, match=r"summary\.json: must be"):
        read_summary(tmp_path)


def test_fields_of_newer_code_are_ignored_and_required_ones_are_not_guessed(tmp_path):
    change(tmp_path, newer=[1])
    assert read_summary(tmp_path) == summary_of()
    values = json.loads((tmp_path / "summary.json").read_text())
    del values["seed"]
    (tmp_path / "summary.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="seed is missing"):
        read_summary(tmp_path)


def test_a_folder_without_a_summary_is_named(tmp_path):
    with pytest.raises(ConfigError, match="must be the output folder of a finished run"):
        read_summary(tmp_path)


def test_sentence_of_a_success():
    assert sentence(summary_of(), chance=0.1) == (
        "PINA found the 4 hidden groups of 232 users (clustering accuracy 0.99) and reached 0.91 mean "
        "test accuracy at ε = 8.0 (model recipients, noise of a 10,000-user cohort)."
    )


@pytest.mark.parametrize(
    ("clustering_accuracy", "verdict"),
    [
        (1.0, "PINA found the"),
        (0.946, "PINA found the"),
        (0.944, "PINA only partly found the"),
        (0.8, "PINA only partly found the"),
        (0.75, "PINA did not find the"),
        (0.5, "PINA did not find the"),
    ],
)
def test_sentence_says_whether_groups_were_found(clustering_accuracy, verdict):
    text = sentence(summary_of(clustering_accuracy=clustering_accuracy))
    assert text.startswith(verdict)
    assert f"(clustering accuracy {clustering_accuracy:.2f})" in text


def test_fewer_clusters_than_groups_cannot_find_them():
    assert "only partly found" in sentence(summary_of(clusters=3, clustering_accuracy=0.96))


def test_sentence_without_privacy():
    text = sentence(summary_of(**NOISE_OFF))
    assert text.endswith("0.91 mean test accuracy without privacy noise (ε = ∞).")
    assert "10,000" not in text
    infinite = Epsilons(recipient=math.inf, server=math.inf, sketch=math.inf)
    assert sentence(summary_of(**NOISE_OFF | {"epsilon": infinite})) == text


@pytest.mark.parametrize("recipient", [None, math.inf, math.nan])
def test_noise_without_a_guarantee_is_not_called_private(recipient):
    text = sentence(summary_of(epsilon=Epsilons(recipient=recipient, server=1.0, sketch=1.0)))
    assert text.endswith("with no finite ε towards model recipients.")


@pytest.mark.parametrize("noise_cohort_size", [0, 50])
def test_noise_of_the_own_cohort_is_not_borrowed(noise_cohort_size):
    summary = summary_of(noise_cohort_size=noise_cohort_size)
    assert sentence(summary).endswith("at ε = 8.0 (model recipients).")


def test_sentence_of_a_natural_split():
    text = sentence(summary_of(groups=None, clustering_accuracy=None, ari=None, clusters=2, users=2840))
    assert text.startswith(
        "PINA trained 2 cluster models for 2,840 users, whose true groups are unknown, and reached"
    )
    assert "found" not in text


def test_sentence_of_fedavg_says_nothing_on_clusters():
    text = sentence(summary_of(strategy="fedavg", clusters=1, clustering_accuracy=0.25))
    assert text.startswith("FedAvg trained one model for 232 users and reached 0.91")
    assert "cluster" not in text


def test_sentence_does_not_credit_the_oracle():
    text = sentence(summary_of(strategy="oracle", clustering_accuracy=1.0))
    assert text.startswith("The oracle was given the 4 hidden groups")
    assert "found" not in text


def test_sentence_without_hidden_groups_or_measurements():
    assert "found" not in sentence(summary_of(groups=1, clustering_accuracy=1.0))
    text = sentence(summary_of(clustering_accuracy=None, accuracy=None))
    assert text == (
        "PINA trained 4 cluster models for 232 users (clustering accuracy not measured), test accuracy "
        "not measured, at ε = 8.0 (model recipients, noise of a 10,000-user cohort)."
    )
    assert sentence(summary_of(clustering_accuracy=math.nan, accuracy=math.nan)) == text


@pytest.mark.parametrize(
    ("users", "strategy", "said"),
    [
        (1, "pina", "PINA trained 4 cluster models for 1 user, who forms one group, and"),
        (1, "oracle", "The oracle trained 4 cluster models for 1 user, who forms one group, and"),
        (1, "fedavg", "FedAvg trained 4 cluster models for 1 user, who forms one group, and"),
        (3, "pina", "PINA found the 3 hidden groups of 3 users"),
        (3, "oracle", "The oracle was given the 3 hidden groups of 3 users"),
        (5, "pina", "PINA found the 4 hidden groups of 5 users"),
    ],
)
def test_sentence_counts_groups_that_have_users(users, strategy, said):
    assert sentence(summary_of(users=users, strategy=strategy)).startswith(said)


@pytest.mark.parametrize("measured", [None, 0.3, math.nan])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sentence_says_that_nothing_was_trained(strategy, measured):
    text = sentence(summary_of(trained=False, strategy=strategy, accuracy=measured), chance=0.1)
    assert text == (
        f"{NAMES[strategy]} trained nothing: every round of stage 2 was dropped, so the models are those "
        "that training starts from, at ε = 8.0 (model recipients, noise of a 10,000-user cohort)."
    )


def test_sentence_names_dropped_rounds():
    assert sentence(summary_of(dropped_rounds=2)).endswith(", with 2 of 28 rounds dropped.")


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        (0.13, "and reached 0.13 mean test accuracy at ε"),
        (0.11, "and reached only 0.11 mean test accuracy, about chance (0.10), at ε"),
        (0.05, "and reached only 0.05 mean test accuracy, below chance (0.10), at ε"),
    ],
)
def test_sentence_names_chance_when_it_is_not_beaten(accuracy, said):
    assert said in sentence(summary_of(accuracy=accuracy), chance=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_a_name(strategy):
    assert sentence(summary_of(strategy=strategy)).startswith(NAMES[strategy])


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (8.0, "8.0"),
        (7.981, "7.99"),
        (7.9999, "8.0"),
        (1.1, "1.1"),
        (0.001, "0.01"),
        (12345.671, "12,345.68"),
        (1.2341e9, "1.24e+9"),
        (1e300, "1.00e+300"),
    ],
)
def test_epsilon_is_rounded_up(epsilon, text):
    said = sentence(summary_of(epsilon=Epsilons(recipient=epsilon, server=None, sketch=None)))
    assert f"ε = {text} (model" in said


def test_table_names_the_adversary_of_every_epsilon():
    counts = {"recipient": 4.2, "sketch": None}
    epsilon = Epsilons(recipient=8.0, server=None, sketch=0.0)
    lines = printed(summary_of(epsilon=epsilon, epsilon_as_paper_counts=counts)).splitlines()
    for start, value in [
        ("ε towards model recipients (amplified by sampling)", "8.0"),
        ("ε towards the server (not amplified)", "∞ (no finite guarantee)"),
        ("ε towards the reader of a single sketch (local)", "0 (nothing is released, or ε rounds to 0)"),
        ("ε as the paper counts, towards model recipients (amplified by sampling)", "4.2"),
        ("ε as the paper counts, towards the reader of a single sketch (local)", "∞ (no finite guarantee)"),
    ]:
        (line,) = [line for line in lines if start in line]
        assert line.strip("│ ").endswith(value)


def test_table_of_local_noise_says_whose_it_is_and_amplifies_nothing():
    text = printed(summary_of(local_updates=True))
    assert "ε towards model recipients (not amplified)" in text
    assert "each user's own" in text
    assert "noise of a cohort" not in text


def test_nothing_is_amplified_without_noise():
    none = NoiseMultipliers(stage1=None, stage2=None)
    text = printed(summary_of(noise_multiplier=none))
    assert "ε towards model recipients " in text
    assert "amplified by sampling" not in text


def test_accuracy_on_validation_images_is_not_called_test_accuracy():
    summary = summary_of(test_on="validation")
    assert "mean validation accuracy" in sentence(summary)
    text = printed(summary)
    assert "validation accuracy, mean" in text
    assert "test accuracy" not in text


def test_print_summary_tells_caveats_and_place(tmp_path):
    folder = tmp_path / ("long-folder-name-" * 8)
    text = printed(summary_of(caveats=["Keep [bold]brackets[/bold]."]), folder=folder, width=80)
    assert "• Keep [bold]brackets[/bold]." in text
    assert f"Report: {folder}\n" in text
    assert text.count("•") == 1


def test_table_adds_up_the_rounds():
    rows = [
        RoundRow(
            round=1, rounds=3, stage=2, bytes_up=1500, bytes_down=500, cluster_sizes=[200, 32], left_out=1
        ),
        RoundRow(
            round=2, rounds=3, stage=2, bytes_up=1500, bytes_down=500, cluster_sizes=[132, 100], left_out=2
        ),
        RoundRow(round=3, rounds=3, stage=2, dropped="too few users answered"),
    ]
    lines = printed(summary_of(rounds=3, dropped_rounds=1), rows).splitlines()
    for label, value in [
        ("sent to server, to clients", "3.0 kB, 1.0 kB"),
        ("users per cluster", "132, 100"),
        ("updates left out, not finite", "3"),
        ("rounds", "3, 1 of them dropped (too few users answered)"),
        ("time", "75.2 s"),
        ("test accuracy, mean", "0.912"),
    ]:
        (line,) = [line for line in lines if line.strip("│ ").startswith(f"{label} ")]
        assert line.strip("│ ").endswith(f" {value}")


def test_table_of_fedavg_and_of_a_natural_split():
    assert "clustering" not in printed(summary_of(strategy="fedavg", clusters=1))
    natural = printed(summary_of(groups=None, clustering_accuracy=None, ari=None))
    assert natural.count("groups unknown") == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (119.9, "119.9 s"), (125.4, "2 min 5 s"), (3599.7, "1 h 0 min"), (7384, "2 h 3 min")],
)
def test_durations(seconds, text):
    assert module._duration(seconds) == text


def test_a_local_folder_is_known_by_its_name():
    names = ["digits", "owner/mnist", "/data/mnist", "./mnist", "../mnist", "~/x/mnist/"]
    assert [known_as(name) for name in names] == ["digits", "owner/mnist", *["mnist"] * 4]
