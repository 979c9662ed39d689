"""The spool: what is durable comes back, what is broken is named, a full disk loses nothing."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenants import frames, segments
from tenants.frames import HEADER_BYTES, SpoolVersionError
from tenants.segments import START, Position, SpoolFiles, SpoolLocked, end_of, read, read_all
from tenants.spool import Spool, SpoolFailed, SpoolFull
from tests.tenants.support import run


def payloads(path: Path, start: Position = START) -> list[bytes]:
    found, position, end = [], start, end_of(path)
    while position != end:
        records = read(path, position, end)
        found += [frame.payload for frame in records.frames]
        position = records.position
    return found


def faults(path: Path) -> list[frames.Fault]:
    return [fault for records in read_all(path, end_of(path)) for fault in records.faults]


def written(root: Path, *groups: list[bytes], **options: int) -> SpoolFiles:
    files = SpoolFiles.create(root, **options)
    for group in groups:
        files.append(group)
        files.sync()
    return files


def only_segment(files: SpoolFiles) -> Path:
    (segment,) = files.path.glob("*.seg")
    return segment


def test_records_come_back_in_order_over_segments(tmp_path: Path) -> None:
    groups = [[b"%d" % number, b"x" * 100] for number in range(10)]
    files = written(tmp_path, *groups, segment_bytes=300)
    assert payloads(files.path) == [payload for group in groups for payload in group]
    assert len(list(files.path.glob("*.seg"))) == 4
    assert files.position == end_of(files.path)


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    files = written(tmp_path, [b"one"])
    middle = files.position
    files.append([b"two"])
    assert payloads(files.path, middle) == [b"two"]
    assert read(files.path, middle, middle).frames == []


def test_a_record_of_the_greatest_size_crosses_read_windows(tmp_path: Path) -> None:
    groups = [[bytes([number]) * frames.MAX_PAYLOAD_BYTES] for number in range(5)]
    assert payloads(written(tmp_path, *groups).path) == [group[0] for group in groups]


@pytest.mark.parametrize("n_bytes", [1, 5, 10, 13])
def test_a_torn_tail_is_passed_over_and_named(tmp_path: Path, n_bytes: int) -> None:
    files = written(tmp_path, [b"one", b"two", b"three"])
    segment = only_segment(files)
    size = segment.stat().st_size
    os.truncate(segment, size - n_bytes)
    assert payloads(files.path) == [b"one", b"two"]
    (fault,) = faults(files.path)
    assert fault == frames.Fault(segment, size - 15, 15 - n_bytes, torn=True)
    assert str(fault) == f"{segment}: torn tail, {15 - n_bytes} bytes at offset {size - 15}"


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    files = written(tmp_path, [b"one"])
    with only_segment(files).open("ab") as file:
        file.write(bytes(4096))
    assert payloads(files.path) == [b"one"]
    assert [fault.torn for fault in faults(files.path)] == [True]


@settings(max_examples=60, deadline=None)
@given(bit=st.integers(0, 8 * 13 - 1))
def test_a_flipped_bit_costs_one_record_and_is_named(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    files = written(tmp_path_factory.mktemp("spool"), [b"one", b"two", b"three"])
    segment = only_segment(files)
    data = bytearray(segment.read_bytes())
    data[HEADER_BYTES + 13 + bit // 8] ^= 1 << bit % 8
    segment.write_bytes(data)
    assert payloads(files.path) == [b"one", b"three"]
    assert faults(files.path) == [frames.Fault(segment, HEADER_BYTES + 13, 13, torn=False)]
    files.close()


@pytest.mark.parametrize("offset", [0, 9, 14, 20, HEADER_BYTES - 1])
def test_a_damaged_header_is_named_and_its_records_are_read(tmp_path: Path, offset: int) -> None:
    files = written(tmp_path, [b"one"])
    segment = only_segment(files)
    data = bytearray(segment.read_bytes())
    data[offset] ^= 1
    segment.write_bytes(data)
    assert payloads(files.path) == [b"one"]
    assert faults(files.path) == [frames.Fault(segment, 0, HEADER_BYTES, torn=False)]


def test_another_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = written(tmp_path, [b"one"])
    monkeypatch.setattr(frames, "FORMAT_VERSION", 2)
    with pytest.raises(SpoolVersionError, match="spool format 1; this version of radixgate reads format 2"):
        payloads(files.path)


def test_a_spool_has_one_owner(tmp_path: Path) -> None:
    files = written(tmp_path, [b"one"])
    script = "import sys, pathlib; from tenants.segments import SpoolFiles; SpoolFiles.adopt(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(files.path)]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"SpoolLocked: the spool {files.path} belongs to a running process" in other.stderr
    with pytest.raises(SpoolLocked):
        SpoolFiles.adopt(files.path)
    files.close()
    assert subprocess.run(command, check=False).returncode == 0


def test_an_adopted_spool_goes_on_in_a_new_segment(tmp_path: Path) -> None:
    files = written(tmp_path, [b"one", b"two"])
    files.close()
    first = only_segment(files)
    os.truncate(first, first.stat().st_size - 1)
    before = first.read_bytes()
    adopted = SpoolFiles.adopt(files.path)
    adopted.append([b"three"])
    assert payloads(files.path) == [b"one", b"three"]
    assert first.read_bytes() == before
    assert adopted.position.segment == 2


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SpoolFiles.create(tmp_path / "file" / "spool")


# --- group commit -----------------------------------------------------------------------------------------------------


class Disk:
    """Counts fsyncs and refuses writes while it is full; stands in for the two calls that reach the medium."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 1 << 40
        self.syncs = 0
        self.sync_error: OSError | None = None
        self._write_all, self._sync = frames.write_all, segments.sync_file
        monkeypatch.setattr(frames, "write_all", self.write_all)
        monkeypatch.setattr(segments, "sync_file", self.sync_file)

    def write_all(self, fd: int, data: bytes) -> None:
        self._write_all(fd, data[: self.free_bytes])
        if len(data) > self.free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free_bytes -= len(data)

    def sync_file(self, fd: int) -> None:
        self.syncs += 1
        if self.sync_error is not None:
            error, self.sync_error = self.sync_error, None
            raise error
        self._sync(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_one_fsync_serves_a_group(tmp_path: Path, disk: Disk) -> None:
    async def main() -> None:
        journal = Spool(SpoolFiles.create(tmp_path))
        await journal.append(b"warm")
        before = disk.syncs
        await asyncio.gather(*(journal.append(b"%d" % number) for number in range(1000)))
        assert disk.syncs == before + 1
        assert journal.durable == end_of(journal.files.path)
        assert len(payloads(journal.files.path)) == 1001
        await journal.close(lambda files: None)

    run(main)


def test_the_latest_of_a_key_is_written_without_an_fsync(tmp_path: Path, disk: Disk) -> None:
    async def main() -> None:
        journal = Spool(SpoolFiles.create(tmp_path))
        await journal.append(b"open")
        before, durable = disk.syncs, journal.durable
        journal.put_latest("r", b"1")
        journal.put_latest("r", b"2")
        journal.put_latest("gone", b"3")
        journal.drop_latest("gone")
        await journal.close(lambda files: None)
        assert disk.syncs == before
        assert journal.durable == durable
        assert payloads(journal.files.path) == [b"open", b"2"]

    run(main)


def test_a_full_disk_refuses_what_is_new_and_keeps_what_must_be_kept(tmp_path: Path, disk: Disk) -> None:
    async def main() -> None:
        journal = Spool(SpoolFiles.create(tmp_path))
        await journal.append(b"open")
        disk.free_bytes = 4
        with pytest.raises(SpoolFull, match="free some disk"):
            await journal.append(b"new")
        closing = journal.append_kept(b"close")
        opening = journal.append(b"new too")
        disk.free_bytes = 30  # what giving up the reserve brings
        await closing
        with pytest.raises(SpoolFull):
            await opening
        assert not journal.files.has_reserve
        assert payloads(journal.files.path) == [b"open", b"close"]
        disk.free_bytes = 1 << 40
        await journal.append(b"room again")
        assert journal.files.has_reserve
        assert payloads(journal.files.path) == [b"open", b"close", b"room again"]
        await journal.close(lambda files: None)

    run(main)


def test_what_no_reserve_can_hold_waits_in_memory(tmp_path: Path, disk: Disk) -> None:
    async def main() -> None:
        journal = Spool(SpoolFiles.create(tmp_path))
        await journal.append(b"open")
        disk.free_bytes = 0
        with pytest.raises(SpoolFull):
            await journal.append_kept(b"close 1")
        assert journal.unwritten == 1
        disk.free_bytes = 1 << 40
        await journal.append_kept(b"close 2")
        assert journal.unwritten == 0
        assert payloads(journal.files.path) == [b"open", b"close 1", b"close 2"]
        await journal.close(lambda files: None)

    run(main)


def test_closing_says_what_could_not_be_written(tmp_path: Path, disk: Disk) -> None:
    async def main() -> None:
        journal = Spool(SpoolFiles.create(tmp_path))
        disk.free_bytes = 0
        with pytest.raises(SpoolFull):
            await journal.append_kept(b"close")
        with pytest.raises(SpoolFailed, match="1 finished requests could not be written"):
            await journal.close(lambda files: pytest.fail("sealed"))

    run(main)


def test_after_a_failed_fsync_the_record_is_written_again_elsewhere(tmp_path: Path, disk: Disk) -> None:
    async def main() -> None:
        journal = Spool(SpoolFiles.create(tmp_path))
        await journal.append(b"open")
        disk.sync_error = OSError(errno.EIO, os.strerror(errno.EIO))
        await journal.append_kept(b"close")
        assert journal.durable.segment == 2
        assert payloads(journal.files.path) == [b"open", b"close", b"close"]
        disk.sync_error = OSError(errno.EIO, os.strerror(errno.EIO))
        with pytest.raises(SpoolFailed, match="Input/output error"):
            await journal.append(b"new")
        await journal.close(lambda files: None)

    run(main)
