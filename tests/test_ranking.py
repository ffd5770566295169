"""The judge is judged: every figure of the ladder passes through ranking.py, so its cases are worked out by hand."""
import itertools
import math

import numpy as np
import pytest

import ranking
from data.dataset import LINE
from data.rows import Rows
from ranking import Parsed, consistent, grounding, metrics, parse, reward

LETTERS = "ABCDEFGHIJ"


def answer(tok, letters):
    """A short output that answers with these identifiers."""
    return [tok.think, tok.grade[3], tok.answer, *(tok.slots[LETTERS.index(x)] for x in letters), tok.eos]


def reasoned(tok, grades, top, letters):
    """An output by hand, as in reasoned(tok, [3, 5], "5B 3A", "BA"): its verdicts are these, its claims arbitrary."""
    out = [tok.think, tok.kind[1], tok.kind_count[1], tok.brand[1], tok.brand_count[1]]
    for slot, g in zip(tok.slots, grades):
        out += [slot, tok.brand[1], tok.brand_count[0], tok.kind[1], tok.kind_count[0], tok.h[0], tok.together[0],
                tok.next[0], tok.grade[g]]
    out.append(tok.top)
    for place in top.split():
        out += [tok.grade[int(place[0])], tok.slots[LETTERS.index(place[1])]]
    return out + answer(tok, letters)[2:]


def put(output, at, token):
    """A copy of output with another token in one place."""
    return output[:at] + [token] + output[at + 1:]


def load(rows, name):
    """One set of traces: its Rows, prompts and outputs."""
    r = Rows(rows / "data" / f"{name}.npz")
    return r, *zip(*(r[i] for i in range(len(r))))


# === Parser ===========================================================================================================

def test_parser_names_each_failure(tok):
    """A permutation of what was shown becomes an order; anything else gets a name and no order."""
    def kind(output, n=3):
        parsed = parse(output, tok, n)
        assert parsed.order is None and parsed.failure in ranking.FAILURES
        return parsed.failure

    assert parse(answer(tok, "CAB"), tok, 3) == Parsed(order=[2, 0, 1])
    assert parse(np.array(answer(tok, LETTERS[::-1])), tok, 10).order == list(range(10))[::-1]
    assert kind([]) == kind(answer(tok, "CAB")[:-1]) == kind([7] * 50) == "no_eos"
    assert kind([tok.eos]) == kind([tok.think, *tok.slots[:3], tok.eos]) == kind(range(tok.vocab)) == "no_answer"
    assert kind(answer(tok, "")) == kind(answer(tok, "CA")) == "omission"
    assert kind(answer(tok, "CAC")) == kind(answer(tok, "CC")) == kind(answer(tok, "CABA")) == "duplicate"
    assert kind(answer(tok, "CAD")) == kind(answer(tok, "CABD")) == kind(answer(tok, "D")) == "out_of_set"
    assert parse(answer(tok, "CABD"), tok, 4).order == [2, 0, 1, 3]
    for strange in (tok.pad, tok.mask, tok.answer, tok.think, tok.grade[0], tok.h[0], 65, tok.vocab + 5, -1):
        for at in range(3, 7):                                      # before, between and after the identifiers
            output = answer(tok, "CAB")
            assert kind(output[:at] + [strange] + output[at:]) == "malformed", (strange, at)


def test_only_the_answer_before_eos_counts(tok):
    """What follows the first <eos> neither helps nor hurts, and what precedes <answer> is free."""
    good = answer(tok, "BCA")
    for tail in ([tok.slots[0]], [tok.pad] * 4, answer(tok, "ABC"), [tok.eos, tok.eos]):
        assert parse(good + tail, tok, 3).order == [1, 2, 0]
    assert parse([tok.mask, tok.slots[9], tok.pad, *good], tok, 3).order == [1, 2, 0]
    assert parse([tok.eos] + good, tok, 3).failure == "no_answer"
    assert parse(answer(tok, "BC") + [tok.slots[0], tok.eos], tok, 3).failure == "omission"


