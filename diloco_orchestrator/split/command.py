"""`diloco split`: divides data files into training and held-out ones, before any run."""

import json
from pathlib import Path
from typing import Any

import click

_EXAMPLES = 2  # of excluded items, for each rule
_MANY = 0.1  # excluded, of the items that are not held out


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
    help="Texts that share so many of their grams with a held-out one are left out.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, on stdout.")
def split(files: tuple[Path, ...], out: Path, as_json: bool, **given: Any) -> None:
    """Split FILES into training and held-out items, and write a manifest that replicas check training data by.

    FILES: .jsonl, .parquet and .txt (items between blank lines), folders of text files (an item each), folders that
    `save_to_disk` of `datasets` wrote. The same inputs give the same split, whatever their order; more data changes no
    earlier decision, unless lineage joins groups.
    """
    from diloco_orchestrator.split.files import Fields, split_files
    from diloco_orchestrator.split.near_duplicates import Rule
    from diloco_orchestrator.split.split import HeldoutSplit, Side

    settings = HeldoutSplit(share=given["share"], salt=given["salt"], near_duplicates=given["near_duplicates"])
    fields = Fields(text=given["text"], group=given["group"], id=given["id_"], parent=given["parent"])
    done = split_files(files, out, settings, fields)
    counts = {str(side): done.count(side) for side in Side}
    by_rule = {rule: sorted(name for name, each in done.why.items() if each.rule is rule) for rule in Rule}
    if as_json:
        rules = {str(rule): len(names) for rule, names in by_rule.items()}
        said = {"excluded_by": rules, "groups_of_several_spellings": len(done.spellings)}
        click.echo(json.dumps({"out": str(out), "root": done.manifest.root, **counts, **said}))
        return
    share = f"{counts['heldout'] / len(done.sides):.1%} of {len(done.sides)} items"
    click.echo(f"train     {counts['train']:>8}  {out / 'train'}")
    click.echo(f"held out  {counts['heldout']:>8}  {out / 'heldout'} ({share})")
    click.echo(f"excluded  {counts['excluded']:>8}  too close to a held-out item")
    for rule, names in by_rule.items():
        if names:
            examples = "; ".join(f"{name} is {done.why[name]}" for name in names[:_EXAMPLES])
            click.echo(f"{rule:>10}{len(names):>8}  {examples}{'; …' if len(names) > _EXAMPLES else ''}")
    if counts["excluded"] > _MANY * (len(done.sides) - counts["heldout"]):
        click.echo(
            f"          This is more than {_MANY:.0%} of the items that are not held out. Items made from one template "
            "share most of their grams: keep them together with --group, or give a higher --near-duplicates."
        )
    if done.spellings:
        spelled = ", ".join(map(repr, done.spellings[0]))
        click.echo(f"groups    {len(done.spellings):>8}  of several spellings count as one each, such as {spelled}")
    click.echo(f"manifest            {out / 'manifest.json'}, root {done.manifest.root[:12]}")
