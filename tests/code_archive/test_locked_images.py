"""Digests of images in a lock file: every attempt of the run is sent them, wherever the tag has moved to since."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from cli_support import diloco_here
from loopback_kubernetes import running_kubernetes
from loopback_registry import LoopbackRegistry
from protocol_fleet import BY_HAND, Fleet
from scripted import STAMP, ScriptedExecutor

from diloco_orchestrator.clock import ManualClock
from diloco_orchestrator.code_archive.pack import LOCK_NAME, needed_there
from diloco_orchestrator.code_archive.requirements import image_lines, read_image_lines, read_requirements
from diloco_orchestrator.config import make_config
from diloco_orchestrator.errors import ConfigError, RecordInvalid
from diloco_orchestrator.inspection.status import RunReader
from diloco_orchestrator.launching.plan import LaunchPlan, plan_launch
from diloco_orchestrator.launching.run import attach, launch
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.digests import sha256_hex
from diloco_orchestrator.protocol.records import MOST_IMAGES, Begin, Run
from diloco_orchestrator.run_log.launched_here import remember
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.store.base import Store
from diloco_orchestrator.store.open_store import open_store
from diloco_orchestrator.supervision.coordinator import Coordinator, Means
from executors import EKSExecutor, HFJobsExecutor, MixedExecutor, ModalExecutor, RemoteExecutor
from executors.contract import LaunchRequest, ReplicaHandle, ReplicaState, ReplicaStatus
from executors.kubernetes_jobs import KubernetesExecutor
from executors.testing import request_of, wait_until
from executors.testing.rig import STAY

HASH, OTHER = "sha256:" + "0a" * 32, "sha256:" + "0b" * 32
WHOLE = "".join(f"{each.name}==1.0 --hash={HASH}\n" for each in needed_there(["s3"]))
IMAGE = "reg.example:5000/team/image:1"
SECRETS = {"AWS_ACCESS_KEY_ID": "a" * 20, "AWS_SECRET_ACCESS_KEY": "b" * 40}


@pytest.fixture
def registry():
    with LoopbackRegistry() as found:
        yield found


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (folder := tmp_path / "code").mkdir()
    (folder / "my_train.py").write_text("def train(ctx):\n    ...\n")
    return folder


def planned(code: Path, executor: RemoteExecutor, **settings: object) -> LaunchPlan:
    return plan_launch("my_train:train", "s3://b/x", executor=executor, code=code, secrets=SECRETS, **settings)  # type: ignore[arg-type]


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `uv` on PATH that finds the packages of `WHOLE`, whatever it is asked for."""
    (folder := tmp_path / "tools").mkdir()
    (folder / "lock.txt").write_text(WHOLE)
    (script := folder / "uv").write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; exec cp {folder}/lock.txt "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uv" else found(name))


# -- the lines --------------------------------------------------------------------------------------------------------


def test_lines_are_read_as_they_were_written_and_pip_sees_comments():
    digests = {"python:3.11-slim": HASH, "ghcr.io/org/team/image": OTHER}
    lines = image_lines(digests)
    assert lines.splitlines()[1] == f"# diloco: image python:3.11-slim {HASH}"
    assert read_image_lines(lines + WHOLE) == digests and image_lines({}) == ""
    read = read_requirements((lines + WHOLE).splitlines())
    assert read is not None and read.images == digests and len(read.packages) == len(WHOLE.splitlines())
    assert read_image_lines("# image processing\npillow\n#diloco-lock is a file\n") == {}  # anybody's comments


@pytest.mark.parametrize(
    "line",
    [
        f"# diloco: image python:3.11 {HASH[:-1]}",
        f"# diloco: image python:3.11 {HASH.upper()}",
        f"# diloco: image python:3.11 {HASH} {HASH}",
        f"# diloco: image python:3.11@{HASH} {HASH}",
        f"#diloco: image python:3.11 {HASH}",
        f"# Diloco: image python:3.11 {HASH}",
        f"  # diloco: image python:3.11 {HASH}",
        f"# diloco: image pyth\x1b[2Jon:3.11 {HASH}",
        "# diloco: image python:3.11",
        f"# diloco: images python:3.11 {HASH}",
        "# diloco:",
    ],
)
def test_a_line_that_is_broken_or_unknown_is_refused(line: str):
    with pytest.raises(ConfigError, match="no line that `diloco lock` writes") as refused:
        read_requirements([line, "packaging"])
    assert "\x1b" not in str(refused.value)


def test_an_image_has_one_digest_and_a_run_so_many_images():
    line = f"# diloco: image python:3.11 {HASH}"
    assert read_image_lines(f"{line}\n{line}\n") == {"python:3.11": HASH}
    with pytest.raises(ConfigError, match=r"image python:3\.11 two digests"):
        read_image_lines(f"{line}\n# diloco: image python:3.11 {OTHER}\n")
    with pytest.raises(ConfigError, match=f"at most {MOST_IMAGES}"):
        read_image_lines(image_lines({f"python:{each}": HASH for each in range(MOST_IMAGES + 1)}))


