"""``cxlfs inspect``, ``diff``, ``manifest``, ``verify --manifest`` and ``verify --deep``."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cxlfs.checkpoint.tensors import draw
from tests.support.cli import Run, assert_two_lines
from tests.support.mount import Workplace

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(weights(0), path)
    return path


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Of two layers; each step changes them a little."""
    make = np.random.default_rng(7)
    found = {
        f"model.layers.{layer}.{name}.weight": make.standard_normal((8, 40), dtype=np.float32)
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm")
    }
    found["model.embed_tokens.weight"] = make.standard_normal((50, 8), dtype=np.float32)
    found["step"] = np.array(step)
    for _ in range(step):
        for name in found.keys() - {"step"}:
            noise = make.standard_normal(found[name].shape, dtype=np.float32)
            found[name] = found[name] + np.float32(1e-3) * noise
    return found


# --- inspect ------------------------------------------------------------------------------------


def test_table(run: Run, model: Path) -> None:
    said = run("inspect", model)
    assert said.code == 0
    header, *rows, last = said.stdout.splitlines()
    assert header.split() == ["NAME", "DTYPE", "SHAPE", "SIZE", "OFFSET", "FILE"]
    assert len(rows) == 8
    (row,) = [row.split() for row in rows if "layers.1.mlp" in row]
    assert row[:5] == ["model.layers.1.mlp.up_proj.weight", "F32", "8x40", "1.2", "KiB"]
    assert row[6] == "model.safetensors"
    data = model.read_bytes()[int(row[5]) :]
    assert data.startswith(weights(0)["model.layers.1.mlp.up_proj.weight"].tobytes())
    assert last.startswith("safetensors, complete, 8 tensors, ")


def test_statistics_as_text_and_json(run: Run, model: Path) -> None:
    values = weights(0)
    values["model.embed_tokens.weight"][3, 3] = np.nan
    save_file(values, model)
    said = run("inspect", model, "--stats")
    header = said.stdout.splitlines()[0].split()
    assert header[4:10] == ["MIN", "MAX", "MEAN", "NORM", "NAN", "INF"]
    assert said.stdout.splitlines()[-1] == "1 NaN and 0 Inf"
    found = run("inspect", model, "--stats", "--json").document
    assert found["schema"] == "cxlfs.inspect/1"
    assert (found["nan"], found["inf"], found["with_statistics"]) == (1, 0, True)
    for tensor in found["tensors"]:
        wide = values[tensor["name"]].astype(np.float64)
        finite = wide[np.isfinite(wide)]
        numbers = tensor["statistics"]
        assert numbers["minimum"] == finite.min()
        assert numbers["norm"] == pytest.approx(np.linalg.norm(finite), rel=1e-5)
    without = run("inspect", model, "--json").document
    assert without["nan"] is None
    assert {tensor["statistics"] for tensor in without["tensors"]} == {None}


def test_numbers_that_json_has_no_word_for(run: Run, model: Path) -> None:
    save_file({"w": np.full(4, 1e200)}, model)
    (tensor,) = run("inspect", model, "--stats", "--json").document["tensors"]
    assert tensor["statistics"]["maximum"] == 1e200
    assert tensor["statistics"]["norm"] is None
    row = run("inspect", model, "--stats").stdout.splitlines()[1].split()
    assert row[5:9] == ["1e+200", "1e+200", "1e+200", "-"]


def test_some_tensors(run: Run, model: Path) -> None:
    found = run("inspect", model, "--tensor", "*norm*", "--json").document
    assert {each["layer"] for each in found["tensors"]} == {0, 1}
    assert {each["family"] for each in found["tensors"]} == {"norm"}


