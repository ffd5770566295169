"""The ladder: rows worked out by hand, intervals that are as wide as theory says, and the tables that are printed."""
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import ranking
from plumbing import ladder, loop
from plumbing.ladder import System, bootstrap, ladder_row, order_row
from plumbing.settings import OnPolicySettings
from ranking import parse
from sample import Rollout


def answer(tok, letters):
    """A short output that answers with these identifiers."""
    return [tok.think, tok.grade[3], tok.answer, *(tok.slots["ABCDEF".index(x)] for x in letters), tok.eos]


def test_plain_orders_as_rows():
    """Floor, reverse, random and oracle over targets spread evenly on ten places."""
    targets, rng = list(range(10)) * 60, np.random.default_rng(0)
    floor = order_row("floor", [list(range(10))] * 600, targets)
    reverse = order_row("reverse", [list(range(10))[::-1]] * 600, [0] * 600)
    random = order_row("random", [rng.permutation(10).tolist() for _ in targets], targets)
    oracle = order_row("oracle", [[t] + [c for c in range(10) if c != t] for t in targets], targets)
    assert (floor["system"], floor["n"], floor["r1"], floor["r3"], floor["r5"]) == ("floor", 600, .1, .3, .5)
    assert floor["ndcg3"] == pytest.approx(.2130930) and floor["tau"] is None
    assert reverse["r5"] == reverse["ndcg5"] == 0
    assert abs(random["r1"] - .1) < .04 and abs(random["r3"] - .3) < .06
    assert oracle["r1"] == oracle["ndcg3"] == oracle["ndcg5"] == 1 and oracle["r1_ci"] == [1, 1]
    assert floor["users"]["r1"] == [float(t == 0) for t in targets]


def test_bootstrap():
    """As wide as theory says, around the mean, the same for the same seed; narrower where users are paired."""
    rng = np.random.default_rng(1)
    a = (rng.random(400) < .3).astype(float)
    b = np.where(rng.random(400) < .05, 1 - a, a)                   # the same users, a few of them different
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lo, hi = bootstrap(a)
    assert lo < a.mean() < hi and (hi - lo) == pytest.approx(2 * 1.96 * a.std() / 20, rel=.1)
    low, high = bootstrap(b, a)
    assert low < (b - a).mean() < high and high - low < .6 * (hi - lo)
    assert [low, high] == pytest.approx(bootstrap((b - a).tolist())) and bootstrap(a, a) == [0, 0]
    c = rng.random(50)
    assert bootstrap(c) == bootstrap(c) != bootstrap(c, seed=1) and bootstrap([.7]) == [.7, .7]
    assert torch.equal(before, torch.get_rng_state())               # it leaves the global generator alone


# === A row by hand ====================================================================================================

@pytest.fixture
def judged(prompts, tok):
    """Five rollouts of one prompt: (prompts, rollouts, targets). Valid with the target first, valid with it second, cut
    off with it first shown, a duplicate with it third shown, and the pre-rank order copied with it second."""
    prompt, trace = next((p, o) for p, o in prompts[::-1] if parse(o, tok, 6).order not in (None, list(range(6))))
    order = parse(trace, tok, 6).order
    outputs = [trace, trace, trace[:-1], answer(tok, "AABCDE"), answer(tok, "ABCDEF")]
    rollouts = [Rollout(o, nfe=10 * (i + 1)) for i, o in enumerate(outputs)]
    return [prompt] * 5, rollouts, [order[0], order[1], 0, 2, 1]


