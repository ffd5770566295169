"""The command evaluate.py on a finished run of the miniature: its results file, its weights, its figures."""
import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import evaluate
import sample
from conftest import link
from data import dataset
from plumbing import checkpoint, figures, loop, machine, speed
from plumbing.settings import UserError


def flags(out):
    return ["--preset", "mini", "--out", str(out), "--device", "cpu"]


def test_results_file(trained, tmp_path, capsys, monkeypatch):
    """Every key that README and figures rely on, from one small run of everything."""
    monkeypatch.setattr(speed, "TAUS", (1.0, 0.4))
    monkeypatch.setattr(machine, "matmul_rate", lambda *_: 1.0)     # bfloat16 counts as emulated: no trials of it
    monkeypatch.setattr(speed, "SIZES", {"output_len": (8, 999), "candidates": (3, 10), "prompt_len": (16, 32),
                                         "batch": (1, 2), "block_len": (4, 999)})
    link(trained, tmp_path, *(p.name for p in trained.iterdir() if p.name != "results.json"))
    evaluate.main(flags(tmp_path) + ["--block-len", "8", "--time-users", "1", "--repeats", "1",
                                "--users", "4", "--dtype", "float32"])
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {"preset", "seed", "device", "n_users", "ladder", "frontier"} <= set(results)
    systems = {row["system"]: row for row in results["ladder"]}
    assert {"random", "reverse", "floor", "teacher", "ar_sft", "ar", "naive", "cft", "opd", "rl",
            "oracle"} <= set(systems)
    assert systems["oracle"]["r1"] == 1.0 and systems["ar"]["nfe"] == pytest.approx(systems["ar"]["tokens"])
    for key in ("r1", "r3", "r5", "ndcg3", "ndcg5", "r1_ci", "valid", "failures", "copy_rate", "grounding",
                "consistency", "nfe", "tokens", "tokens_per_nfe", "r1_minus_ar", "r1_minus_ar_ci", "ndcg3_minus_ar_ci",
                "speedup"):
        assert key in systems["cft"], key
    assert all("users" not in row for row in results["ladder"])
    assert [row["tau"] for row in results["ladder"] if row["system"] == "cft"] == [1.0, 0.9]
    assert results["frontier"][0]["mode"] == "ar" and results["frontier"][0]["speedup"] == 1.0
    assert [row["mode"] for row in results["frontier"][:2]] == ["ar", "plain loop"]
    assert [row["tau"] for row in results["frontier"][2:]] == list(speed.TAUS)
    assert {name: len(rows) for name, rows in results["sweeps"].items()} == {
        "output_len": 2, "candidates": 2, "prompt_len": 2, "batch": 2, "block_len": 1}      # 999: too long
    assert all(row["speedup"] > 0 for rows in results["sweeps"].values() for row in rows)
    lengths = [row["tokens"] for row in results["sweeps"]["output_len"]]
    assert results["student"] == "rl" and lengths[0] <= 8 < lengths[1] and systems["ar"]["speedup"] == 1.0
    said = capsys.readouterr().out
    assert "oracle" in said and "tokens per forward" in said and "--full" in said and "minus floor" not in said
    for name in ("frontier", "sweep_batch", "rl_valid_r1", "rl_failures", "opd_valid_kl"):
        assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8").startswith("<svg")

    file, now = tmp_path / "results.json", results["weights"]
    assert evaluate.measured(file, "cpu", now)["frontier"] == results["frontier"]
    assert "frontier" in evaluate.measured(file, "cpu", now | {"cft_b8": "1"})
    assert evaluate.measured(file, "cuda", now) == evaluate.measured(file, "cpu", now | {"cft": "1"}) == {}


def test_only_what_is_asked_for_is_measured(trained, tmp_path, capsys, monkeypatch):
    """--only ladder leaves what was measured before; without a student there is no frontier, and that is said."""
    link(trained, tmp_path, "data", "ar.pt")
    monkeypatch.setattr(speed, "add_speedups", lambda *_: None)
    evaluate.main(flags(tmp_path))
    assert "no frontier" in capsys.readouterr().out
    file = tmp_path / "results.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    assert [r["system"] for r in before["ladder"]] == ["random", "reverse", "floor", "teacher", "ar", "oracle"]
    file.write_text(json.dumps(before | {"frontier": []}), encoding="utf-8")
    evaluate.main(flags(tmp_path) + ["--only", "ladder", "--full"])
    assert "minus floor, paired" in capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf-8")) == before | {"frontier": []}
    with pytest.raises(UserError, match="--only all"):
        evaluate.main(flags(tmp_path) + ["--only", "all"])


