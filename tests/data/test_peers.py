"""Readers of other runs' rollouts while these write, go back and disappear."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.data.swarm import peers as peers_module
from rlsys.data.swarm.peers import Peer, PeerReader, Peers, Tail
from rlsys.data.swarm.shared_pool import Shared, SharedGroup, SharedPool
from rlsys.runs.observe.records import RolloutRecord, RolloutWriter


def records(step: int, group_id: int, size: int = 2, **changes: object) -> list[RolloutRecord]:
    settings = {"finish_reason": "stop", "row": {"answer": "4"}, "prompt": "2+2=", **changes}
    return [
        RolloutRecord(
            step=step,
            group_id=group_id,
            index=index,
            token_ids=[1],
            policy_versions=[0],
            staleness=0,
            rewards={},
            advantage=0.0,
            **{  # type: ignore[arg-type]
                "reward": float(index),
                "completion": f"{group_id}.{index}",
                **settings,
            },
        )
        for index in range(size)
    ]


def written(directory: Path, *groups: list[RolloutRecord], run_id: str = "") -> RolloutWriter:
    directory.mkdir(exist_ok=True)
    writer = RolloutWriter(directory / "rollouts.jsonl", run_id=run_id, after_step=10**6)
    for group in groups:
        writer.write(group)
    return writer


def ids(groups: list[SharedGroup]) -> list[int]:
    return [group.group_id for group in groups]


@settings(deadline=None, max_examples=60)
@given(
    lines=st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))),
    cuts=st.lists(st.integers(0, 80), max_size=8),
)
def test_every_line_is_read_once_however_the_file_grows(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "file"
    content = b"".join(line + b"\n" for line in lines)
    tail = Tail(path)
    assert tail.read() == []
    found: list[bytes] = []
    place = 0
    with path.open("ab", buffering=0) as file:
        for cut in [*sorted(cuts), len(content)]:
            file.write(content[place:cut])
            place = max(place, cut)
            found += tail.read()
    assert found == lines
    assert tail.read() == []
    tail.close()


def test_a_file_that_was_cut_replaced_or_deleted_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1\n2\n3\n")
    tail = Tail(path)
    assert tail.read() == [b"1", b"2", b"3"]
    path.write_bytes(b"1\n")  # cut in place
    assert tail.read() == [b"1"]
    (tmp_path / "other").write_bytes(b"1\n4\n5\n6\n")
    (tmp_path / "other").replace(path)
    assert tail.read() == [b"1", b"4", b"5", b"6"]
    path.unlink()
    assert tail.read() == []
    path.write_bytes(b"7\n")
    assert tail.read() == [b"7"]
    tail.close()


def test_only_the_newest_lines_of_a_long_file_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "READ_BYTES", 10)
    path = tmp_path / "file"
    path.write_bytes(b"1111\n2222\n3333\n4444\n")
    tail = Tail(path)
    assert tail.read() == [b"3333", b"4444"]
    with path.open("ab") as file:
        file.write(b"x" * 25)  # a line longer than READ_BYTES
    assert len(b"".join(tail.read())) == 10
    with path.open("ab") as file:
        file.write(b"x\n5555\n")
    assert tail.read()[-1] == b"5555"
    tail.close()


def test_groups_are_returned_when_they_are_complete(tmp_path: Path) -> None:
    peer = Peer("a", tmp_path / "a", own="own-id", group_size=2)
    assert peer.read() == []
    first, second = records(1, 4)
    writer = written(tmp_path / "a", [first])
    assert peer.read() == []
    writer.write([second])
    (group,) = peer.read()
    assert (group.peer, group.group_id, group.asked) == ("a", 4, "2+2=")
    assert group.row == {"answer": "4"}
    assert [c.text for c in group.completions] == ["4.0", "4.1"]
    assert list(group.rewards) == [0.0, 1.0]
    peer.close()
    writer.close()


def test_groups_that_cannot_be_trained_on_are_skipped(tmp_path: Path) -> None:
    writer = written(
        tmp_path,
        records(1, 0, size=1),  # too small
        records(1, 1, size=3),  # larger: its first two
        records(1, 2, shared_by="b"),  # taken from another run
        records(1, 3, finish_reason="length", asked=[{"role": "user", "content": "2+2?"}]),
    )
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(b'no json\n[]\n{"index": 0}\n5\n' + b"[" * 100_000 + b"\n")
    writer.write(records(2, 5))
    writer.close()
    peer = Peer("a", tmp_path, own="own-id", group_size=2)
    one, three, five = peer.read()
    assert ids([one, three, five]) == [1, 3, 5]
    assert [c.truncated for c in three.completions] == [True, True]
    assert three.asked == [{"role": "user", "content": "2+2?"}]
    peer.close()


def test_a_peer_that_goes_back_offers_its_later_groups_again(tmp_path: Path) -> None:
    """Their keys show whether they are the same groups."""
    writer = written(tmp_path, records(1, 0), records(2, 1))
    peer = Peer("a", tmp_path, own="own-id", group_size=2)
    before = peer.read()
    writer.go_back(1)
    assert ids(peer.read()) == [0]
    writer.write(records(2, 1, prompt="1+1="))
    (again,) = peer.read()
    assert again.key != before[1].key
    writer.close()
    peer.close()


def test_peers_come_and_go(tmp_path: Path) -> None:
    shared = Shared(peers=["node-*", "other"], groups_per_step=1)
    found = Peers(tmp_path, shared, own="node-0", run_id="own-id", group_size=2)
    written(tmp_path / "node-0", records(1, 0)).close()
    written(tmp_path / "stranger", records(1, 1)).close()
    (tmp_path / "node-9").mkdir()  # has not begun
    assert found.read() == []
    written(tmp_path / "node-1", records(1, 2)).close()
    written(tmp_path / "other", records(1, 3)).close()
    assert [(group.peer, group.group_id) for group in found.read()] == [("node-1", 2), ("other", 3)]
    assert found.read() == []
    shutil.rmtree(tmp_path / "node-1")
    assert found.read() == []
    written(tmp_path / "node-1", records(1, 4)).close()
    assert ids(found.read()) == [4]
    found.close()


def test_a_reader_passes_on_new_groups_until_it_is_closed(tmp_path: Path) -> None:
    received: list[SharedGroup] = []
    arrived = threading.Event()

    def receive(groups: list[SharedGroup]) -> None:
        received.extend(groups)
        if received:
            arrived.set()

    shared = Shared(peers=["a"], groups_per_step=1)
    reader = PeerReader(Peers(tmp_path, shared, own="b", run_id="own-id", group_size=2), receive)
    written(tmp_path / "a", records(1, 7)).close()
    assert arrived.wait(300)
    reader.close()
    reader.check()
    assert ids(received) == [7]


def test_a_bug_in_the_thread_is_raised_by_check(tmp_path: Path) -> None:
    asked = threading.Event()
    bug = AssertionError("a bug")

    def receive(groups: list[SharedGroup]) -> None:
        asked.set()
        raise bug

    shared = Shared(peers=["a"], groups_per_step=1)
    before = set(threading.enumerate())
    reader = PeerReader(Peers(tmp_path, shared, own="b", run_id="own-id", group_size=2), receive)
    assert asked.wait(300)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    with pytest.raises(AssertionError) as raised:
        reader.check()
    assert raised.value is bug


def test_a_group_without_rewards_is_not_shared(tmp_path: Path) -> None:
    written(tmp_path / "peer", records(1, 4), records(1, 5, reward=None), records(1, 6))
    assert ids(Peer("a", tmp_path / "peer", own="own-id", group_size=2).read()) == [4, 6]


def test_a_malformed_group_is_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deep: object = []
    for _ in range(300):
        deep = [deep]
    bad = [
        records(1, 1, reward=10**400),
        records(1, 2, reward=float("nan")),
        records(1, float("inf")),  # type: ignore[arg-type]
        records(1, 3, row={"answer": "4", "more": deep}),
        records(1, 4, asked=deep),
        records(1, 5, reward="1.0"),
        records(1, 6, reward=True),
        records(1, 7, completion=12),
        records(1, 8, row=[["answer", "4"]]),
        *(
            [one, replace(other, **{name: value})]  # type: ignore[arg-type]
            for one, other in [records(1, 8)]
            for name, value in (
                ("prompt", "3+3="),
                ("asked", [{"role": "user", "content": "3+3?"}]),
                ("row", {"answer": "6"}),
                ("row", {}),
            )
        ),
    ]
    for number, group in enumerate(bad):
        caplog.clear()
        directory = tmp_path / f"peer-{number}"
        directory.mkdir()
        lines = [json.dumps(vars(one)) for one in [*records(1, 0), *group, *group, *records(2, 9)]]
        (directory / "rollouts.jsonl").write_text("\n".join([*lines, ""]))
        peer = Peer("a", directory, own="own-id", group_size=2)
        assert ids(peer.read()) == [0, 9]
        peer.close()
        (warning,) = caplog.messages
        assert warning.startswith("a group in rollouts.jsonl of a ")


def test_a_pipe_instead_of_a_file_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "rollouts.jsonl")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rollouts.jsonl").symlink_to("/dev/zero")
    written(tmp_path / "c", records(1, 2)).close()
    received: list[SharedGroup] = []
    arrived = threading.Event()

    def receive(groups: list[SharedGroup]) -> None:
        received.extend(groups)
        arrived.set()

    shared = Shared(peers=["*"], groups_per_step=1)
    reader = PeerReader(Peers(tmp_path, shared, own="d", run_id="own-id", group_size=2), receive)
    try:
        assert arrived.wait(30)
    finally:
        reader.close()
    reader.check()
    assert ids(received) == [2]


def test_a_run_with_several_names_counts_once_and_the_own_run_never(tmp_path: Path) -> None:
    written(tmp_path / "own", records(1, 0)).close()
    written(tmp_path / "node", records(1, 1)).close()
    for name, target in (("a-link", "node"), ("own-link", "own"), ("gone", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for name, target in (("soft", "own"), ("z", "node")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollouts.jsonl").symlink_to(tmp_path / target / "rollouts.jsonl")
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / "rollouts.jsonl").hardlink_to(tmp_path / "own" / "rollouts.jsonl")
    (tmp_path / "runs").symlink_to(tmp_path)
    shared = Shared(peers=["*"], groups_per_step=1)
    for runs_dir in (tmp_path, tmp_path / "runs"):
        found = Peers(runs_dir, shared, own="own", run_id="own-id", group_size=2)
        assert [(group.peer, group.group_id) for group in found.read()] == [("node", 1)]
        found.close()


def test_own_rollouts_are_skipped_in_every_file(tmp_path: Path) -> None:
    written(tmp_path / "own", records(1, 0), records(2, 1), run_id="own-id").close()
    written(tmp_path / "node", records(1, 1), records(2, 2), run_id="node-id").close()
    shutil.copytree(tmp_path / "own", tmp_path / "own.bak")
    shutil.copytree(tmp_path / "own", tmp_path / "replaced")
    with (tmp_path / "node" / "rollouts.jsonl").open("ab") as file:
        file.write((tmp_path / "own" / "rollouts.jsonl").read_bytes())
    # Like after a resume: the backup has steps that the run no longer has.
    written(tmp_path / "own.bak", records(3, 7), run_id="own-id").close()
    shared = Shared(peers=["*"], groups_per_step=1)
    found = Peers(tmp_path, shared, own="own", run_id="own-id", group_size=2)
    assert [(group.peer, group.group_id) for group in found.read()] == [("node", 1), ("node", 2)]
    found.close()


def test_a_group_in_several_files_is_taken_once(tmp_path: Path) -> None:
    """This holds over resumes."""
    written(tmp_path / "node", *(records(1, number) for number in range(4))).close()
    for name in ("node.bak", "a-node"):
        shutil.copytree(tmp_path / "node", tmp_path / name)
    shared = Shared(peers=["*node*"], groups_per_step=9)
    taken: list[SharedGroup] = []
    for part in range(2):  # before and after a resume
        pool = SharedPool(seed=part, groups_per_step=9, taken=[group.key for group in taken])
        found = Peers(tmp_path, shared, own="own", run_id="own-id", group_size=2)
        pool.add(found.read())
        found.close()
        for index in range(3 if part == 0 else 9):
            if (group := pool.take(index)) is not None:
                taken.append(group)
    assert sorted(ids(taken)) == [0, 1, 2, 3]
