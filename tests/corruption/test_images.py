"""Images that are no store, no whole store, or a hostile one: a clear error, no crash, no hang."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cxlfs.errors import CxlfsError, MediaError, MediaUnavailableError, NotACxlfsError
from cxlfs.media import MemoryMedia, open_media
from cxlfs.store import Store, StoreOptions
from cxlfs.verify import inspect
from tests.corruption.conftest import CAMPAIGN
from tests.support import fuzz, hostile
from tests.support.corrupt import IMAGE_BYTES
from tests.support.verdict import findings_of, good_picture, good_store, picture_of, short

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "fuzz-images"
FUZZ_SEED = 20_260_101


def _media(content: bytes) -> MemoryMedia:
    media = MemoryMedia(len(content))
    media.unguarded_memory()[:] = content
    return media


def _assert_no_store(media: MemoryMedia) -> None:
    with pytest.raises(NotACxlfsError) as caught:
        Store.open(media, StoreOptions(read_only=True))
    assert "mkfs" in caught.value.next_step
    assert short(findings_of(media)) == [("superblock-unusable", "superblock", None)]
    for dump in (inspect.superblock_copies, inspect.root_slots, inspect.journal_records):
        with pytest.raises(CxlfsError):
            list(dump(media))


def _ext4() -> bytes:
    """The magic number of ext2, 3 and 4 at its place."""
    image = bytearray(IMAGE_BYTES)
    image[1024 + 56 : 1024 + 58] = b"\x53\xef"
    return bytes(image)


@pytest.mark.parametrize(
    "content",
    [
        bytes(IMAGE_BYTES),
        b"\xff" * IMAGE_BYTES,
        b"PK\x03\x04" * (IMAGE_BYTES // 4),
        b"a text file\n" * 100_000,
        _ext4(),
        b"\0" * 4096,
        b"x",
    ],
    ids=["zeros", "ones", "archive", "text", "ext4", "a page", "a byte"],
)
def test_foreign_images(content: bytes) -> None:
    _assert_no_store(_media(content))


def test_random_images(rng: random.Random, sample_count: int | None) -> None:
    for _ in range(sample_count or 500):
        _assert_no_store(_media(rng.randbytes(rng.randrange(1, 300_000))))


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with pytest.raises(MediaUnavailableError, match="empty"):
        open_media(path, read_only=True)


def test_a_store_that_was_cut(rng: random.Random, sample_count: int | None) -> None:
    """Wherever: it says that it shrank as long as a superblock copy is left."""
    whole = bytes(good_store(closed=True).media.unguarded_memory())
    sizes = rng.sample(range(1, len(whole)), (sample_count or 500) * 2)
    for size in [*sizes, 511, 512, 4095, 65536, len(whole) - 1, len(whole) - 4096]:
        media = _media(whole[:size])
        with pytest.raises((NotACxlfsError, MediaError)) as caught:
            Store.open(media, StoreOptions(read_only=True))
        assert [finding.id for finding in findings_of(media)] == ["superblock-unusable"]
        if size >= len(whole) // 2:
            assert caught.value.next_step


def test_a_store_on_a_larger_source() -> None:
    """What lies behind it does not matter, not even an older store's superblock copies."""
    whole = bytes(good_store(closed=True).media.unguarded_memory())
    for tail in (bytes(100), bytes(65536), b"\xff" * 5000, whole[-40_000:], bytes(3 << 20)):
        media = _media(whole + tail)
        assert picture_of(media) == good_picture(closed=True)
        assert findings_of(media) == []


# --- hostile images -------------------------------------------------------------------------


def test_hostile_images() -> None:
    """The first few of the campaign, in this process."""
    opened = 0
    for index in range(100):
        image, notes = fuzz.make_image(FUZZ_SEED, index)
        try:
            opened += hostile.exercise(image, index).opened
        except Exception:
            print(f"image {index} of seed {FUZZ_SEED}: {notes}")
            raise
    assert 20 < opened < 100, "some images can be opened, some cannot"


def test_images_are_the_same_each_time() -> None:
    for index in range(20):
        assert fuzz.make_image(FUZZ_SEED, index) == fuzz.make_image(FUZZ_SEED, index)
    assert fuzz.make_image(FUZZ_SEED, 3) != fuzz.make_image(FUZZ_SEED + 1, 3)


def _run_program(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_campaign_program(tmp_path: Path) -> None:
    result_path = tmp_path / "result.json"
    done = _run_program("--count", 30, "--seed", 7, "--jobs", 2, "--json", result_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(result_path.read_text())
    assert result["schema"] == "cxlfs.fuzz_images/1"
    assert (result["seed"], result["count"], result["done"]) == (7, 30, 30)
    assert result["failures"] == []
    assert 0 < result["opened"] < 30
    assert result["findings"]


@pytest.mark.sampled(3)
@pytest.mark.timeout(600)  # a busy machine takes its time
@pytest.mark.parametrize("how", ["raise", "hang", "sleep", "die", "eat"])
def test_the_campaign_program_notices_failures(tmp_path: Path, how: str) -> None:
    """A check that cannot fail proves nothing."""
    result_path = tmp_path / "result.json"
    program = tmp_path / "planted"
    text = PROGRAM.read_text(encoding="utf-8")
    planted = {
        "raise": "raise KeyError('planted')",
        "hang": "any(iter(int, 1))",
        "sleep": "time.sleep(1000)",
        "die": "os.kill(os.getpid(), 9)",
        "eat": "bytes(8 << 30)",
    }[how]
    call = "outcome = hostile.exercise(image, index)"
    assert call in text
    text = text.replace(call, f"{planted} if index == 2 else None; {call}")
    # Limits are short for this image alone: a busy machine may be slow with any other.
    for setter, limit, seconds in (
        ("ITIMER_PROF, ", "SECONDS_PER_IMAGE", 1),
        ("dump_traceback_later(", "10 * SECONDS_PER_IMAGE", 2),
    ):
        assert setter + limit in text
        text = text.replace(setter + limit, f"{setter}{seconds} if index == 2 else {limit}")
    text = text.replace("raise KeyError('planted') if", "{}['planted'] if")
    text = text.replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    program.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program), "--count", "5", "--jobs", "1", "--json", str(result_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(result_path.read_text())
    assert [failure["index"] for failure in result["failures"]] == [2]
    assert result["done"] == 5
    assert "FAILED image 2" in done.stdout


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.skipif(not CAMPAIGN, reason="hours: CXLFS_CAMPAIGN=1 runs it")
def test_campaign(tmp_path: Path) -> None:
    result_path = tmp_path / "result.json"
    jobs = os.cpu_count() or 1
    done = _run_program("--count", 100_000, "--jobs", jobs, "--quiet", "--json", result_path)
    assert done.returncode == 0, done.stdout
    assert json.loads(result_path.read_text())["done"] == 100_000
