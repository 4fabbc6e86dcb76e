"""Executors at the command line: their options, plans, mixed fleets, secrets from the environment."""

import json
import re
from pathlib import Path

import pytest
from cli_support import diloco, diloco_here
from clouds import modal
from s3_server import S3Server

from diloco_orchestrator.cli.executor_options import number

SECRET = "wandb-secret-0011223344"
PLAN = ["plan", "my_train:train", "--pin", "given"]  # uv is not asked, which takes a second; one test below does


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "my_train.py").write_text("def train(ctx):\n    ...\n")
    return tmp_path


def error_of(*args: str, cwd: Path) -> str:
    done = diloco_here(*args, cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("modal", ["--gpu VALUE", "--region VALUE", "--oidc / --no-oidc"]),
        ("hf-jobs", ["--hardware VALUE", "[default: cpu-basic]"]),
        ("eks", ["--cluster VALUE", "--service-account VALUE", "--spot / --no-spot"]),
        ("kubernetes", ["--context VALUE", "--queue VALUE"]),
        ("local", ["--grace-s VALUE"]),
        ("ray", ["--address VALUE", "--gpu VALUE", "--resources VALUE", "[default: python]"]),
        ("slurm", ["--partition VALUE", "--gpu VALUE", "--time-limit VALUE", "--sbatch VALUE", "[default: 60]"]),
    ],
)
def test_help_shows_the_options_of_the_executor_that_is_named(project: Path, name: str, words: list[str]):
    text = re.sub(r"\s+", " ", diloco_here("run", "--executor", name, "--help", cwd=project).stdout)
    assert "--outer-lr VALUE" in text
    assert [word for word in words if word not in text] == []
    assert "--token" not in text  # credentials do not belong on a command line


def test_what_cannot_be_meant_is_refused_with_the_nearest(project: Path):
    run = ["run", "my_train:train", "--store", "bucket"]
    assert "did you mean 'modal'?" in error_of(*run, "--executor", "modl", cwd=project)
    assert "--gpu" in error_of(*run, "--executor", "modal", "--gpus", "A100", cwd=project)
    assert "--executor modal:2" in error_of(*run, "--executor", "modal", "--executor", "eks:2", cwd=project)
    assert "write NAME or NAME:COUNT" in error_of(*run, "--executor", "modal:none", cwd=project)
    text = error_of(*run, "--executor", "local:1", "--executor", "modal:2", "--replicas", "4", cwd=project)
    assert "--replicas 4, but the executors ask for 3" in text
    assert "there is no such variable" in error_of(*run, "--secret", "NOT_SET_ANYWHERE", cwd=project)
    assert "which look like secrets" in error_of(*run, "--env", "API_KEY=x", cwd=project)
    assert "Did you mean 'train'?" in error_of("run", "my_train:trian", *run[2:], cwd=project)
    assert "Did you mean 'train'?" in error_of("plan", "my_train:trian", *run[2:], "--executor", "modal", cwd=project)
    required = error_of("plan", *run[1:], "--executor", "modal", "--pin", "require", cwd=project)
    assert 'pin="require", and packages without hashes: ' in required
    assert not (project / "bucket").exists()


@pytest.mark.parametrize(
    ("text", "count"), [("124M", 124_000_000), ("1.5B", 1_500_000_000), ("1e9", 10**9), ("7_000_000", 7_000_000)]
)
def test_a_count_is_read_as_people_write_it(text: str, count: int):
    assert number(text) == count


def test_a_plan_shows_what_would_be_sent_where_and_for_how_much(project: Path):
    options = ["--executor", "hf-jobs", "--hardware", "a100-large", "--replicas", "2", "--secret", "WANDB_API_KEY"]
    where = ["plan", "my_train:train", "--store", "bucket", "--parameters", "124M", "--max-hours", "3"]
    done = diloco_here(*where, *options, cwd=project, environ={"WANDB_API_KEY": SECRET})
    assert done.returncode == 0, done.stderr
    assert "machines:  $5.00 an hour together" in done.stdout
    assert "992.0 MB up, 992.0 MB down a round" in done.stdout and "limits:    3 hours" in done.stdout
    assert "flavor: a100-large" in done.stdout and "WANDB_API_KEY: <redacted>" in done.stdout
    assert "1 files" in done.stdout and SECRET not in done.stdout
    body = json.loads(
        diloco_here(*PLAN, *where[2:], *options, "--json", cwd=project, environ={"WANDB_API_KEY": SECRET}).stdout
    )
    assert (
        body["hourly_usd"] == 5.0
        and body["requests"]["replica 0 (hf-jobs)"]["secrets"]["DILOCO_CODE_URL"] == "<redacted>"
    )
    assert not (project / "bucket").exists()
    for url in ("s3://bucket/run", "gs://bucket/run"):  # without credentials: nothing is signed
        planned = diloco_here(*PLAN, "--store", url, *options[:2], cwd=project)
        assert planned.returncode == 0 and f"would have no credentials for {url}" in planned.stdout


