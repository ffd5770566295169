"""The whole chain on the miniature, a few steps each: what is asserted is the plumbing, not the learning."""
import itertools
import json
import shutil

import pytest
import torch

import checkpoint
import evaluate
import ranking
import show
import settings
import stage
import train_ar
import train_cft
import train_opd
import train_rl

QUICK = dict(steps=3, batch=4, eval_every=3, eval_users=4, dtype="float32", block_len=8)


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    """RL from nothing: it finds no opd.pt and trains that first, for which it trains cft.pt, for which ..."""
    out = tmp_path_factory.mktemp("chain")
    (out / "data").symlink_to(rows / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=320))
        quick = {key: v for key, v in QUICK.items() if key != "block_len"}
        patch.setitem(train_ar.PRESETS, "mini", quick | dict(accepted_steps=1, rl_steps=2))
        for module, group in ((train_cft, {}), (train_opd, {"group": 2}), (train_rl, {"group": 2})):
            patch.setitem(module.PRESETS, "mini", QUICK | group)
        # Models this young write no permutation, and equal rewards teach nothing: let rewards differ.
        rewards = itertools.cycle([1.0, -1.0, 0.5])
        patch.setattr(ranking, "reward", lambda *_: {"rank": 0, "format": 0, "invalid": 0, "total": next(rewards)})
        train_rl.main(["--preset", "mini", "--out", str(out), "--device", "cpu"])
    return out


def test_stages_chain_and_keep_the_weights(trained):
    ar, *others = (torch.load(trained / f"{name}.pt", weights_only=True) for name in ("ar", "ar_sft", "cft", "opd", "rl"))
    for other in others:
        assert ar["config"] == other["config"] and set(ar["model"]) == set(other["model"])
        assert ar["fingerprint"] == other["fingerprint"]
    assert ar["settings"]["block_len"] == 1 and ar["settings"]["start"] == "ar_sft"
    assert others[-1]["settings"]["start"] == "opd"


def test_validation_names_the_failures(trained):
    """Of every stage: the decoded validation logs each kind's share, and they add up to what is not valid."""
    for name in ("ar_sft", "ar", "cft", "opd", "rl"):
        lines = [json.loads(x) for x in (trained / f"{name}.jsonl").read_text().splitlines()]
        found = [x for x in lines if "valid_failures" in x]
        assert found and all(set(x["valid_failures"]) <= set(ranking.FAILURES) for x in found)
        assert all(sum(x["valid_failures"].values()) == pytest.approx(1 - x["valid_valid"]) for x in found)


def test_rl_and_distillation_log_what_to_watch(trained):
    """Beside the loss: parts of the reward, failures, copies by case, entropy, KL, clipping; the first ratio is 1."""
    lines = [json.loads(x) for x in (trained / "rl.jsonl").read_text().splitlines()]
    told = [x for x in lines if "reward_invalid" in x]
    assert [x["step"] for x in told] == [0, 1, 2] and all(x["version"] in (0, 2) for x in told if "version" in x)
    assert all(x["failures"] and 0 <= x["dropped_groups"] <= 4 for x in told)
    assert all(x["failures"] and x["entropy"] > 0 and x["kl_to_start"] == 0 for x in told if x["step"] == 0)
    assert all(x["ratio_off"] < 1e-4 for x in told if x["step"] in (0, 2)) and told[1]["ratio_off"] > 1e-4
    assert all(x["groups"] == 4 for x in told)                      # those of the step's share, not of the whole phase
    texts = (trained / "rl.rollouts.txt").read_text()
    assert texts.count("step 3, reward ") == 2                      # two rollouts of the last batch, as text
    kl = [x["valid_kl"] for x in map(json.loads, (trained / "opd.jsonl").read_text().splitlines()) if "valid_kl" in x]
    assert len(kl) == 2 and all(v >= 0 for v in kl)                 # before the first step, and at the end