# -- the record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "images",
    [
        {"python:3.11": "sha256:abc"},
        {"python:3.11": f"{HASH}\n"},
        {"python:3.11": None},
        {"pyth\x1b[2Jon": HASH},
        {f"python@{OTHER}": HASH},
        {"x" * 401: HASH},
        {f"python:{each}": HASH for each in range(MOST_IMAGES + 1)},
        [HASH],
    ],
)
def test_a_run_record_with_anything_else_in_its_images_is_refused(images: object):
    run = Run(
        write_id="a-1", at=0.0, run_id="r", config=make_config({"entrypoint": "m:f"}), package_version="0", images={}
    )
    body = {**json.loads(run.to_bytes()), "images": images}
    with pytest.raises(RecordInvalid, match="field 'images") as refused:
        Run.from_bytes(json.dumps(body).encode(), "run.json")
    assert "\x1b" not in str(refused.value)


# -- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "place"),
    [
        (HFJobsExecutor(image=IMAGE), ("image",)),
        (ModalExecutor(image=IMAGE), ("image",)),
        (KubernetesExecutor(image=IMAGE), ("job", "spec", "template", "spec", "containers", 0, "image")),
        (EKSExecutor("c", image=IMAGE), ("job", "spec", "template", "spec", "containers", 0, "image")),
        (MixedExecutor([(HFJobsExecutor(image=IMAGE), 1)]), ("image",)),
    ],
    ids=["hf-jobs", "modal", "kubernetes", "eks", "mixed"],
)  # fmt: skip
def test_every_executor_sends_the_digest_that_the_request_has_for_its_image(executor: RemoteExecutor, place: tuple):
    request = LaunchRequest("run-1", 0, 1, ["python"], images={IMAGE: HASH, "python:3": OTHER})
    sent = executor.plan(request)
    for part in place:
        sent = sent[part]
    assert sent == f"reg.example:5000/team/image@{HASH}"


def test_names_of_all_forms_are_sent_without_their_tag():
    images = dict.fromkeys(["python", "python:3.11-slim", "localhost:5000/image", "localhost:5000/team/image:1"], HASH)
    request = LaunchRequest("run-1", 0, 1, ["python"], images=images)
    assert [request.pinned(name) for name in images] == [
        f"python@{HASH}", f"python@{HASH}", f"localhost:5000/image@{HASH}", f"localhost:5000/team/image@{HASH}",
    ]  # fmt: skip
    assert request.pinned("python:3.12") == "python:3.12" and request.pinned(f"python@{OTHER}") == f"python@{OTHER}"


def test_images_of_a_pod_template_are_pinned_too_and_the_template_stays_as_it_is():
    template = {
        "spec": {
            "initContainers": [{"name": "fetch", "image": "busybox:1"}, {"name": "own", "image": "own:2"}],
            "containers": [{"name": "replica", "image": "python:3.11"}],
        }
    }
    executor = KubernetesExecutor(pod_template=template)
    pinned = LaunchRequest("run-1", 0, 1, ["python"], images={"busybox:1": HASH, "python:3.11": OTHER})
    pod = executor.plan(pinned)["job"]["spec"]["template"]["spec"]
    assert [each["image"] for each in pod["initContainers"]] == [f"busybox@{HASH}", "own:2"]
    assert pod["containers"][0]["image"] == f"python@{OTHER}"
    unpinned = LaunchRequest("run-1", 0, 1, ["python"])
    assert executor.plan(unpinned)["job"]["spec"]["template"]["spec"]["initContainers"][0]["image"] == "busybox:1"


class Sending(ScriptedExecutor):
    """A scripted executor of other machines that keeps the image that a real one would have sent for every attempt."""

    shares_machine = False

    def __init__(self, real: RemoteExecutor) -> None:
        super().__init__()
        self._real = real
        self.images: list[str] = []

    def plan(self, request: LaunchRequest) -> dict:
        return dict(self._real.plan(request))

    def launch(self, request: LaunchRequest) -> ReplicaHandle:
        self.images.append(self._real.plan(request)["image"])
        return super().launch(request)


