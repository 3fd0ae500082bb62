from pathlib import Path

import pytest

from rlsys.common.available_memory import available_bytes, require_memory

GIB = 2**30


def machine(root: Path, available_gib: int, groups: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:   {available_gib * 2**20} kB\n"
    )
    (root / "proc/self/cgroup").write_text(groups)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_without_limits_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    machine(tmp_path, 5, "3:cpu:/\n0::/user/session\n")
    assert available_bytes(tmp_path) == 5 * GIB


def test_the_narrowest_group_counts_and_caches_are_available(tmp_path: Path) -> None:
    machine(tmp_path, 50, "0::/outer/inner\n")
    outer = tmp_path / "sys/fs/cgroup/outer"
    write(outer, max=f"{8 * GIB}\n", current=f"{5 * GIB}", stat=f"anon 7\ninactive_file {GIB}\n")
    assert available_bytes(tmp_path) == 4 * GIB
    write(outer / "inner", max="max\n", current="1", stat="")
    assert available_bytes(tmp_path) == 4 * GIB
    write(outer / "inner", max=f"{2 * GIB}", current=f"{GIB}", stat="inactive_file 0\n")
    assert available_bytes(tmp_path) == GIB


def test_version_1_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    machine(tmp_path, 50, "4:memory:/docker/abc\n1:cpu:/docker/abc\n")
    write(
        tmp_path / "sys/fs/cgroup/memory",
        limit_in_bytes=f"{3 * GIB}",
        usage_in_bytes=f"{2 * GIB}",
        stat="cache 1\ntotal_inactive_file 0\n",
    )
    assert available_bytes(tmp_path) == GIB


def test_the_error_has_purpose_and_sizes(tmp_path: Path) -> None:
    machine(tmp_path, 2, "")
    require_memory(GIB, purpose="the store", root=tmp_path)
    with pytest.raises(OSError) as found:  # noqa: PT011 - asserted below
        require_memory(3 * GIB, purpose="the store", root=tmp_path)
    assert "the store" in str(found.value)
    assert "3.00 GiB" in str(found.value)
    assert "1.25 GiB" in str(found.value)


def test_this_machine_has_some() -> None:
    assert 2**20 < available_bytes() < 2**50
