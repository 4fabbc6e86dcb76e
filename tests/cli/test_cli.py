"""The `diloco` command as a user runs it, in processes of its own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import ROOT, diloco, diloco_here
from protocol_fleet import Fleet, play
from signed_s3 import running_signed_s3

from diloco_orchestrator.protocol import keys
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.open_store import open_store


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's module and a run in `bucket` that `diloco run` completed."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_train.py").write_text((ROOT / "tests/support/tiny_workloads.py").read_text())
    options = ["--rounds", "2", "--replicas", "2", "--sync-every", "3", "--timing-poll-s", "0.05", "--arg", "lr=0.02"]
    (folder / "elsewhere").mkdir()
    shutil.copy(folder / "my_train.py", folder / "elsewhere")
    done = diloco("run", "elsewhere/my_train.py:train", "--store", "bucket", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["demo"], ["run"], ["status"]])
def test_help_explains_every_command(command, tmp_path):
    done = diloco_here(*command, "--help", cwd=tmp_path)
    assert done.returncode == 0 and "Usage:" in done.stdout


def test_help_loads_nothing_heavy():
    """What makes a command slow to start is what it imports."""
    code = (
        "import sys\n"
        "from diloco_orchestrator.cli.main import diloco\n"
        "assert len([diloco.get_command(None, name) for name in diloco.list_commands(None)]) > 20\n"
        "heavy = {'torch', 'transformers', 'torchft', 'obstore', 'pydantic', 'rich', 'numpy', 'boto3', 'modal'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_run_help_lists_every_setting_with_its_default(tmp_path):
    tiers = (diloco_here("run", flag, cwd=tmp_path).stdout for flag in ("--help", "--help-settings", "--help-experts"))
    text = re.sub(r"\s+", " ", "".join(tiers))
    assert "--guard-decline-patience" in text and "3 halts healthy runs" in text
    assert "--outer-lr VALUE outer learning rate; the paper's value [default: 0.7]" in text
    assert "--strict / --no-strict" in text


def test_run_help_shows_settings_in_three_tiers_each_by_itself(tmp_path):
    from diloco_orchestrator.cli.setting_options import FIRST, LAST, SECTIONS, setting_options

    def listed(flag: str, section: str) -> set[str]:
        text = diloco_here("run", "--executor", "local", flag, cwd=tmp_path).stdout
        assert text.count("\nSettings") + text.startswith("Settings") == 1
        return set(re.findall(r"^  (--[\w-]+)", text.partition(f"{section}:\n")[2], flags=re.MULTILINE))

    short = {"ranks_per_replica": "ranks"}
    flags = [
        {f"--{short.get(name, name).replace('.', '-').replace('_', '-')}" for name in names} for names in (FIRST, LAST)
    ]
    assert listed("--help", SECTIONS[0]) == flags[0] and listed("--help-experts", SECTIONS[2]) == flags[1]
    assert listed("--help-settings", SECTIONS[1]) == {each.opts[0] for each in setting_options()} - flags[0] - flags[1]


@pytest.mark.parametrize(
    ("command", "executor", "rate"),
    [
        ("run", "local", "0.7"),
        ("resume", "that of the launch", "that of the run"),
        ("attach", "that of the launch", ""),
    ],
)
def test_help_gives_the_defaults_of_that_command(command: str, executor: str, rate: str, tmp_path: Path):
    """A resume without options keeps the run's settings and its place, and named those of a new run."""
    shown = " ".join(diloco_here(command, "--help", cwd=tmp_path).stdout.split())
    assert f"Its own options: --executor NAME --help. [default: {executor}]" in shown
    assert not rate or f"outer learning rate; the paper's value [default: {rate}]" in shown


def test_help_lists_the_options_of_a_place_when_it_is_named(tmp_path):
    plain, local = (diloco_here("run", *of, "--help", cwd=tmp_path).stdout for of in ([], ["--executor", "local"]))
    assert "--grace-s" not in plain and "--grace-s" in local and "--store" in plain


