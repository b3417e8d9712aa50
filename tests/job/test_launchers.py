"""Which engine a job gets by itself, and that no process takes itself for all of a job."""

from __future__ import annotations

import os
import sys
import types

import pytest

from cxlfs.errors import JobEngineError
from cxlfs.job.engines import engine_named, launchers

SEVERAL = {
    "torchrun": {"WORLD_SIZE": "2", "RANK": "0"},
    "torchrun, without a size": {"TORCHELASTIC_RUN_ID": "x"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
    "srun, an older one": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    "srun, another rank": {"SLURM_PROCID": "1"},
    "LSF": {"JSM_NAMESPACE_SIZE": "4"},
    "Flux": {"FLUX_JOB_SIZE": "4"},
    "Cray": {"PALS_RANKID": "0"},
    "PMIx": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"},
    "JAX": {"JAX_COORDINATOR_ADDRESS": "a:1"},
    "JAX, with a size": {"JAX_NUM_PROCESSES": "2"},
    "TPU": {"TPU_WORKER_HOSTNAMES": "a,b"},
    "an indexed Job": {"JOB_COMPLETION_INDEX": "0"},
    "LeaderWorkerSet": {"LWS_GROUP_SIZE": "2"},
    "a size that is none": {"WORLD_SIZE": "several"},
}
ALONE: dict[str, dict[str, str]] = {
    "nothing": {},
    "torchrun of one": {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
    "sbatch": {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    "salloc": {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},
    "srun of one": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "PMIx of one": {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
    "an indexed Job of one": {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"},
    "TPU of one": {"TPU_WORKER_HOSTNAMES": "localhost"},
}
VARIABLES = {name for each in (*SEVERAL.values(), *ALONE.values()) for name in each} | {
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MEGASCALE_NUM_SLICES",
    "TPU_PROCESS_ADDRESSES",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started the tests."""
    for name in VARIABLES & os.environ.keys():
        monkeypatch.delenv(name)


@pytest.mark.parametrize("launcher", SEVERAL)
def test_one_of_several_is_told_which_engine_to_ask_for(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SEVERAL[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobEngineError) as caught:
        engine_named("auto")
    assert any(name in caught.value.message for name in SEVERAL[launcher])
    assert "engine='torch'" in str(caught.value.next_step)
    assert engine_named("local").world().size == 1, "asked for by name"


@pytest.mark.parametrize("launcher", ALONE)
def test_a_process_that_is_alone_is_so(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE[launcher].items():
        monkeypatch.setenv(name, value)
    assert engine_named("auto").world().size == 1


def test_sizes_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(JobEngineError, match="SLURM_STEP_NUM_TASKS=4"):
        engine_named("auto")


def test_a_worker_of_ray_and_a_process_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, worker = types.ModuleType("ray"), types.SimpleNamespace(mode=1)
    private = types.SimpleNamespace(worker=types.SimpleNamespace(global_worker=worker))
    monkeypatch.setattr(ray, "_private", private, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(JobEngineError, match="Ray"):
        engine_named("auto")
    worker.mode = 0
    assert engine_named("auto").world().size == 1, "the driver"
    jax = types.ModuleType("jax._src.distributed")
    state = types.SimpleNamespace(client=object(), num_processes=2)
    monkeypatch.setattr(jax, "global_state", state, raising=False)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", jax)
    with pytest.raises(JobEngineError, match="2 processes"):
        engine_named("auto")
    state.num_processes = 1
    assert engine_named("auto").world().size == 1


def test_a_process_group_of_one_among_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of a step has made one for itself."""
    fake = types.ModuleType("torch.distributed")
    for name, value in (("is_available", True), ("is_initialized", True), ("get_world_size", 1)):
        monkeypatch.setattr(fake, name, lambda value=value: value, raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed", fake)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(JobEngineError, match="Slurm"):
        engine_named("auto")


def test_each_rule_reads_variables_alone() -> None:
    assert launchers.said_by({}) == ()
