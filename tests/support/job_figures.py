"""What ``scripts/simulate-job`` shows: the formulas of ``cxlfs.job.advice`` beside
``job_simulation``, as figures, tables and a picture.

``table`` is about the efficiencies that the comparison table of a CXL memory module states (78 %
with storage over the network, 94 % with a module in each node): which failures and which overhead
they hold for, and what does not follow from the times beside them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cxlfs.job import advice
from cxlfs.job.advice import Costs
from tests.support.bench.svg import FAINT, GRID, INK, Picture, Point
from tests.support.job_simulation import Job, Run, simulate

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """How a job saves, in seconds."""

    name: str
    save: float
    stall: float
    restart: float
    interval: float

    def costs(self, mtbf: float, overhead: float = 0.0) -> Costs:
        return Costs(mtbf, self.save, self.stall, self.restart, overhead)


NETWORK = System("storage over the network", 17.5 * MINUTE, 0.0, 10 * MINUTE, 30 * MINUTE)
"""The middle of 15 to 20 minutes for a save, beside training, and of 8 to 12 for a recovery."""
BLOCKING = dataclasses.replace(
    NETWORK, name="the same, blocking", stall=NETWORK.save, interval=NETWORK.interval + NETWORK.save
)
LOCAL = System("a store in each node", 1.0, 1.0, 2 * MINUTE, 5 * MINUTE)
STATED = {NETWORK: 0.78, LOCAL: 0.94}
FAILURES_A_WEEK = 2.5
"""What the text around that table says of its nodes: 2 to 3."""
NODE_MTBF = 54 * DAY * 2048 / 419
"""16 384 GPUs, 8 a node, 419 unexpected interruptions in 54 days (arXiv:2407.21783)."""
NODES = (10, 30, 100, 300, 1000, 3000, 10_000)
SHAPES = (0.5, 0.7, 1.0, 1.5)


def exact(costs: Costs, interval: float) -> float:
    return advice.shares(costs, interval).training


def fit(estimate: Callable[[Costs, float], float]) -> tuple[float, float]:
    """The MTBF and the overhead with which an estimate gives both efficiencies of the table."""

    def overhead_at(mtbf: float) -> float:
        """With which the second one holds; an overhead is taken off, or is a share of the rest."""
        low, high = 0.0, 0.5
        for _ in range(60):
            middle = (low + high) / 2
            is_low = estimate(LOCAL.costs(mtbf, middle), LOCAL.interval) > STATED[LOCAL]
            low, high = (middle, high) if is_low else (low, middle)
        return low

    low, high = HOUR, 100 * HOUR
    for _ in range(60):
        middle = (low + high) / 2
        found = estimate(NETWORK.costs(middle, overhead_at(middle)), NETWORK.interval)
        low, high = (middle, high) if found < STATED[NETWORK] else (low, middle)
    return low, overhead_at(low)


def run_of(
    system: System, nodes: int, node_mtbf: float, failures: int, seed: int, **more: float
) -> Run:
    job = Job(
        nodes=nodes,
        node_mtbf_seconds=node_mtbf,
        save_seconds=system.save,
        stall_seconds=system.stall,
        interval_seconds=system.interval,
        restart_seconds=system.restart,
    )
    return simulate(dataclasses.replace(job, **more), failures=failures, seed=seed)  # type: ignore[arg-type]


# --- figures ------------------------------------------------------------------------------------


def table(failures: int, seed: int) -> Figures:
    found: Figures = {}
    for name, estimate in (("added up", advice.first_order), ("exact", exact)):
        mtbf, overhead = fit(estimate)
        systems = {}
        for system in (NETWORK, BLOCKING, LOCAL):
            run = run_of(system, 100, 100 * mtbf, failures, seed, overhead=overhead)
            costs = system.costs(mtbf, overhead)
            systems[system.name] = {
                "estimated": estimate(costs, system.interval),
                "exact": exact(costs, system.interval),
                "simulated": run.efficiency,
                "without_failures": 1 - system.stall / system.interval,
                "redone_minutes": advice.failure(costs, system.interval).redone_seconds / MINUTE,
                "redone_minutes_max": run.lost_most / MINUTE,
            }
        found[name] = {"mtbf_hours": mtbf / HOUR, "overhead": overhead, "systems": systems}
    mtbf, overhead = 7 * DAY / FAILURES_A_WEEK, fit(exact)[1]
    found["as the text says"] = {
        "mtbf_hours": mtbf / HOUR,
        "overhead": overhead,
        "systems": {
            system.name: {"exact": exact(system.costs(mtbf, overhead), system.interval)}
            for system in (NETWORK, LOCAL)
        },
    }
    return found


def plans(mtbf: float) -> Iterator[System]:
    """The systems, and each at its best."""
    for system in (NETWORK, LOCAL):
        yield system
        best = advice.best_interval(system.costs(mtbf))
        yield dataclasses.replace(system, name=f"{system.name}, best interval", interval=best)


def scale(failures: int, seed: int) -> list[Figures]:
    rows = []
    for nodes in NODES:
        mtbf = NODE_MTBF / nodes
        of_plans = {
            system.name: {
                "interval_minutes": system.interval / MINUTE,
                "exact": exact(system.costs(mtbf), system.interval),
                "simulated": run_of(system, nodes, NODE_MTBF, failures, seed).efficiency,
            }
            for system in plans(mtbf)
        }
        rows.append({"nodes": nodes, "mtbf_minutes": mtbf / MINUTE, "plans": of_plans})
    return rows


def bursts(failures: int, seed: int) -> list[Figures]:
    """Times between failures that are not exponential, which is what the formulas take them for."""
    nodes, mtbf = 1000, NODE_MTBF / 1000
    rows = []
    for shape in SHAPES:
        row: Figures = {"shape": shape}
        for system in (NETWORK, LOCAL):
            run = run_of(system, nodes, NODE_MTBF, failures, seed, shape=shape)
            measured = run.elapsed / run.failures
            row[system.name] = {
                "mtbf_minutes": measured / MINUTE,
                "exact": exact(system.costs(measured), system.interval),
                "exact_expected": exact(system.costs(mtbf), system.interval),
                "simulated": run.efficiency,
            }
        rows.append(row)
    return rows


def copies(failures: int, seed: int) -> list[Figures]:
    """A failure in ten takes the node's store with it."""
    rows = []
    for replicas in (1, 2, 3):
        run = run_of(
            LOCAL,
            1000,
            NODE_MTBF,
            failures,
            seed,
            store_lost=0.1,
            replicas=replicas,
            tier_seconds=HOUR,
        )
        rows.append(
            {
                "replicas": replicas,
                "simulated": run.efficiency,
                "failures": run.failures,
                "fallbacks": run.fallbacks,
                "redone_minutes_max": run.lost_most / MINUTE,
            }
        )
    return rows


