"""The model card of a snapshot on the Hub: its run, participants, curves, digests, how to load it.

Pure: facts of a run and of the snapshot's folder to Markdown. The run's address is left out, because a card may be
public.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_orchestrator.errors import RecordInvalid
from diloco_orchestrator.inspection.charts import Line, svg_file
from diloco_orchestrator.inspection.status import RoundRow
from diloco_orchestrator.protocol.record_format import parse_json

README, CURVES = "README.md", "curves.svg"
# A name on the Hub, and a class: what else a snapshot's files may say there could end the front matter or be code.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_CLASS_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_CONTROL = re.compile(r"[^\x20-\x7e\n\xa0-\u2027\u202f-\u2065\u2070-\ud7ff\uf900-\U0010ffff]")
_MOST_ROWS = 20  # of the table; the picture has every round


@dataclass(frozen=True)
class CardFacts:
    """Facts about the run that made a snapshot, for the snapshot's model card on the Hub."""

    repo_id: str
    run_id: str
    round: int
    replicas: int
    sync_every: int  # inner steps between two synchronisations of a parameter
    rows: Sequence[RoundRow]  # of all rounds
    heldout: float | None  # score of this snapshot; None if none was measured
    base_digest: str  # of parameters and outer momenta
    head_sha256: str  # of the last commit; empty before the first one
    version: str  # of this package
    others: Sequence[int] = ()  # rounds of further snapshots in the same repository


def card_files(facts: CardFacts, folder: Path) -> dict[str, str]:
    """The model card and its picture by file name, for the snapshot whose files are in `folder`.

    Whoever can write to the bucket wrote those files, so only well-formed names, and a README as text, are copied into
    the card. Raises `RecordInvalid` for an invalid config.json or adapter_config.json.
    """
    pictures = {CURVES: curves(facts.rows)}
    sections = [
        _front_matter(folder),
        f"# {facts.repo_id.partition('/')[2]}",
        _summary(facts),
        _loading(facts, folder),
        _curves(facts.rows),
        _digests(facts),
    ]
    files = {README: "\n\n".join(section for section in sections if section) + "\n", **pictures}
    return {name: text for name, text in files.items() if text}


def curves(rows: Sequence[RoundRow]) -> str:
    """An SVG of the run's training metric and held-out score over rounds; empty if neither was reported."""
    training = [(row.round, row.loss if row.loss is not None else row.reward) for row in rows]
    heldout = [(row.round, row.heldout) for row in rows]
    return svg_file(
        [
            Line(name, [(float(round_), value) for round_, value in points if value is not None])
            for name, points in (("training", training), ("held-out before", heldout))
        ]
    )


def _front_matter(folder: Path) -> str:
    adapter = folder / "adapter_config.json"
    library = "peft" if adapter.exists() else "transformers" if (folder / "config.json").exists() else "pytorch"
    fields: dict[str, Any] = {"library_name": library, "tags": ["diloco"]}
    base = _json_in(adapter).get("base_model_name_or_path") if adapter.exists() else None
    if isinstance(base, str) and _HUB_NAME.fullmatch(base):  # a name on the Hub, not a folder
        fields["base_model"] = base
    import yaml  # a dependency of huggingface_hub, without which nothing is pushed

    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"  # type: ignore[no-untyped-call]


def base_of_a_machine(folder: Path) -> str:
    """The base that an adapter in `folder` names by its path on the machine that trained; empty for any other model."""
    adapter = folder / "adapter_config.json"
    base = _json_in(adapter).get("base_model_name_or_path") if adapter.exists() else None
    named = base if isinstance(base, str) else ""
    return named if re.search(r"[/\\]", named) and not _HUB_NAME.fullmatch(named) else ""


def _json_in(path: Path) -> dict[str, Any]:
    try:
        body = parse_json(path.read_bytes())
    except ValueError as error:
        raise _broken(path, f"is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise _broken(path, "holds no object")
    return body


def _broken(path: Path, how: str) -> RecordInvalid:
    return RecordInvalid(
        f"{path.name} of this snapshot {how}, so that no model card can be written: it was changed after a replica "
        "wrote it. `diloco verify` names what differs in the run; push another round."
    )


def _summary(facts: CardFacts) -> str:
    tokens = sum(row.tokens for row in facts.rows if row.round <= facts.round)
    outer_steps = next((row.outer_step for row in facts.rows if row.round == facts.round), 0)
    last = max((row.round for row in facts.rows if row.applied), default=0)  # the final evaluation makes no model
    table = {
        "run": facts.run_id,
        "round": f"{facts.round} of {last}",
        "outer steps": f"{outer_steps}, every {facts.sync_every} inner steps",
        "replicas": str(facts.replicas),
        "tokens": f"{tokens:,}" if tokens else "",
        "held-out score": "" if facts.heldout is None else f"{facts.heldout:.4f}",
        "other snapshots here": ", ".join(f"`{tag_of(round_)}`" for round_ in facts.others),
    }
    lines = [f"| {name} | {text} |" for name, text in table.items() if text]
    words = "The global model of a DiLoCo run, made by diloco-orchestrator."
    return "\n".join([words, "", "| | |", "|---|---|", *lines])


def _loading(facts: CardFacts, folder: Path) -> str:
    own = folder / README
    if own.exists():
        text = _CONTROL.sub("\ufffd", own.read_text(errors="replace").strip())
        fence = "`" * (1 + max((len(each) for each in re.findall("`+", text)), default=2))
        return f"## Loading\n\n{fence}text\n{text}\n{fence}"
    config = folder / "config.json"
    names = _json_in(config).get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name):
        raise _broken(config, "names no class under architectures")
    where = f'"{facts.repo_id}", revision="{tag_of(facts.round)}"'
    code = f"from transformers import {name}\n\nmodel = {name}.from_pretrained({where})"
    return f"## Loading\n\n```python\n{code}\n```"


def _curves(rows: Sequence[RoundRow]) -> str:
    if not curves(rows):
        return ""
    step = -(-len(rows) // _MOST_ROWS)
    shown = [row for index, row in enumerate(rows) if index % step == 0 or index == len(rows) - 1]
    lines = [
        f"| {row.round} | {_number(row.loss if row.loss is not None else row.reward)} | {_number(row.heldout)} | "
        f"{len(row.contributors)} |"
        for row in shown
    ]
    head = ["| round | training | held-out before | replicas averaged |", "|---|---|---|---|"]
    return "\n".join([f"## Curves\n\n![training and held-out score over rounds]({CURVES})\n", *head, *lines])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _digests(facts: CardFacts) -> str:
    table: Mapping[str, str] = {
        "base (parameters and outer momenta)": facts.base_digest,
        "head of the commit log (sha256)": facts.head_sha256,
        "diloco-orchestrator": facts.version,
    }
    lines = [f"| {name} | `{text}` |" for name, text in table.items() if text]
    words = "`diloco verify` derives both digests again from the run's bucket."
    return "\n".join(["## Digests", "", words, "", "| | |", "|---|---|", *lines])


def tag_of(round_: int) -> str:
    """The tag in the Hub's repository for a round's snapshot."""
    return f"round-{round_}"