def test_picture(run: Run, model: Path, tmp_path: Path) -> None:
    said = run("inspect", model, "--plot", tmp_path / "norms.svg")
    assert f"drawn: {tmp_path}/norms.svg" in said.stdout
    root = ET.parse(tmp_path / "norms.svg").getroot()  # noqa: S314  our own
    assert root.tag == f"{SVG}svg"
    words = [each.text for each in root.iter(f"{SVG}text")]
    assert {"embedding", "attention", "mlp", "norm", "none", "0", "1", "layer"} <= set(words)
    lines = [each for each in root.iter(f"{SVG}polyline") if each.get("stroke-width") == "2"]
    assert len(lines) == 3, "attention, mlp and norm have two layers"
    assert all(len((line.get("points") or "").split()) == 2 for line in lines)


def test_pictures_of_nothing_and_of_hostile_names() -> None:
    for title, named in (
        ("", []),
        ("<script>&\x1b[31m\ud800", [("a<b>&\0.1", 1.0), ("c", 0.0)]),
        ("one", [("w", 5e-324), ("layers.1.w", 1.7e308)]),
    ):
        text = draw(title, named)
        assert "<script>" not in text
        ET.fromstring(text)  # noqa: S314  our own
    assert draw("a", [("w", 1.0)]) == draw("a", [("w", 1.0)])


def test_what_cannot_be_inspected(run: Run, tmp_path: Path) -> None:
    assert run("inspect", tmp_path / "absent").code == 32
    (tmp_path / "text").write_text("hello")
    said = run("inspect", tmp_path / "text")
    assert_two_lines(said, 37, "cxlfs inspect", "no reader here knows its format")
    for step in (1, 2):
        np.savez(tmp_path / f"step-{step}.npz", w=np.ones(step))
        os.utime(tmp_path / f"step-{step}.npz", (step, step))
    said = run("inspect", tmp_path)
    assert said.code == 37
    assert f"next: name one of them: {tmp_path}/step-2.npz" in said.stderr


def test_an_incomplete_one_is_said_to_be(run: Run, model: Path) -> None:
    os.truncate(model, model.stat().st_size - 10)
    said = run("inspect", model)
    assert said.code == 0
    assert "incomplete" in said.stdout


def test_names_never_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    save_file({"\x1b[31mred\n": np.ones(3)}, tmp_path / "a.safetensors")
    for verb in (("inspect", "--stats"), ("diff", tmp_path / "a.safetensors", "--tensors")):
        said = run(*verb[:1], tmp_path / "a.safetensors", *verb[1:])
        assert said.code == 0
        assert "\x1b" not in said.stdout


# --- diff ---------------------------------------------------------------------------------------


def test_diff(run: Run, tmp_path: Path) -> None:
    before, after = weights(0), weights(0)
    after["model.layers.1.mlp.up_proj.weight"][0, :10] += 1
    after["new"] = after.pop("model.embed_tokens.weight")
    save_file(before, tmp_path / "a.safetensors")
    save_file(after, tmp_path / "b.safetensors")
    said = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--tensors")
    lines = said.stdout.splitlines()
    assert lines[:2] == ["added: new", "gone: model.embed_tokens.weight"]
    assert lines[2].split() == ["TENSOR", "CHANGED", "NORM", "RELATIVE", "NOTE"]
    assert lines[3].split()[:3] == ["model.layers.1.mlp.up_proj.weight", "3.12%", "3.162"]
    (family,) = [line.split() for line in lines if line.startswith("mlp")]
    assert family[:5] == ["mlp", "1", "of", "2", "1.56%"]
    assert lines[-2] == "1 changed, 6 unchanged, 1 added, 1 gone"
    found = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").document
    assert (found["same"], found["changed"], found["unchanged"]) == (False, 1, 6)
    assert found["bytes_shared"] == 0
    (tensor,) = [each for each in found["tensors"] if each["changed_items"]]
    assert (tensor["changed_items"], tensor["largest"]) == (10, pytest.approx(1, rel=1e-6))


