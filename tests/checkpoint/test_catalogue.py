"""Many checkpoints in a directory: their order, the newest good one, and what is set aside."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlfs.checkpoint import Level, State, catalogue, good, plan, tidy, undo
from cxlfs.checkpoint.catalogue import ASIDE, step_in
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.trackers import trackers_of
from cxlfs.checkpoint.writers import Writer
from cxlfs.errors import (
    BusyError,
    DirectoryAbsentError,
    NoCheckpointError,
    NoGoodCheckpointError,
    NotFoundError,
)
from tests.checkpoint.conftest import Unpack


def tree(directory: Path) -> dict[str, bytes]:
    """Everything below, links as what they say."""
    return {
        str(path.relative_to(directory)): bytes(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def run(unpack: Unpack) -> Path:
    """Hugging Face's: checkpoint-2, -4 and -6."""
    directory = unpack("hugging-face")
    for step in (4, 6):
        copy = directory / f"checkpoint-{step}"
        shutil.copytree(directory / "checkpoint-2", copy)
        state = copy / "trainer_state.json"
        state.write_text(state.read_text().replace('"global_step": 2,', f'"global_step": {step},'))
    return directory


def names(directory: Path) -> list[str]:
    return [entry.path.name for entry in catalogue(directory)]


# --- order and the newest good one --------------------------------------------------------------


def test_the_newest_step_comes_first(run: Path) -> None:
    (run / "runs").mkdir()
    (run / "train.log").write_text("step 6")
    assert names(run) == ["checkpoint-6", "checkpoint-4", "checkpoint-2"]
    found, passed_over = good(run)
    assert found.path == run / "checkpoint-6"
    assert found.checkpoint.content_verified
    assert passed_over == ()


def test_steps_are_numbers(run: Path) -> None:
    shutil.copytree(run / "checkpoint-6", run / "checkpoint-10")
    state = run / "checkpoint-10" / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 6,', '"global_step": 10,'))
    assert names(run)[0] == "checkpoint-10"


def test_an_incomplete_one_is_passed_over(run: Path) -> None:
    (run / "checkpoint-6" / "optimizer.pt").unlink()
    found, (newer,) = good(run)
    assert found.path == run / "checkpoint-4"
    assert newer.checkpoint.words == "incomplete: optimizer.pt is missing"


def test_damage_in_a_tensor_is_found_where_everything_is_read(run: Path) -> None:
    path = run / "checkpoint-6" / "rng_state.pth"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    times = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert good(run, Level.STRUCTURE)[0].path == run / "checkpoint-6"
    found, (newer,) = good(run)
    assert found.path == run / "checkpoint-4"
    assert newer.checkpoint.words.startswith("damaged: tensor ")


def test_files_beside_directories_are_no_checkpoints(run: Path) -> None:
    shutil.copy(run / "checkpoint-6" / "model.safetensors", run / "model.safetensors")
    shutil.copy(run / "checkpoint-6" / "training_args.bin", run / "training_args.bin")
    assert names(run) == ["checkpoint-6", "checkpoint-4", "checkpoint-2"]


def test_a_directory_that_is_one_checkpoint(run: Path) -> None:
    one = run / "checkpoint-4"
    (entry,) = catalogue(one)
    assert (entry.path, entry.names) == (one, ())
    assert good(one)[0].path == one


def test_files_by_the_time_of_their_last_write(tmp_path: Path) -> None:
    for number, name in enumerate(("best", "last", "other")):
        np.savez(tmp_path / f"{name}.npz", w=np.arange(8))
        os.utime(tmp_path / f"{name}.npz", (1000 + number, 1000 + number))
    assert names(tmp_path) == ["other.npz", "last.npz", "best.npz"]
    os.truncate(tmp_path / "other.npz", 100)
    os.utime(tmp_path / "other.npz", (2000, 2000))
    assert good(tmp_path)[0].path.name == "last.npz"


def test_a_prefix_is_one_checkpoint(unpack: Unpack) -> None:
    directory = unpack("tensorflow") / "run"
    assert names(directory) == ["ckpt-20", "ckpt-10"]
    assert len(catalogue(directory)[0].names) == 2


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=100.ckpt", 100),
        ("iter_0000200", 200),
        ("global_step10", 10),
        ("step-7", 7),
        ("Step_00008.pt", 8),
        ("model.pt", None),
        ("checkpoint-5", None),
    ],
)
def test_steps_in_names(name: str, step: int | None) -> None:
    assert step_in(name) == step


def test_nothing_there(tmp_path: Path) -> None:
    for directory, error in (
        (tmp_path, NoCheckpointError),
        (tmp_path / "absent", DirectoryAbsentError),
    ):
        with pytest.raises(error):
            good(directory)
        with pytest.raises(error):
            tidy(directory)