def test_commands_are_listed_by_what_they_are_for_on_one_screen(tmp_path):
    text = diloco_here("--help", cwd=tmp_path, environ={"COLUMNS": "80"}).stdout
    assert re.findall(r"^(\w+):$", text, flags=re.MULTILINE) == ["Options", "Start", "Look", "Check", "Care"]
    assert (
        "  attach     Supervise the run in URL, whose launcher is gone\n" in text
        and "..." not in text.partition("Start:")[2]
    )
    assert len(text.splitlines()) <= 45


def test_help_lists_options_and_no_argument_among_the_options(tmp_path):
    for command, argument in (("run", "FILE.py:FUNCTION"), ("plan", "FILE.py:FUNCTION"), ("resume", "URL")):
        text = diloco_here(command, "--help", cwd=tmp_path).stdout
        assert argument in text.splitlines()[0]
        assert f"\n  {argument}" not in text.partition("\nOptions:\n")[2]


def test_a_file_that_does_not_exist_is_refused_before_anything_starts(tmp_path):
    for command in ("run", "plan"):
        done = diloco_here(command, "trian.py:train", "--store", "bucket", cwd=tmp_path)
        assert done.returncode == 2 and "there is no file" in done.stderr and "trian.py" in done.stderr
    assert not (tmp_path / "bucket").exists()


# -- run and status ---------------------------------------------------------------------------------------------------