def test_diff_of_the_same(run: Run, model: Path) -> None:
    found = run("diff", model, model, "--json").document
    assert (found["same"], found["bytes_read"]) == (True, 0)
    assert run("diff", model, model).stdout.splitlines()[-2] == "same"
    assert run("diff", model, model, "--all", "--json").document["bytes_read"] > 0


# --- manifest -----------------------------------------------------------------------------------


def test_manifest_and_verify(run: Run, model: Path, tmp_path: Path) -> None:
    out, sums = tmp_path / "m.json", tmp_path / "sums"
    said = run("manifest", model, "--output", out, "--sha256", sums, "--json").document
    assert said["schema"] == "cxlfs.manifest_written/1"
    assert (said["files"], said["tensors"], said["sha256"], said["signed"]) == (1, 8, True, False)
    done = subprocess.run(["sha256sum", "-c", sums], cwd=tmp_path, check=False)
    assert done.returncode == 0
    said = run("verify", "--manifest", out)
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout.startswith("as the manifest says: 1 files, 8 tensors, ")
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    said = run("verify", "--manifest", out, tmp_path)
    assert said.code == 3
    last = max(json.loads(out.read_text())["tensors"], key=lambda each: each["parts"][0]["offset"])
    assert said.stdout.startswith(
        f"error file-checksum: tensor {last['name']}: model.safetensors: "
    )
    found = run("verify", "--manifest", out, model, "--json").document
    assert found["schema"] == "cxlfs.verify_manifest/1"
    assert [(each["file"], each["tensor"]) for each in found["findings"]] == [
        ("model.safetensors", last["name"])
    ]


def test_manifest_on_standard_output_and_parents(run: Run, model: Path, tmp_path: Path) -> None:
    first = run("manifest", model).stdout
    (tmp_path / "first").write_text(first)
    found = run("manifest", model, "--parent", tmp_path / "first", "--json").document
    assert found["schema"] == "cxlfs.manifest/1"
    parent = json.loads(first)
    assert found["parents"] == [
        {"name": "model.safetensors", "step": parent["step"], "id": parent["id"]}
    ]
    (tmp_path / "second").write_text(json.dumps(found))
    assert run("verify", "--manifest", tmp_path / "second", tmp_path).code == 0


