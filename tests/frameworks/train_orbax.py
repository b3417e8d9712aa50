"""An ordinary JAX script that saves with Orbax: it knows nothing of what its directory lies on.

    train_orbax.py DIRECTORY STEPS     save the steps up to STEPS, the last two kept
    train_orbax.py DIRECTORY --show    restore the latest one

Prints one JSON document: the steps kept, and a digest of every array restored from the latest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

KEEP = 2


def make_state(step: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(step), 3)
    return {
        "params": {
            "kernel": jax.random.normal(keys[0], (1024, 517)),
            "bias": jax.random.normal(keys[1], (517,), dtype=jnp.bfloat16),
        },
        "momentum": jax.random.normal(keys[2], (1024, 517)),
        "step": np.int64(step),
    }


def digest(state: dict[str, Any]) -> str:
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def main() -> None:
    directory, steps = Path(sys.argv[1]), sys.argv[2]
    options = ocp.CheckpointManagerOptions(max_to_keep=KEEP)
    with ocp.CheckpointManager(directory, options=options) as manager:
        if steps != "--show":
            for step in range(1, int(steps) + 1):
                manager.save(step, args=ocp.args.StandardSave(make_state(step)))
            manager.wait_until_finished()
        latest = manager.latest_step()
        template = jax.tree.map(np.zeros_like, make_state(0))
        restored = manager.restore(latest, args=ocp.args.StandardRestore(template))
        report = {
            "kept": sorted(manager.all_steps()),
            "names": sorted(path.name for path in directory.iterdir()),
            "restored": digest(restored),
            "expected": digest(make_state(latest)),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