def test_parser_against_all_short_answers(tok):
    """Of all answers of up to four tokens about two candidates, exactly AB and BA pass; overflow alone cannot occur."""
    met = {parse([], tok, 2).failure, parse([tok.eos], tok, 2).failure}
    alphabet = [*tok.slots[:3], tok.grade[0]]
    for length in range(5):
        for said in itertools.product(alphabet, repeat=length):
            parsed = parse([tok.think, tok.answer, *said, tok.eos], tok, 2)
            want = [tok.slots.index(t) for t in said] if set(said) == set(tok.slots[:2]) and length == 2 else None
            assert parsed.order == want
            met.add(parsed.failure)
    assert met == set(ranking.FAILURES) - {"overflow"} | {None}


def test_only_a_failure_falls_back(tok):
    """An answer is shown as it is, however bad; a failure shows the pre-rank order of as many as there were."""
    assert ranking.order_shown(parse(answer(tok, "CBA"), tok, 3), 3) == [2, 1, 0]
    for output in ([], answer(tok, "CB"), answer(tok, "CBB"), answer(tok, "CBAD")):
        assert ranking.order_shown(parse(output, tok, 3), 3) == [0, 1, 2]


# === Metrics and reward ===============================================================================================

def test_metrics_by_hand():
    """Ranks 1, 2, 3, 11 and infinity; the discount is 1 / log2(1 + rank), and the cut at K is inclusive."""
    m = metrics([1, 2, 3, 11, math.inf])
    assert (m["r1"], m["r3"], m["r5"], m["r10"]) == (.2, .6, .6, .6) and m["ndcg1"] == .2
    assert m["ndcg3"] == m["ndcg5"] == m["ndcg10"] == pytest.approx((1 + 0.6309298 + 0.5) / 5)
    m = metrics([4])
    assert (m["r3"], m["ndcg3"], m["r5"]) == (0, 0, 1) and m["ndcg5"] == pytest.approx(0.4306766)
    assert metrics([10])["r10"] == 1 and metrics([11])["r10"] == metrics([11])["ndcg10"] == 0
    assert ranking.rank_of([2, 0, 1], 1) == 3 and ranking.rank_of([2, 0, 1], None) == math.inf


def test_ties_count_against_the_target():
    """A constant scorer, or one that only gives NaN, gets no Recall@1 wherever the target stands."""
    for scores in ([0.5] * 10, [math.nan] * 10):
        assert [ranking.rank_by_score(scores, t) for t in range(10)] == [10] * 10
    assert [ranking.rank_by_score([.1, .9, .5, .5], t) for t in range(4)] == [4, 1, 3, 3]


@pytest.mark.parametrize("order,target,rank,fmt", [
    ([3, 0, 1, 2, 4, 5, 6, 7, 8, 9], 3, 0.3, 0.2),                  # rises by three of ten
    ([0, 2, 1, 3, 4, 5, 6, 7, 8, 9], 1, -0.1, 0.0),                 # falls
    ([9, 1, 2, 3, 4, 5, 6, 7, 8, 0], 4, 0.0, 0.0),                  # stays, though others move
    ([0, 9, 1, 2, 3, 4, 5, 6, 7, 8], 0, 0.0, 0.2),                  # first stays first
    ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], 0, -0.9, 0.0),                 # first falls
    ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], 9, 0.9, 0.2)])                 # last becomes first
def test_reward_by_hand(order, target, rank, fmt):
    """What the target rose, in tenths, and the bonus, which falling or staying (unless first) does not get."""
    r = reward(Parsed(order=order), target, 10)
    assert (r["rank"], r["format"], r["invalid"]) == pytest.approx((rank, fmt, 0))
    assert r["total"] == pytest.approx(rank + fmt)


