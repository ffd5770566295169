"""The stages on the miniature, a few steps each: what is asserted is their plumbing, and that the conversion loses nothing."""
import json

import pytest
import torch

import diffusion
import ranking
import train_ar
import train_cft
import train_opd
import train_rl
from conftest import QUICK, TINY, link, state_of
from data.rows import Rows
from plumbing import checkpoint, loop, settings
from plumbing.settings import UserError

MORE = {train_ar: dict(accepted_steps=1), train_cft: dict(block_len=8), train_opd: dict(block_len=8, group=2),
        train_rl: dict(block_len=8, group=2)}
NAMES = {train_ar: "ar_sft", train_cft: "cft", train_opd: "opd", train_rl: "rl"}


def lines(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def preset(monkeypatch):
    """preset(module, **values): the stage's preset `mini` is a quick one."""
    monkeypatch.setitem(settings.MODELS, "mini", TINY)

    def quick(module, **values):
        monkeypatch.setitem(module.PRESETS, "mini", QUICK | MORE[module] | values)
    return quick


@pytest.fixture
def begun(trained, tmp_path):
    """A fresh folder with all that a stage may start from, without a table at its end -> flags."""
    link(trained, tmp_path, "data", "ar_sft.pt", "ar.pt", "cft.pt", "opd.pt")
    return ["--preset", "mini", "--out", str(tmp_path), "--device", "cpu", "--table", "0"]


# === The conversion ===================================================================================================

def test_the_conversion_keeps_the_model(trained, prepared):
    """Converted weights at block length 1 give the logits of the AR model's plain causal forward, token for token."""
    _, tok, summary = prepared
    s = settings.Settings(preset="mini", out=str(trained), device="cpu")
    (ar, _), (converted, block_len) = (open_(s, "ar", tok, summary) for open_ in (checkpoint.open_model, checkpoint.open_student))
    rows = Rows(trained / "data" / "all.npz")
    assert block_len == diffusion.BLOCK_LEN
    for prompt, output in (rows[i] for i in range(0, len(rows), len(rows) // 5)):
        x = torch.tensor([prompt + output[:-1]])
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        with torch.no_grad():
            hidden = ar(x, torch.arange(x.shape[1])[None], causal)[0, len(prompt) - 1:]
            text = diffusion.pack([prompt], [output], tok, block_len=1)
            logits, _ = diffusion.score(converted, text, torch.ones_like(text.target, dtype=torch.bool), tok)
        assert torch.allclose(logits, diffusion.output_logits(ar, hidden, tok), atol=1e-5)


def test_without_cft_the_ar_weights_are_converted(trained, tmp_path, preset, capsys):
    """Distilled straight from AR: <mask> starts at the mean of the others, and the table calls the start naive."""
    preset(train_opd, steps=1)
    link(trained, tmp_path, "data", "ar.pt")
    train_opd.main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu", "--start", "ar", "--lr", "0", "--name", "arc"])
    said = capsys.readouterr().out
    assert "\nnaive" in said and "\narc" in said
    ar, opd = (torch.load(tmp_path / f"{n}.pt", weights_only=True)["model"]["embed.weight"] for n in ("ar", "arc"))
    moved = (ar != opd).any(1).nonzero().flatten().tolist()
    assert len(moved) == 1 and torch.allclose(opd[moved[0]], torch.cat((ar[:moved[0]], ar[moved[0] + 1:])).mean(0), atol=1e-6)


def test_sft_ends_on_the_accepted_traces(begun, preset, monkeypatch):
    """Two steps on the broad set and one on the accepted set, each counted from its own first batch."""
    asked, real = [], loop.Batches.__getitem__
    monkeypatch.setattr(loop.Batches, "__getitem__",
                        lambda self, step: asked.append((len(self.lengths), step)) or real(self, step))
    preset(train_ar)
    train_ar.main(begun)
    (broad, first), (_, second), (accepted, last) = asked
    assert (first, second, last) == (0, 1, 0) and accepted < broad


# === The chain as a whole =============================================================================================

def test_stages_chain_and_keep_the_weights(trained):
    ar, *others = (torch.load(trained / f"{name}.pt", weights_only=True) for name in ("ar", "ar_sft", "cft", "opd", "rl"))
    for other in others:
        assert ar["config"] == other["config"] and set(ar["model"]) == set(other["model"])
        assert ar["fingerprint"] == other["fingerprint"]
    assert ar["settings"]["block_len"] == 1 and ar["settings"]["start"] == "ar_sft"
    assert others[-1]["settings"]["start"] == "opd"


@pytest.mark.parametrize("preset_name,advantage,steps", [("mini", "mean", 10), ("small", "std", 100), ("beauty", "std", 300)])
def test_rl_of_the_teacher_has_a_preset_of_its_own(preset_name, advantage, steps):
    """At block length 1 `small` takes the paper's RL; the same command's other block lengths keep the stage's preset."""
    args = ["--preset", preset_name, "--device", "cpu", "--start", "ar_sft", "--name", "ar", "--block-len", "1"]
    s = settings.parse(train_rl.RLSettings, train_rl.PRESETS, "", args, train_rl.AR_PRESETS)
    assert (s.advantage, s.steps) == (advantage, steps) and (s.kl_weight, s.temperature)[preset_name != "mini"] != 0
    assert s.kl_weight == (0.3 if advantage == "mean" else 0) and s.temperature == (0.6 if advantage == "mean" else 1)
    s = settings.parse(train_rl.RLSettings, train_rl.PRESETS, "", ["--preset", "small", "--device", "cpu"], train_rl.AR_PRESETS)
    assert (s.advantage, s.steps) == ("mean", 60)


def test_validation_names_the_failures(trained):
    """Of every stage: the decoded validation logs the share of each kind, and they add up to what is not valid."""
    for name in ("ar_sft", "ar", "cft", "opd", "rl"):
        found = [x for x in lines(trained, name) if "valid_failures" in x]
        assert found and all(set(x["valid_failures"]) <= set(ranking.FAILURES) for x in found)
        assert all(sum(x["valid_failures"].values()) == pytest.approx(1 - x["valid_valid"]) for x in found)


def test_rl_and_distillation_log_what_to_watch(trained):
    """Beside the loss: parts of the reward, failures, copies by case, entropy, KL, clipping; the first ratio is 1."""
    told = [x for x in lines(trained, "rl") if "reward_invalid" in x]
    assert [x["step"] for x in told] == [0, 1, 2] and all(x["version"] in (0, 2) for x in told)
    assert all(x["failures"] and 0 <= x["dropped_groups"] <= 4 for x in told)
    assert all(x["entropy"] > 0 and x["kl_to_start"] == 0 for x in told if x["step"] == 0)
    assert all(x["ratio_off"] < 1e-4 for x in told if x["step"] in (0, 2)) and told[1]["ratio_off"] > 1e-4
    assert all(x["groups"] == 4 for x in told)                      # those of the step's share, not of the whole phase
    texts = (trained / "rl.rollouts.txt").read_text(encoding="utf-8")
    assert texts.count("step 3, reward ") == 2                      # two rollouts of the last phase, as text
    found = [x for x in lines(trained, "opd") if "valid_kl" in x]
    assert len(found) == 2                                          # before the first step, and at the end
    assert all(x["valid_kl"] >= 0 and x["valid_score"] == -x["valid_kl"] for x in found)    # the divergence decides


# === Resuming, splitting, refusing ====================================================================================

def test_cft_resumes_bit_for_bit(trained, begun, tmp_path, preset, interrupt_at):
    preset(train_cft)
    (tmp_path / "cft.pt").unlink()
    interrupt_at(2, RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        train_cft.main(begun + ["--save-every", "2"])
    interrupt_at(None)
    train_cft.main(begun + ["--save-every", "2", "--resume"])
    whole, again = state_of(trained, "cft"), state_of(tmp_path, "cft")
    assert again["step"] == 3 and all(torch.equal(v, again["model"][k]) for k, v in whole["model"].items())


@pytest.fixture
def told_apart(monkeypatch):
    """Rewards that differ: models this young write no permutation."""
    play = train_rl.play

    def judged(*args):
        groups = play(*args)
        for e in (e for group in groups for e in group):
            e.reward["total"] = sum(e.rollout.tokens) % 7 / 7
        return groups
    monkeypatch.setattr(train_rl, "play", judged)


@pytest.mark.parametrize("module,start", [(train_opd, "cft"), (train_rl, "opd")])
def test_distillation_and_rl_resume_bit_for_bit(module, start, trained, tmp_path, preset, interrupt_at, told_apart):
    """Four steps at once = two, a kill where a phase of rollouts ends, and two more. Another start is refused."""
    name, states = NAMES[module], []
    preset(module, steps=4, eval_every=4, save_every=2)
    for kill in (False, True):
        out = tmp_path / str(kill)
        out.mkdir()
        link(trained, out, *(n for n in ("data", "ar_sft.pt", "ar.pt", "cft.pt", "opd.pt") if n != f"{name}.pt"))
        args = ["--preset", "mini", "--out", str(out), "--device", "cpu", "--table", "0"]
        if kill:
            interrupt_at(2, RuntimeError("killed"))
            with pytest.raises(RuntimeError, match="killed"):
                module.main(args)
            interrupt_at(None)
            begun_from = out / f"{start}.pt"
            other = torch.load(begun_from, weights_only=True)
            begun_from.unlink()
            torch.save(other | {"step": 99}, begun_from)
            with pytest.raises(UserError, match="begun from another"):
                module.main(args + ["--resume"])
            begun_from.unlink()
            link(trained, out, begun_from.name)
        module.main(args + ["--resume"] * kill)
        states.append(state_of(out, name))
        assert [x["step"] for x in lines(out, name) if "valid_score" in x] == [0, 4]     # the start is judged once
    whole, again = states
    before = torch.load(trained / f"{start}.pt", weights_only=True)["model"]
    assert again["step"] == 4 and any(not torch.equal(v, before[key]) for key, v in whole["model"].items())
    assert all(torch.equal(v, again["model"][key]) for key, v in whole["model"].items())


def test_rl_goes_on_within_a_phase(begun, interrupt_at, tmp_path, preset, monkeypatch):
    """Stopped after the first of a phase's two steps: the second gets rollouts of its own, made by the policy as it is."""
    preset(train_rl, log_every=1)
    interrupt_at(0)
    with pytest.raises(SystemExit):
        train_rl.main(begun)
    interrupt_at(None)
    asked, real = [], loop.Batches.__getitem__
    monkeypatch.setattr(loop.Batches, "__getitem__", lambda self, step: asked.append(step) or real(self, step))
    train_rl.main(begun + ["--resume"])
    assert [(x["step"], x["version"]) for x in lines(tmp_path, "rl") if "version" in x] == [(0, 0), (1, 1), (2, 2)]
    assert asked == [0, 1, 2, 3]                                    # the prompts of the phase it stopped in, then the next's


def test_each_step_of_a_phase_has_its_own_share_and_the_anchor(begun, tmp_path, preset, monkeypatch, told_apart):
    """Two steps of a phase learn from different groups; with --kl-weight each of them is anchored, logged or not."""
    seen, real = [], train_rl.normalise
    monkeypatch.setattr(train_rl, "normalise", lambda groups, kind: seen.append(groups) or real(groups, kind))
    preset(train_rl, steps=2, log_every=100, kl_weight=0.3)
    train_rl.main(begun)
    first, second = ({id(group) for group in groups} for groups in seen)
    assert len(first) == len(second) == 4 and not first & second
    assert [("kl_to_start" in x) for x in lines(tmp_path, "rl") if "version" in x] == [True, True]


def test_dropped_groups_are_not_counted(begun, tmp_path, preset, monkeypatch):
    """Three groups of four differ in rewards: the loss is the mean over three, and the fourth is not replayed."""
    play, group_loss, seen = train_rl.play, train_rl.group_loss, []

    def one_group_alike(*args):
        groups = play(*args)
        for i, group in enumerate(groups):
            for g, e in enumerate(group):
                e.reward["total"] = -1.0 if i == 1 else float(g == 0)
        return groups

    def counted(model, group, *rest):
        seen.append(group)
        loss, watch = group_loss(model, group, *rest)
        return loss * 0 + 1.0, watch
    monkeypatch.setattr(train_rl, "play", one_group_alike)
    monkeypatch.setattr(train_rl, "group_loss", counted)
    preset(train_rl, steps=1, log_every=1)
    train_rl.main(begun)
    [line] = [x for x in lines(tmp_path, "rl") if "loss" in x]
    assert len(seen) == 3 and line["loss"] == pytest.approx(1.0)
    assert [x["dropped_groups"] for x in lines(tmp_path, "rl") if "version" in x] == [1]


@pytest.mark.parametrize("module", [train_ar, train_cft, train_opd])
def test_micro_batches_change_nothing(module, trained, tmp_path, preset):
    """One numerator and one denominator, whatever the rows of a forward: same loss, same gradient norm."""
    preset(module, steps=1, log_every=1, **({"accepted_steps": 0} if module is train_ar else {}))
    found = []
    for micro in ("0", "3"):                                        # 3: the last forward has fewer rows
        out = tmp_path / micro
        out.mkdir()
        link(trained, out, "data", "ar.pt")
        moved = torch.load(trained / "cft.pt", weights_only=True)   # away from its teacher, or OPD's loss would be about 0
        moved["model"]["embed.weight"] *= 20
        checkpoint.save(out / "cft.pt", moved)
        module.main(["--preset", "mini", "--out", str(out), "--device", "cpu", "--table", "0", "--micro", micro] +
                    (["--name", "x"] if module is train_cft else []))
        [line] = [x for x in lines(out, "x" if module is train_cft else NAMES[module]) if "grad_norm" in x]
        found.append((line["loss"], line["grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0][0] > 0


@pytest.mark.parametrize("module", list(NAMES))
def test_a_refusal_writes_nothing(module, trained, begun, tmp_path, monkeypatch):
    """Finished weights stay finished: their state and log are as they were before the mistake."""
    monkeypatch.setitem(settings.MODELS, "mini", TINY | dict(ctx_len=8))
    name = NAMES[module]
    for end in (".state.pt", ".jsonl"):
        (tmp_path / (name + end)).write_bytes((trained / (name + end)).read_bytes())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(UserError, match="ctx_len"):
        module.main(begun + ["--block-len", "512"] * (module is not train_ar))
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
