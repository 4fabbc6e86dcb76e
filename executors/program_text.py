"""`program_text`: source of the programs that start on machines without our packages (`python -c`).

A program is a stdlib-only module of ours. It imports `process_contract`, as any module would; the text that travels
holds that module's source in place of the import.
"""

import ast
from pathlib import Path
from types import ModuleType

from diloco_orchestrator.executors import process_contract


def program_text(program: ModuleType) -> str:
    """The source of `program` with its import of `process_contract` replaced by the source of that module.

    Raises ValueError if the module does not import it exactly once, at the top level and under its own names.
    """
    source = Path(str(program.__file__)).read_text()
    imports = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and str(node.module).endswith(".process_contract")
    ]
    if len(imports) != 1 or any(alias.asname for alias in imports[0].names):
        raise ValueError(
            f"{program.__name__} cannot travel as text: it has {len(imports)} imports from process_contract. "
            "Write one `from …process_contract import NAME, …` at its top level, without `as`."
        )
    (found,) = imports
    lines = source.splitlines(keepends=True)
    contract = Path(process_contract.__file__).read_text()
    return "".join([*lines[: found.lineno - 1], contract, *lines[found.end_lineno :]])