def test_without_cft_the_ar_weights_are_converted(trained, tmp_path, monkeypatch, capsys):
    """Distilled straight from AR: <mask> starts at the mean of the others, and the table calls the start naive."""
    monkeypatch.setitem(train_opd.PRESETS, "mini", QUICK | {"group": 2, "steps": 1})
    for name in ("data", "ar.pt"):
        (tmp_path / name).symlink_to(trained / name)
    train_opd.main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu", "--start", "ar", "--lr", "0", "--name", "arc"])
    said = capsys.readouterr().out
    assert "\nnaive " in said and "\narc " in said
    ar, opd = (torch.load(tmp_path / f"{n}.pt", weights_only=True)["model"]["embed.weight"] for n in ("ar", "arc"))
    moved = (ar != opd).any(1).nonzero().flatten().tolist()
    assert len(moved) == 1 and torch.allclose(opd[moved[0]], torch.cat((ar[:moved[0]], ar[moved[0] + 1:])).mean(0), atol=1e-6)


def test_a_student_is_asked_for_by_name(trained, tmp_path):
    """Any diffusion weights in the folder, whatever a stage called them; AR's are no student, and a name must be there."""
    for name in ("data", "ar.pt", "cft.pt"):
        (tmp_path / name).symlink_to(trained / name)
    (tmp_path / "mine.pt").symlink_to(trained / "cft.pt")
    (tmp_path / "grpo.pt").symlink_to(trained / "ar.pt")                 # AR by another name is no student
    (tmp_path / "arc.pt").symlink_to(trained / "opd.pt")                 # nor is a name that begins with ar
    s = evaluate.EvalSettings(preset="mini", out=str(tmp_path))
    (tmp_path / "cft.state.pt").symlink_to(trained / "cft.state.pt")
    assert checkpoint.pick_student(s) == "cft"                           # a stage's, where no name is given
    assert checkpoint.students(s.out, s.preset) == ["cft", "arc", "mine"]  # what the ladder shows; a state is no model
    s.student = "mine"
    assert checkpoint.pick_student(s) == "mine"
    for s.student in ("ar", "opd", "grpo"):
        with pytest.raises(checkpoint.UserError, match=f"--student {s.student}.*there are: cft"):
            checkpoint.pick_student(s)


def test_a_results_file_that_cannot_be_read_is_named(trained, tmp_path):
    for name in ("data", "ar.pt"):
        (tmp_path / name).symlink_to(trained / name)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(checkpoint.UserError, match="results.json"):
        evaluate.main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu"])


def test_cft_resumes_bit_for_bit(trained, rows, tmp_path, monkeypatch):
    monkeypatch.setitem(settings.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=320))
    whole = torch.load(trained / "cft.state.pt", weights_only=True)
    monkeypatch.setitem(train_cft.PRESETS, "mini", QUICK)
    for name in ("data", "ar.pt"):
        (tmp_path / name).symlink_to(trained / name)
    args = ["--preset", "mini", "--out", str(tmp_path), "--device", "cpu", "--save-every", "2"]
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


@pytest.mark.parametrize("module", [train_opd, train_rl])
def test_distillation_and_rl_resume_bit_for_bit(module, trained, tmp_path, monkeypatch):
    """Four steps at once = two, a kill where a phase of rollouts ends, and two more."""
    name = {train_opd: "opd", train_rl: "rl"}[module]
    real, judged = stage.batch_rows, train_rl.roll_out

    def told_apart(*a):                                             # rewards that differ: these models write no permutation
        b = judged(*a)
        b.rewards = torch.tensor([[sum(r.tokens) % 7 / 7 for r in group] for group in b.rollouts])
        return b

    def killer(*a):
        if a[3] == 2:
            raise RuntimeError("killed")
        return real(*a)
    monkeypatch.setattr(train_rl, "roll_out", told_apart)
    monkeypatch.setattr(checkpoint, "NEEDED", ["a later stage"])         # no table at the end
    monkeypatch.setitem(module.PRESETS, "mini", QUICK | {"group": 2, "steps": 4, "eval_every": 4, "save_every": 2})
    states = []
    for kill in (False, True):
        out = tmp_path / str(kill)
        out.mkdir()
        for need in ("data", "ar_sft.pt", "ar.pt", "cft.pt", "opd.pt"):
            if need != f"{name}.pt":
                (out / need).symlink_to(trained / need)
        args = ["--preset", "mini", "--out", str(out), "--device", "cpu"]
        if kill:
            monkeypatch.setattr(stage, "batch_rows", killer)
            with pytest.raises(RuntimeError, match="killed"):
                module.main(args)
            monkeypatch.setattr(stage, "batch_rows", real)
            other = torch.load(begun_from := out / ("cft.pt" if name == "opd" else "opd.pt"), weights_only=True)
            begun_from.unlink()
            torch.save(other | {"step": 99}, begun_from)
            with pytest.raises(checkpoint.UserError, match="begun from another"):
                module.main(args + ["--resume"])
            begun_from.unlink()
            begun_from.symlink_to(trained / begun_from.name)
        module.main(args + ["--resume"] * kill)
        states.append(torch.load(out / f"{name}.state.pt", weights_only=True))
    whole, again = states
    start = torch.load(trained / ("cft.pt" if name == "opd" else "opd.pt"), weights_only=True)["model"]
    assert again["step"] == 4 and any(not torch.equal(v, start[key]) for key, v in whole["model"].items())
    assert all(torch.equal(v, again["model"][key]) for key, v in whole["model"].items())