def test_a_student_is_asked_for_by_name(trained, tmp_path):
    """Any diffusion weights in the folder, whatever a stage called them; AR's are no student; a name must be there."""
    link(trained, tmp_path, "data", "ar.pt", "cft.pt", "cft.state.pt")
    (tmp_path / "mine.pt").symlink_to(trained / "cft.pt")
    (tmp_path / "grpo.pt").symlink_to(trained / "ar.pt")            # AR by another name is no student
    (tmp_path / "arc.pt").symlink_to(trained / "opd.pt")            # nor is a name that begins with ar
    s = evaluate.EvalSettings(preset="mini", out=str(tmp_path), device="cpu")
    _, tok, summary = loop.load_data(s)
    assert checkpoint.pick_student(s, summary) == "cft"             # a stage's, where no name is given
    assert checkpoint.students(s, summary) == ["cft", "arc", "mine"]        # a state is no model
    rows = evaluate.decoded_systems(s, evaluate.open_all(s, tok, summary), "cft")
    assert [(r.row, r.tau) for r in rows] == [("ar", None), ("naive", 0.9), ("cft", 1.0), ("cft", 0.9), ("arc", 0.9),
                                              ("mine", 0.9)]
    s.student = "mine"
    assert checkpoint.pick_student(s, summary) == "mine"
    for s.student in ("ar", "opd", "grpo"):
        with pytest.raises(UserError, match=f"--student {s.student}.*there are: cft"):
            checkpoint.pick_student(s, summary)
    with pytest.raises(UserError, match="--student none"):
        evaluate.main(flags(tmp_path) + ["--student", "none"])


def test_a_results_file_that_cannot_be_read_is_named(trained, tmp_path):
    link(trained, tmp_path, "data", "ar.pt")
    (tmp_path / "results.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="results.json"):
        evaluate.main(flags(tmp_path))


def test_nothing_trained_yet(rows, tmp_path):
    link(rows, tmp_path, "data")
    with pytest.raises(UserError, match="train_cft.py"):
        evaluate.main(flags(tmp_path))


def test_fewer_candidates(prompts, tok):
    """A prompt cut to its first n candidates reads as those n, and one that has no more is left alone."""
    prompt = prompts[-1][0]
    history, candidates = dataset.read_prompt(prompt, tok)
    assert dataset.read_prompt(speed.fewer(prompt, tok, 3), tok) == (history, candidates[:3])
    assert speed.fewer(prompt, tok, 6) == speed.fewer(prompt, tok, 10) == prompt


def test_the_faster_dtype_is_taken(model, monkeypatch):
    """bfloat16 where it decodes faster, else the model as it is; where it is emulated, it is not even tried."""
    seconds = {torch.float32: 2.0, torch.bfloat16: 1.0}
    monkeypatch.setattr(machine, "matmul_rate", lambda *_: 1e12)
    monkeypatch.setattr(sample, "timed", lambda m, *_: ([], seconds[m.embed.weight.dtype], 0.0))
    assert speed.fastest(model, [], None, 1, None, 8).embed.weight.dtype == torch.bfloat16
    assert model.embed.weight.dtype == torch.float32                # a copy was converted
    seconds[torch.bfloat16] = 3.0
    assert speed.fastest(model, [], None, 1, None, 8) is model
    monkeypatch.setattr(machine, "matmul_rate", lambda *_: 1e9)
    monkeypatch.setattr(sample, "timed", None)
    assert speed.fastest(model, [], None, 1, None, 8) is model


def test_a_figure_is_xml_whatever_it_is_called(tmp_path):
    """Names with <, & and quotes are shown as they are, and points lie within the axes."""
    strange = "a < b & \"c\" > 'd'"
    figures.draw(tmp_path / "x.svg", strange, strange, strange, {strange: [(0, 1.0), (2, 3.0)], "flat": [(1, 1.0)]})
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    assert [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")].count(strange) == 4
    circles = [(float(e.get("cx")), float(e.get("cy"))) for e in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert circles == [(70, 330), (550, 50), (310, 330)]
