"""The whole chain on the miniature, a few steps each: what is asserted is the plumbing, not the learning."""
import json

import pytest
import torch

import evaluate
import sample
import stage
import train_cft

QUICK = ["--steps", "3", "--batch", "4", "--eval-every", "3", "--eval-users", "4", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    """CFT from nothing: it finds no ar.pt and trains that first."""
    out = tmp_path_factory.mktemp("chain")
    (out / "data").symlink_to(rows / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stage.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=320))
        patch.setitem(train_cft.train_ar.PRESETS, "mini", dict(steps=3, accepted_steps=1, batch=4, eval_every=3, eval_users=4))
        train_cft.main(["--preset", "mini", "--out", str(out), "--block-len", "8", *QUICK])
    return out


def test_stages_chain_and_keep_the_weights(trained):
    ar, cft = (torch.load(trained / f"{name}.pt", weights_only=True) for name in ("ar", "cft"))
    assert ar["config"] == cft["config"] and set(ar["model"]) == set(cft["model"])
    assert ar["fingerprint"] == cft["fingerprint"]


def test_cft_resumes_bit_for_bit(trained, rows, tmp_path, monkeypatch):
    monkeypatch.setitem(stage.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=320))
    whole = torch.load(trained / "cft.state.pt", weights_only=True)
    for name in ("data", "ar.pt"):
        (tmp_path / name).symlink_to(trained / name)
    args = ["--preset", "mini", "--out", str(tmp_path), "--block-len", "8", *QUICK, "--save-every", "2"]
    real = stage.batch_rows

    def killer(*a):
        if a[3] == 2:
            raise RuntimeError("killed")
        return real(*a)
    monkeypatch.setattr(stage, "batch_rows", killer)
    with pytest.raises(RuntimeError, match="killed"):
        train_cft.main(args)
    monkeypatch.setattr(stage, "batch_rows", real)
    train_cft.main(args + ["--resume"])
    again = torch.load(tmp_path / "cft.state.pt", weights_only=True)
    assert again["step"] == 3 and all(torch.equal(v, again["model"][k]) for k, v in whole["model"].items())


def test_results_file(trained, capsys):
    evaluate.main(["--preset", "mini", "--out", str(trained), "--device", "cpu", "--block-len", "8", "--time-users", "2",
                   "--repeats", "1"])
    results = json.loads((trained / "results.json").read_text())
    assert {"preset", "seed", "device", "n_users", "ladder", "frontier"} <= set(results)
    systems = {row["system"]: row for row in results["ladder"]}
    assert {"random", "reverse", "floor", "teacher", "ar", "naive", "cft", "oracle"} <= set(systems)
    assert systems["oracle"]["r1"] == 1.0 and systems["ar"]["nfe"] == pytest.approx(systems["ar"]["tokens"])
    for key in ("r1", "r3", "r5", "ndcg3", "ndcg5", "r1_ci", "valid", "failures", "copy_rate", "grounding", "consistency",
                "nfe", "tokens", "tokens_per_nfe", "r1_minus_ar", "r1_minus_ar_ci"):
        assert key in systems["cft"], key
    assert results["frontier"][0]["mode"] == "ar" and results["frontier"][0]["speedup"] == 1.0
    assert [row["tau"] for row in results["frontier"][1:]] == list(evaluate.TAUS)
    assert "oracle" in capsys.readouterr().out


def user_of(trained):
    from data import amazon, prepare
    summary = json.loads((trained / "data" / "summary.json").read_text())
    split = amazon.load(summary["config"]["data"])
    return split.user[int(prepare.Rows(trained / "data" / "test.npz").arrays["user"][0])]


def test_command_line_shows_one_user(trained, capsys):
    sample.main(["--preset", "mini", "--out", str(trained), "--user", user_of(trained), "--block-len", "8"])
    text = capsys.readouterr().out
    assert "--- ar:" in text and "--- diffusion, blocks of 8" in text and "tokens/s" in text and "Crème" in text
    assert "<- the true next purchase" in text or "not among the candidates" in text


def test_command_line_json(trained, capsys):
    sample.main(["--preset", "mini", "--out", str(trained), "--user", user_of(trained), "--block-len", "8", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [m["mode"] for m in result["modes"]] == ["ar", "diffusion"]
    assert all(m["tok_s"] >= m["tok_s_end_to_end"] > 0 for m in result["modes"])


@pytest.mark.parametrize("flags,says", [(["--user", "99999"], "no user 99999"), (["--tau", "0"], "tau 0"),
                                        (["--block-len", "0"], "block length 0"), (["--temperature", "-1"], "temperature")])
def test_command_line_mistakes(trained, flags, says):
    with pytest.raises(stage.UserError, match=says):
        sample.main(["--preset", "mini", "--out", str(trained), *flags])


def test_nothing_trained_yet(rows, tmp_path):
    (tmp_path / "data").symlink_to(rows / "data")
    with pytest.raises(stage.UserError, match="train_ar.py"):
        evaluate.main(["--preset", "mini", "--out", str(tmp_path)])
    with pytest.raises(stage.UserError, match="train_ar.py"):
        sample.main(["--preset", "mini", "--out", str(tmp_path), "--user", "0"])