SECTIONS: dict[str, Callable[[int, int], Any]] = {
    "table": table,
    "scale": scale,
    "bursts": bursts,
    "copies": copies,
}


# --- text ---------------------------------------------------------------------------------------


def lines(figures: Figures) -> Iterator[str]:
    """Markdown, as in docs/advice.md."""
    for number, (name, write) in enumerate(_TABLES.items()):
        if name in figures:
            yield from [""] * (number > 0)
            yield from write(figures[name])


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield _row(*["---"] * len(cells))


def _table_lines(found: Figures) -> Iterator[str]:
    yield from _head("losses", "MTBF", "overhead", "system", "estimated", "exact", "simulated")
    for name, each in found.items():
        for system, row in each["systems"].items():
            numbers = [
                f"{row[key]:.1%}" if key in row else ""
                for key in ("estimated", "exact", "simulated")
            ]
            hours = f"{each['mtbf_hours']:.1f} h"
            yield _row(name, hours, f"{each['overhead']:.1%}", system, *numbers)


def _scale_lines(rows: list[Figures]) -> Iterator[str]:
    yield from _head("nodes", "MTBF", *rows[0]["plans"])
    for row in rows:
        cells = [
            f"{plan['simulated']:.1%} (every {_minutes(plan['interval_minutes'])})"
            for plan in row["plans"].values()
        ]
        yield _row(row["nodes"], _minutes(row["mtbf_minutes"]), *cells)


def _minutes(minutes: float) -> str:
    if minutes >= 600:
        return f"{minutes / 60:.0f} h"
    return f"{minutes:.0f} min" if minutes >= 10 else f"{minutes:.1f} min"


def _bursts_lines(rows: list[Figures]) -> Iterator[str]:
    names = [name for name in rows[0] if name != "shape"]
    yield from _head(
        "shape", *(f"{name}: {what}" for name in names for what in ("exact", "simulated"))
    )
    for row in rows:
        cells = [f"{row[name][what]:.1%}" for name in names for what in ("exact", "simulated")]
        yield _row(f"{row['shape']:g}", *cells)


