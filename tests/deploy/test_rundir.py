"""The directory of a deployment's sockets and locks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_flow.deploy.rundir import RunDir


def test_a_run_directory_is_removed_although_a_socket_in_it_goes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the memory manager's does, which ends when the launcher has."""
    run_dir = RunDir(str(tmp_path / "run"))
    for name in ("a.sock", "b.sock"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"{run_dir.path}/{name}")
    look = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        entries = sorted(look(path), key=lambda entry: entry.name)
        os.unlink(f"{path}/a.sock")
        return iter(entries)

    monkeypatch.setattr(os, "scandir", scandir)
    run_dir.remove()
    assert list(tmp_path.iterdir()) == []
