"""XGBoost: one file for each step, named by its number, as its callback TrainingCheckPoint names
them; two kept; the one with the highest number is resumed from.

The state is a model of as many trees as the step; each leaf of a tree says its number.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import xgboost

from tests.support.matrix.trainers.life import Life, serve

ROWS = 20_000
KEEP = 2


def models(directory: Path) -> list[Path]:
    return sorted(directory.glob("model_*.ubj"), key=lambda path: int(path.stem[6:]))


def make_data() -> xgboost.DMatrix:
    source = np.random.default_rng(1)
    return xgboost.DMatrix(source.random((ROWS, 8)), label=source.random(ROWS))


def train(life: Life) -> None:
    data = make_data()
    settings = {"max_depth": 11, "nthread": 1, "seed": 1, "base_score": 0.5}
    found = models(life.directory)
    if found:
        booster = xgboost.Booster(settings, model_file=found[-1])
        steps = {int(booster.attr("step")), int(found[-1].stem[6:])}
        wrong = [] if booster.attr("digest") == digest(booster) else ["trees"]
        life.say("resumed " + json.dumps({"steps": sorted(steps), "wrong": wrong}))
        life.has_resumed = True
        step = max(steps)
    else:
        booster = xgboost.Booster(settings, [data])
        step = life.nothing()

    def save(step: int) -> None:
        booster.save_model(life.directory / f"model_{step}.ubj")
        for old in models(life.directory)[:-KEEP]:
            old.unlink()

    def next_step(step: int) -> None:
        if booster.num_boosted_rounds() < 40:
            booster.update(data, step)
        booster.set_attr(step=str(step), digest=digest(booster))

    while life.goes_on:
        step += 1
        next_step(step)
        life.begin(step)
        save(step)
        life.end(step)


def digest(booster: xgboost.Booster) -> str:
    return hashlib.sha256("".join(booster.get_dump()).encode()).hexdigest()


if __name__ == "__main__":
    serve({"xgboost": xgboost.__version__}, train)