def test_run_prints_one_plain_line_per_round_where_there_is_no_terminal(finished):
    lines = (finished / "output.txt").read_text().splitlines()
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == 3 and "outer step 1/2  loss " in rounds[0] and "held-out before" in rounds[0]
    assert any(line.startswith("completed: every outer step is taken") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_without_torch_a_run_can_be_read_and_what_computes_says_what_it_needs(finished):
    """As after an install without torch: a name that is None in sys.modules cannot be imported."""
    commands = "status bucket,report bucket page,compare bucket,join --help,verify bucket,verify bucket --load,demo"
    code = (
        "import sys\n"
        "sys.modules |= {'torch': None, 'transformers': None}\n"
        "from diloco_orchestrator.cli.main import main\n"
        f"for command in '{commands}'.split(','):\n"
        "    sys.argv[1:] = command.split()\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        print('exit', command.split()[0], end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=finished, capture_output=True, text=True, check=True)
    ends = re.findall(r"^exit (\w+) (\d)$", done.stdout, flags=re.MULTILINE)
    assert ends[:4] == [("status", "0"), ("report", "0"), ("compare", "0"), ("join", "0")]
    assert ends[4:] == [("verify", "1"), ("verify", "2"), ("demo", "2")]
    assert "not derived: averages, outer steps, bases, and the tensors of snapshots: needs torch" in done.stdout
    assert "NOT VERIFIED: what was checked agrees; pip install torch" in done.stdout
    assert "this command computes, and needs torch, which is not installed here: pip install torch" in done.stderr
    assert "replicas on this machine need torch, which is not installed: pip install torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_status_reads_a_run_from_its_folder_alone(finished):
    done = diloco_here("status", "bucket", cwd=finished)
    assert done.returncode == 0
    assert "completed" in done.stdout and "2/2 outer steps" in done.stdout and "ended: the run ended" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row[1:2] and re.fullmatch(r"\d+\.\d{3}", row[1])] == ["1", "2"]


@pytest.mark.parametrize("columns", ["40", "20"])
def test_a_narrow_terminal_cuts_no_number_off(columns, finished):
    narrow, wide = (
        diloco_here("status", "bucket", cwd=finished, environ={"COLUMNS": each}).stdout for each in (columns, "200")
    )
    numbers = [re.findall(r"\d+\.\d{3}", text) for text in (narrow, wide)]
    assert "…" not in narrow and numbers[0] == numbers[1] != []


def test_status_as_json_is_one_object(finished):
    status = json.loads(diloco_here("status", "bucket", "--json", cwd=finished).stdout)
    assert (status["state"], status["round"], status["outer_step"]) == ("completed", 3, 2)
    assert len(status["rounds"]) == 3 and status["snapshots"] == [0, 2]


def test_arguments_reach_the_workload_as_json_where_they_are(finished):
    config = json.loads((finished / "bucket" / "run.json").read_text())["config"]
    assert config["args"] == {"lr": 0.02} and config["timing"]["poll_s"] == 0.05


@pytest.mark.slow
def test_a_collapse_exits_with_3_as_one_object_on_stdout_and_says_why_on_stderr(finished):
    options = ["--rounds", "20", "--replicas", "1", "--sync-every", "3", "--json"]
    guard = ["--guard-min-steps", "2", "--guard-ema-alpha", "0"]
    done = diloco("run", "my_train:train_collapsing", "--store", "collapse", *options, *guard, cwd=finished)
    result = json.loads(done.stdout)
    assert done.returncode == 3 and result["status"] == "halted" and len(result["metrics"]) == 2
    assert "Hacking Gap" in result["verdict"]["reason"]
    assert "round 1" in done.stderr and "halted: the guard fired: Hacking Gap" in done.stderr


@pytest.mark.slow
def test_a_failed_run_exits_with_1_and_shows_the_users_traceback(finished):
    options = ["--replicas", "2", "--sync-every", "2", "--retry-max-errors", "0", "--quorum", "all", "--json"]
    done = diloco("run", "my_train:train_failing", "--store", "failed", *options, cwd=finished)
    assert done.returncode == 1 and "a bug in the user's own code" in done.stderr
    assert json.loads(done.stdout)["status"] == "failed"


@pytest.mark.slow
def test_settings_from_a_file_are_read_and_options_go_before_them(finished):
    (finished / "run.toml").write_text(
        "replicas = 1\nrounds = 7\nsync_every = 2\n[args]\nlr = 0.5\n[guard]\nmin_steps = 3\nema_alpha = 0.25\n"
    )
    options = ["--config", "run.toml", "--rounds", "1", "--guard-min-steps", "4", "--arg", "lr=0.125"]
    assert diloco("run", "my_train:train", "--store", "by-file", *options, cwd=finished).returncode == 0
    config = json.loads((finished / "by-file" / "run.json").read_text())["config"]
    assert (config["replicas"], config["rounds"], config["sync_every"]) == (1, 1, 2)
    assert (config["guard"]["min_steps"], config["guard"]["ema_alpha"]) == (4, 0.25)
    assert config["args"] == {"lr": 0.125}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = ", "cannot read settings from bad.toml"),
        ("roundz = 1", "unknown setting 'roundz': did you mean 'rounds'?"),
        ("[guard]\nmin_step = 1", "unknown setting 'guard.min_step': did you mean 'guard.min_steps'?"),
        ('entrypoint = "m:f"', "which is the command's own argument"),
    ],
)
def test_a_file_of_settings_that_cannot_be_meant_is_refused(text, words, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    (tmp_path / "m.py").write_text("def f(ctx): pass\n")
    done = diloco_here("run", "m:f", "--store", "bucket", "--config", "bad.toml", cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert not (tmp_path / "bucket").exists()


# -- a run's other commands -------------------------------------------------------------------------------------------


def test_watch_tells_of_a_finished_run_and_leaves(finished):
    done = diloco_here("watch", "bucket", cwd=finished)
    assert done.returncode == 0 and "completed: every outer step is taken" in done.stdout
    assert json.loads(diloco_here("watch", "bucket", "--json", cwd=finished).stdout)["state"] == "completed"


def test_logs_are_read_from_the_bucket(finished):
    done = diloco_here("logs", "bucket", "--replica", "1", cwd=finished)
    assert done.returncode == 0 and "replica 1.1 INFO round 1: committed by" in done.stdout
    assert len(json.loads(diloco_here("logs", "bucket", "--tail", "2", "--json", cwd=finished).stdout)) == 2
    done = diloco_here("logs", "bucket", "--replica", "1", "--attempt", "9", cwd=finished)
    assert done.returncode == 2 and "its attempts are 1" in done.stderr
    done = diloco_here("logs", "bucket", "--replica", "7", cwd=finished)
    assert done.returncode == 2 and "the run has replicas 0 to 1" in done.stderr


def test_snapshots_are_listed_with_their_scores(finished):
    done = diloco_here("snapshots", "bucket", cwd=finished)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == ["round 0", "round 2"]
    found = json.loads(diloco_here("snapshots", "bucket", "--json", cwd=finished).stdout)
    assert found[1]["round"] == 2 and found[1]["heldout"] < found[0]["heldout"]
    assert (Path(found[1]["url"]) / "model.safetensors").exists()


def test_verify_agrees_and_exits_with_4_where_a_byte_was_changed(finished, tmp_path):
    done = diloco_here("verify", "bucket", cwd=finished)
    assert done.returncode == 0 and "everything agrees" in done.stdout and "rounds 0 to 2" in done.stdout
    shutil.copytree(finished / "bucket", tmp_path / "bucket")
    payload = tmp_path / "bucket/rounds/00000002/payload/0/1/0.bin"
    payload.write_bytes(payload.read_bytes()[:-1] + b"!")
    changed = diloco_here("verify", "bucket", "--json", cwd=tmp_path)
    told = json.loads(changed.stdout)
    assert changed.returncode == 4 and told["disagreement"]["key"] == "rounds/00000002/payload/0/1/0.bin"


@pytest.mark.parametrize("scheme", ["s3", pytest.param("fsspec+s3", marks=pytest.mark.slow)])
def test_a_run_in_a_public_bucket_or_at_the_readers_cost_is_read_at_the_command_line(scheme, finished, tmp_path):
    with running_signed_s3() as server:
        for path in (path for path in (finished / "bucket").rglob("*") if path.is_file()):
            for bucket in ("public", "requester-pays"):
                server.server.objects.put(
                    f"{bucket}/run/{path.relative_to(finished / 'bucket')}", path.read_bytes(), True
                )
        unsigned = {"AWS_ENDPOINT_URL": server.url, "AWS_SKIP_SIGNATURE": "true"}
        payer = {**server.environ(), "AWS_REQUEST_PAYER": "requester"}
        for bucket, environ in (("public", unsigned), ("requester-pays", payer)):
            url = f"{scheme}://{bucket}/run"
            for command in (["status", url], ["verify", url], ["pull", url, bucket], ["report", url, f"{bucket}.html"]):
                done = diloco_here(*command, cwd=tmp_path, environ=environ)
                assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        refused = diloco_here("status", url, cwd=tmp_path, environ=server.environ())
        assert refused.returncode == 1 and "cannot read run.json in" in refused.stderr


def test_gc_tells_what_would_go_before_it_goes(finished):
    done = diloco_here("gc", "bucket", "--payloads", "needed", "--dry-run", "--json", cwd=finished)
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["removed"] is False and told["snapshots"]["0"] == "all are kept"
    wrong = diloco_here("gc", "bucket", "--payloads", "some", cwd=finished)
    assert wrong.returncode == 2 and "'all', 'needed'" in wrong.stderr


def test_pull_copies_any_round_and_offers_the_nearest(finished):
    done = diloco_here("pull", "bucket", "pulled", "--round", "1", "--json", cwd=finished)
    assert json.loads(done.stdout) == {"round": 1, "destination": "pulled"}
    assert (finished / "pulled" / "model.safetensors").exists()
    done = diloco_here("pull", "bucket", "nowhere", "--round", "9", cwd=finished)
    assert done.returncode == 2 and "The nearest is 2" in done.stderr and not (finished / "nowhere").exists()


def test_halt_and_resume_say_what_they_cannot_do(finished):
    done = diloco_here("halt", "bucket", cwd=finished)
    assert done.returncode == 2 and "has ended already (completed" in done.stderr
    done = diloco_here("resume", "bucket", cwd=finished)
    assert done.returncode == 2 and "Say how many more" in done.stderr
    done = diloco_here("resume", "bucket", "--codec", "int4", cwd=finished)
    assert done.returncode == 2 and "--codec: a resume cannot change that setting" in done.stderr
    done = diloco_here("resume", "bucket", "--rounds", "1", "--replicas", "5", cwd=finished)
    assert done.returncode == 2 and "was launched with 2 replicas, no max_replicas" in done.stderr


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_the_command_line(finished):
    options = ["--rounds", "1", "--replicas", "1", "--sync-every", "2"]
    started = diloco("run", "my_train:train", "--store", "more", "--arg", "width=3", *options, cwd=finished)
    assert started.returncode == 0
    other = ["--outer-lr", "0.25", "--arg", "width=4"]
    done = diloco("resume", "more", "--rounds", "1", "--why", "one more", *other, cwd=finished)
    assert done.returncode == 0, done.stderr
    begin = json.loads((finished / "more" / "legs/2/begin.json").read_text())
    assert begin["why"] == "one more" and begin["settings"] == {"outer.lr": 0.25, "args.width": 4}
    done = diloco("attach", "more", "--json", cwd=finished)
    assert done.returncode == 0 and json.loads(done.stdout)["outer_steps"] == 2


def test_doctor_examines_machine_and_store_and_leaves_nothing(tmp_path):
    found = json.loads(diloco_here("doctor", "bucket", "--json", cwd=tmp_path).stdout)
    machine = ["machine", "memory", "disk", "shared memory", "GPU", "torch", "packages", "arithmetic"]
    assert [f["name"] for f in found] == [*machine, "store", "latency", "throughput"]
    assert all(f["ok"] for f in found)
    assert not [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    done = diloco_here("doctor", "/proc/nothing", cwd=tmp_path)
    assert done.returncode == 1 and re.search(r"FAIL +store +cannot open the folder /proc/nothing", done.stdout)


@pytest.mark.slow
def test_doctor_tells_where_s3_credentials_are_from(s3_server, bucket, tmp_path):
    done = diloco("doctor", f"s3://{bucket}/x", cwd=tmp_path, environ=s3_server.environ())
    assert done.returncode == 0 and re.search(r"credentials +from env", done.stdout), done.stdout
    assert s3_server.secret not in done.stdout + done.stderr
    wrong = {**s3_server.environ(), "AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"}
    done = diloco("doctor", f"s3://{bucket}/x", cwd=tmp_path, environ=wrong)
    assert done.returncode == 1 and "SignatureDoesNotMatch" in done.stdout


# -- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "m:f", "--store", "x", "--replica", "3"], "'--replicas'"),
        (["run", "m:f", "--store", "x", "--guard-min-step", "3"], "'--guard-min-steps'"),
        (["demo", "--round", "3"], "'--rounds'"),
        (["stauts", "x"], "status"),
        (["run", "m:f"], "Missing option '--store'"),
        (["run", "m:f", "--store", "x", "--replicas", "0"], "'replicas' = '0'"),
        (["run", "m:f", "--store", "x", "--outer-lr", "fast"], "'outer.lr' = 'fast'"),
        (["run", "my.mod.train", "--store", "x"], "Write 'my.mod:train'"),
        (["run", "no_such:f", "--store", "x"], "there is no module 'no_such'"),
        (["run", "m:f", "--store", "x", "--arg", "lr"], "--arg lr: write it as K=V"),
        (["run", "m:f", "--store", "x", "--arg", "a=1", "--arg", "a=2"], "--arg a is given twice"),
        (["demo", "--text", "nowhere"], "--text nowhere: there is no such folder"),
        (["demo", "--quorum", "most"], "--quorum most"),
        (["demo", "--quorum", "5"], "quorum=5: choose 1..4"),
        (["run", "m:f", "--store", "s4://bucket/x"], "unknown store scheme 's4'"),
        (["plan", "m:f", "--store", "x", "--executor", "eks", "--compare", "modal"], "leave out --executor"),
        (["report", "x", "page.html", "--follow", "--csv", "t.csv"], "go with --influence"),
        (["report", "x", "page.html", "--influence", "--items", "m:f"], "go with --score"),
        (["report", "x", "page.html", "--port", "80"], "--port goes with --serve"),
        (["verify", "x", "--items", "m:f"], "go with --score"),
        (["verify", "x", "--load", "--tolerance", "0"], "--tolerance go with --score"),
        (["key", "x", "--why", "a key is in a log"], "--why goes with --rotate"),
        (["key", "x", "--certify", "a line", "--why", "a colleague"], "--why goes with --rotate"),
        (["whatif", "x", "--round", "1", "--without", "0", "--build", "m:f"], "go with --score"),
        (["invite", "x", "--replica", "1", "--own-credentials", "--role", "arn"], "leave --role"),
        (["doctor", "x", "--env", "A=1"], "name --executor and URL too"),
    ],
)
def test_usage_errors_exit_with_2_start_nothing_and_offer_the_nearest(args, words, tmp_path):
    (tmp_path / "m.py").write_text("def f(ctx): pass\n")
    done = diloco_here(*args, cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["m.py"]


@pytest.mark.parametrize("args", [("report", "{run}", "no/page.html"), ("compare", "{run}", "--html", "no/page.html")])
def test_a_file_that_cannot_be_written_is_named_without_a_traceback(args, finished, tmp_path):
    done = diloco_here(*(each.format(run=finished / "bucket") for each in args), cwd=tmp_path)
    assert done.returncode == 1 and "Error: no/page.html: No such file or directory. Name another" in done.stderr


def test_status_of_nothing_exits_with_1_and_makes_nothing(tmp_path):
    done = diloco_here("status", "typo", cwd=tmp_path)
    assert done.returncode == 1 and "there is no folder" in done.stderr
    (tmp_path / "empty").mkdir()
    done = diloco_here("status", "empty", cwd=tmp_path)
    assert done.returncode == 1 and "holds no run" in done.stderr
    assert not (tmp_path / "typo").exists()


def test_a_text_folder_with_too_little_in_it_is_refused(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a few words")
    done = diloco_here("demo", "--text", "notes", cwd=tmp_path)
    assert done.returncode == 2 and "holds 11 bytes of text in 1 files" in done.stderr


@pytest.mark.slow
def test_bash_completes_commands_options_and_executors():
    program = Path(sys.executable).parent
    tries = {"rep": "report", "report --infl": "--influence", "run --executor sl": "slurm"}
    script = f'PATH="{program}:$PATH"; eval "$(_DILOCO_COMPLETE=bash_source diloco)"\n' + "".join(
        f"COMP_WORDS=(diloco {typed}); COMP_CWORD={len(typed.split())}; "
        "_diloco_completion diloco; echo ${COMPREPLY[@]}; COMPREPLY=()\n"
        for typed in tries
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(tries.values())


@pytest.mark.parametrize("command", [["status"], ["explain"], ["verify"], ["pull", "model"]], ids=lambda args: args[0])
def test_a_void_commit_is_logged_once_by_a_command(command: list[str], tmp_path: Path, caplog):
    """Each reader of the log logged it, and each again when the log was found to contradict itself: up to six times."""
    fleet = Fleet(replicas=2, rounds=20, store=open_store(str(tmp_path / "run")))
    participants = fleet.join_all()
    for _ in range(2):
        play(participants, [1.0, 1.0])
    last = RunLog(fleet.store).commit(2)
    junk = last.written.model_copy(update={"round": 3, "outer_step": 9, "previous": last.sha256})
    assert fleet.store.create(keys.commit(3), junk.to_bytes())
    for _ in range(2):
        play(participants, [1.0, 1.0])
    caplog.clear()
    diloco_here(command[0], str(tmp_path / "run"), *command[1:], cwd=tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert len([words for words in said if words.startswith("rounds/00000003/commit.json is void: ")]) == 1, said