def test_nothing_good(run: Path) -> None:
    for each in run.glob("checkpoint-*"):
        (each / "model.safetensors").unlink()
    with pytest.raises(NoGoodCheckpointError, match=r"none of the 3 .* has no weights"):
        good(run)


# --- setting aside ------------------------------------------------------------------------------


def test_what_is_unfinished_goes_aside_and_comes_back(run: Path) -> None:
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    (run / "checkpoint-8").mkdir()
    (run / "checkpoint-8" / "model.safetensors").write_bytes(b"")
    before = tree(run)
    planned = plan(run)
    assert tree(run) == before, "planning changes nothing"
    done = tidy(run)
    assert [Path(move.path).name for move in done.moves] == ["checkpoint-8", "checkpoint-6"]
    assert [move.path for move in planned.moves] == [move.path for move in done.moves]
    assert names(run) == ["checkpoint-4", "checkpoint-2"]
    assert tidy(run).aside is None, "once is enough"
    assert done.aside is not None

    assert (done.aside / "checkpoint-8" / "model.safetensors").exists()
    undone = undo(run)
    assert len(undone.moves) == 2
    assert tree(run) == before
    assert not (run / ASIDE).exists()
    with pytest.raises(NotFoundError):
        undo(run)


def test_older_ones_that_are_incomplete_stay(run: Path) -> None:
    (run / "checkpoint-2" / "model.safetensors").unlink()
    os.utime(run / "checkpoint-2" / "trainer_state.json", (1, 1))
    for path in (run / "checkpoint-2").iterdir():
        os.utime(path, (1, 1))
    assert tidy(run).moves == ()


def test_a_first_save_that_was_killed(run: Path) -> None:
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    done = tidy(run)
    assert done.good is None
    assert [Path(move.path).name for move in done.moves] == ["checkpoint-6"]
    with pytest.raises(NoCheckpointError):
        good(run)


def test_damage_everywhere_is_left_where_it_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "step-1.npz", w=np.arange(800))
    data = bytearray((tmp_path / "step-1.npz").read_bytes())
    data[1000] ^= 1
    (tmp_path / "step-1.npz").write_bytes(data)
    before = tree(tmp_path)
    with pytest.raises(NoGoodCheckpointError, match=r"damaged: tensor w"):
        tidy(tmp_path)
    assert tree(tmp_path) == before


def test_a_name_that_is_taken_again_stays_aside(run: Path) -> None:
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    done = tidy(run)
    shutil.copytree(run / "checkpoint-4", run / "checkpoint-6")
    assert undo(run).moves == ()
    assert done.aside is not None
    assert (done.aside / "checkpoint-6").is_dir()


