"""The harness of ``scripts/frameworks``: what a resume finds is told apart, and units hold.

The framework is NumPy, the program one that takes no care: eight files, one after the other.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.matrix import table
from tests.support.matrix.campaign import OUTCOMES, Campaign, Outcome, run_campaign
from tests.support.matrix.catalogue import CARELESS, FRAMEWORKS, QUIET_SECONDS
from tests.support.matrix.places import Place, open_place
from tests.support.matrix.trainer import ROOT, Life, Trainer


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    """Three steps were saved into an ordinary directory, the last one whole."""
    place = Place("directory", tmp_path, can_be_full=False)
    place.prepare(CARELESS)
    trainer = Trainer(CARELESS, Path(sys.executable), tmp_path / "log")
    outcome = Outcome("careless", "directory", "trainer", seed=1, wanted=1)
    campaign = Campaign(CARELESS, place, trainer, outcome, restart_seconds=0.0)
    campaign.measure()
    yield campaign
    trainer.close()


def judged(campaign: Campaign) -> str:
    """What the next life says, and the campaign of it."""
    counts = campaign.outcome.counts
    campaign.resume(judged=True)
    return next(name for name in OUTCOMES if counts[name])


def shard(campaign: Campaign, number: int) -> Path:
    return campaign.place.directory / f"tensor-{number}.npy"


def test_what_was_saved_last(campaign: Campaign) -> None:
    assert judged(campaign) == "old"


def test_what_was_saved_before(campaign: Campaign) -> None:
    campaign.saved += 1
    campaign.begun += 1
    assert judged(campaign) == "older"


def test_what_was_being_saved(campaign: Campaign) -> None:
    campaign.saved -= 1
    assert judged(campaign) == "new"


def test_a_program_that_counts_from_one_again(campaign: Campaign) -> None:
    """In an emptied directory, as the Hugging Face Trainer: its steps are below the last one's."""
    campaign.begun = 90
    campaign.note(Life(begun=3, saved=2))
    assert (campaign.saved, campaign.begun) == (2, 3)
    assert judged(campaign) == "new"
    campaign.saved = campaign.begun = 7
    campaign.note(Life())
    assert (campaign.saved, campaign.begun) == (7, 7)


def test_bytes_of_two_steps(campaign: Campaign) -> None:
    kept = shard(campaign, 3).read_bytes()
    life = campaign.start(saves=1)  # and ends by itself: a kill could cut a file of the next one
    assert campaign.trainer.wait_until_ended()
    campaign.note(life)
    shard(campaign, 3).write_bytes(kept)
    assert judged(campaign) == "mixed"


def test_a_tensor_with_one_wrong_byte(campaign: Campaign) -> None:
    value = np.load(shard(campaign, 5))
    value[1000] += 1
    np.save(shard(campaign, 5), value)
    assert judged(campaign) == "mixed"


def test_a_tensor_that_is_not_there(campaign: Campaign) -> None:
    shard(campaign, 7).unlink()
    assert judged(campaign) == "mixed"


def test_a_file_that_was_cut(campaign: Campaign) -> None:
    with shard(campaign, 0).open("r+b") as file:
        file.truncate(1000)
    assert judged(campaign) == "failed"
    assert any("reshape" in cause or "Error" in cause for cause in campaign.outcome.causes)


def test_nothing_is_left(campaign: Campaign) -> None:
    campaign.place.wipe()
    assert judged(campaign) == "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
def test_a_careless_program_in_a_unit(seed: int, tmp_path: Path, fresh: bool) -> None:
    outcome = Outcome("careless", "cxlfs-policies", "trainer", seed, wanted=2)
    with open_place("cxlfs-policies") as place:
        trainer = Trainer(CARELESS, Path(sys.executable), tmp_path / "log", fresh=fresh)
        try:
            run_campaign(outcome, CARELESS, place, trainer)
        finally:
            trainer.close()
    assert outcome.problem is None
    assert outcome.resumed == outcome.events == 2, outcome


def test_the_readme_says_what_the_table_says() -> None:
    columns = [table.HEADINGS[place] for place in table.SHORT_PLACES]
    full = table.rows((ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8"), columns)
    short = table.rows((ROOT / "README.md").read_text(encoding="utf-8"), columns)
    assert list(short) == [FRAMEWORKS[name].title for name in table.SHORT]
    assert short == {title: full[title] for title in short}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_guide_says_what_was_tried(name: str) -> None:
    """The policy of each framework, as the matrix sets it but for the quiet time."""
    framework = FRAMEWORKS[name]
    words = [word for word in framework.unit if word != "--quiet"]
    words = [word for word in words if word != str(QUIET_SECONDS)]
    tried = shlex.join(words) or "default"
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    guide = page[page.index("## Checkpoint directories") : page.index(table.BEGIN)]
    said = [line for line in guide.splitlines() if line.startswith(f"| {framework.title} |")]
    assert len(said) == 1
    assert tried in said[0]


def test_the_short_table() -> None:
    document = {
        "framework": "torch",
        "place": "tmpfs",
        "event": "trainer",
        "versions": {"torch": "1.2"},
        "counts": dict.fromkeys(OUTCOMES, 0) | {"old": 3, "failed": 2},
        "problem": None,
    }
    found = table.rows(table.make_short([document]), ["ext4", "tmpfs"])
    assert found["`torch.save` by name, one name"] == ("", "3/5: 2 fail")
    with pytest.raises(ValueError, match="no table"):
        table.rows("nothing", ["ext4"])


def test_the_table_stands_between_its_marks() -> None:
    document = {
        "framework": "dcp",
        "place": "ext4",
        "event": "trainer",
        "versions": {"torch": "1.2"},
        "counts": dict.fromkeys(OUTCOMES, 0) | {"old": 3, "mixed": 2},
        "problem": None,
    }
    made = table.make([document])
    assert "| torch DCP, one directory | 1.2 | 3/5: 2 mixed |" in made
    text = table.put_into(f"a\n{table.BEGIN}\nold\n{table.END}\nb\n", made)
    assert made in text
    assert "old\n" not in text