def test_copying_earns_nothing_and_failing_costs_one():
    """The pre-rank order pays only where the target was first; a failure costs 1 wherever it was; parts add up."""
    for target in range(10):
        same = Parsed(order=list(range(10)))
        assert ranking.copied(same) and reward(same, target, 10)["total"] == (0.2 if target == 0 else 0.0)
        for kind in ranking.FAILURES:
            r = reward(Parsed(failure=kind), target, 10)
            assert r["total"] == r["rank"] + r["format"] + r["invalid"] == -1
            assert not ranking.copied(Parsed(failure=kind))
    assert not ranking.copied(Parsed(order=[0, 2, 1]))


# === Grounding ========================================================================================================

def test_teacher_is_grounded_and_consistent(rows, tok):
    """Every trace, greedy or drawn, of six candidates or fewer, says what its prompt shows and follows from itself."""
    for name in ("all", "accepted", "test"):
        r, prompts, outputs = load(rows, name)
        assert set(grounding(prompts, outputs, tok, 6).values()) == {1.0}, name
        assert all(consistent(o, tok) for o in outputs), name
        assert ranking.shown_counts(prompts, tok) == r.n_shown.tolist()
        orders = [parse(o, tok, n).order for o, n in zip(outputs, r.n_shown)]
        assert None not in orders
        grades = [[tok.grade.index(o[4 + LINE * (j + 1)]) for j in range(n)] for o, n in zip(outputs, r.n_shown)]
        greedy = all(order[0] == np.argmax(g) for order, g in zip(orders, grades))
        assert greedy == (name != "accepted")                       # so drawn picks are among those
        assert name != "all" or min(r.n_shown) < 6 == max(r.n_shown)     # and short lists among these


def test_one_wrong_claim_costs_its_part(prompts, tok):
    """Each of the 4 + 8n claim tokens, changed alone, lowers the share by its own claims and no other part."""
    for prompt, output in (prompts[0], prompts[-1]):                # few candidates and many
        [n] = ranking.shown_counts([prompt], tok)
        total = 2 + 5 * n

        def lost(said):
            g = grounding([prompt], [said], tok, 6)
            share = g.pop("grounding")
            return round((1 - share) * total, 6), {p: round((1 - v) * (2 if p == "pattern" else n), 6)
                                                   for p, v in g.items() if v < 1}
        for at in range(1, 5):
            assert lost(put(output, at, tok.mask)) == (1, {"pattern": 1})
        for j in range(n):
            at = 5 + LINE * j
            for c, family in enumerate(("brand", "brand_count", "kind", "kind_count", "h", "together", "next"), 1):
                tokens = getattr(tok, family)
                other = tokens[(tokens.index(output[at + c]) + 1) % len(tokens)]
                part = "link" if family == "h" else family.removesuffix("_count")
                assert lost(put(output, at + c, other)) == (1, {part: 1})
            assert lost(put(output, at, tok.slots[j + 1]))[0] == 5  # another's identifier: all five are misplaced
            assert lost(put(output, at + LINE - 1, tok.grade[0]))[0] == 0  # a verdict is an opinion, not a claim


def test_lines_elsewhere_missing_or_after_the_end_are_wrong(prompts, tok):
    """A claim counts at its place and before <eos>; one that is missing is as wrong as a false one."""
    prompt, output = prompts[-1]
    total, line = 2 + 5 * 6, [output[5 + LINE * j:5 + LINE * (j + 1)] for j in range(6)]
    head, tail = output[:5], output[5 + LINE * 6:]

    def right(said):
        return round(grounding([prompt], [said], tok, 6)["grounding"] * total, 6)
    assert right(head + line[1] + line[0] + sum(line[2:], []) + tail) == total - 10         # another order
    assert right(head + line[0] + line[0] + sum(line[2:], []) + tail) == total - 5          # repeated in place of B
    assert right(head + line[0] + sum(line, []) + tail) == 2 + 5                            # repeated: all move on
    assert right(head + sum(line[:4], []) + tail) == total - 10                             # two lines missing
    assert right(output[:5 + LINE * 2 + 3]) == 2 + 10 + 1                           # cut within a line
    assert right([]) == right([tok.eos]) == right([tok.pad] * 500) == right(list(range(tok.vocab))) == 0
    assert right(output[:5 + LINE] + [tok.eos] + output[6 + LINE:]) == 2 + 5                # the rest comes too late
    assert right(output + [tok.slots[0]] * 30) == total