def _copies_lines(rows: list[Figures]) -> Iterator[str]:
    yield from _head("replicas", "training", "failures", "back to the tier", "most done again")
    for row in rows:
        most = _minutes(row["redone_minutes_max"])
        yield _row(
            row["replicas"], f"{row['simulated']:.1%}", row["failures"], row["fallbacks"], most
        )


_TABLES: dict[str, Callable[[Any], Iterator[str]]] = {
    "table": _table_lines,
    "scale": _scale_lines,
    "bursts": _bursts_lines,
    "copies": _copies_lines,
}


# --- picture ------------------------------------------------------------------------------------

COLOURS = ("#6e7781", "#a33ea1", "#d66f00", "#0b5fa5")
_LEFT, _TOP, _WIDTH, _HEIGHT = 60.0, 34.0, 600.0, 240.0


def place(nodes: float, share: float) -> Point:
    low, high = math.log10(min(NODES)), math.log10(max(NODES))
    x = _LEFT + _WIDTH * (0.04 + 0.92 * (math.log10(nodes) - low) / (high - low))
    return x, _TOP + _HEIGHT * (1 - share)


def draw(rows: list[Figures], path: Path) -> None:
    """Lines: the formula; dots: the simulation."""
    picture = Picture(690, 400, "Share of a job's time that is training, by its nodes")
    picture.text((_LEFT, 20), "training, of all the time", fill=FAINT)
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        _, y = place(NODES[0], share)
        stroke = INK if share == 0 else GRID
        picture.line([(_LEFT, y), (_LEFT + _WIDTH, y)], stroke=stroke)
        picture.text((_LEFT - 8, y + 4), f"{share:.0%}", anchor="end", fill=FAINT)
    for nodes in NODES:
        x, y = place(nodes, 0)
        picture.line([(x, y), (x, y + 4)])
        picture.text((x, y + 18), f"{nodes}", anchor="middle", fill=FAINT, size=11)
    picture.text((_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 36), "nodes", anchor="middle", fill=FAINT)
    for number, (name, colour) in enumerate(zip(rows[0]["plans"], COLOURS, strict=True)):
        points = [place(row["nodes"], row["plans"][name]["exact"]) for row in rows]
        dots = [place(row["nodes"], row["plans"][name]["simulated"]) for row in rows]
        picture.line(points, stroke=colour, width=1.8)
        picture.dots(dots, fill=colour)
        y = _TOP + _HEIGHT + 58 + 17 * number
        picture.line([(_LEFT, y), (_LEFT + 24, y)], stroke=colour, width=1.8)
        picture.dots([(_LEFT + 12, y)], fill=colour)
        best = rows[0]["plans"][name]["interval_minutes"]
        every = "" if name.endswith("best interval") else f", every {_minutes(best)}"
        picture.text((_LEFT + 32, y + 4), name + every)
    picture.write(path)


def draw_table(found: Figures, path: Path) -> None:
    """Bars: the formula; dots: the simulation; strokes: what is stated."""
    rows = [(name, each, s) for name, each in found.items() for s in each["systems"]]
    stated = {system.name: share for system, share in STATED.items()}
    picture = Picture(690, 60 + 30 * len(rows), "Training efficiency: what a table states, and why")
    left, width = 330.0, 330.0
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x = left + width * share
        picture.line([(x, 30), (x, 40 + 30 * len(rows))], stroke=GRID)
        picture.text((x, 22), f"{share:.0%}", anchor="middle", fill=FAINT)
    for number, (name, each, system) in enumerate(rows):
        y, figures = 44 + 30 * number, each["systems"][system]
        colour = COLOURS[0] if system != LOCAL.name else COLOURS[3]
        picture.rectangle((left, y), width * figures["exact"], 14, fill=colour)
        if "simulated" in figures:
            picture.dots([(left + width * figures["simulated"], y + 7)], fill=COLOURS[2])
        if system in stated:
            x = left + width * stated[system]
            picture.line([(x, y - 4), (x, y + 18)], stroke=INK, width=2)
        words = f"{system}; {name}: {each['mtbf_hours']:.1f} h"
        picture.text((left - 8, y + 11), words, anchor="end", size=11)
    picture.write(path)