def test_ladder_row_by_hand(judged, tok):
    """Failures fall back to the pre-rank order in the accuracy, are misses in the strict figure, and are counted."""
    prompts, rollouts, targets = judged
    row = ladder_row("x", prompts, rollouts, targets, tok, 6, tau=0.9)
    assert row["users"]["r1"] == [1, 0, 1, 0, 0] and row["r1"] == .4 and row["r3"] == 1 and row["n"] == 5
    second = 1 / math.log2(3)
    assert row["ndcg3"] == pytest.approx((1 + second + 1 + .5 + second) / 5)
    assert row["users"]["ndcg3"] == pytest.approx([1, second, 1, .5, second])
    assert row["ndcg3_strict"] == pytest.approx((1 + second + second) / 5)
    assert row["valid"] == .6 and row["failures"] == {"no_eos": .2, "duplicate": .2} and row["copy_rate"] == .2
    assert row["tau"] == .9 and row["consistency"] == .4 and row["grounding"] == pytest.approx(.6)
    assert row["grounding_parts"] == pytest.approx({p: .6 for p in ranking.CLAIMS})
    tokens = sum(len(r.tokens) for r in rollouts)
    assert row["nfe"] == 30 and row["tokens"] == tokens / 5 and row["tokens_per_nfe"] == pytest.approx(tokens / 150)
    written = ladder_row("teacher", prompts, [Rollout(r.tokens) for r in rollouts], targets, tok, 6)
    assert "nfe" not in written and "tokens_per_nfe" not in written
    assert written["tokens"] == row["tokens"]


def test_difference_is_paired_with_the_other_row(judged, tok):
    """Mean and interval of this row minus that one, user by user."""
    row = ladder_row("x", *judged, tok, 6)                          # hits 1, 0, 1, 0, 0
    other = order_row("y", [[0, 1]] * 5, [1, 1, 0, 0, 1])           # hits 0, 0, 1, 1, 0
    mean, interval = ladder.difference(row, other)
    assert mean == pytest.approx(0) and interval == bootstrap([1, 0, 0, -1, 0])
    assert ladder.difference(row, row) == (0, [0, 0])
    mean, interval = ladder.difference(row, other, "ndcg3")        # 1, s, 1, .5, s against s, s, 1, 1, s
    first = 1 - 1 / math.log2(3)
    assert mean == pytest.approx((first - .5) / 5) and interval == pytest.approx(bootstrap([first, 0, 0, -.5, 0]))
    worse, better = order_row("w", [[1, 0]] * 4, [0] * 4), order_row("b", [[0, 1]] * 4, [0, 0, 0, 1])
    mean, (_, high) = ladder.difference(worse, better)
    assert mean == -.75 and high <= 0


# === The tables =======================================================================================================

@pytest.fixture
def ladder_rows(judged, tok):
    """random, floor, teacher, ar and cft at tau 0.9, about the same five users."""
    prompts, rollouts, targets = judged
    return [order_row("random", [[5, 4, 3, 2, 1, 0]] * 5, targets),
            order_row("floor", [list(range(6))] * 5, [0, 1, 1, 2, 1]),
            ladder_row("teacher", prompts, [Rollout(r.tokens) for r in rollouts], targets, tok, 6),
            ladder_row("ar", *judged, tok, 6), ladder_row("cft", *judged, tok, 6, tau=0.9)]


def test_the_first_table_has_five_columns(ladder_rows, capsys):
    """System, R@1, its interval, valid, tokens per forward; no random order; three lines that explain, and no more."""
    floor, _, ar = ladder_rows[1:4]
    lines = ladder.table(ladder_rows).split("\n")
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["system", "R@1", "95%", "interval", "valid", "tokens", "per", "forward"]
    assert lines[1].split() == ["floor", "0.200", *"[{:.3f}, {:.3f}]".format(*floor["r1_ci"]).split()]
    assert lines[2].split()[-1] == "60.0%"                          # the teacher was not decoded
    assert lines[3].split()[-2:] == ["60.0%", "{:.1f}".format(ar["tokens_per_nfe"])]
    assert lines[4].startswith("cft, tau 0.9 ") and lines[4].split()[3] == "0.400"
    ladder.show_ladder(ladder_rows, hit_rate=.1, full=False)
    said = capsys.readouterr().out
    assert said.startswith("\n".join(lines)) and "--full" in said and "minus" not in said and "random" not in said
    after = said.removeprefix("\n".join(lines)).strip().split("\n")
    assert len(after) == 3 and max(map(len, after)) <= 120
    ladder.show_ladder(ladder_rows, hit_rate=.1, full=False, rest="There is more.")
    assert capsys.readouterr().out.endswith("\nThere is more.\n")