def test_manifest_of_a_directory(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "step-3"
    place.mkdir()
    save_file(weights(3), place / "model.safetensors")
    (place / "config.json").write_text("{}")
    out = place / "manifest.json"
    for _ in range(2):
        assert run("manifest", place, "--output", out).code == 0
    assert run("verify", "--manifest", out, place).code == 0
    (tmp_path / "m.json").write_bytes(out.read_bytes())
    said = run("verify", "--manifest", tmp_path / "m.json")
    assert "note: manifest.json is not in the manifest" in said.stdout
    (place / "config.json").unlink()
    assert run("verify", "--manifest", tmp_path / "m.json").code == 3
    without = run("manifest", place, "--no-tensors", "--json").document
    assert without["tensors"] == []
    (tmp_path / "m.json").rename(tmp_path.parent / "alone.json")
    assert run("verify", "--manifest", tmp_path.parent / "alone.json").code == 2


def test_signed_manifests(run: Run, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="pip install 'cxlfs[sign]' has it")
    key, public, out = tmp_path / "key", tmp_path / "public", tmp_path / "m.json"
    make = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", key]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    assert run("manifest", model, "--output", out, "--sign", key, "--json").document["signed"]
    assert "--public-key checks by whom" in run("verify", "--manifest", out).stdout
    assert run("verify", "--manifest", out, "--public-key", public).code == 0
    assert run("manifest", model, "--output", out).code == 0
    said = run("verify", "--manifest", out, "--public-key", public)
    assert said.code == 3
    assert "error signature: " in said.stdout
    (tmp_path / "none").write_text("")
    assert run("manifest", model, "--sign", tmp_path / "none").code == 2


def test_manifests_that_are_none(run: Run, model: Path) -> None:
    said = run("verify", "--manifest", model)
    assert_two_lines(said, 38, "cxlfs verify", "not JSON")


# --- verify --deep ------------------------------------------------------------------------------


def save_steps(place: Path, count: int) -> list[Path]:
    place.mkdir()
    paths = [place / f"step-{step}.npz" for step in range(1, count + 1)]
    for step, path in enumerate(paths, 1):
        np.savez(path, **weights(step))  # type: ignore[arg-type]
        os.utime(path, (1000 + step, 1000 + step))
    return paths


def change(path: Path, name: str, place: tuple[int, int], value: float) -> None:
    """In a saved step, without a checksum that differs: as memory that flipped before the save."""
    with np.load(path) as found:
        values = dict(found)
    values[name][place] = value
    status = path.stat()
    np.savez(path, **values)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_deep_finds_nothing(run: Run, tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 5)
    said = run("verify", "--deep", tmp_path / "run")
    assert said.code == 0, said.stdout
    assert said.stdout.splitlines()[-1] == "nothing found in 5 checkpoints"


def test_deep_hints_at_what_no_checksum_finds(run: Run, tmp_path: Path) -> None:
    paths = save_steps(tmp_path / "run", 5)
    change(paths[1], "model.embed_tokens.weight", (2, 2), np.inf)
    change(paths[4], "model.layers.0.mlp.up_proj.weight", (1, 1), 3e3)
    change(paths[4], "model.layers.1.mlp.up_proj.weight", (0, 0), np.nan)
    said = run("verify", "--deep", tmp_path / "run", "--json")
    assert said.code == 5
    *found, summary = said.documents
    assert (summary["bad"], summary["hints"], summary["exit_code"]) == (0, 3, 5)
    assert [Path(each["path"]).name for each in found] == [f"step-{n}.npz" for n in range(1, 6)]
    hints = {(Path(c["path"]).stem, h["id"], h["tensor"]) for c in found for h in c["hints"]}
    assert hints == {
        ("step-2", "inf", "model.embed_tokens.weight"),
        ("step-5", "jump", "model.layers.0.mlp.up_proj.weight"),
        ("step-5", "nan", "model.layers.1.mlp.up_proj.weight"),
    }
    text = run("verify", "--deep", tmp_path / "run")
    assert (
        "hint nan: tensor model.layers.1.mlp.up_proj.weight: 1 of 320 items are NaN" in text.stdout
    )
    assert text.stdout.splitlines()[-1].endswith("none of them proves damage")
    assert run("verify", "--deep", tmp_path / "run", "--last", "1").code == 5
    assert run("verify", "--deep", paths[0]).code == 0


def test_deep_says_once_that_everything_changed(run: Run, tmp_path: Path) -> None:
    """A learning rate that was raised is one hint, not one for each tensor."""
    paths = save_steps(tmp_path / "run", 4)
    with np.load(paths[3]) as found:
        values = {name: each * (1.5 if each.ndim else 1) for name, each in found.items()}
    np.savez(paths[3], **{n: v.astype(np.float32) if v.ndim else v for n, v in values.items()})
    *_, last, summary = run("verify", "--deep", tmp_path / "run", "--json").documents
    assert [(each["id"], each["tensor"]) for each in last["hints"]] == [("jump", None)]
    assert summary["hints"] == 1


def test_deep_calls_damage_damage(run: Run, tmp_path: Path) -> None:
    paths = save_steps(tmp_path / "run", 3)
    data = bytearray(paths[1].read_bytes())
    data[len(data) // 2] ^= 1
    paths[1].write_bytes(data)
    os.utime(paths[1], (1002, 1002))
    os.truncate(paths[2], 3000)
    os.utime(paths[2], (1003, 1003))
    said = run("verify", "--deep", tmp_path / "run", "--json")
    assert said.code == 3
    *found, summary = said.documents
    assert [each["state"] for each in found] == ["complete", "damaged", "incomplete"]
    assert summary["bad"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--deep"],
        [],
        ["--deep", "--manifest", "a"],
        ["--deep", "--repair", "a"],
        ["--public-key", "a", "b"],
        ["--last", "3", "a"],
        ["--manifest", "a", "--undo", "b"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together(run: Run, arguments: list[str]) -> None:
    assert run("verify", *arguments).code == 2


# --- on a store ---------------------------------------------------------------------------------


@pytest.mark.mounted
def test_on_a_mount_what_has_one_checksum_is_not_read(
    run: Run, place: Workplace, model: Path, tmp_path: Path
) -> None:
    mountpoint = place.mount()
    for name in ("a.safetensors", "b.safetensors"):
        (mountpoint / name).write_bytes(model.read_bytes())
    pair = mountpoint / "a.safetensors", mountpoint / "b.safetensors"
    found = run("diff", *pair, "--json").document
    assert (found["same"], found["bytes_read"]) == (True, 0)
    assert found["bytes_shared"] > 0
    everything = run("diff", *pair, "--all", "--json").document
    assert (everything["same"], everything["bytes_shared"]) == (True, 0)
    out = tmp_path / "m.json"
    assert run("manifest", pair[0], "--no-tensors", "--output", out).code == 0
    assert run("verify", "--manifest", out, mountpoint).code == 0
    assert run("inspect", pair[0], "--stats").code == 0
    assert run("verify", "--deep", mountpoint).code == 0


# --- what a user's files may meet ---------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("manifest", "-o"), ("manifest", "--sha256"), ("inspect", "--plot")]
)
def test_nothing_of_another_kind_is_replaced(
    run: Run, model: Path, tmp_path: Path, arguments: tuple[str, str]
) -> None:
    """Neither the checkpoint itself nor any other file; what was written before is, by all."""
    verb, option = arguments
    before = model.read_bytes()
    for target in (model, tmp_path):
        said = run(verb, model, option, target)
        assert_two_lines(said, 2, f"cxlfs {verb}")
    assert model.read_bytes() == before
    for _ in range(2):
        assert run(verb, model, option, tmp_path / "said").code == 0
    assert list(tmp_path.glob("*.tmp")) == []


def test_manifests_do_not_lead_elsewhere(run: Run, model: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert run("manifest", model, "-o", made).code == 0
    plain = json.loads(made.read_text())
    for name in ("/etc", "..", "a/b", "", "\ud800"):
        made.write_text(json.dumps(plain | {"name": name}))
        said = run("verify", "--manifest", made)
        assert_two_lines(said, 38, "cxlfs verify")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run("verify", "--manifest", pipe).code == 38


def test_manifest_of_here(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "step-3"
    below.mkdir()
    model.rename(below / model.name)
    monkeypatch.chdir(below)
    assert run("manifest", ".", "-o", "../made").code == 0
    assert run("verify", "--manifest", "../made").code == 0


def test_empty_tensors_of_great_shapes_are_the_same(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.empty((0, 2, 3)))
    data = (tmp_path / "one.npy").read_bytes()
    great = data.replace(b"(0, 2, 3), }" + b" " * 20, b"(0, 4611686018427387904, 2), }  ")
    assert len(great) == len(data)
    (tmp_path / "one.npy").write_bytes(great)
    (tmp_path / "other.npy").write_bytes(great.replace(b"False", b"True "))
    assert run("diff", tmp_path / "one.npy", tmp_path / "other.npy").code == 0


def test_deep_says_what_it_did_not_look_at(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "texts.npy", np.array(["a", "b"]))
    said = run("verify", "--deep", tmp_path / "texts.npy")
    assert said.code == 0
    assert "nothing found" not in said.stdout
    assert "could not be looked at" in said.stdout
    assert run("verify", "--deep", tmp_path / "a**[b").code != 1
