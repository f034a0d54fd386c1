"""The store of frozen activations: it saves work and never changes a number."""

import dataclasses
import errno
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pina_flwr.config import ConfigError, RunConfig, parse
from pina_flwr.training import activations
from pina_flwr.training.activations import DECISIVE, Activations, open_activations


class Source:
    """Counts how often it was asked: 4 images, 3 tokens, width 8, so 192 bytes as bfloat16."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return torch.randn((4, 3, 8), generator=torch.Generator().manual_seed(0))


def rounded():
    return Source()().to(torch.bfloat16)


@pytest.mark.parametrize(("cap", "calls"), [(0, 3), (191, 3), (192, 1), (10**6, 1)])
def test_memory_saves_work_and_changes_nothing(cap, calls):
    store, source = Activations(cap), Source()
    for _ in range(3):
        assert torch.equal(store.get("user-1", source), rounded())
    assert source.calls == calls


def test_memory_stays_under_the_cap():
    store, sources = Activations(400), [Source() for _ in range(4)]
    for _ in range(2):
        for user, source in enumerate(sources):
            store.get(f"user-{user}", source)
    assert [source.calls for source in sources] == [1, 1, 2, 2]


def test_keys_are_kept_apart():
    store = Activations(10**6)
    zeros, ones = (
        store.get(name, lambda value=value: torch.full((1, 2, 3), value))
        for name, value in [("a", 0.0), ("b", 1.0)]
    )
    assert not zeros.any()
    assert ones.all()


def test_folder_serves_a_second_run(tmp_path):
    first, again = Source(), Source()
    kept = Activations(0, tmp_path).get("user-1", first)
    store = Activations(0, tmp_path)
    for _ in range(2):
        assert torch.equal(store.get("user-1", again), kept)
    assert torch.equal(kept, rounded())
    assert (first.calls, again.calls) == (1, 0)


def spoil_first_byte(path):
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


def spoil_a_number(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def without_checksum(path):
    save_file({"hidden": torch.ones((4, 3, 8), dtype=torch.bfloat16)}, path)


def another_tensor(path):
    save_file({"other": torch.ones(2)}, path)


def other_shape(path):
    """The numbers of another file under this one's name would have another checksum; so has another shape."""
    value = rounded().reshape(3, 4, 8)
    save_file({"hidden": value}, path, {"checksum": activations._checksum(rounded())})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(os.urandom(300)),
        spoil_first_byte,
        spoil_a_number,
        without_checksum,
        another_tensor,
        other_shape,
    ],
    ids=[
        "empty",
        "cut short",
        "one byte short",
        "noise",
        "first byte",
        "one bit",
        "no checksum",
        "other",
        "shape",
    ],
)
def test_a_damaged_file_is_worked_out_again(tmp_path, spoil):
    Activations(0, tmp_path).get("user-1", Source())
    (path,) = tmp_path.iterdir()
    spoil(path)
    source = Source()
    assert torch.equal(Activations(0, tmp_path).get("user-1", source), rounded())
    assert source.calls == 1
    assert torch.equal(Activations(0, tmp_path).get("user-1", source), rounded())
    assert source.calls == 1  # the good file took its place
    assert [p.name for p in tmp_path.iterdir()] == ["user-1.safetensors"]


def test_a_full_disk_costs_the_cache_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(activations, "save_file", full)
    store, source = Activations(10**6, tmp_path), Source()
    for key in ("user-1", "user-2"):
        assert torch.equal(store.get(key, source), rounded())
    assert [record.message for record in caplog.records if "No space left" in record.message] != []
    assert len(caplog.records) == 1
    assert list(tmp_path.iterdir()) == []


class TestFolderOfARun:
    def folder(self, tmp_path, **options):
        config = parse(
            {"cache-dir": str(tmp_path / "cache")} | {k.replace("_", "-"): v for k, v in options.items()}
        )
        return open_activations(config)._folder

    def test_none_unless_asked(self):
        assert open_activations(parse({}))._folder is None

    @pytest.mark.parametrize("name", DECISIVE)
    def test_a_decisive_option_has_its_own(self, tmp_path, name):
        """What the trainable layers see depends on it."""
        others = {"rotations": 2, "deal": "disjoint", "lora_layers": 2, "augment": 3, "test_on": "validation"}
        others["group_shares"] = "4,3,2,1"
        base = {"rotations": 1} if name == "user_column" else {}
        default = getattr(parse(base), name)
        value = others.get(name, default + 1 if isinstance(default, int) else default + "x")
        assert self.folder(tmp_path, **base, **{name: value}) != self.folder(tmp_path, **base)

    @pytest.mark.parametrize(
        "options",
        [
            {"learning_rate": 0.7},
            {"strategy": "fedavg"},
            {"epsilon": 2.0},
            {"lora_rank": 8},
            {"cache_gib": 0.0},
        ],
    )
    def test_others_share_it(self, tmp_path, options):
        assert self.folder(tmp_path, **options) == self.folder(tmp_path)

    def test_decisive_options_are_options(self):
        assert set(DECISIVE) <= {field.name for field in dataclasses.fields(parse({}))}

    @pytest.mark.parametrize("option", ["backbone", "dataset"])
    def test_a_changed_local_folder_has_its_own(self, tmp_path, option):
        """The same path may hold other weights or data in the next run."""
        local = tmp_path / "local"
        (local / "train").mkdir(parents=True)
        (local / "train" / "a.bin").write_bytes(b"1")
        before = self.folder(tmp_path, **{option: str(local)})
        assert self.folder(tmp_path, **{option: str(local)}) == before
        (local / "train" / "a.bin").write_bytes(b"22")
        after = self.folder(tmp_path, **{option: str(local)})
        (local / "train" / "b.bin").write_bytes(b"3")
        assert len({before, after, self.folder(tmp_path, **{option: str(local)})}) == 3

    def test_same_relative_path_elsewhere(self, tmp_path, monkeypatch):
        folders = set()
        for place in ("a", "b"):
            (tmp_path / place / "model").mkdir(parents=True)
            (tmp_path / place / "model" / "w").write_bytes(b"1")
            os.utime(tmp_path / place / "model" / "w", (0, 0))
            monkeypatch.chdir(tmp_path / place)
            folders.add(self.folder(tmp_path, backbone="model"))
        assert len(folders) == 2

    def test_new_weights_of_the_embedded_backbone(self, tmp_path, monkeypatch):
        from pina_flwr.models import tiny_vit

        before = self.folder(tmp_path)
        (tmp_path / "other.json").write_text("{}")
        monkeypatch.setattr(tiny_vit, "WEIGHTS", tmp_path / "other.json")
        assert self.folder(tmp_path) != before

    @pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
    def test_folder_that_cannot_be_made(self, tmp_path, place):
        (tmp_path / "file").write_text("")
        path = str(tmp_path / place)
        with pytest.raises(ConfigError, match=r"^cache-dir = '.*': can't be written \(") as error:
            open_activations(parse({"cache-dir": path}))
        assert "\n" not in str(error.value)


def test_all_that_decides_which_images_there_are_is_decisive():
    """Else a run would find the activations of other images in the folder, and never know."""
    data = Path(activations.__file__).parents[1] / "data"
    read = {
        name
        for path in data.glob("*.py")
        for name in re.findall(r"\b(?:config|c)\.([a-z_]+)\b", path.read_text(encoding="utf-8"))
    }
    assert read & {"seed", "deal", "test_on"} == {"seed", "deal", "test_on"}
    assert {name for name in read if name in RunConfig.__dataclass_fields__} <= set(DECISIVE)
