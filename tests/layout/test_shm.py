import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlsys.layout.transport.shared_memory import MemoryGone
from rlsys.layout.transport.shm import (
    ALIGNMENT,
    WeightFile,
    held,
    local_copy,
    open_weights,
    read_weights,
    write_weights,
)

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


def test_pieces_are_converted_to_the_dtype_of_the_file() -> None:
    file = WeightFile(1, {"w": (torch.bfloat16, (2,))})
    file.put("w", torch.tensor([1.0, 1 / 3]))
    found = open_weights(file.manifest())["w"]
    file.close()
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
        OSError, match=r"cannot take 256 bytes for a version of the weights: No space left"
    ) as error:
        write_weights(1, TENSORS.items(), tmp_path / "weights")
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def make_file(version: int) -> WeightFile:
    file = WeightFile(version, {name: (t.dtype, t.shape) for name, t in TENSORS.items()})
    for name, tensor in TENSORS.items():
        file.put(name, tensor)
    return file


def test_a_number_that_is_used_again_is_no_other_version() -> None:
    file = make_file(1)
    first = file.manifest()
    assert torch.equal(open_weights(first)["embedding"], TENSORS["embedding"])
    file.close()
    with pytest.raises(MemoryGone, match="rlsys-weights-v1 is gone"):
        open_weights(first)
    other = make_file(2)
    assert other.manifest().path == first.path
    with pytest.raises(MemoryGone, match=r"rlsys-weights-v1 is gone: .* to /memfd:rlsys-weig"):
        open_weights(first)
    other.close()


READER = """
import pickle, sys
from rlsys.layout.transport.shm import held, open_weights
manifest = pickle.loads(bytes.fromhex(sys.stdin.readline()))
with held(manifest) as own:
    print("held", flush=True)
    sys.stdin.readline()
    print(float(open_weights(own)["scalar"]))
"""


def test_another_process_keeps_the_version_that_it_holds() -> None:
    file = make_file(5)
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(pickle.dumps(file.manifest()).hex() + "\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "held\n"
        file.close()
        output, _ = reader.communicate("\n", timeout=300)
    assert output == "2.5\n"


def test_a_copy_lasts_as_long_as_it_is_used() -> None:
    file = make_file(1)
    manifest = file.manifest()
    with local_copy(manifest, read_weights(manifest)) as local:
        file.close()
        assert local.path != manifest.path
        found = open_weights(local)
    assert torch.equal(found["embedding"], TENSORS["embedding"])
    assert not Path(local.path).exists()


def test_bytes_of_a_closed_version_are_not_sent() -> None:
    file = make_file(1)
    manifest = file.manifest()
    file.close()
    with pytest.raises(MemoryGone), held(manifest):
        pass
    with pytest.raises(MemoryGone):
        read_weights(manifest)
