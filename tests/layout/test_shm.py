import errno
import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys.layout.transport.owned_file import WEIGHTS_PREFIX, local_copy, remove_orphans
from rlsys.layout.transport.shm import ALIGNMENT, WeightFile, open_weights, write_weights

TENSORS = {
    "embedding": torch.arange(12, dtype=torch.float32).view(3, 4),
    "norm": torch.ones(5, dtype=torch.bfloat16),
    "transposed": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    "scalar": torch.tensor(2.5),
}


def test_readers_see_what_was_written(tmp_path: Path) -> None:
    manifest = write_weights(7, TENSORS.items(), tmp_path / "weights")
    assert manifest.version == 7
    found = open_weights(manifest)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert all(entry.offset % ALIGNMENT == 0 for entry in manifest.entries.values())
    assert manifest.num_bytes == 4 * ALIGNMENT == (tmp_path / "weights").stat().st_size


def test_a_reader_keeps_a_version_that_was_unlinked(tmp_path: Path) -> None:
    manifest = write_weights(1, TENSORS.items(), tmp_path / "weights")
    found = open_weights(manifest)
    Path(manifest.path).unlink()
    assert torch.equal(found["embedding"], TENSORS["embedding"])


def test_what_a_reader_writes_stays_with_it(tmp_path: Path) -> None:
    manifest = write_weights(1, TENSORS.items(), tmp_path / "weights")
    open_weights(manifest)["embedding"].zero_()
    assert torch.equal(open_weights(manifest)["embedding"], TENSORS["embedding"])


def test_a_version_is_never_overwritten(tmp_path: Path) -> None:
    write_weights(1, TENSORS.items(), tmp_path / "weights")
    with pytest.raises(FileExistsError):
        write_weights(2, TENSORS.items(), tmp_path / "weights")


def test_pieces_are_converted_to_the_dtype_of_the_file(tmp_path: Path) -> None:
    file = WeightFile(tmp_path / "weights", {"w": (torch.bfloat16, (2,))})
    file.put("w", torch.tensor([1.0, 1 / 3]))
    found = open_weights(file.manifest(1))["w"]
    assert torch.equal(found, torch.tensor([1.0, 1 / 3], dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("damage", "message"), [(b"x", "the bytes changed"), (None, "it was cut off")]
)
def test_damaged_bytes_are_refused(tmp_path: Path, damage: bytes | None, message: str) -> None:
    manifest = write_weights(1, TENSORS.items(), tmp_path / "weights")
    with open(manifest.path, "r+b") as file:
        if damage:
            file.write(damage)
        else:
            file.truncate(ALIGNMENT)
    with pytest.raises(ValueError, match=message):
        open_weights(manifest)


def test_no_room_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reservation a full tmpfs would kill the process at its first write (SIGBUS)."""

    def no_space(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(
        OSError, match=r"cannot reserve 0\.00 GiB for a version of the weights .* --shm-size"
    ) as error:
        write_weights(1, TENSORS.items(), tmp_path / "weights")
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


KILLED_WRITER = """
import os, sys, torch
from pathlib import Path
from rlsys.layout.transport.shm import WeightFile
file = WeightFile(Path(sys.argv[1]), {"w": (torch.float32, (2,))})
os.kill(os.getpid(), 9)
"""


def test_only_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    dead, other = tmp_path / f"{WEIGHTS_PREFIX}dead", tmp_path / "other"
    subprocess.run([sys.executable, "-c", KILLED_WRITER, dead], timeout=60, check=False)
    living = WeightFile(tmp_path / f"{WEIGHTS_PREFIX}living", {"w": (torch.float32, (2,))})
    other.write_bytes(b"")
    assert dead.exists()
    remove_orphans(tmp_path, WEIGHTS_PREFIX)
    assert set(tmp_path.iterdir()) == {living.path, other}


def test_a_copy_lasts_as_long_as_it_is_used(tmp_path: Path) -> None:
    manifest = write_weights(1, TENSORS.items(), tmp_path / f"{WEIGHTS_PREFIX}{uuid.uuid4().hex}")
    with local_copy(manifest, np.fromfile(manifest.path, np.uint8)) as local:
        assert local.path != manifest.path
        remove_orphans(Path(local.path).parent, WEIGHTS_PREFIX)
        found = open_weights(local)
    assert torch.equal(found["embedding"], TENSORS["embedding"])
    assert not Path(local.path).exists()