def test_what_is_being_written_is_not_moved(run: Path) -> None:
    torn = run / "checkpoint-6" / "model.safetensors"
    program = "import sys; f = open(sys.argv[1], 'wb'); print('open', flush=True); sys.stdin.read()"
    import subprocess

    with subprocess.Popen(
        [sys.executable, "-c", program, torn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = tree(run)
        with pytest.raises(BusyError, match=f"process {process.pid}"):
            tidy(run)
        assert tree(run) == before
        assert process.stdin is not None
        process.stdin.close()
    assert len(tidy(run).moves) == 1


def test_processes_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many checkpoints are moved; a file of another one is no reason to refuse."""
    for step in range(1, 6):
        np.savez(tmp_path / f"step-{step}.npz", w=np.arange(1000.0))
    for step in range(2, 6):
        os.truncate(tmp_path / f"step-{step}.npz", 3000)
    looks: list[Path] = []

    def writers(directory: Path) -> Iterator[Writer]:
        looks.append(directory)
        yield Writer(1, "other", f"{os.path.realpath(directory)}/step-1.npz")

    monkeypatch.setattr(sys.modules[tidy.__module__], "writers_in", writers)
    assert len(tidy(tmp_path).moves) == 4
    assert looks == [tmp_path]
    assert tidy(tmp_path).moves == ()
    assert len(looks) == 1


# --- trackers -----------------------------------------------------------------------------------


def test_deepspeed(unpack: Unpack) -> None:
    directory = unpack("deepspeed")
    shutil.copytree(directory / "global_step10", directory / "global_step20")
    (directory / "latest").write_text("global_step20")
    (directory / "global_step20" / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    before = tree(directory)
    done = tidy(directory)
    assert "shard 3 of 4" in (done.moves[0].reason or "")
    assert (directory / "latest").read_text() == "global_step10"
    undo(directory)
    assert tree(directory) == before


def test_a_torn_tracker(unpack: Unpack) -> None:
    directory = unpack("deepspeed")
    (directory / "latest").write_text("")
    done = tidy(directory)
    assert done.moves == ()
    assert (directory / "latest").read_text() == "global_step10"
    undo(directory)
    assert (directory / "latest").read_text() == ""


def test_a_tracker_that_is_behind_is_left_alone(unpack: Unpack) -> None:
    directory = unpack("deepspeed")
    shutil.copytree(directory / "global_step10", directory / "global_step20")
    assert good(directory)[0].path.name == "global_step20"
    assert tidy(directory).retargets == ()
    assert (directory / "latest").read_text() == "global_step10"


def test_megatron(unpack: Unpack) -> None:
    directory = unpack("megatron") / "ranks"
    (directory / "iter_0000200").mkdir()
    (directory / "latest_checkpointed_iteration.txt").write_text("200")
    done = tidy(directory)
    assert [Path(move.path).name for move in done.moves] == ["iter_0000200"]
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "100"


def test_tensorflow(unpack: Unpack) -> None:
    directory = unpack("tensorflow") / "run"
    os.truncate(directory / "ckpt-20.data-00000-of-00001", 100)
    before = tree(directory)
    done = tidy(directory)
    assert len(done.moves[0].names) == 2
    text = (directory / "checkpoint").read_text()
    assert text.startswith('model_checkpoint_path: "ckpt-10"\n')
    assert "ckpt-20" not in text
    assert text.count("all_model_checkpoint_timestamps") == 1
    undo(directory)
    assert tree(directory) == before


def test_accelerate_has_nothing_beside_its_checkpoints(unpack: Unpack) -> None:
    """Its load_state takes every directory there for a checkpoint with a number in its name."""
    project = unpack("accelerate")
    directory = project / "checkpoints"
    directory.mkdir()
    (project / "checkpoint_3").rename(directory / "checkpoint_3")
    shutil.copytree(directory / "checkpoint_3", directory / "checkpoint_4")
    (directory / "checkpoint_4" / "random_states_0.pkl").unlink()
    before = tree(project)
    done = tidy(directory)
    assert [path.name for path in directory.iterdir()] == ["checkpoint_3"]
    assert done.aside is not None
    assert done.aside.parent == project / ASIDE / "checkpoints"
    undo(directory)
    assert tree(project) == before
    assert not (project / ASIDE).exists()


def test_the_last_of_lightning_becomes_a_copy_of_a_good_one(unpack: Unpack) -> None:
    """Without it Lightning starts anew; a link would be written through by the next save."""
    directory = unpack("lightning")
    good_one = directory / "epoch=0-step=3.ckpt"
    (directory / "last.ckpt").write_bytes(good_one.read_bytes()[:1000])
    before = tree(directory)
    done = tidy(directory)
    assert [Path(move.path).name for move in done.moves] == ["last.ckpt"]
    assert (directory / "last.ckpt").read_bytes() == good_one.read_bytes()
    assert not (directory / "last.ckpt").is_symlink()
    assert (directory / "last.ckpt").stat().st_nlink == 1
    assert tidy(directory).aside is None
    undo(directory)
    assert tree(directory) == before


def test_a_symbolic_link(run: Path) -> None:
    (run / "last").symlink_to("checkpoint-6")
    assert names(run) == ["checkpoint-6", "checkpoint-4", "checkpoint-2"]
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    before = tree(run)
    tidy(run)
    assert (run / "last").readlink() == Path("checkpoint-4")
    undo(run)
    assert tree(run) == before


@pytest.mark.parametrize("target", ["/etc/passwd", "../elsewhere", "a/b", ".", ".."])
def test_a_link_to_somewhere_else_is_no_tracker(tmp_path: Path, target: str) -> None:
    (tmp_path / "last").symlink_to(target)
    assert trackers_of(Place(tmp_path)) == []


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"moves": [{"names": ["../../x"]}], "trackers": []}', "\0", ""]
)
def test_a_list_of_what_is_aside_that_was_tampered_with(tmp_path: Path, text: str) -> None:
    aside = tmp_path / "run" / ASIDE / "20260101T000000Z-000"
    aside.mkdir(parents=True)
    (tmp_path / "run" / "x").write_text("mine")
    (aside / "tidy.json").write_text(text)
    before = tree(tmp_path)
    with pytest.raises(NotFoundError):
        undo(tmp_path / "run")
    assert tree(tmp_path) == before


def test_a_crash_in_mid_tidy_is_mended_by_the_next(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is written, one of two checkpoints is moved, and the process is gone."""
    for step in (4, 6):
        (run / f"checkpoint-{step}" / "trainer_state.json").unlink()
    before = tree(run)
    rename = Path.rename

    def dies_at_the_second(self: Path, target: Path) -> Path:
        if self.name == "checkpoint-4":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        tidy(run)
    monkeypatch.undo()
    assert sorted(names(run)) == ["checkpoint-2", "checkpoint-4"]
    assert [Path(m.path).name for m in tidy(run).moves] == ["checkpoint-4"]
    undo(run)
    undo(run)
    assert {n: d for n, d in tree(run).items() if ASIDE not in n} == before


def test_states_have_the_words_of_the_store() -> None:
    assert [state.value for state in State] == ["complete", "incomplete", "damaged", "unknown"]