def test_a_plan_of_a_mixed_fleet_counts_its_replicas(project: Path):
    done = diloco_here(
        *PLAN, "--store", "bucket", "--executor", "local:1", "--executor", "modal:2", cwd=project
    )  # fmt: skip
    assert "3 replicas by local:1+modal:2" in done.stdout, done.stderr
    assert "replica 0 (local) would be sent:" in done.stdout and "replica 1 (modal) would be sent:" in done.stdout


def test_options_that_parts_of_a_mixed_fleet_share_are_told_apart(project: Path):
    fleet = [*PLAN, "--store", "bucket", "--executor", "eks:1", "--executor", "modal:2"]
    done = diloco_here(*fleet, "--eks-gpu", "1", "--modal-gpu", "A100", "--oidc", cwd=project)
    assert done.returncode == 0 and "nvidia.com/gpu: 1" in done.stdout, done.stderr
    assert "--modal-gpu" in error_of(*fleet, "--gpu", "A100", cwd=project)


def test_a_plan_has_price_and_memory_of_replicas_of_unequal_size(project: Path):
    fleet = [*PLAN, "--store", "bucket", "--replicas", "3", "--ranks", "4,1,4"]
    shown = diloco_here(*fleet, "--executor", "modal", "--gpu", "H100", "--parameters", "4B", cwd=project).stdout
    four, one = re.findall(r"ranks: +(.*) an hour each; beside the training (.*) GiB of host memory in each", shown)
    assert four[0].startswith("4 in replicas 0 and 2, ") and one[0].startswith("1 in replica 1, ")
    of_four, of_one = (float(each[0].rpartition("$")[2]) for each in (four, one))
    assert 3 * of_one < of_four < 4 * of_one  # four GPUs, and one machine around them
    assert float(one[1]) == pytest.approx(4 * float(four[1]), rel=0.02)
    together = re.search(r"machines: +\$([0-9.]+) an hour together", shown)
    assert together and float(together[1]) == pytest.approx(2 * of_four + of_one)


def test_a_plan_has_the_machines_of_replicas_that_need_several(project: Path):
    fleet = [*PLAN, "--store", "s3://bucket/run", "--replicas", "2", "--ranks", "4,2"]
    shown = diloco_here(*fleet, "--executor", "kubernetes", "--ranks-per-machine", "2", cwd=project).stdout
    assert "4 in replica 0, on 2 machines with 2 on each, with a GPU" in shown
    assert "2 in replica 1, on one machine, with a GPU" in shown and "completionMode: Indexed" in shown


def test_a_limit_in_dollars_needs_prices(project: Path):
    where = [*PLAN, "--store", "bucket", "--max-cost-usd", "5"]
    assert "--hourly-usd" in error_of(*where, "--executor", "kubernetes", cwd=project)
    given = diloco_here(*where, "--executor", "kubernetes", "--hourly-usd", "2.5", cwd=project).stdout
    assert "machines:  $10.00 an hour together" in given
    # A round of a minute takes 4 replicas for $0.1667, and the 30th reaches $5.
    limit = "limits:    $5 for machines alone (no requests, traffic or storage): halted after about round 30 of"
    assert limit in given
    few = diloco_here(*where, "--executor", "kubernetes", "--hourly-usd", "2.5", "--rounds", "29", cwd=project).stdout
    assert "limits:    $5 for machines alone, which the run's 29 rounds do not reach" in few


def test_options_without_their_executor_are_told(project: Path):
    (project / "bucket").mkdir()
    assert "no --executor" in error_of("attach", "bucket", "--grace-s", "3", cwd=project)


@pytest.mark.slow
def test_a_mixed_fleet_meets_in_the_bucket(tmp_path: Path, s3_server: S3Server, bucket: str):
    """One replica on this machine, one on Modal's loopback: launched, attached to and resumed from the command line."""
    (tmp_path / "my_train.py").write_text((Path(__file__).parents[1] / "support/tiny_workloads.py").read_text())
    fleet = ["--executor", "local:1", "--executor", "modal:1", "--secret", "MY_TOKEN"]
    settings = ["--rounds", "3", "--sync-every", "3", "--quorum", "all", "--timing-poll-s", "0.05"]
    with modal(tmp_path) as cloud:
        # The sandbox has only what it is sent: here the bucket's address and keys, as a Modal Secret would bring them.
        keys = {**s3_server.environ(), "MY_TOKEN": SECRET}
        secrets = [word for name in s3_server.environ() for word in ("--secret", name)]
        environ = {**cloud.environ, **keys}
        url = f"s3://{bucket}/run"
        done = diloco(
            "run", "my_train:train", "--store", url, *fleet, *secrets, *settings, cwd=tmp_path, environ=environ
        )
        assert done.returncode == 0, done.stdout + done.stderr
        again = diloco("resume", url, "--rounds", "1", *fleet, *secrets, cwd=tmp_path, environ=environ)
        assert again.returncode == 0, again.stdout + again.stderr
        forgot = diloco("resume", url, "--rounds", "1", *fleet[:4], cwd=tmp_path, environ=environ)
        assert forgot.returncode == 2 and "--secret NAME" in forgot.stderr
        told = json.loads(diloco("status", url, "--json", cwd=tmp_path, environ=environ).stdout)
    assert [row["contributors"] for row in told["rounds"] if row["applied"]] == [[0, 1]] * 4
