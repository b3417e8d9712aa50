"""Which checkpoint is newest: by commits on a mount, by contents or times elsewhere, never by a
name that happens to hold numbers.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cxlfs.checkpoint import By, Level, State, catalogue, good, newer_by, tidy
from tests.support.checkpoints import unpack_into
from tests.support.cli import Run
from tests.support.mount import Workplace

SCHEMES = (
    ("step-1", "step-2"),
    ("step-9", "step-10"),
    ("step_00000900", "step_00001000"),
    ("100", "200"),
    ("global_step99", "global_step100"),
    ("iter_0000999", "iter_0001000"),
    ("checkpoint-500", "checkpoint-1000"),
    ("checkpoint_9", "checkpoint_10"),
    ("ckpt-9", "ckpt-10"),
    ("model.ckpt-9999", "model.ckpt-10000"),
    ("epoch=9-step=90", "epoch=10-step=100"),
    ("epoch=1-step=200", "epoch=2-step=100"),
    ("epoch_10_loss_3", "epoch_11_loss_2"),
    ("epoch9-acc0.9", "epoch10-acc0.91"),
    ("e10_vloss_0.4312", "e11_vloss_0.4120"),
    ("best_acc_92.7", "best_acc_93.1"),
    ("best_loss_0.51", "best_loss_0.47"),
    ("weights.09-0.52", "weights.10-0.48"),
    ("ckpt_20240105_235959", "ckpt_20240106_000100"),
    ("2024-01-31", "2024-02-01"),
    ("ckpt_2024-12-31", "ckpt_2025-01-01"),
    ("model-23:59", "model-24:00"),
    ("2024-01-05T23-59-59Z", "2024-01-06T00-01-00Z"),
    ("31.12.2024", "01.01.2025"),
    ("Jan31", "Feb01"),
    ("monday", "tuesday"),
    ("1704499199", "1704499260"),
    ("run2", "run1"),
    ("seed7-step100", "seed3-step200"),
    ("lr0.1-final", "lr0.01-final"),
    ("v2.10.1", "v2.9.2"),
    ("llama-70b-step5", "llama-7b-step6"),
    ("ckpt-9f8a33", "ckpt-ab10c2"),
    ("5d41402abc4b2a76b9719d911017c592", "0cc175b9c0f1b6a831c399e269772661"),
    ("b7e23ec2-9af0-4b1e-8ca1-000000000009", "a7e23ec2-9af0-4b1e-8ca1-000000000001"),
    ("last-v1", "last"),
    ("last", "last-v1"),
    ("ckpt.old", "ckpt"),
    ("final", "best"),
    ("100k", "1M"),
    ("step-1e3", "step-2e3"),
    ("model_999999999999999999", "model_1000000000000000000"),
)


def save(path: Path) -> None:
    """One that says nothing of how far training had come."""
    np.savez(path, w=np.arange(100.0))


def test_there_are_as_many_schemes_as_promised() -> None:
    assert len(set(SCHEMES)) >= 40


@pytest.mark.parametrize("names", SCHEMES, ids=" ".join)
def test_elsewhere_what_was_written_last(names: tuple[str, str], tmp_path: Path) -> None:
    for moment, name in enumerate(names):
        save(tmp_path / f"{name}.npz")
        os.utime(tmp_path / f"{name}.npz", (1000 + moment, 1000 + moment))
    newest, oldest = catalogue(tmp_path)
    assert (newest.path.stem, oldest.path.stem) == names[::-1]
    assert newer_by(newest, oldest) is By.TIME
    assert good(tmp_path)[0].path.stem == names[1]
    os.truncate(newest.path, 100)
    os.utime(newest.path, (1002, 1002))
    (tmp_path / "latest.npz").symlink_to(newest.path.name)
    done = tidy(tmp_path)
    assert [Path(move.path).stem for move in done.moves] == [names[1]]
    assert (tmp_path / "latest.npz").readlink() == Path(oldest.path.name)


@pytest.mark.mounted
def test_on_a_mount_what_was_committed_last(run: Run, place: Workplace) -> None:
    """Times that say the opposite change nothing; neither do contents."""
    place.mount()
    for number, names in enumerate(SCHEMES):
        directory = place.mountpoint / str(number)
        directory.mkdir()
        for age, name in enumerate(names):
            save(directory / f"{name}.npz")
            os.utime(directory / f"{name}.npz", (2000 - age, 2000 - age))
    for number, names in enumerate(SCHEMES):
        directory = place.mountpoint / str(number)
        newest, oldest = catalogue(directory)
        assert (newest.path.stem, oldest.path.stem) == names[::-1]
        assert newer_by(newest, oldest) is By.COMMIT
        assert good(directory, Level.STRUCTURE)[0].path.stem == names[1]
    found = run("good", directory, "--json").document
    assert (found["path"], found["newest_by"]) == (str(newest.path), "commit")
    newest.path.write_bytes(newest.path.read_bytes()[:100])
    (directory / "latest.npz").symlink_to(newest.path.name)
    assert [Path(move.path) for move in tidy(directory).moves] == [newest.path]
    assert (directory / "latest.npz").readlink() == Path(oldest.path.name)


def saved(path: Path, moment: int, **values: object) -> None:
    """As torch.save writes a dictionary."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(values, protocol=2))
        archive.writestr("archive/version", "3\n")
    os.utime(path, (moment, moment))


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"step": 100}, {"step": 200}),
        ({"global_step": 9}, {"global_step": 10}),
        ({"epoch": 9}, {"epoch": 10}),
        ({"epoch": 1, "step": 90}, {"epoch": 2, "step": 10}),
        ({"iteration": 5}, {"iteration": 6}),
    ],
    ids=str,
)
def test_elsewhere_the_content_says_how_far_it_had_come(
    older: dict[str, int], newer: dict[str, int], tmp_path: Path
) -> None:
    """A copy has other times, and whoever copies may give other names."""
    saved(tmp_path / "step-999.pt", 2000, **older)
    saved(tmp_path / "step-1.pt", 1000, **newer)
    first, second = catalogue(tmp_path)
    assert first.path.name == "step-1.pt"
    assert newer_by(first, second) is By.STEP
    saved(tmp_path / "weights.pt", 3000, w=1)  # one that says nothing: then times decide
    assert [e.path.name for e in catalogue(tmp_path)] == ["weights.pt", "step-999.pt", "step-1.pt"]


