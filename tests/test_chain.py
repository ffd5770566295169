"""The chain of stages: what is missing is run, in order, with the settings that matter; what is there is left alone."""
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import evaluate
from conftest import link
from plumbing import chain, checkpoint, settings
from plumbing.settings import UserError
from train_rl import RLSettings


@pytest.fixture
def commands(monkeypatch):
    """The commands that the chain would run, instead of running them."""
    ran = []

    class Child:
        def __init__(self, command):
            ran.append(command[1:])

        def wait(self):
            return 0
    monkeypatch.setattr(subprocess, "Popen", Child)
    return ran


@pytest.fixture
def s(rows, tmp_path):
    link(rows, tmp_path, "data")
    s = RLSettings(preset="mini", out=str(tmp_path), device="cpu", dtype="float32", seed=7, threads=1, micro=2, block_len=16)
    s.given = {"dtype", "micro"}
    return s


def given(command):
    """The flags of a command line as a dict."""
    return dict(zip((word.removeprefix("--") for word in command[1::2]), command[2::2]))


@pytest.mark.parametrize("name", checkpoint.NAMES)
def test_what_is_missing_is_run_with_all_settings_that_matter(name, s, commands, prepared):
    """Each row of the table, and the command line that it becomes is one that its own parser takes."""
    s.data, s.given = "a folder", s.given | {"data"}
    chain.need(s, name, prepared[2])
    [command] = commands
    assert command[0] == str(settings.ROOT / checkpoint.MADE_BY[name].split()[0])
    flags = given(command)
    want = dict(preset="mini", out=s.out, seed="7", device="cpu", dtype="float32", micro="2", threads="1", table="0",
                data="a folder")
    assert want.items() <= flags.items() and "resume" not in flags
    assert flags.get("block-len") == {"ar_sft": None, "ar": "1"}.get(name, "16")         # AR stays AR
    assert flags.get("name") == (name if name in ("ar", "cft_rl") else None)
    assert flags.get("start") == {"ar": "ar_sft", "cft_rl": "cft"}.get(name)             # else the stage's own default


def test_what_was_not_given_is_left_to_the_stage(s, commands, prepared):
    """OPD's preset has its own micro-batches; RL's default of 0 must not take their place."""
    s.given = set()
    chain.need(s, "opd", prepared[2])
    assert not {"micro", "dtype", "data"} & set(given(commands[0]))
    assert settings.parse(RLSettings, {}, "", ["--preset", "mini", "--micro", "3"]).given == {"preset", "micro"}


def test_a_stopped_stage_whose_start_was_made_anew_begins_again(s, commands, trained, tmp_path, prepared):
    """To go on from other weights would be refused each time."""
    state = torch.load(trained / "ar.state.pt", weights_only=True)
    checkpoint.save(tmp_path / "ar.state.pt", state | {"step": 1})
    link(trained, tmp_path, "ar_sft.pt")
    chain.need(s, "ar", prepared[2])
    (tmp_path / "ar_sft.pt").unlink()
    shutil.copyfile(trained / "cft.pt", tmp_path / "ar_sft.pt")
    chain.need(s, "ar", prepared[2])
    assert [command[-1] == "--resume" for command in commands] == [True, False]


