"""Messages come whole and in order, whatever the other end writes."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.protocol.channel import CHANNEL, Channel, connect
from autotune.protocol.disk import TrialFolder
from autotune.worker.place import Place


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """One end as a channel, the other as a socket that may write anything."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_messages_and_descriptors_arrive(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    other = Channel(theirs)
    reading, writing = os.pipe()
    channel.send({"number": 1}, writing)
    channel.send({"text": "two\nlines"})
    assert other.receive(None, descriptors=1) == {"number": 1}
    assert other.receive(0.0) == {"text": "two\nlines"}
    assert other.receive(0.0) is None
    os.write(other.descriptors[0], b"x")
    assert os.read(reading, 1) == b"x"
    for one in (reading, writing, *other.descriptors):
        os.close(one)


def test_junk_is_skipped_and_a_line_waits_for_its_end(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, theirs = ends
    theirs.send(b'\n[1]\n\xff{\nnull\n"text"\n' + b"[" * 5000 + b'\n{"a": 1}\n{"b"')
    assert channel.receive(0.0) == {"a": 1}
    assert channel.receive(0.0) is None
    theirs.send(b": 2}\n")
    assert channel.receive(0.0) == {"b": 2}


def test_an_end_that_is_gone_is_noticed_after_its_messages(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, theirs = ends
    theirs.send(b'{"a": 1}\n{"half')
    theirs.close()
    assert channel.receive(None) == {"a": 1}
    with pytest.raises(EOFError):
        channel.receive(None)
    with pytest.raises(OSError, match="Broken pipe"):
        channel.send({})


@pytest.mark.parametrize("descriptors", [(), (0,)])
def test_a_lost_end_spares_a_process_that_dies_of_closed_pipes(
    ends: tuple[Channel, socket.socket], descriptors: tuple[int, ...]
) -> None:
    channel, theirs = ends
    theirs.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as many scripts do
    try:
        with pytest.raises(BrokenPipeError):
            channel.send({}, *descriptors)
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_line_without_end_is_not_kept(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.setblocking(False)
    with pytest.raises(EOFError):  # noqa: PT012 - at an unknown round
        while True:
            theirs.send(b"x" * 2**15)
            assert channel.receive(0.0) is None


def test_an_end_that_reads_nothing_does_not_block(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    with pytest.raises(BlockingIOError):  # noqa: PT012 - as above
        while True:
            channel.send({"text": "x" * 1000}, within_s=0.0)


def test_a_descriptor_that_is_closed_costs_no_exception(
    ends: tuple[Channel, socket.socket], tmp_path: Path
) -> None:
    channel, _ = ends
    place = Place(folder=TrialFolder(tmp_path), rank=0, local_rank=0, channel=channel)
    os.close(channel.fileno())
    assert place.receive(0.0) == {}
    assert place.channel is None
    channel.close()


def test_without_a_descriptor_no_parent_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket, "socket", full)
    assert connect(tmp_path) is None


def test_a_parent_is_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    link = tmp_path / "sockets"
    assert connect(link) is None
    link.symlink_to(tmp_path / "made")
    assert connect(link) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(link / CHANNEL))
        listener.listen()
        channel = connect(link)
        assert channel is not None
        channel.send({"a": 1})
        channel.close()
        accepted = Channel(listener.accept()[0])
        assert accepted.receive(None) == {"a": 1}, "what was sent arrives though its sender is gone"
        accepted.close()