def test_what_is_torn_comes_where_its_time_puts_it(tmp_path: Path) -> None:
    for moment, step in enumerate((1, 2, 3)):
        saved(tmp_path / f"{'cab'[moment]}.pt", 1000 + 10 * moment, step=step)
    for moment in (995, 1015, 1030):
        (tmp_path / f"torn-{moment}.pt").write_bytes(b"PK\3\4")
        os.utime(tmp_path / f"torn-{moment}.pt", (moment, moment))
    names = [entry.path.stem for entry in catalogue(tmp_path)]
    assert names == ["torn-1030", "b", "torn-1015", "a", "c", "torn-995"]
    assert [Path(move.path).stem for move in tidy(tmp_path).moves] == ["torn-1030"]


def test_frameworks_say_their_own_step(tmp_path: Path) -> None:
    """Directories whose names lie, and whose times are alike."""
    directory = unpack_into("hugging-face", tmp_path)
    for step, name in ((40, "checkpoint-4"), (6, "checkpoint-600")):
        copy = shutil.copytree(directory / "checkpoint-2", directory / name)
        state = copy / "trainer_state.json"
        content = json.loads(state.read_text()) | {"global_step": step}
        state.write_text(json.dumps(content))
    found = catalogue(directory)
    assert [(e.path.name, e.checkpoint.step) for e in found] == [
        ("checkpoint-4", 40),
        ("checkpoint-600", 6),
        ("checkpoint-2", 2),
    ]
    assert all(entry.checkpoint.state is State.COMPLETE for entry in found)


def test_what_a_framework_would_resume_from_by_its_name_goes_aside(tmp_path: Path) -> None:
    """The Trainer takes the highest number, whatever was written last."""
    directory = unpack_into("hugging-face", tmp_path)
    torn = shutil.copytree(directory / "checkpoint-2", directory / "checkpoint-600")
    (torn / "trainer_state.json").unlink()
    for path in (torn, *torn.iterdir()):
        os.utime(path, (1000, 1000))
    assert [entry.path.name for entry in catalogue(directory)] == ["checkpoint-2", torn.name]
    assert [Path(move.path).name for move in tidy(directory).moves] == [torn.name]


@pytest.mark.parametrize(
    "names", [("step-9", "step-10"), ("e9_0.5", "e10_0.4"), ("2024-01-31", "2024-02-01")]
)
def test_where_nothing_else_is_known_a_name_decides_and_is_said(
    run: Run, names: tuple[str, str], tmp_path: Path
) -> None:
    for name in reversed(names):
        save(tmp_path / f"{name}.npz")
        os.utime(tmp_path / f"{name}.npz", (1000, 1000))
    said = run("good", tmp_path)
    assert said.stdout == f"{tmp_path}/{names[1]}.npz\n"
    assert "is the newest only by its name" in said.stderr
    assert run("good", tmp_path, "--json").document["newest_by"] == "name"
    (tmp_path / f"{names[0]}.npz").unlink()
    assert run("good", tmp_path, "--json").document["newest_by"] is None


@pytest.mark.parametrize(
    ("name", "step"),
    [("model-7.safetensors", 7), ("step-100", 100), ("2024-01-31", None), ("e10_0.4", None)],
)
def test_a_step_is_shown_where_a_name_has_one_number(name: str, step: int, tmp_path: Path) -> None:
    path = tmp_path / f"{name.removesuffix('.safetensors')}.safetensors"
    save_file({"w": np.arange(4.0)}, path)
    assert catalogue(tmp_path)[0].checkpoint.step == step
