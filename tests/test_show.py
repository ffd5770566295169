"""The command line of sample.py, and the users that come with the clone."""
import gzip
import io
import json
import os
import subprocess
import sys
import time

import pytest

import sample
from data import amazon
from data import rows as rows_on_disk
from plumbing import checkpoint, demo, show
from plumbing.settings import ROOT, UserError


@pytest.fixture
def nothing_prepared(monkeypatch, tmp_path):
    """An empty working folder, in which no rows can be made or read."""
    def fail(*_):
        raise AssertionError("rows were asked for")
    for module, name in ((show, "load_data"), (amazon, "load"), (rows_on_disk.Rows, "__init__")):
        monkeypatch.setattr(module, name, fail)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def user_of(trained):
    summary = json.loads((trained / "data" / "summary.json").read_text(encoding="utf-8"))
    split = amazon.load(summary["config"]["data"])
    return split.user[int(rows_on_disk.Rows(trained / "data" / "test.npz").arrays["user"][0])]


# === A run of one's own ===============================================================================================

def run_of(trained, *flags):
    return ["--preset", "mini", "--out", str(trained), "--device", "cpu", "--block-len", "8", *flags]


def test_command_line_shows_one_user(trained, capsys):
    show.main(run_of(trained, "--user", user_of(trained)))
    text = capsys.readouterr().out
    assert "--- ar:" in text and "--- rl, blocks of 8" in text and "tokens/s" in text and "Crème" in text
    assert "<- the true next purchase" in text or "not among the candidates" in text
    assert text.splitlines()[-1].endswith("python train_cft.py --preset mini")


def test_command_line_json(trained, capsys):
    show.main(run_of(trained, "--user", user_of(trained), "--json"))
    result = json.loads(capsys.readouterr().out)
    assert [m["mode"] for m in result["modes"]] == ["ar", "rl"]
    assert all(m["tok_s"] >= m["tok_s_end_to_end"] > 0 for m in result["modes"])


def test_without_a_number_the_first_user_of_other_rows_is_shown(trained, capsys):
    show.main(run_of(trained, "--json"))
    assert str(json.loads(capsys.readouterr().out)["user"]) == user_of(trained)


def test_watching_ends_with_the_text(trained, capsys):
    """Where the output is no terminal, nothing is redrawn: the finished text of each model appears once."""
    show.main(run_of(trained, "--watch", "--prompt"))
    text = capsys.readouterr().out
    assert "--- ar ---" in text and "--- rl ---" in text and "\x1b" not in text and text.count("<history>") == 1


@pytest.mark.parametrize("flag,value,says", [
    ("--user", "99999", "no user 99999"), ("--tau", "0", "tau 0"), ("--block-len", "0", "block length 0"),
    ("--temperature", "-1", "temperature"), ("--student", "none", "--student none"),
    ("--device", "abacus", "--device")])
def test_command_line_mistakes(trained, flag, value, says):
    with pytest.raises(UserError, match=says):
        show.main(["--preset", "mini", "--out", str(trained), flag, value])


def test_nothing_trained_yet(rows, tmp_path):
    (tmp_path / "data").symlink_to(rows / "data")
    with pytest.raises(UserError, match="train_cft.py"):
        show.main(["--preset", "mini", "--out", str(tmp_path), "--user", "0"])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_redrawn(model, prompts, tok, monkeypatch):
    """Each drawing goes up over the lines of the one before it, and the last one is the finished text. A file gets that
    alone."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(tok, "text", lambda tokens, inner=tok.text: inner(tokens).replace("<mask>", "\n<mask>"))
    screen = Terminal()
    watch = show.Screen(tok, screen)
    watch.text, texts = (lambda decoder, inner=watch.text: texts.append(inner(decoder)) or texts[-1]), []
    [out] = sample.Decoder(model, [prompts[0][0]], tok, 4, 0.5, 8).run(watch)
    drawn = screen.getvalue().split("\x1b[J")
    assert len(drawn) == len(texts) == out.nfe and " ·" in texts[0] and " ·" not in texts[-1]
    assert all(d.endswith(f"\x1b[{text.count(chr(10)) + 1}F") for d, text in zip(drawn, texts[:-1]))
    file = io.StringIO()
    sample.Decoder(model, [prompts[0][0]], tok, 4, 0.5, 8).run(show.Screen(tok, file))
    assert texts[-1] == tok.text(out.canvas) and file.getvalue() == texts[-1] + "\n"


# === The users that come with the clone ===============================================================================

def test_the_shipped_file():
    """Small, of the same rows as the weights beside it, and without a path of the machine that made it."""
    path = demo.file("small")
    assert path.stat().st_size <= demo.LARGEST
    users, tok, summary = demo.load("small")
    for name in checkpoint.NAMES:
        assert checkpoint.load(path.with_name(f"{name}.pt"), "")["fingerprint"] == summary["fingerprint"]
    assert summary["config"]["data"] == "data/beauty"
    assert list(users)[0] == demo.FIRST and len(users) == 1 + demo.HITS + demo.MISSES
    assert sum(user.target is None for user in users.values()) == demo.MISSES
    for user in users.values():
        assert user.prompt[0] == tok.history and user.prompt[-1] == tok.rank and max(user.prompt) < tok.vocab
        assert 0 < len(user.history) <= 8 and len(user.candidates) == sum(t in tok.slot_of for t in user.prompt)
        assert user.target is None or 0 <= user.target < len(user.candidates)


def test_the_first_minute(nothing_prepared, capsys):
    """No flag, another working folder, nothing prepared: two models and one ranking, because they agree."""
    show.main(["--device", "cpu"])
    text = capsys.readouterr().out
    for part in (f"User {demo.FIRST}", "--- ar: 114 tokens in 114 forwards", "--- rl, blocks of 32"):
        assert part in text
    assert text.count(" after before   candidate") == 1 and "ar and rl, which agree" in text
    assert text.count("<- the true next purchase") == 1
    assert not list(nothing_prepared.iterdir())


def test_the_first_minute_as_a_command(tmp_path):
    """The same through the shell, and the terminal's encoding lacks most characters."""
    found = subprocess.run([sys.executable, str(ROOT / "sample.py"), "--device", "cpu"], cwd=tmp_path,
                           env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, encoding="utf-8")
    assert found.returncode == 0, found.stderr
    assert "<- the true next purchase" in found.stdout and not found.stderr and not list(tmp_path.iterdir())


