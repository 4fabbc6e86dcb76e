"""The docs as a site: `make docs` writes docs/_build/html.

The source folder is the whole repository, so that a link to a file of it leads there on GitHub and here.
"""

from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

from diloco_orchestrator.protocol.version import VERSION

project, author, release = "diloco-orchestrator", "the authors of diloco-orchestrator", VERSION
root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md", "examples/**.md", "infra/**.md"]
exclude_patterns = [".venv*", ".git", "build", "dist", "runs", "tests", "diloco_orchestrator", "docs/_build"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 6
myst_enable_extensions = ["attrs_inline"]
default_role = "literal"  # single backticks in docstrings are code
highlight_language = "text"  # of a block that names none, a command or a drawing: else coloured as Python
autodoc_member_order = "bysource"
autodoc_typehints = "description"
python_use_unqualified_type_names = True
lexers["mermaid"] = TextLexer()  # diagrams stay text here; GitHub draws them

html_theme = "furo"
html_title = f"diloco-orchestrator {release}"
html_additional_pages = {"index": "to_start.html"}
templates_path = ["_templates"]
html_copy_source = False
html_show_copyright = False
smartquotes = False  # docstrings quote values of code
