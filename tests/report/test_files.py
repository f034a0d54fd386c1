"""Files are replaced as a whole or not at all."""

from __future__ import annotations

import os

import pytest

from pina_flwr.report.files import write_atomically


def test_text_and_bytes_replace_what_was_there(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, "ε")
    assert path.read_bytes() == "ε".encode()
    write_atomically(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomically(path, "old")

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]
