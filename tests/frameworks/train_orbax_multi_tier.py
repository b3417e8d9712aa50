"""An ordinary JAX program of two processes that saves with Orbax's multi-tier checkpoints, each
into a directory of its own: it knows nothing of what that lies on.

    train_orbax_multi_tier.py DIRECTORY STEPS KILL_AT     process 1 is killed in the save of KILL_AT

Prints one JSON document: the step that it went on from, and the steps that are there at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental.emergency.multi_tier_checkpointing import (
    initialization,
    replicator_checkpoint_manager,
)


def make_state(step: int, sharding: NamedSharding) -> dict[str, Any]:
    values = {
        "weights": np.arange(5000, dtype=np.float32) * (step + 1),
        "step": np.asarray(step),
    }
    return {
        name: jax.make_array_from_callback(value.shape, sharding, lambda index, v=value: v[index])
        for name, value in values.items()
    }


def restore(manager: Any, step: int, sharding: NamedSharding) -> dict[str, Any]:
    wanted = make_state(0, sharding)
    how = jax.tree.map(
        lambda a: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype),
        wanted,
    )
    what = ocp.args.PyTreeRestore(item=wanted, restore_args=how)
    found = manager.restore(step, args=ocp.args.Composite(state=what))["state"]
    return dict(found)


def main() -> None:
    directory, steps, kill_at = epath.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    initialization.initialize_multi_tier_checkpointing(
        directory, backup_interval_steps=2, num_slices=2, run_name="run1"
    )
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("slice", "device"))
    sharding = NamedSharding(mesh, PartitionSpec())
    options = replicator_checkpoint_manager.ReplicatorCheckpointManagerOptions()
    with replicator_checkpoint_manager.ReplicatorCheckpointManager(
        directory, options, global_mesh=mesh
    ) as manager:
        latest = manager.latest_step()
        if latest is not None:
            found, wanted = restore(manager, latest, sharding), make_state(latest, sharding)
            for name, value in wanted.items():
                same = np.array_equal(found[name].addressable_data(0), value.addressable_data(0))
                assert same, name
        first = 0 if latest is None else latest + 1
        for step in range(first, steps):
            state = ocp.args.PyTreeSave(make_state(step, sharding))
            manager.save(step, args=ocp.args.Composite(state=state))
            if step == kill_at and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        manager.wait_until_finished()
    names = sorted(path.name for path in directory.iterdir() if path.name.isdigit())
    print(json.dumps({"first": first, "steps": names}))


jax.config.update("jax_cpu_collectives_implementation", "gloo")
flags.FLAGS(sys.argv[:1])  # as absl.app.run does: Orbax asks for one when it restores
main()
