"""One data set, read by every replica where it lies: a folder, a mounted volume, an S3 bucket, or the Hub's stream.

    python examples/data_sets.py local   STORE --data /corpus
    python examples/data_sets.py modal   STORE --data /data --volume corpus           # a Modal Volume
    python examples/data_sets.py hf-jobs STORE --data /data --volume hf://datasets/org/text
    python examples/data_sets.py eks     STORE --data /data --volume corpus           # a PersistentVolumeClaim
    python examples/data_sets.py slurm   STORE --data /scratch/corpus                 # a folder that nodes share
    python examples/data_sets.py local   STORE --data s3://bucket/corpus              # on any executor
    python examples/data_sets.py hf-jobs STORE --data hub:org/text                    # on any executor, unmounted

The data set is JSON lines with a "text": train-*.jsonl, of which each replica reads its own, and heldout.jsonl, which
all read. Both readers have a position, so that a restarted replica goes on where its last published step ended.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import fsspec
import torch

from diloco_orchestrator import (
    EKSExecutor,
    HFJobsExecutor,
    KubernetesExecutor,
    LocalProcessExecutor,
    ModalExecutor,
    SlurmExecutor,
    launch,
)

HUB = "hub:"


class Shards:
    """The files of one replica, line by line, with a position: (file, line). They are on anything that fsspec opens."""

    def __init__(self, folder, replica_id, replicas, options):
        self.files = fsspec.open_files(f"{folder}/train-*.jsonl", "rb", **options)[replica_id::replicas]
        if not self.files:
            raise FileNotFoundError(f"{folder} has no train-*.jsonl for replica {replica_id} of {replicas}")
        self.file = self.line = 0

    def __iter__(self):
        while self.file < len(self.files):
            with self.files[self.file] as lines:
                for number, line in enumerate(lines):
                    if number >= self.line:
                        self.line += 1
                        yield json.loads(line)["text"]
            self.file, self.line = self.file + 1, 0
        self.file = 0  # the next epoch

    def state_dict(self):
        return {"file": self.file, "line": self.line}

    def load_state_dict(self, state):
        self.file, self.line = state["file"], state["line"]


class Stream:
    """A replica's share of a data set of the Hub, as it is downloaded. `datasets` keeps the position."""

    def __init__(self, name, replica_id, replicas):
        from datasets import load_dataset

        whole = load_dataset(name, data_files={"train": "train-*.jsonl"}, split="train", streaming=True)
        self.rows = whole.shard(replicas, replica_id)

    def __iter__(self):
        return (row["text"] for row in self.rows)

    def state_dict(self):
        return self.rows.state_dict()

    def load_state_dict(self, state):
        self.rows.load_state_dict(state)

    def set_epoch(self, epoch):  # without it `datasets` begins every further epoch where it was loaded
        self.rows.set_epoch(epoch)


def train(ctx):
    """What every replica does: a bigram model of bytes."""
    data, options = ctx.args["data"], json.loads(os.environ.get("DATA_STORAGE_OPTIONS", "{}"))
    if data.startswith(HUB):
        from datasets import load_dataset

        name = data.removeprefix(HUB)
        texts = Stream(name, ctx.replica_id, ctx.replicas)
        heldout = load_dataset(name, data_files={"heldout": "heldout.jsonl"}, split="heldout")["text"]
    else:
        texts = Shards(data, ctx.replica_id, ctx.replicas, options)
        with fsspec.open(f"{data}/heldout.jsonl", "rb", **options) as lines:
            heldout = [json.loads(line)["text"] for line in lines]
    model = torch.nn.Embedding(256, 256)  # logits of the next byte
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with ctx.attach(model, optimizer, heldout=score, heldout_items=list(heldout), in_loop="loss") as replica:
        for text in replica.batches(texts):
            loss = loss_of(model, text)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            replica.observe(loss=loss.item(), tokens=len(text.encode()))


def loss_of(model, text):
    """Mean nats per byte."""
    tokens = torch.tensor(list(text.encode()))
    return torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])


def score(model, items):
    return [loss_of(model, text).item() for text in items]


def executor_of(place, volume, mount):
    """Where replicas run, with `volume` mounted at `mount`: the only lines that differ."""
    if place == "modal":
        return ModalExecutor("data-sets", volumes={mount: volume} if volume else ())
    if place == "hf-jobs":
        return HFJobsExecutor(volumes=[f"{volume}:{mount}:ro"] if volume else ())
    if place == "slurm":
        return SlurmExecutor()
    if place in ("eks", "kubernetes"):
        claim = {"name": "corpus", "persistentVolumeClaim": {"claimName": volume, "readOnly": True}}
        mounted = {"name": "replica", "volumeMounts": [{"name": "corpus", "mountPath": mount, "readOnly": True}]}
        pod = {"spec": {"volumes": [claim], "containers": [mounted]}} if volume else None
        image = os.environ["DATA_SETS_IMAGE"]
        if place == "kubernetes":
            return KubernetesExecutor(image=image, pod_template=pod)
        cluster = os.environ["DATA_SETS_CLUSTER"]
        return EKSExecutor(cluster, region=os.environ["AWS_REGION"], image=image, pod_template=pod)
    return LocalProcessExecutor()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains on a data set that lies elsewhere.")
    parser.add_argument("place", choices=["local", "modal", "hf-jobs", "eks", "kubernetes", "slurm"])
    parser.add_argument("store")
    parser.add_argument("--data", required=True, help="a folder over there, s3://bucket/folder, or hub:org/name")
    parser.add_argument("--volume", help="what is mounted at --data")
    given = parser.parse_args()
    bucket = json.loads(os.environ.get("DILOCO_STORAGE_OPTIONS", "{}"))
    # Credentials of the data, where its own SDK does not find them over there: they travel as a secret.
    secrets = {name: os.environ[name] for name in ("DATA_STORAGE_OPTIONS", "HF_TOKEN") if name in os.environ}
    run = launch(
        "data_sets:train",
        store=given.store,
        executor=executor_of(given.place, given.volume, given.data),
        replicas=2,
        rounds=4,
        sync_every=8,
        quorum="all",
        args={"data": given.data},
        secrets=secrets,
        storage_options=bucket,
        requirements=["datasets>=5"] if given.data.startswith(HUB) else ["s3fs"] if "://" in given.data else [],
    )
    result = run.wait()
    first, last = result.metrics[0].heldout, result.metrics[-1].heldout
    print(f"{result.status}: held-out {first:.2f} -> {last:.2f} nats per byte, {Path(given.store).name}")
    sys.exit(result.status != "completed")
