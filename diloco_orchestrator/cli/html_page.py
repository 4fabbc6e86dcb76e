"""Parts of our HTML pages: the document with its style, sections, tables. Pure: text to text, all of it escaped.

A page has no script and no external resource, so that it can be mailed, and is readable on a phone.
"""

from collections.abc import Sequence
from html import escape


def document(title: str, sections: Sequence[str]) -> str:
    """A whole page. `sections`: HTML; those that are empty are left out."""
    return _PAGE.format(title=escape(title), body="\n".join(filter(None, sections)))


def section(name: str, content: str, words: str) -> str:
    """A section with a heading and a sentence about it; empty if `content`, HTML, is."""
    if not content:
        return ""
    anchor = name.lower().replace(" ", "-")
    return f'<section id="{anchor}"><h2>{name}</h2><p>{escape(words)}</p>{content}</section>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, which scrolls sideways on a phone; empty without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    """A table cell; one with a sentence gets a width readable on a phone."""
    return f"<td{' class=words' if len(text) > _LONG_CELL else ''}>{escape(text)}</td>"


_LONG_CELL = 10  # characters

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1c1e21; background: #fff; margin: 0 auto; max-width: 720px;
       padding: 16px; }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere; }} h2 {{ font-size: 1.05rem; margin: 1.6em 0 0; }}
p {{ color: #5c6470; margin: 0 0 .4em; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; border-left: 4px solid #8b95a1;
     padding-left: 12px; }}
dl.completed {{ border-color: #3f7d3a; }} dl.halted {{ border-color: #d08700; }} dl.failed {{ border-color: #b91c1c; }}
dt {{ color: #5c6470; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
svg {{ width: 100%; height: auto; }} svg text {{ font-size: 12px; fill: #5c6470; }} .grid {{ stroke: #e6e8eb; }}
.legend span {{ margin-right: 1em; white-space: nowrap; }}
.legend i {{ display: inline-block; width: 12px; height: 12px; margin-right: 5px; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: 2px 10px 2px 0; vertical-align: top; }} th {{ font-weight: 600; }}
.words {{ min-width: 13em; overflow-wrap: anywhere; }}
.strip {{ display: flex; flex-wrap: wrap; }} .strip b {{ width: 9px; height: 14px; margin: 1px; }}
.in {{ background: #2563a8; }} .out {{ background: #e1e4e8; }}
@media (max-width: 520px) {{
svg text {{ font-size: 20px; }} th, td {{ font-size: 14px; }}
dl {{ grid-template-columns: 1fr; }} dt {{ margin-top: .4em; }} }}
@media (prefers-color-scheme: dark) {{
body {{ color: #e4e6ea; background: #16181c; }} .grid {{ stroke: #2c3036; }} .out {{ background: #33383f; }}
p, dt, svg text {{ color: #9aa3ae; fill: #9aa3ae; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
