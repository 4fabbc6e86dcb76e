"""Parts of HTML pages: the document with its style and script, sections, tables. Pure: text to text, all escaped.

A page loads nothing from elsewhere, so that it can be mailed. Its one script draws curves over the SVGs, which stay for
print, for screen readers and where scripts do not run. Browsers run no other script: the page's own policy names this
one by its digest, so that nothing a run's records hold can be executed, even if it were not escaped.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files


def document(title: str, sections: Sequence[str]) -> str:
    """A whole HTML page. `sections`: their HTML; empty ones are left out."""
    script = "\n".join(_part(name) for name in ("uPlot.iife.min.js", "curves.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="'
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
            "form-action 'none'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_part('uPlot.min.css')}\n{_part('page.css')}</style>",
            "</head>",
            "<body>",
            f"<h1>{escape(title)}</h1>",
            "<main>",
            *filter(None, sections),
            "</main>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _part(name: str) -> str:
    return (files("diloco_orchestrator.cli") / "html-page" / name).read_text(encoding="utf-8")


def section(name: str, content: str, words: str) -> str:
    """An HTML section with a heading and the sentence `words` about it; empty if `content`, its HTML, is empty."""
    if not content:
        return ""
    anchor = name.lower().replace(" ", "-")
    curves = ' class="curves"' if "data-curves" in content else ""
    return f'<section id="{anchor}"{curves}><h2>{name}</h2><p>{escape(words)}</p>{content}</section>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table, which scrolls sideways on a phone; empty without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    return f"<td{' class=words' if len(text) > _LONG_CELL else ''}>{escape(text)}</td>"


_LONG_CELL = 10  # characters