@pytest.fixture
def begun(trained, tmp_path, monkeypatch):
    """A stage in a fresh folder with all that it may start from, without a table at its end -> flags."""
    monkeypatch.setattr(checkpoint, "NEEDED", ["a later stage"])
    for name in ("data", "ar_sft.pt", "ar.pt", "cft.pt", "opd.pt"):
        (tmp_path / name).symlink_to(trained / name)
    return ["--preset", "mini", "--out", str(tmp_path), "--device", "cpu"]


def test_rl_goes_on_within_a_phase(begun, ctrl_c_at, tmp_path, monkeypatch):
    """Stopped after the first of a phase's two steps: the second gets rollouts of its own, made by the policy as it is."""
    ctrl_c_at(0)
    monkeypatch.setitem(train_rl.PRESETS, "mini", QUICK | {"group": 2, "steps": 3, "log_every": 1})
    with pytest.raises(SystemExit):
        train_rl.main(begun)
    ctrl_c_at(None)
    train_rl.main(begun + ["--resume"])
    told = [json.loads(x) for x in (tmp_path / "rl.jsonl").read_text().splitlines()]
    assert [(x["step"], x["version"]) for x in told if "version" in x] == [(0, 0), (1, 1), (2, 2)]


def test_dropped_groups_are_not_counted(begun, monkeypatch):
    """Three groups of four differ in rewards: three parts of weight 1 in the loss."""
    judged, steps = train_rl.roll_out, []

    def one_group_alike(*a):
        b = judged(*a)
        b.rewards = torch.tensor([[1.0, 0.0]]).repeat(len(b.rewards), 1)
        b.rewards[1] = -1.0
        return b
    monkeypatch.setattr(train_rl, "roll_out", one_group_alike)
    monkeypatch.setattr(stage.Run, "train", lambda run, batch_loss, *_, **__: steps.append(batch_loss(0)))
    monkeypatch.setitem(train_rl.PRESETS, "mini", QUICK | {"group": 2})
    train_rl.main(begun)
    [(parts, _)] = steps
    assert [weight for _, weight in parts] == [1.0] * 3


@pytest.mark.parametrize("module,name,needs", [(train_ar, "ar_sft", []), (train_cft, "cft", ["ar.pt"]),
                                               (train_opd, "opd", ["ar.pt", "cft.pt"])])
