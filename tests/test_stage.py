"""Resume, atomic saving, refusals: what a user's evening depends on."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import settings
import stage
import train_ar
import train_rl
from model import ModelConfig, Transformer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setitem(settings.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=320))


@pytest.fixture
def train(rows, tmp_path, small_model):
    """Runs train_ar on the miniature in a folder of its own; returns that folder."""
    (tmp_path / "data").symlink_to(rows / "data")

    def run(*flags, steps=20):
        train_ar.main(["--preset", "mini", "--out", str(tmp_path), "--steps", str(steps), "--accepted-steps", "5", "--rl-steps", "0",
                       "--batch", "8", "--eval-every", "1000", "--eval-users", "4", "--log-every", "5",
                       "--save-every", "10", "--device", "cpu", *flags])
        return tmp_path
    return run


@pytest.mark.parametrize("paper", [0, 1])
def test_rl_of_the_teacher_is_the_papers_or_the_presets(train, monkeypatch, paper):
    given = []

    def stop(argv):
        given.extend(argv)
        raise InterruptedError
    monkeypatch.setattr(train_rl, "main", stop)
    with pytest.raises(InterruptedError):
        train("--rl-steps", "2", "--rl-paper", str(paper), steps=6)
    s = settings.parse(train_rl.RLSettings, {"mini": dict(advantage="mean", kl_weight=0.5, temperature=0.7)}, "", given)
    assert (s.advantage, s.kl_weight, s.temperature) == (("std", 0.0, 1.0) if paper else ("mean", 0.5, 0.7))
    assert (s.steps, s.block_len, s.start, s.name) == (2, 1, "ar_sft", "ar")


def test_resume_is_bit_exact(train, tmp_path, monkeypatch):
    """Twenty steps = ten, a kill, ten more: the weights and the optimiser agree in every bit."""
    train("--dtype", "float32")
    whole = torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)
    (tmp_path / "ar_sft.state.pt").unlink()

    class Killed(Exception):
        pass

    real = stage.batch_rows

    def killer(lengths, batch, seed, step):
        if step == 13:
            raise Killed
        return real(lengths, batch, seed, step)
    monkeypatch.setattr(stage, "batch_rows", killer)
    with pytest.raises(Killed):
        train("--dtype", "float32")
    monkeypatch.setattr(stage, "batch_rows", real)
    assert torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)["step"] == 10
    train("--dtype", "float32", "--resume")
    again = torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)
    for name, p in whole["model"].items():
        assert torch.equal(p, again["model"][name]), name
    for i, moments in whole["opt"]["state"].items():
        assert all(torch.equal(v, again["opt"]["state"][i][k]) for k, v in moments.items())


def test_ctrl_c_saves_and_says_how_to_go_on(train, tmp_path, monkeypatch):
    real, seen = stage.batch_rows, []

    def interrupting(*args):
        seen.append(args[3])
        if len(seen) == 5:
            signal.raise_signal(signal.SIGINT)
        return real(*args)
    monkeypatch.setattr(stage, "batch_rows", interrupting)
    with pytest.raises(SystemExit) as stop:
        train()
    assert "--resume" in str(stop.value) and "step 5" in str(stop.value)
    assert torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)["step"] == 5
    assert len(seen) == 5
    train("--resume")
    assert torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)["step"] == 20


@pytest.mark.parametrize("at", [5, 19])                              # 19: SFT is done, what follows it was not begun
def test_a_stage_that_was_stopped_is_gone_on_with(train, ctrl_c_at, tmp_path, monkeypatch, capsys, at):
    """Its weights may be there already, from a validation: what counts is that it did not come to its end."""
    monkeypatch.setitem(train_ar.PRESETS, "mini", dict(steps=20, accepted_steps=0, batch=8, eval_every=2, eval_users=4,
                                                       log_every=5, save_every=10, dtype="float32"))
    ctrl_c_at(at)
    with pytest.raises(SystemExit):
        train_ar.main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu"])
    assert (tmp_path / "ar_sft.pt").exists() and not (tmp_path / "ar.pt").exists()
    ctrl_c_at(None)
    s = settings.Settings(preset="mini", out=str(tmp_path), device="cpu")
    checkpoint.need(s, "ar")
    assert f"ar_sft was stopped at step {at + 1}: going on with it" in capsys.readouterr().out
    assert torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)["step"] == 20 and (tmp_path / "ar.pt").exists()
    checkpoint.need(s, "ar")
    assert "going on" not in capsys.readouterr().out                # finished: nothing is run


def test_a_kill_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    checkpoint.save(path, {"v": 1})
    monkeypatch.setattr(torch, "save", lambda state, f: (f.write(b"half"), (_ for _ in ()).throw(OSError("disk full"))))
    with pytest.raises(OSError):
        checkpoint.save(path, {"v": 2})
    assert torch.load(path, weights_only=True) == {"v": 1}


def test_log_is_jsonl(train):
    out = train()
    lines = [json.loads(line) for line in (out / "ar_sft.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == [5, 10, 15, 20]
    assert all(x["tokens_per_s"] > 0 and 0 < x["matmul_share"] < 2 for x in lines if "loss" in x)
    assert any("valid_score" in x for x in lines)


def test_other_settings_are_refused_on_resume(train):
    train()
    with pytest.raises(checkpoint.UserError, match="--lr"):
        train("--lr", "0.5", "--resume")


def test_a_state_from_before_a_flag_existed_is_gone_on_with(train, tmp_path):
    train("--steps", "10")
    state = torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)
    del state["settings"]["clip"]
    checkpoint.save(tmp_path / "ar_sft.state.pt", state | {"step": 5})
    train("--steps", "10", "--resume")
    assert torch.load(tmp_path / "ar_sft.state.pt", weights_only=True)["step"] == 10


def test_foreign_checkpoints_are_refused(tmp_path, prepared):
    _, tok, summary = prepared
    path = tmp_path / "ar.pt"
    config = dict(vocab=tok.vocab, width=16, layers=1, heads=1, ctx_len=64, rope_base=1e4)
    good = {"model": Transformer(ModelConfig(**config)).state_dict(), "config": config, "fingerprint": summary["fingerprint"],
            "settings": {}}

    def refused(state, match):
        torch.save(state, path)
        with pytest.raises(checkpoint.UserError, match=match) as e:
            checkpoint.load_model(path, tok, summary, "train it")
        assert "ar.pt" in str(e.value) and "train it" in str(e.value)

    torch.save(good, path)
    checkpoint.load_model(path, tok, summary, "train it")
    refused(good | {"fingerprint": "other"}, "other rows")
    refused(good | {"config": config | {"layers": 2}}, "another shape")
    refused(good | {"config": config | {"vocab": 7}}, "vocabulary")
    refused(good | {"config": config | {"colour": 3}}, "another kind of config")
    refused({"something": 1}, "not a model checkpoint")
    refused({k: v for k, v in good.items() if k != "fingerprint"}, "not a model checkpoint")
    refused(torch.zeros(3), "not a model checkpoint")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(checkpoint.UserError, match="not a checkpoint"):
        checkpoint.load_model(path, tok, summary, "train it")
    path.unlink()
    with pytest.raises(checkpoint.UserError, match="missing"):
        checkpoint.load_model(path, tok, summary, "train it")


def test_what_is_kept(tmp_path, model, tok, prepared):
    """The best, or a later one as good within .1 / sqrt(users), here .01; never one that creeps down from the best."""
    s = settings.Settings(preset="mini", out=str(tmp_path), device="cpu", dtype="float32", eval_users=100)
    run, kept = stage.Run("x", s, model, tok, prepared[2]), []
    for run.step, score in enumerate((.50, .495, .489, .52, .505, .511)):
        run.check(lambda _: {"score": score})
        kept.append(torch.load(tmp_path / "x.pt", weights_only=True)["step"])
    assert kept == [0, 1, 1, 3, 3, 5]


def test_data_order_covers_each_epoch_once():
    lengths = np.arange(100) % 7
    seen = np.concatenate([stage.batch_rows(lengths, 10, 3, step) for step in range(10)])
    assert sorted(seen) == list(range(100))
    assert np.array_equal(stage.batch_rows(lengths, 10, 3, 4), seen[40:50])             # a function of the step alone
    assert not np.array_equal(np.concatenate([stage.batch_rows(lengths, 10, 3, s) for s in range(10, 20)]), seen)


def test_generators_are_keyed():
    draw = [torch.rand(3, generator=stage.generator(*key)) for key in ((0, 1, 2), (0, 1, 2), (0, 2, 1), (-1, 1, 2))]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2]) and not torch.equal(draw[0], draw[3])


@pytest.mark.parametrize("args,says", [(["--no-such-flag"], "no-such-flag"), (["--preset", "huge"], "huge"),
                                       (["--preset", "mini", "--steps", "0"], "--steps 0"),
                                       (["--preset", "mini", "--data", "/no/such"], "/no/such"),
                                       (["--preset", "beauty", "--out", "OUT", "--device", "cpu"], "prepared for --preset mini")])
def test_mistakes_are_one_line(args, says, rows, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    if "OUT" in args:
        (out / "data").symlink_to(rows / "data")
    args = [str(out) if a == "OUT" else a for a in args] + ([] if "OUT" in args else ["--out", str(out)])
    done = subprocess.run([sys.executable, str(ROOT / "train_ar.py"), *args], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0 and says in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()[-1]) > 10


@pytest.mark.parametrize("flag,value", [("micro", "-1"), ("dtype", "float16"), ("seed", "-1"), ("lr", "-1"), ("decay", "-1"),
                                        ("device", "banana"), ("device", "cuda:99"), ("device", "meta"), ("clip", "0.0"),
                                        ("eval-users", "0"), ("answer", "-1.0"), ("reasoning", "nan"), ("rl-steps", "-3"),
                                        ("accepted-steps", "-1"), ("rl-paper", "2"), ("seed", str(2**63))])
def test_values_that_cannot_be_used_are_named(flag, value):
    """Before anything is prepared or written."""
    with pytest.raises(checkpoint.UserError, match=f"--{flag} {value}"):
        train_ar.main(["--preset", "mini", "--out", "/nowhere", f"--{flag}", value])


def test_nothing_to_resume(rows, tmp_path, monkeypatch):
    monkeypatch.setitem(settings.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=320))
    (tmp_path / "data").symlink_to(rows / "data")
    with pytest.raises(checkpoint.UserError, match="ar_sft.state.pt is missing; start without --resume: python"):
        train_ar.main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu", "--resume"])


def test_a_place_that_cannot_be_written_to_is_found_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(stage.prepare, "build", lambda *_: pytest.fail("minutes of work before the message"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        settings.main(train_ar.main, ["--preset", "mini", "--out", str(tmp_path / "file"), "--device", "cpu"])
    assert "file" in str(stop.value)


def test_rows_longer_than_the_context_are_refused(rows, tok):
    from data import prepare
    data = prepare.Rows(rows / "data" / "all.npz")
    with pytest.raises(checkpoint.UserError, match="ctx_len"):
        stage.check_fits(ModelConfig(vocab=tok.vocab, ctx_len=64), data, 1, 6)
    stage.check_fits(ModelConfig(vocab=tok.vocab, ctx_len=400), data, 32, 6)