def test_a_termination_reaches_the_stage(tmp_path):
    """Without that it would train on unseen, and a second start would write into the same folder."""
    script = ("import subprocess, sys\nfrom plumbing import chain\nreal = subprocess.Popen\n"
              "class Sleeper(real):\n    def __init__(self, command):\n"
              "        super().__init__([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
              "    def wait(self, *rest):\n        print(self.pid, flush=True)\n        return super().wait(*rest)\n"
              "subprocess.Popen = Sleeper\nchain.run(['train_cft.py'])\n")
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=settings.ROOT)
    child = int(parent.stdout.readline())
    parent.terminate()
    parent.communicate(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_what_is_there_is_left_alone(s, commands, trained, tmp_path, prepared):
    link(trained, tmp_path, "cft.pt", "cft.state.pt")
    chain.need(s, "cft", prepared[2])
    assert not commands


def test_a_stage_that_was_stopped_is_gone_on_with(s, commands, trained, tmp_path, prepared, capsys):
    """Its weights may be there already, from a validation: what counts is that it did not come to its end."""
    link(trained, tmp_path, "ar.pt", "cft.pt")
    state = torch.load(trained / "cft.state.pt", weights_only=True)
    checkpoint.save(tmp_path / "cft.state.pt", state | {"step": 1})
    chain.need(s, "cft", prepared[2])
    [command] = commands
    assert command[-1] == "--resume" and "cft was stopped before its end" in capsys.readouterr().out


def test_a_stage_that_fails_ends_the_chain(s, monkeypatch, prepared):
    monkeypatch.setattr(subprocess, "Popen", lambda command: SimpleNamespace(wait=lambda: 1))
    with pytest.raises(UserError, match="train_cft.py ended early"):
        chain.need(s, "cft", prepared[2])


def test_weights_that_no_stage_makes(s, trained, tmp_path, prepared):
    with pytest.raises(UserError, match="mine.pt is missing"):
        chain.need(s, "mine", prepared[2])
    state = torch.load(trained / "cft.state.pt", weights_only=True)
    checkpoint.save(tmp_path / "mine.state.pt", state | {"step": 1})
    with pytest.raises(UserError, match="mine was stopped: finish it by its own command"):
        chain.need(s, "mine", prepared[2])


def test_commands_run_for_real(s, prepared, tiny, tmp_path):
    """One row of the table as a process of its own: it refuses what it cannot use, and says so on the error stream."""
    s.data, s.given = str(tmp_path / "elsewhere"), {"data"}
    with pytest.raises(UserError, match="train_ar.py ended early"):
        chain.need(s, "ar_sft", prepared[2])


# === Which weights a run has ==========================================================================================

def test_weights_in_the_clone_are_used_where_a_run_has_none(trained, rows, tmp_path, monkeypatch, prepared):
    """Looked at in place; copied, with all they were made from, where a stage is to start from them; never mixed with a
    run's own, and never used for other rows."""
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "clone")
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "mini").symlink_to(trained)
    summary = prepared[2]

    def run(name):
        (tmp_path / name).mkdir()
        link(rows, tmp_path / name, "data")
        return settings.Settings(preset="mini", out=str(tmp_path / name), device="cpu")
    s = run("out")
    assert checkpoint.weights(s, "rl", summary) == tmp_path / "clone" / "mini" / "rl.pt"
    assert checkpoint.weights(s, "rl", summary | {"fingerprint": "other"}) is None
    chain.need(s, "cft", summary)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.pt")) == ["ar.pt", "ar_sft.pt", "cft.pt"]
    assert checkpoint.weights(s, "rl", summary) is None
    assert checkpoint.weights(s, "cft", summary) == tmp_path / "out" / "cft.pt"
    s = run("begun")                                                # AR was stopped before its first validation:
    link(trained, tmp_path / "begun", "ar_sft.state.pt")            # a student of the clone's is not mixed in
    assert checkpoint.weights(s, "cft", summary) is None
    chain.need(run("sft"), "ar_sft", summary)
    assert sorted(p.name for p in (tmp_path / "sft").glob("*.pt")) == ["ar.pt", "ar_sft.pt"]     # tables ask for ar


def test_a_student_is_asked_for_by_name(trained, tmp_path, prepared):
    """Any diffusion weights in the folder, whatever a stage called them; AR's are no student, and a name must be there."""
    link(trained, tmp_path, "data", "ar.pt", "cft.pt", "cft.state.pt")
    (tmp_path / "mine.pt").symlink_to(trained / "cft.pt")
    (tmp_path / "grpo.pt").symlink_to(trained / "ar.pt")                 # AR by another name is no student
    (tmp_path / "arc.pt").symlink_to(trained / "opd.pt")                 # nor is a name that begins with ar AR
    s, summary = evaluate.EvalSettings(preset="mini", out=str(tmp_path)), prepared[2]
    assert checkpoint.pick_student(s, summary) == "cft"                  # a stage's, where no name is given
    assert checkpoint.students(s, summary) == ["cft", "arc", "mine"]     # what the ladder shows; a state is no model
    s.student = "mine"
    assert checkpoint.pick_student(s, summary) == "mine"
    for s.student in ("ar", "opd", "grpo"):
        with pytest.raises(UserError, match=f"--student {s.student}.*there are: cft"):
            checkpoint.pick_student(s, summary)


def test_weights_of_another_start_are_pointed_out(trained, tmp_path, capsys, prepared):
    """AR weights that are not those from which the student was made. The note goes to stderr: --json stays JSON."""
    for name in ("ar.pt", "cft.pt"):
        shutil.copyfile(trained / name, tmp_path / name)
    s, (_, tok, summary) = settings.Settings(preset="mini", out=str(tmp_path), device="cpu"), prepared
    checkpoint.open_model(s, "cft", tok, summary)
    assert "note" not in capsys.readouterr().err
    shutil.copyfile(trained / "ar_sft.pt", tmp_path / "ar.pt")
    checkpoint.open_model(s, "cft", tok, summary)
    said = capsys.readouterr()
    assert "made from another ar.pt" in said.err and not said.out


def test_the_clone_is_whole():
    """The six weights that come with it are of one chain, and of the same rows."""
    made = {name: checkpoint.load(checkpoint.SHIPPED / "small" / f"{name}.pt", "") for name in checkpoint.NAMES}
    assert len({state["fingerprint"] for state in made.values()}) == 1
    for name, start in (("ar", "ar_sft"), ("cft", "ar"), ("opd", "cft"), ("cft_rl", "cft"), ("rl", "opd")):
        assert made[name]["made_from"] == checkpoint.digest(checkpoint.SHIPPED / "small" / f"{start}.pt"), name
