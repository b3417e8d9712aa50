"""Retention: what rules keep, what is never removed, and what a crash on the way leaves."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cxlfs.checkpoint import keep
from cxlfs.checkpoint.keep import Rules, Value, decide, remove
from cxlfs.errors import DirectoryAbsentError, NoCheckpointError, NoGoodCheckpointError, UsageError

DAY = 86_400
BEGIN = int(dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC).timestamp())


def save(top: Path, step: int, *, seconds: int = 0, loss: object = None) -> Path:
    """A checkpoint directory as Hugging Face's Trainer names it."""
    path = top / f"checkpoint-{step}"
    path.mkdir(parents=True)
    header = {"w": {"dtype": "F32", "shape": [step], "data_offsets": [0, 4 * step]}}
    encoded = json.dumps(header).encode()
    data = np.full(step, step, "<f4").tobytes()
    content = len(encoded).to_bytes(8, "little") + encoded + data
    (path / "model.safetensors").write_bytes(content)
    (path / "config.json").write_text("{}")
    history = [{"loss": 9.0}] if loss is None else [{"eval_loss": loss}, {"loss": 9.0}]
    state = {"global_step": step, "log_history": history}
    (path / "trainer_state.json").write_text(json.dumps(state))
    moment = BEGIN + seconds
    for each in (*path.iterdir(), path):
        os.utime(each, (moment, moment))
    return path


def run_of(top: Path, *steps: int) -> Path:
    for number, step in enumerate(steps):
        save(top, step, seconds=number * 3600)
    return top


def kept(top: Path, rules: Rules) -> list[int]:
    """Steps, the lowest first; removing must leave just these."""
    decisions = decide(top, rules)
    steps = sorted(d.entry.checkpoint.step or 0 for d in decisions if d.is_kept)
    list(remove(decisions))
    left = sorted(int(p.name.rpartition("-")[2]) for p in top.iterdir() if p.is_dir())
    assert left == steps
    return steps


def damage(path: Path) -> None:
    """Cut the tensors."""
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


RULES: list[tuple[Rules, list[int]]] = [
    (Rules(last=2), [9, 10]),
    (Rules(last=100), list(range(1, 11))),
    (Rules(every=4), [4, 8, 10]),
    (Rules(last=2, every=5), [5, 9, 10]),
    (Rules(hourly=3), [8, 9, 10]),
    (Rules(daily=2), [10]),
    (Rules(within_ns=2 * 3600 * 10**9), [8, 9, 10]),
]


@pytest.mark.parametrize(("rules", "expected"), RULES, ids=str)
def test_rules(tmp_path: Path, rules: Rules, expected: list[int]) -> None:
    """Ten checkpoints, an hour apart, on one day."""
    assert kept(run_of(tmp_path, *range(1, 11)), rules) == expected