def test_micro_batches_change_nothing(module, name, needs, trained, tmp_path, monkeypatch):
    """One numerator and one denominator, whatever the rows of a forward: same loss, same gradient norm."""
    monkeypatch.setattr(checkpoint, "NEEDED", ["a later stage"])
    monkeypatch.setitem(settings.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=320))
    quick = QUICK | {"steps": 1, "log_every": 1}
    if module is train_ar:
        quick = {k: v for k, v in quick.items() if k != "block_len"} | {"accepted_steps": 0, "rl_steps": 0}
    monkeypatch.setitem(module.PRESETS, "mini", quick)
    found = []
    for micro in ("0", "3"):                                        # 3: the last forward has one row
        out = tmp_path / micro
        out.mkdir()
        for need in ("data", *needs):
            (out / need).symlink_to(trained / need)
        module.main(["--preset", "mini", "--out", str(out), "--device", "cpu", "--micro", micro])
        [line] = [x for x in map(json.loads, (out / f"{name}.jsonl").read_text().splitlines()) if "grad_norm" in x]
        found.append((line["loss"], line["grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0][0] > 0


@pytest.mark.parametrize("module,name", [(train_ar, "ar_sft"), (train_cft, "cft"), (train_rl, "rl"), (train_opd, "opd")])
def test_a_refusal_writes_nothing(module, name, trained, tmp_path, monkeypatch):
    """Finished weights stay finished: their state and log are as they were before the mistake."""
    monkeypatch.setitem(settings.MODELS, "mini", dict(width=16, layers=1, heads=1, ctx_len=8))
    for n in ("data", "ar_sft.pt", "ar.pt", "cft.pt", "opd.pt"):
        (tmp_path / n).symlink_to(trained / n)
    for end in (".state.pt", ".jsonl"):
        (tmp_path / (name + end)).write_bytes((trained / (name + end)).read_bytes())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(checkpoint.UserError, match="ctx_len"):
        module.main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu"] + ["--block-len", "512"] * (name != "ar_sft"))
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}


def test_results_file(trained, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "TAUS", (1.0, 0.4))
    monkeypatch.setattr(evaluate, "SIZES", {"output_len": (8, 999), "candidates": (3, 10), "prompt_len": (16, 32),
                                           "batch": (1, 2), "block_len": (4, 999)})
    evaluate.main(["--preset", "mini", "--out", str(trained), "--device", "cpu", "--block-len", "8", "--time-users", "2",
                   "--repeats", "1"])
    results = json.loads((trained / "results.json").read_text())
    assert {"preset", "seed", "device", "n_users", "ladder", "frontier"} <= set(results)
    systems = {row["system"]: row for row in results["ladder"]}
    assert {"random", "reverse", "floor", "teacher", "ar_sft", "ar", "naive", "cft", "opd", "rl", "oracle"} <= set(systems)
    assert systems["oracle"]["r1"] == 1.0 and systems["ar"]["nfe"] == pytest.approx(systems["ar"]["tokens"])
    for key in ("r1", "r3", "r5", "ndcg3", "ndcg5", "r1_ci", "valid", "failures", "copy_rate", "grounding", "consistency",
                "nfe", "tokens", "tokens_per_nfe", "r1_minus_ar", "r1_minus_ar_ci", "ndcg3_minus_ar_ci", "speedup"):
        assert key in systems["cft"], key
    assert results["frontier"][0]["mode"] == "ar" and results["frontier"][0]["speedup"] == 1.0
    assert [row["tau"] for row in results["frontier"][1:]] == list(evaluate.TAUS)
    assert {name: len(rows) for name, rows in results["sweeps"].items()} == {"output_len": 2, "candidates": 2, "prompt_len": 2,
                                                                             "batch": 2, "block_len": 1}    # 999: too long
    file, now = trained / "results.json", results["weights"]
    assert evaluate.measured(file, "cpu", now)["frontier"] == results["frontier"]
    assert "frontier" in evaluate.measured(file, "cpu", now | {"cft_b8": "1"})
    assert evaluate.measured(file, "cuda", now) == evaluate.measured(file, "cpu", now | {"cft": "1"}) == {}
    assert all(row["speedup"] > 0 for rows in results["sweeps"].values() for row in rows)
    lengths = [row["tokens"] for row in results["sweeps"]["output_len"]]
    assert results["student"] == "rl" and lengths[0] <= 8 < lengths[1] and systems["ar"]["speedup"] == 1.0
    assert "oracle" in capsys.readouterr().out
    for name in ("frontier", "sweep_batch", "rl_valid_r1", "rl_failures", "opd_valid_kl"):
        assert (trained / f"{name}.svg").read_text().startswith("<svg")


def test_fewer_candidates(prompts, tok):
    """A prompt cut to its first n candidates reads as those n, and one that has no more is left alone."""
    from data import dataset
    prompt = prompts[-1][0]
    history, candidates = dataset.read_prompt(prompt, tok)
    assert dataset.read_prompt(evaluate.fewer(prompt, tok, 3), tok) == (history, candidates[:3])
    assert evaluate.fewer(prompt, tok, 6) == evaluate.fewer(prompt, tok, 10) == prompt


def user_of(trained):
    from data import amazon, prepare
    summary = json.loads((trained / "data" / "summary.json").read_text())
    split = amazon.load(summary["config"]["data"])
    return split.user[int(prepare.Rows(trained / "data" / "test.npz").arrays["user"][0])]


def test_command_line_shows_one_user(trained, capsys):
    show.main(["--preset", "mini", "--out", str(trained), "--user", user_of(trained), "--block-len", "8"])
    text = capsys.readouterr().out
    assert "--- ar:" in text and "--- rl, blocks of 8" in text and "tokens/s" in text and "Crème" in text
    assert "<- the true next purchase" in text or "not among the candidates" in text


def test_command_line_json(trained, capsys):
    show.main(["--preset", "mini", "--out", str(trained), "--user", user_of(trained), "--block-len", "8", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [m["mode"] for m in result["modes"]] == ["ar", "rl"]
    assert all(m["tok_s"] >= m["tok_s_end_to_end"] > 0 for m in result["modes"])


@pytest.mark.parametrize("flags,says", [(["--user", "99999"], "no user 99999"), (["--tau", "0"], "tau 0"),
                                        (["--block-len", "0"], "block length 0"), (["--temperature", "-1"], "temperature")])
def test_command_line_mistakes(trained, flags, says):
    with pytest.raises(checkpoint.UserError, match=says):
        show.main(["--preset", "mini", "--out", str(trained), *flags])


def test_weights_of_another_start_are_pointed_out(trained, tmp_path, capsys):
    """AR weights that are not those from which the student was made."""
    (tmp_path / "data").symlink_to(trained / "data")
    for name in ("ar.pt", "cft.pt"):
        shutil.copyfile(trained / name, tmp_path / name)
    s = settings.Settings(preset="mini", out=str(tmp_path), device="cpu")
    _, tok, summary = stage.load_data(s)
    checkpoint.open_model(s, "cft", tok, summary)
    assert "note" not in capsys.readouterr().out
    shutil.copyfile(trained / "ar_sft.pt", tmp_path / "ar.pt")
    checkpoint.open_model(s, "cft", tok, summary)
    assert "ar.pt is not the one from which" in capsys.readouterr().out


def test_weights_that_are_not_there(trained):
    for main in (show.main, evaluate.main):
        with pytest.raises(checkpoint.UserError, match="--student none"):
            main(["--preset", "mini", "--out", str(trained), "--student", "none"])


def test_weights_in_the_clone_are_used_where_a_run_has_none(trained, rows, tmp_path, monkeypatch, capsys):
    """Looked at in place; copied, with all they were made from, where a stage is to start from them; never mixed with a
    run's own, and never used for other rows."""
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "clone")
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "mini").symlink_to(trained)
    out = tmp_path / "out"
    out.mkdir()
    assert checkpoint.weights(out, "mini", "rl") is None                 # nothing is prepared yet: rows unknown
    (out / "data").symlink_to(rows / "data")
    assert checkpoint.weights(out, "mini", "rl") == tmp_path / "clone" / "mini" / "rl.pt"
    checkpoint.need(settings.Settings(preset="mini", out=str(out), device="cpu"), "cft")
    assert sorted(p.name for p in out.glob("*.pt")) == ["ar.pt", "ar_sft.pt", "cft.pt"]
    assert checkpoint.weights(out, "mini", "rl") is None and checkpoint.weights(out, "mini", "cft") == out / "cft.pt"
    begun = tmp_path / "begun"                                           # AR was stopped before its first validation:
    begun.mkdir()                                                        # a student of the clone's is not mixed in
    (begun / "data").symlink_to(rows / "data")
    (begun / "ar_sft.state.pt").symlink_to(trained / "ar_sft.state.pt")
    assert checkpoint.weights(begun, "mini", "cft") is None
    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / "data").symlink_to(rows / "data")
    checkpoint.need(settings.Settings(preset="mini", out=str(sft), device="cpu"), "ar_sft")
    assert sorted(p.name for p in sft.glob("*.pt")) == ["ar.pt", "ar_sft.pt"]    # the table will ask for ar
    other = tmp_path / "other"
    (other / "data").mkdir(parents=True)
    (other / "data" / "summary.json").write_text(json.dumps({"fingerprint": "other"}))
    assert checkpoint.weights(other, "mini", "rl") is None


def test_nothing_trained_yet(rows, tmp_path):
    (tmp_path / "data").symlink_to(rows / "data")
    with pytest.raises(checkpoint.UserError, match="train_ar.py"):
        evaluate.main(["--preset", "mini", "--out", str(tmp_path)])
    with pytest.raises(checkpoint.UserError, match="train_ar.py"):
        show.main(["--preset", "mini", "--out", str(tmp_path), "--user", "0"])
