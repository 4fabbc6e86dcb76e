"""`diloco split`: divides data files into training and held-out ones, before any run."""

import json
from pathlib import Path
from typing import Any

import click


class _Similarity(click.ParamType[float | None]):
    """A number above 0 and at most 1, or "off"."""

    name = "similarity"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        if value == "off" or value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number <= 1:
            self.fail(f"{value!r} is neither a number above 0 and at most 1 nor off.", param, ctx)
        return number


@click.command()
@click.argument("files", metavar="FILES...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", metavar="FOLDER", required=True, type=click.Path(path_type=Path), help="Written; must be new.")
@click.option(
    "--share", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.1, show_default=True,
    help="Of the groups that is held out.",
)  # fmt: skip
@click.option("--salt", metavar="TEXT", default="diloco", show_default=True, help="Another one: an independent split.")
@click.option("--text", metavar="FIELD", help='The item in a record.  [default: "text" if all have it, or all of it]')
@click.option("--group", metavar="FIELD", help="Records with one value of it lie on one side, such as a repository.")
@click.option("--id", "id_", metavar="FIELD", help="What names a record.  [default: file and line]")
@click.option("--parent", metavar="FIELD", help="Id or ids of the records that this one was made from.")
@click.option(
    "--near-duplicates", metavar="0..1|off", type=_Similarity(), default="0.5", show_default=True,
    help="Texts this similar to a held-out one are left out.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, on stdout.")
def split(files: tuple[Path, ...], out: Path, as_json: bool, **given: Any) -> None:
    """Split FILES into training and held-out items, and write a manifest that replicas check training data by.

    FILES: .jsonl, .parquet and .txt (items between blank lines), folders of text files (an item each), folders that
    `save_to_disk` of `datasets` wrote. The same inputs give the same split, whatever their order; more data changes no
    earlier decision, unless lineage joins groups.
    """
    from diloco_orchestrator.split.files import Fields, split_files
    from diloco_orchestrator.split.split import HeldoutSplit, Side

    rule = HeldoutSplit(share=given["share"], salt=given["salt"], near_duplicates=given["near_duplicates"])
    fields = Fields(text=given["text"], group=given["group"], id=given["id_"], parent=given["parent"])
    done = split_files(files, out, rule, fields)
    counts = {str(side): done.count(side) for side in Side}
    if as_json:
        click.echo(json.dumps({"out": str(out), "root": done.manifest.root, **counts}))
        return
    share = f"{counts['heldout'] / len(done.sides):.1%} of {len(done.sides)} items"
    click.echo(f"train     {counts['train']:>8}  {out / 'train'}")
    click.echo(f"held out  {counts['heldout']:>8}  {out / 'heldout'} ({share})")
    click.echo(f"excluded  {counts['excluded']:>8}  equal or close to a held-out item")
    for name in sorted(done.why)[:5]:
        click.echo(f"          {name}: {done.why[name]}")
    click.echo(f"manifest            {out / 'manifest.json'}, root {done.manifest.root[:12]}")