def test_users_are_listed_in_one_line(nothing_prepared, capsys):
    show.main(["--list"])
    [line] = capsys.readouterr().out.splitlines()
    numbers = [int(number) for number in line.split()]
    assert numbers == list(demo.load("small")[0])
    show.main(["--device", "cpu", "--json", "--user", str(numbers[-1])])
    assert json.loads(capsys.readouterr().out)["user"] == numbers[-1]
    with pytest.raises(UserError, match="no users come with the clone for --preset mini"):
        show.main(["--list", "--preset", "mini"])


@pytest.mark.parametrize("own", ["cft.state.pt", "data/summary.json"])
def test_a_run_of_its_own_is_not_shown_the_shipped_users(own, nothing_prepared):
    """Other users, and folders with rows or weights of their own, go to the rows."""
    with pytest.raises(AssertionError, match="rows were asked for"):
        show.main(["--device", "cpu", "--user", "0"])
    path = nothing_prepared / "out" / "small" / own
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(AssertionError, match="rows were asked for"):
        show.main(["--device", "cpu"])


def test_the_file_is_made_from_rows(trained, tmp_path, monkeypatch, capsys):
    """Of the miniature: the same users are shown, from the file, as from the rows."""
    monkeypatch.setattr(demo, "SHIPPED", tmp_path)
    demo.main(["--preset", "mini", "--out", str(trained)])
    first = demo.file("mini").read_bytes()
    demo.main(["--preset", "mini", "--out", str(trained)])
    assert demo.file("mini").read_bytes() == first and str(tmp_path) not in gzip.decompress(first).decode("utf-8")
    users, tok, summary = demo.load("mini")
    _, whole = rows_on_disk.load(trained / "data")
    prepared = demo.Prepared(trained / "data", whole)
    assert summary["fingerprint"] == whole["fingerprint"] and len(users) > demo.MISSES
    assert all(user == prepared.user(prepared.numbers.index(number)) for number, user in users.items())
    for r in (0, 5):                                                # the history is all before the last purchase
        bought = prepared.split.histories[prepared.rows.arrays["user"][r]]
        assert prepared.user(r).history == [prepared.split.title[i] for i in bought[:-1]][-8:]


def test_disagreement_and_failure_are_shown(capsys):
    """Two orders give two tables; a failed answer leaves the order as it was."""
    user = demo.User(7, [], 1, ["bought"], ["first", "", "third"])
    show.show_rankings(user, [{"mode": "ar", "order": [1, 0, 2], "failure": None},
                              {"mode": "rl", "order": None, "failure": "duplicate"}])
    text = capsys.readouterr().out
    assert text.count(" after before   candidate") == 2
    assert "The ranking of ar:" in text and "The ranking of rl:" in text
    assert "rl wrote no valid permutation (duplicate)" in text
    assert "     1      2   B (no title)  <- the true next purchase" in text
    user.target = None
    show.show_rankings(user, [{"mode": "ar", "order": [2, 1, 0], "failure": None}])
    assert "not among the candidates" in capsys.readouterr().out
