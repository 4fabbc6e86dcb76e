"""`SnapshotLoader`: loads snapshots as their users do, and scores them as the replicas did.

Loads with transformers, with PEFT if installed, or with the user's own model class.
"""

import importlib
import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco_orchestrator.errors import ConfigError
from diloco_orchestrator.guard.shares import set_digest, shares_of
from diloco_orchestrator.inspection.pull import write_files
from diloco_orchestrator.inspection.verify.findings import TOLERANCE, Differs, Verification, is_of_this_reader
from diloco_orchestrator.protocol import keys
from diloco_orchestrator.protocol.records import Score
from diloco_orchestrator.protocol.round_metrics import sign_of
from diloco_orchestrator.protocol.start_records import Start
from diloco_orchestrator.run_log.run_log import RunLog
from diloco_orchestrator.snapshots.buffers import buffers_of_base
from diloco_orchestrator.snapshots.confirmation import ConfirmedSnapshots
from diloco_orchestrator.snapshots.file_plan import ADAPTER_GROUP, MODEL_GROUP
from diloco_orchestrator.snapshots.first_snapshot import files_of_run
from diloco_orchestrator.snapshots.reader_folder import files_of
from diloco_orchestrator.snapshots.stored import StoredSnapshot
from diloco_orchestrator.snapshots.tensor_file import views
from diloco_orchestrator.store.base import Store

log = logging.getLogger(__name__)

_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


@dataclass(frozen=True)
class OwnCode:
    """The caller's code that makes and scores the models of a run: arguments of `verify`, described there."""

    build: Callable[[], torch.nn.Module] | None = None
    score: Callable[[torch.nn.Module, Sequence[Any]], Any] | None = None
    items: Sequence[Any] | None = None  # `heldout_items`


NO_CODE = OwnCode()


def check_loading(store: Store, done: Verification, code: OwnCode = NO_CODE, tolerance: float = TOLERANCE) -> None:
    """Load all snapshots of a verified run, and with a scorer score them; adds the results to `done`.

    `code`: the caller's, which makes and scores models. `tolerance`: by which a mean score may differ from the logged
    one, relative where that is above 1.
    """
    run_log = RunLog(store)
    start = run_log.start()
    if start is None:
        return
    try:
        SnapshotLoader(run_log, start.record, code, tolerance).check_all(done)
    except Differs as difference:
        done.disagreement = difference.found


class CannotLoad(Exception):
    """A class or package needed to load a snapshot is missing here. The message is a clause."""


class ModelScorer:
    """Scores models on the held-out set of one run, as its replicas do. Executes only the caller's code.

    `code` has a scorer. Raises `ConfigError` if the run scored no base, or other items.
    """

    def __init__(self, run_log: RunLog, start: Start, code: OwnCode) -> None:
        assert code.score is not None
        self._score = code.score
        if start.heldout is None:
            raise ConfigError(f"the replicas of {run_log.store.url} scored no held-out set: leave the scorer out.")
        items = run_log.run.config.heldout_items if code.items is None else code.items
        if set_digest(items) != start.heldout.digest:
            given = f"the {len(items)} held-out items given are" if items else "no held-out items are given, which are"
            raise ConfigError(
                f"{given} not those that the replicas of {run_log.store.url} scored "
                f"({start.heldout.items} items): pass the list "
                "that the training function passes to attach (`items`, `--items pkg.mod:LIST`)."
            )
        self.sign = sign_of(start.heldout)
        self.items = len(items)
        self._shares = shares_of(items, len(start.heldout.shares))

    def share_mean(self, model: torch.nn.Module, share: int) -> float:
        """The mean score of a model on one share of the held-out set, higher is better."""
        return self.sign * self._sum(model, share) / len(self._shares[share])

    def mean(self, model: torch.nn.Module) -> float:
        """The mean score of a model over all held-out items, scored share by share, with the metric's own sign."""
        sums = [self._sum(model, share) for share in range(len(self._shares)) if self._shares[share]]
        return sum(sums) / self.items

    def _sum(self, model: torch.nn.Module, share: int) -> float:
        model.eval()
        with torch.no_grad():
            return sum(float(value) for value in self._score(model, self._shares[share]))