def test_the_newest_of_each_period(tmp_path: Path) -> None:
    for step in range(1, 71):
        save(tmp_path, step, seconds=step * DAY // 2)
    rules = Rules(daily=3, weekly=2, monthly=3)
    by_step = {d.entry.checkpoint.step: d.reasons for d in decide(tmp_path, rules)}
    daily = [step for step, reasons in by_step.items() if "daily" in reasons]
    assert daily == [70, 68, 66]  # 5 April 12:00, 4 April 12:00, 3 April 12:00
    assert [step for step, reasons in by_step.items() if "monthly" in reasons] == [70, 60]
    assert [step for step, reasons in by_step.items() if "weekly" in reasons] == [70, 56]


def test_the_best_by_a_value(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: 0.1, 3: 0.3, 4: float("nan"), 5: "low", 6: None, 7: 0.9}
    for step, loss in losses.items():
        save(tmp_path, step, loss=loss)
    value = Value.parse("trainer_state.json:log_history.eval_loss", is_highest_best=False)
    highest = Value.parse("trainer_state.json:log_history.eval_loss", is_highest_best=True)
    best = {
        d.entry.checkpoint.step
        for d in decide(tmp_path, Rules(best=1, value=highest))
        if "best 1" in d.reasons
    }
    assert best == {7}
    assert kept(tmp_path, Rules(best=2, value=value)) == [2, 3, 7]


HOSTILE = {
    "deep": '{"log_history": ' + "[" * 900 + "]" * 900 + "}",
    "huge": '{"log_history": [{"eval_loss": 1' + "0" * 400 + "}]}",
    "an object": '{"log_history": {"eval_loss": {"eval_loss": 1}}}',
    "a list": "[1]",
    "true": '{"log_history": [{"eval_loss": true}]}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_values_that_are_none(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1, loss=0.5)
    path = save(tmp_path, 2) / "other.json"
    path.write_text(text)
    value = Value.parse("other.json:log_history.eval_loss", is_highest_best=True)
    found = {
        d.entry.checkpoint.step: d.reasons for d in decide(tmp_path, Rules(best=1, value=value))
    }
    assert found == {2: ("newest good",), 1: ()}


def test_the_newest_good_one_stays(tmp_path: Path) -> None:
    """A newer one that is damaged counts for nothing, and stays, too."""
    run_of(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "checkpoint-4")
    assert kept(tmp_path, Rules(last=1)) == [3, 4]


def test_nothing_goes_without_a_good_one(tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        damage(path)
    with pytest.raises(NoGoodCheckpointError):
        decide(tmp_path, Rules(last=1))
    with pytest.raises(DirectoryAbsentError):
        decide(tmp_path / "none", Rules(last=1))
    (tmp_path / "none").mkdir()
    with pytest.raises(NoCheckpointError):
        decide(tmp_path / "none", Rules(last=1))


def test_an_incomplete_one_stays(tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "checkpoint-2")
    assert kept(tmp_path, Rules(last=1)) == [2, 4]


@pytest.mark.parametrize(
    "name",
    [
        lambda top: (top / "latest").write_text("checkpoint-1"),
        lambda top: (top / "best").symlink_to("checkpoint-1"),
    ],
    ids=["a tracker", "a link"],
)
def test_what_is_named_stays(tmp_path: Path, name: Callable[[Path], object]) -> None:
    run_of(tmp_path, 1, 2, 3)
    name(tmp_path)
    reasons = {d.entry.checkpoint.step: d.reasons for d in decide(tmp_path, Rules(last=1))}
    assert [step for step, why in reasons.items() if why] == [3, 1]
    assert reasons[1][0].startswith("named by ")


def test_what_a_process_writes_to_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cxlfs.checkpoint.writers import Writer

    run_of(tmp_path, 1, 2, 3)
    writer = Writer(7, "python", f"{os.path.realpath(tmp_path)}/checkpoint-1/optimizer.pt")
    monkeypatch.setattr(keep, "writers_in", lambda _directory: iter([writer]))
    assert kept(tmp_path, Rules(last=1)) == [1, 3]


def test_order_is_not_that_of_times(tmp_path: Path) -> None:
    save(tmp_path, 1, seconds=5 * DAY)
    save(tmp_path, 2, seconds=1)
    save(tmp_path, 3, seconds=0)
    assert kept(tmp_path, Rules(last=1)) == [3]


def test_a_file_that_is_gone_already(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        np.savez(tmp_path / f"step-{step}.npz", w=np.arange(step * 10.0))
    decisions = decide(tmp_path, Rules(last=1))
    (tmp_path / "step-1.npz").unlink()
    assert len(list(remove(decisions))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-3.npz"]


def test_a_directory_that_changes_meanwhile(tmp_path: Path) -> None:
    decisions = decide(run_of(tmp_path, 1, 2), Rules(last=1))
    (tmp_path / "checkpoint-1").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-1").symlink_to("elsewhere")
    list(remove(decisions))
    assert (tmp_path / "elsewhere" / "model.safetensors").exists()


def test_the_oldest_goes_first(tmp_path: Path) -> None:
    decisions = decide(run_of(tmp_path, 1, 2, 3, 4), Rules(last=1))
    steps = []
    for gone in remove(decisions):
        steps.append(gone.entry.checkpoint.step)
        assert not gone.entry.path.exists()
        assert (tmp_path / "checkpoint-4").exists()
    assert steps == [1, 2, 3]


def test_links_are_not_followed(tmp_path: Path) -> None:
    top = tmp_path / "run"
    run_of(top, 1, 2)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"x")
    (top / "checkpoint-1" / "link").symlink_to(precious)
    assert kept(top, Rules(last=1)) == [2]
    assert (precious / "file").read_bytes() == b"x"


@pytest.mark.parametrize("text", ["", "file", "file:", ":key", "/etc/passwd:x", "../f.json:x"])
def test_values_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError):
        Value.parse(text, is_highest_best=True)


@pytest.mark.parametrize(
    "rules", [Rules(), Rules(best=2), Rules(value=Value("f", ("k",), is_highest_best=True))]
)
def test_rules_that_mean_nothing(tmp_path: Path, rules: Rules) -> None:
    run_of(tmp_path, 1, 2)
    with pytest.raises(UsageError):
        decide(tmp_path, rules)


def test_a_checkpoint_itself(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    with pytest.raises(UsageError, match="a checkpoint itself"):
        decide(path, Rules(last=1))
    assert path.exists()