def test_the_full_table(ladder_rows, capsys):
    """One aligned line per row, blank where a system has no value; below it differences and how outputs failed."""
    _, floor, teacher, ar, cft = ladder_rows
    lines = ladder.table([floor, teacher, ar, cft], full=True).split("\n")
    assert len(lines) == 5 and len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["floor", "0.200", "[{:.3f},".format(floor["r1_ci"][0]),
                                "{:.3f}]".format(floor["r1_ci"][1]), "1.000", "{:.3f}".format(floor["ndcg3"])]
    assert lines[2].split()[-4:] == ["60.0%", "60.0%", "40.0%", "20.0%"] and lines[2].endswith(" " * 16)
    assert lines[3].split()[-2:] == ["30.0", "{:.1f}".format(ar["tokens_per_nfe"])] and lines[3][16:21].strip() == ""
    assert lines[4][16:21].strip() == "0.90"
    ladder.show_ladder([floor, teacher, ar, cft], hit_rate=.1, full=True)
    said = capsys.readouterr().out
    assert said.startswith("\n".join(lines)) and "ar: R@1 on all users 0.0400 (floor 0.0200)" in said
    assert "cft, tau 0.9: R@1 on all users" in said
    assert "minus ar, paired, 95% interval: R@1 +0.0000 [+0.0000, +0.0000], NDCG@3 +0.0000 [+0.0000, +0.0000]" in said
    assert said.count("failures: no_eos 20.00%, duplicate 20.00%") == 2 and said.count("minus floor, paired") == 2
    assert said.count("R@1 +0.2000") == 2
    timed = ladder.table([floor, ar | {"speedup": 1.0}, cft | {"speedup": 7.25}], full=True).split("\n")
    assert timed[0].endswith("speed-up") and timed[1].endswith(" " * 10) and timed[3].split()[-1] == "7.25"
    assert "random" in ladder.table(ladder_rows, full=True)


# === The whole ladder, and the table at a stage's end =================================================================

@pytest.fixture
def run(trained):
    """A finished run of the miniature: settings, and what show_stage and show_step need besides."""
    s = OnPolicySettings(preset="mini", out=str(trained), device="cpu", block_len=8)
    s.name, s.start = "rl", "opd"
    return s, *loop.load_data(s)


def test_the_ladder_compares_with_ar_where_it_is(run):
    """Every other decoded row gets its difference to the row "ar". Without that row, the rest is as it was."""
    systems = [System("ar_sft", "ar_sft", 1, None), System("ar", "ar", 1, None)]
    rows = {r["system"]: r for r in ladder.ladder(*run, systems, nullcontext())}
    assert list(rows) == ["random", "reverse", "floor", "teacher", "ar_sft", "ar", "oracle"]
    assert {"r1_minus_ar", "r1_minus_ar_ci", "ndcg3_minus_ar", "ndcg3_minus_ar_ci"} <= set(rows["ar_sft"])
    assert not any("r1_minus_ar" in rows[name] for name in ("floor", "teacher", "ar", "oracle"))
    alone = {r["system"]: r for r in ladder.ladder(*run, systems[:1], nullcontext())}
    assert alone["ar_sft"] == {key: v for key, v in rows["ar_sft"].items() if "minus_ar" not in key}


def test_a_stage_ends_with_its_table(run, capsys):
    """AR, the start and the result in five columns, and the command that shows the rest; nothing where s.table is 0."""
    s = run[0]
    ladder.show_step(*run, nullcontext())
    said = capsys.readouterr().out
    shown = [line.split()[0].rstrip(",") for line in said.split("\n") if "[" in line]
    assert shown == ["floor", "teacher", "ar", "opd", "rl", "oracle"]
    assert f"python evaluate.py --preset mini --out {s.out} --only ladder --full" in said
    s.full, s.start = True, "ar"                                    # straight from AR: the naive conversion
    ladder.show_step(*run, nullcontext())
    said = capsys.readouterr().out
    assert "\nnaive " in said and "\nrandom " in said and "minus ar, paired" in said
    s.block_len, s.start, s.name = 1, "ar_sft", "ar"                # RL at block length 1: both are AR
    ladder.show_step(*run, nullcontext())
    said = capsys.readouterr().out
    assert "\nar_sft " in said and "\nar " in said and "naive" not in said
    s.table = 0
    ladder.show_step(*run, nullcontext())
    assert capsys.readouterr().out == ""