class SnapshotLoader:
    """Loads the confirmed snapshots of one run as its users do, and compares their held-out scores with the logged
    ones.

    `tolerance`: by which a mean score may differ from the logged one, relative where that is above 1. Raises
    `ConfigError` if the run scored nothing, or other items.
    """

    def __init__(self, run_log: RunLog, start: Start, code: OwnCode = NO_CODE, tolerance: float = TOLERANCE) -> None:
        self._log = run_log
        self._tolerance = tolerance
        self._start = start
        self._build = code.build
        self._scorer = None if code.score is None else ModelScorer(run_log, start, code)

    def check_all(self, done: Verification) -> None:
        """Load every confirmed snapshot, one at a time, and score it. Raises `Differs` at the first that disagrees."""
        confirmed = ConfirmedSnapshots(self._log)
        for round_ in confirmed.rounds:
            take = confirmed.take_of(round_)
            if take is None:
                continue
            base = StoredSnapshot(self._log.store, round_, self._log.snapshot(round_, take), take).base(self._start)
            changed = {} if self._start.buffers is None else buffers_of_base(self._log, round_)
            with tempfile.TemporaryDirectory(prefix="diloco-verify-") as folder:
                files = files_of(base, files_of_run(self._log).with_buffers(changed))
                write_files(Path(folder), ((name, data) for name, data in files if not name.startswith("outer")))
                try:
                    model = load_model(Path(folder), self._build)
                except CannotLoad as error:
                    done.unchecked.append(f"whether snapshot {round_} loads: {error}")
                    return  # nor do the others
                except (ImportError, MemoryError) as error:  # of this machine
                    done.unchecked.append(f"whether snapshot {round_} loads: {type(error).__name__}: {error}")
                    return
                except Exception as error:  # whatever the model class and its library raise
                    if is_of_this_reader(error) and not isinstance(error, OSError):  # a broken file is an OSError too
                        done.unchecked.append(f"whether snapshot {round_} loads: {error}")
                        return
                    raise Differs(keys.snapshot(round_, "", take), f"does not load: {error}") from error
            done.checked["snapshots loaded"] += 1
            self._check_scores(model, round_, take, confirmed, done)

    def _check_scores(
        self, model: torch.nn.Module, round_: int, take: str, confirmed: ConfirmedSnapshots, done: Verification
    ) -> None:
        digest = self._log.snapshot(round_, take).base_digest
        logged = logged_scores(self._log, confirmed, round_, digest) if self._scorer else {}
        if not logged or self._scorer is None:
            return
        count = sum(score.count for score in logged.values())
        ours = sum(self._scorer.share_mean(model, share) * score.count for share, score in logged.items()) / count
        theirs = sum(score.mean * score.count for score in logged.values()) / count
        if not abs(ours - theirs) <= self._tolerance * max(1.0, abs(theirs)):
            key, sign = keys.snapshot(round_, "", take), self._scorer.sign
            raise Differs(
                key,
                f"scores {sign * ours:.6g}; the replicas logged {sign * theirs:.6g}, and {self._tolerance:g} is "
                "tolerated. If they scored in bf16 or on another device, tolerate more",
            )
        done.checked["snapshots scored"] += 1


def logged_scores(run_log: RunLog, confirmed: ConfirmedSnapshots, round_: int, digest: str) -> dict[int, Score]:
    """Held-out scores by share that replicas logged for the base with `digest` after a round; higher is better.

    Only of replicas whose scores the guard counts: a stranger may report any.
    """
    start = run_log.start()
    unheard = start.record.unheard(run_log.run.config.invited) if start else ()
    claims = (manifest for manifest in confirmed.claims_of(round_) if manifest.base_digest == digest)
    return {score.share: score for each in claims if each.replica_id not in unheard for score in each.scores}


# -- loading ----------------------------------------------------------------------------------------------------------


def load_model(folder: Path, build: Callable[[], torch.nn.Module] | None = None) -> torch.nn.Module:
    """The model of a snapshot whose files are in `folder`.

    Raises `CannotLoad` where a model class or a package is missing, `ValueError` if a tensor is missing or left over,
    and what transformers and PEFT raise.
    """
    if (folder / f"{ADAPTER_GROUP}.safetensors").exists():
        return _adapter(folder, build)
    if build is not None:
        return _built(folder, _made_by(build))
    if not (folder / "config.json").exists():
        raise CannotLoad("its class is the training function's own; pass `build` (`--build`), which makes the model")
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    if not hasattr(transformers, name):
        raise CannotLoad(f"transformers has no {name}; pass `build` (`--build`), which makes the model")
    model, report = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise ValueError(f"{kind.replace('_', ' ')}: {sorted(map(str, report[kind]))[:3]}")
    return model  # type: ignore[no-any-return]


def _made_by(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    try:
        return build()
    except Exception as error:  # the caller's own code, before any file was read
        raise CannotLoad(f"`build` raised {type(error).__name__}: {error}") from error


def _built(folder: Path, model: torch.nn.Module) -> torch.nn.Module:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{MODEL_GROUP}*.safetensors")):
        tensors |= views(path.read_bytes(), path.name)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    state = model.state_dict()
    loaded = {state[name].data_ptr() for name in tensors.keys() & state.keys()}
    missing = [name for name in missing if state[name].data_ptr() not in loaded]  # not second names of tied tensors
    if missing or unexpected:
        raise ValueError(f"missing keys: {missing[:3]}, unexpected keys: {unexpected[:3]}")
    return model


def _adapter(folder: Path, build: Callable[[], torch.nn.Module] | None) -> torch.nn.Module:
    config = json.loads((folder / "adapter_config.json").read_text())
    if importlib.util.find_spec("peft") is None:
        raise CannotLoad("it is an adapter, and PEFT is not installed here")
    peft: Any = importlib.import_module("peft")  # the user's; nothing else here needs it
    if build is not None:
        return peft.PeftModel.from_pretrained(_made_by(build), folder)  # type: ignore[no-any-return]
    base = config["base_model_name_or_path"]
    if not base:
        raise CannotLoad("an adapter without the name of its base; pass `build` (`--build`), which makes the base")
    auto = getattr(peft, _AUTO_CLASSES.get(config["task_type"] or "", "AutoPeftModel"))
    try:
        return auto.from_pretrained(folder)  # type: ignore[no-any-return]
    except OSError as error:
        raise CannotLoad(f"its base {base!r} cannot be loaded here ({str(error).splitlines()[0]})") from error