def test_a_tag_that_moves_between_two_attempts_changes_neither(registry, uv, code: Path, tmp_path: Path, monkeypatch):
    """The attack: whoever may push to the registry moves the tag while the run goes on."""
    image, first = f"{registry.host}/team/image:1", registry.push("team/image", "1", "first")
    made = diloco_here("lock", "--image", image, cwd=code)
    assert made.returncode == 0 and f"image {image} is {first}" in made.stdout
    executor = HFJobsExecutor(image=image)
    plan = planned(code, executor, replicas=1)
    assert plan.images == () and plan.requests["replica 0 (hf-jobs)"]["image"] == f"{image.removesuffix(':1')}@{first}"

    sending = Sending(executor)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(str(code))
    bucket = str(tmp_path / "bucket")
    run = launch("my_train:train", store=bucket, executor=sending, replicas=1, rounds=1, code=code)
    second = registry.push("team/image", "1", "second")
    (code / LOCK_NAME).unlink()  # as on another machine
    sending.states[0, 1] = ReplicaStatus(ReplicaState.PREEMPTED, "lost")
    attached = attach(bucket, executor=sending)
    wait_until(lambda: attached._coordinator.step() or len(sending.images) == 2, "the second attempt")
    assert sending.images == [f"{image.removesuffix(':1')}@{first}"] * 2 and first != second
    assert run.url == attached.url
    assert planned(code, executor).images == (image,)  # a new run without the lock gets what the tag names now


def test_the_image_of_a_lock_that_a_run_does_not_use_is_not_called_pinned(code: Path):
    (code / LOCK_NAME).write_text(image_lines({"python:3.12": HASH}) + WHOLE)
    plan = planned(code, HFJobsExecutor())
    assert plan.images == ("python:3.11",) and "`diloco lock --image NAME` pins one" in "\n".join(plan.lines())


def test_a_lock_names_no_image_that_its_registry_does_not_have(registry, uv, tmp_path: Path):
    refused = diloco_here("lock", "--image", f"{registry.host}/none:1", cwd=tmp_path)
    assert refused.returncode == 2 and "does not have it. Correct the name or the tag." in refused.stderr
    assert not (tmp_path / LOCK_NAME).exists()


# -- whose word it is -------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: Path) -> Store:
    """A run that was launched here with a lock, whose run.json somebody may then change."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (code / LOCK_NAME).write_text(image_lines({"python:3.11": HASH}) + WHOLE)
    monkeypatch.syspath_prepend(str(code))
    given = {"executor": Sending(HFJobsExecutor()), "replicas": 1, "rounds": 1, "code": code}
    launch("my_train:train", store=str(tmp_path / "bucket"), **given)
    return open_store(str(tmp_path / "bucket"))


def choose(store: Store, digest: str) -> None:
    """What whoever may write to the bucket does."""
    run, key = RunReader(store).run, keys.begin(1)
    changed = run.model_copy(update={"images": {"python:3.11": digest}}).to_bytes()
    begin = Begin.from_bytes(store.get(key), key).model_copy(update={"previous": sha256_hex(changed)})
    store.put(keys.RUN, changed)
    store.put(key, begin.to_bytes())


def test_a_bucket_does_not_choose_the_image_of_who_attaches(bucket: Store):
    choose(bucket, OTHER)
    with pytest.raises(ConfigError, match=r"digests for the images python:3\.11, and run\.json was changed since"):
        attach(bucket.url, executor=Sending(HFJobsExecutor()))
    (by_digest := Sending(HFJobsExecutor(image=f"python@{HASH}"))).states = {}
    attach(bucket.url, executor=by_digest)  # who names a digest, or another image, uses none of the bucket's
    attach(bucket.url, executor=Sending(HFJobsExecutor(image="mine:1")))
    attach(bucket.url, executor=ScriptedExecutor())


def test_nor_without_a_change_on_another_machine_unless_it_is_trusted(bucket: Store, tmp_path: Path, monkeypatch):
    attach(bucket.url, executor=Sending(HFJobsExecutor()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    with pytest.raises(ConfigError, match="you did not launch this run on this machine"):
        attach(bucket.url, executor=Sending(HFJobsExecutor()))
    attach(bucket.url, executor=Sending(HFJobsExecutor()), trust_bucket=True)
    remember(RunLog(bucket))
    attach(bucket.url, executor=Sending(HFJobsExecutor()))


# -- what ran ---------------------------------------------------------------------------------------------------------


def test_kubernetes_says_which_image_a_pod_runs_and_the_log_repeats_it(tmp_path: Path, caplog):
    with running_kubernetes() as cluster:
        executor = KubernetesExecutor(kubeconfig=cluster.write_kubeconfig(tmp_path / "kubeconfig"))
        pinned = LaunchRequest("run-1", 0, 1, request_of(STAY).command, images={"python:3.11-slim": HASH})
        handle = executor.launch(pinned)
        wait_until(lambda: executor.poll(handle).state is ReplicaState.RUNNING, "the pod runs")
        assert executor.poll(handle).image == f"docker.io/library/python@{HASH}"
        executor.cancel(handle)
    fleet = Fleet(replicas=1, timing=BY_HAND)
    scripted = ScriptedExecutor()
    scripted.states[0, 1] = ReplicaStatus(ReplicaState.RUNNING, image=f"docker.io/library/python@{HASH}")
    coordinator = Coordinator(RunReader(fleet.store), Means(scripted, ManualClock(), STAMP))
    with caplog.at_level("INFO"):
        for _ in range(3):
            coordinator.step()
    assert caplog.text.count(f"it runs image docker.io/library/python@{HASH}") == 1
