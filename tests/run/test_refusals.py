"""Real runs over S3 whose credentials end, and whose bucket refuses everybody for a while."""

from pathlib import Path

import pytest
from faulty_proxy import Faults, proxy_before
from real_runs import FAST, wait_for
from s3_server import ROLE, running_server

from diloco_orchestrator import LocalProcessExecutor, launch
from diloco_orchestrator.clock import ThreadBackground


@pytest.mark.slow
def test_a_run_whose_tokens_live_for_seconds_outlives_seconds_of_refusals(
    executor: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Role credentials of six seconds, and a bucket that answers 403 to everybody until every replica waits."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with running_server(token_s=6.0) as server, proxy_before(server.url, Faults()) as (proxy, url):
        server.make_bucket("runs")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
        config.write_text(
            f"[default]\nregion = us-east-1\nrole_arn = {ROLE}\nsource_profile = user\n"
            f"[profile user]\naws_access_key_id = {server.key}\naws_secret_access_key = {server.secret}\n"
        )
        settings = {"replicas": 2, "rounds": 12, "sync_every": 3, **FAST}
        run = launch("tiny_workloads:train", store="s3://runs/a", executor=executor, **settings)

        def somebody_forbids_everything_for_a_while() -> None:
            wait_for(lambda: len(run.metrics()) >= 3, "three rounds")
            proxy.faults = Faults(forbidden=1.0)
            outputs = tmp_path / "executor"
            wait_for(
                lambda: all("AccessDenied" in each.read_text() for each in outputs.rglob("output.log")), "two replicas"
            )
            wait_for(lambda: proxy.met["forbidden"] >= 20, "more tries")
            proxy.faults = Faults()

        helper = ThreadBackground().start(somebody_forbids_everything_for_a_while)
        result = run.wait()
        helper.result()
        assert (result.status, result.outer_steps) == ("completed", 12)
        assert [replica.attempt for replica in run.status().replicas] == [1, 1]