def test_grounding_is_a_share_of_all_claims(prompts, tok):
    """Over outputs of unequal size every claim weighs the same, and an empty output loses all of its own."""
    (short, said), (long, _) = prompts[0], prompts[-1]
    [few, many] = ranking.shown_counts([short, long], tok)
    assert few < many == 6
    g = grounding([short, long], [said, []], tok, many)
    assert g["grounding"] == pytest.approx((2 + 5 * few) / (4 + 5 * few + 5 * many))
    assert g["pattern"] == .5 and g["brand"] == g["next"] == pytest.approx(few / (few + many))


# === Consistency ======================================================================================================

def test_consistency_by_hand(tok):
    """The pick is free; then grades decide, ties in pre-rank order; the answer is those three, then the rest."""
    grades = [3, 5, 5, 2]
    for top, letters in (("5B 5C 3A", "BCAD"), ("2D 5B 5C", "DBCA"), ("3A 5B 5C", "ABCD"), ("5C 5B 3A", "CBAD")):
        assert consistent(reasoned(tok, grades, top, letters), tok), top
    assert consistent(reasoned(tok, [0, 0, 7, 0], "7C 0A 0B", "CABD"), tok)
    assert consistent(reasoned(tok, [1, 4], "4B 1A", "BA"), tok)    # fewer candidates than places on top
    for top, letters in (("5B 5C 3A", "BCDA"),                      # the rest, or its end, in another order
                         ("5B 5C 3A", "CBAD"), ("5B 5C 3A", "BCA"), ("5B 5C 3A", "BCADD"), ("5B 5C 3A", ""),
                         ("2D 5C 5B", "DCBA"), ("2D 3A 5B", "DABC"), ("5B 3A 5C", "BACD"),      # wrong second place
                         ("4B 5C 3A", "BCAD"), ("5B 5C 2A", "BCAD"),                            # not its line's grade
                         ("5B 5C", "BCAD"), ("5B 5C 3A 2D", "BCAD"), ("", "BCAD"), ("5E 5B 5C", "EBCA")):
        assert not consistent(reasoned(tok, grades, top, letters), tok), (top, letters)


def test_consistency_of_broken_outputs(tok):
    """No grade, no line, no mark, no end, or a line that names another candidate: nothing follows from those."""
    good = reasoned(tok, [3, 5, 5, 2], "5B 5C 3A", "BCAD")
    line = [good[5 + LINE * j:5 + LINE * (j + 1)] for j in range(4)]
    assert consistent(good, tok) and consistent(good + answer(tok, "A"), tok) and consistent(np.array(good), tok)
    head, tail = good[:5], good[5 + LINE * 4:]
    for lines in (line[:3], line + line[3:], [], [line[1], line[0], *line[2:]], [*line[:2], line[1], line[3]],
                  [*line, [tok.mask] * 3]):
        assert not consistent(head + sum(lines, []) + tail, tok), lines
    for at in range(4 + LINE, 5 + 4 * LINE, LINE):
        assert not consistent(put(good, at, tok.next[0]), tok)      # no grade where the grade stands
    eleventh = [tok.slots[0], *line[0][1:-1], tok.grade[7]]          # more lines than there are identifiers
    assert not consistent(head + sum(line[:1] * 10, []) + eleventh + tail, tok)
    for mark in (tok.top, tok.answer, tok.eos):
        assert not consistent(put(good, good.index(mark), tok.pad), tok), mark
    swapped = put(put(good, good.index(tok.top), tok.answer), good.index(tok.answer), tok.top)
    for said in ([], [tok.eos], [tok.top], [tok.top, tok.answer, tok.eos], [tok.answer, tok.top, tok.eos], swapped,
                 good[:-1], good[:40], [tok.top] * 99, list(range(tok.vocab))):
        assert not consistent(said, tok)
