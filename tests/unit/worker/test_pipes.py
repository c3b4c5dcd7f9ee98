"""Pipes: messages arrive whole and in order, a full pipe blocks nobody, an end is told."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskq.worker.pipes import ChildEnd, Closed, Frames, ParentEnd, pack

messages = st.lists(
    st.lists(
        st.one_of(st.integers(-(2**63), 2**63), st.binary(max_size=300), st.text(max_size=50)), max_size=5
    ),
    max_size=20,
)


@given(messages, st.data())
def test_frames_survive_any_cut(sent: list[list[object]], data: st.DataObject) -> None:
    stream = b"".join(pack(message) for message in sent)
    frames, received = Frames(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += list(frames.feed(stream[:size]))
        stream = stream[size:]

    assert received == sent


def test_a_child_that_reads_nothing_does_not_block_the_supervisor() -> None:
    ours, theirs = socket.socketpair()
    parent = ParentEnd(ours)
    big = [1, b"x" * 1_000_000]
    for _ in range(5):
        parent.send(big)

    assert not parent.flush()

    child, received = ChildEnd(theirs), []
    reader = threading.Thread(target=lambda: received.extend(child.messages()))
    reader.start()
    while not parent.flush():
        continue
    parent.close()
    reader.join()
    child.close()
    assert received == [big] * 5


def test_the_end_is_told_after_the_last_message() -> None:
    ours, theirs = socket.socketpair()
    parent, child = ParentEnd(ours), ChildEnd(theirs)
    child.send([12, "last"])
    child.close()

    assert parent.drain() == [[12, "last"]]
    with pytest.raises(Closed):
        parent.receive()
    parent.close()


def test_sending_to_a_dead_supervisor_says_so() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    child = ChildEnd(theirs)

    with pytest.raises(Closed):
        child.send([11, "hello"])
    child.close()
