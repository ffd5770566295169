"""The loop around a stage: exact resume, whole files, refusals in one line. What a user's evening depends on."""
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate
import train_ar
import train_cft
import train_opd
import train_rl
from conftest import link, state_of
from data.rows import Rows
from model import ModelConfig, Transformer
from plumbing import checkpoint, figures, loop, settings
from plumbing.settings import UserError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def train(rows, tmp_path, tiny):
    """Runs train_ar on the miniature in a folder of its own; returns that folder."""
    link(rows, tmp_path, "data")

    def run(*flags, steps=20):
        train_ar.main(["--preset", "mini", "--out", str(tmp_path), "--steps", str(steps), "--accepted-steps", "5", "--batch",
                       "8", "--eval-every", "1000", "--eval-users", "4", "--log-every", "5", "--save-every", "10",
                       "--device", "cpu", "--table", "0", *flags])
        return tmp_path
    return run


def test_resume_is_bit_exact(train, tmp_path, interrupt_at):
    """Twenty steps = ten, a kill, ten more: the weights and the optimiser agree in every bit."""
    train("--dtype", "float32")
    whole = state_of(tmp_path, "ar_sft")
    (tmp_path / "ar_sft.state.pt").unlink()
    interrupt_at(13, RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        train("--dtype", "float32")
    interrupt_at(None)
    assert state_of(tmp_path, "ar_sft")["step"] == 10
    train("--dtype", "float32", "--resume")
    again = state_of(tmp_path, "ar_sft")
    for name, p in whole["model"].items():
        assert torch.equal(p, again["model"][name]), name
    for i, moments in whole["opt"]["state"].items():
        assert all(torch.equal(v, again["opt"]["state"][i][k]) for k, v in moments.items())


def test_ctrl_c_saves_and_says_how_to_go_on(train, tmp_path, interrupt_at):
    """The step is finished, and the next one is not begun."""
    interrupt_at(4)
    with pytest.raises(SystemExit) as stop:
        train()
    assert "--resume" in str(stop.value) and "step 5" in str(stop.value)
    assert state_of(tmp_path, "ar_sft")["step"] == 5
    interrupt_at(None)
    train("--resume")
    assert state_of(tmp_path, "ar_sft")["step"] == 20


def test_a_kill_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    checkpoint.save(path, {"v": 1})

    def fails_half_way(state, f):
        f.write(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(torch, "save", fails_half_way)
    with pytest.raises(UserError, match="x.pt could not be saved .disk full.; .* MB are free"):
        checkpoint.save(path, {"v": 2})
    assert torch.load(path, weights_only=True) == {"v": 1} and [p.name for p in tmp_path.iterdir()] == ["x.pt"]


def test_half_a_line_in_a_log(tmp_path):
    """It is skipped where the log is read, and a run that is resumed does not write on behind it."""
    log = tmp_path / "x.jsonl"
    loop.end_line(log)
    assert not log.exists()
    log.write_text('{"step": 1}\n{"step": 2, "lo', encoding="utf-8")
    loop.end_line(log)
    loop.end_line(log)
    with open(log, "a", encoding="utf-8") as f:
        f.write('{"step": 3}\n')
    assert figures.read_log(log) == [{"step": 1}, {"step": 3}]


def test_a_reader_that_leaves_early_is_no_mistake(tmp_path):
    """As with `| head`: no traceback, no error line."""
    done = subprocess.run(f'"{sys.executable}" -c "from plumbing import settings\nsettings.main(lambda: [print(i) for i in '
                          f'range(100000)])" | head -1', shell=True, capture_output=True, cwd=ROOT)
    assert done.stdout == b"0\n" and done.stderr == b""


def test_log_is_jsonl(train):
    out = train()
    lines = [json.loads(line) for line in (out / "ar_sft.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == [5, 10, 15, 20]
    assert all(x["tokens_per_s"] > 0 and 0 < x["matmul_share"] < 2 for x in lines if "loss" in x)
    assert any("valid_score" in x for x in lines)


def test_the_learning_rate_rises_and_falls(tmp_path, model, prepared):
    s = settings.Settings(preset="mini", out=str(tmp_path), device="cpu", dtype="float32", lr=1.0, warmup=4, steps=24)
    run = loop.Run("x", s, model, prepared[2])
    assert [run.lr(step) for step in range(5)] == [.25, .5, .75, 1, 1]
    assert run.lr(14) == pytest.approx(.525) and run.lr(24) == pytest.approx(.05)


def test_other_settings_are_refused_on_resume(train):
    train()
    with pytest.raises(UserError, match="--lr"):
        train("--lr", "0.5", "--resume")


def test_a_state_from_before_a_flag_existed_is_gone_on_with(train, tmp_path):
    train("--steps", "10")
    state = state_of(tmp_path, "ar_sft")
    del state["settings"]["clip"]
    checkpoint.save(tmp_path / "ar_sft.state.pt", state | {"step": 5})
    train("--steps", "10", "--resume")
    assert state_of(tmp_path, "ar_sft")["step"] == 10


def test_foreign_checkpoints_are_refused(tmp_path, prepared):
    _, tok, summary = prepared
    path = tmp_path / "ar.pt"
    config = dict(vocab=tok.vocab, width=16, layers=1, heads=1, ctx_len=64, rope_base=1e4)
    good = {"model": Transformer(ModelConfig(**config)).state_dict(), "config": config, "settings": {}, "made_from": "",
            "fingerprint": summary["fingerprint"]}

    def refused(state, match):
        torch.save(state, path)
        with pytest.raises(UserError, match=match) as e:
            checkpoint.load_model(path, tok, summary, "train it")
        assert "ar.pt" in str(e.value) and "train it" in str(e.value)

    torch.save(good, path)
    checkpoint.load_model(path, tok, summary, "train it")
    refused(good | {"fingerprint": "other"}, "other rows")
    refused(good | {"config": config | {"layers": 2}}, "another shape")
    refused(good | {"config": config | {"vocab": 7}}, "vocabulary")
    refused(good | {"config": config | {"colour": 3}}, "another kind of config")
    refused(good | {"model": good["model"] | {"norm.weight": torch.full((16,), float("nan"))}}, "not finite")
    refused({"something": 1}, "not a model checkpoint")
    refused({k: v for k, v in good.items() if k != "fingerprint"}, "not a model checkpoint")
    refused(torch.zeros(3), "not a model checkpoint")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="not a checkpoint"):
        checkpoint.load_model(path, tok, summary, "train it")
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        checkpoint.load_model(path, tok, summary, "train it")


def test_what_is_kept(tmp_path, model, prepared):
    """The best, or a later one as good within .1 / sqrt(users), here .01; never one that creeps down from the best."""
    s = settings.Settings(preset="mini", out=str(tmp_path), device="cpu", dtype="float32", eval_users=100)
    run, kept = loop.Run("x", s, model, prepared[2]), []
    for run.step, score in enumerate((.50, .495, .489, .52, .505, .511)):
        run.check(lambda _: {"score": score})
        kept.append(torch.load(tmp_path / "x.pt", weights_only=True)["step"])
    assert kept == [0, 1, 1, 3, 3, 5]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, model, prepared):
    """Before the optimiser steps: the weights are as they were, and the message names the last good state."""
    s = settings.Settings(preset="mini", out=str(tmp_path), device="cpu", dtype="float32", steps=3)
    run, before = loop.Run("x", s, model, prepared[2]), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError, match="step 0: the loss is nan.*x.state.pt"):
        for _ in run.steps(lambda _: {"score": 0.0}):
            loss = model.embed.weight.sum() * float("nan")
            loss.backward()
            run.count(loss, 1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_data_order_covers_each_epoch_once():
    lengths = np.arange(100) % 7
    batches = loop.Batches(lengths, 10, 3)
    seen = np.concatenate([batches[step] for step in range(10)])
    assert sorted(seen) == list(range(100))
    assert np.array_equal(loop.Batches(lengths, 10, 3)[4], seen[40:50])                  # a function of the step alone
    assert not np.array_equal(loop.Batches(lengths, 10, 4)[4], seen[40:50])              # and of the seed
    assert not np.array_equal(np.concatenate([batches[step] for step in range(10, 20)]), seen)
    assert all(len(set(lengths[batches[step]])) <= 2 for step in range(10))              # like lengths share a batch


def test_generators_are_keyed():
    draw = [torch.rand(3, generator=loop.generator(*key)) for key in ((0, 1, 2), (0, 1, 2), (0, 2, 1), (-1, 1, 2), (2**32, 1, 2))]
    assert torch.equal(draw[0], draw[1]) and not any(torch.equal(draw[0], other) for other in draw[2:])


def test_splitting_a_batch():
    assert loop.split([1, 2, 3], 2) == [[1, 2], [3]] and loop.split([1, 2, 3], 0) == [[1, 2, 3]]
    assert loop.denominator([torch.ones(2, 2) / 2, torch.tensor([0.0, 4.0])]) == 6 and loop.denominator([torch.zeros(2)]) > 0


@pytest.mark.parametrize("args,says", [(["--no-such-flag"], "no-such-flag"), (["--preset", "huge"], "huge"),
                                       (["--preset", "mini", "--steps", "0"], "--steps 0"),
                                       (["--preset", "mini", "--data", "/no/such"], "/no/such"),
                                       (["--preset", "beauty", "--out", "OUT", "--device", "cpu"], "prepared for --preset mini")])
def test_mistakes_are_one_line(args, says, rows, tmp_path):
    """From another folder than the clone's, and under a locale without UTF-8."""
    out = tmp_path / "run"
    out.mkdir()
    if "OUT" in args:
        link(rows, out, "data")
    args = [str(out) if a == "OUT" else a for a in args] + ([] if "OUT" in args else ["--out", str(out)])
    done = subprocess.run([sys.executable, str(ROOT / "train_ar.py"), *args], capture_output=True, cwd=tmp_path,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONUTF8": "0",
                                            "PYTHONCOERCECLOCALE": "0"})
    said = done.stderr.decode("ascii", "replace")
    assert done.returncode != 0 and says in said
    assert "Traceback" not in said and len(said.strip().splitlines()[-1]) > 10


@pytest.mark.parametrize("flag,value", [("micro", "-1"), ("dtype", "float16"), ("seed", "-1"), ("lr", "-1"), ("decay", "-1"),
                                        ("device", "banana"), ("device", "cuda:99"), ("device", "meta"), ("clip", "0.0"),
                                        ("eval-users", "0"), ("answer", "-1.0"), ("reasoning", "nan"), ("lr", "inf"),
                                        ("accepted-steps", "-1"), ("table", "2"), ("seed", str(2**63))])
def test_values_that_cannot_be_used_are_named(flag, value):
    """Before anything is prepared or written."""
    with pytest.raises(UserError, match=f"--{flag} {value}"):
        train_ar.main(["--preset", "mini", "--out", "/nowhere", f"--{flag}", value])


@pytest.mark.parametrize("cls", [train_ar.ARSettings, train_cft.CFTSettings, train_opd.OPDSettings, train_rl.RLSettings,
                                 evaluate.EvalSettings])
def test_a_flag_means_the_same_in_every_command(cls):
    """A stage may change the default of a shared flag, never its kind."""
    for shared in fields(settings.Common):
        [mine] = [f for f in fields(cls) if f.name == shared.name]
        assert type(mine.default) is type(shared.default), shared.name


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        train_ar.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"--{name}" in said for name in ("preset", "lr", "accepted-steps", "resume")) and "mini 400" in said


def test_nothing_to_resume(rows, tmp_path, tiny):
    link(rows, tmp_path, "data")
    with pytest.raises(UserError, match="ar_sft.state.pt is missing; start without --resume: python"):
        train_ar.main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu", "--resume"])


def test_a_place_that_cannot_be_written_to_is_found_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(loop.prepare, "build", lambda *_: pytest.fail("minutes of work before the message"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        settings.main(train_ar.main, ["--preset", "mini", "--out", str(tmp_path / "file"), "--device", "cpu"])
    assert "file" in str(stop.value)


def test_rows_longer_than_the_context_are_refused(rows, tok):
    data = Rows(rows / "data" / "all.npz")
    with pytest.raises(UserError, match="ctx_len"):
        loop.check_fits(ModelConfig(vocab=tok.vocab, ctx_len=64), data, 1, 6)
    loop.check_fits(ModelConfig(vocab=tok.vocab, ctx_len=400), data, 32, 6)
