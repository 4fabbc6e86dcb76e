"""A run that is launched in a notebook: a genuine kernel, and what its cell shows."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


@pytest.mark.slow
def test_a_cell_shows_the_run_while_it_goes_on_and_keeps_its_last_state(tmp_path: Path):
    """Updates of the one output come as messages of the kernel; nbclient keeps the newest of them."""
    (tmp_path / "train.py").write_text(
        """import torch


def train(ctx):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ctx.attach(model, optimizer) as replica:
        for x in replica.batches([torch.ones(4, 2)]):
            loss = model(x).square().mean()
            optimizer.zero_grad(), loss.backward(), optimizer.step(), replica.observe(loss=loss.item())
"""
    )
    code = (
        "from diloco_orchestrator import launch\n"
        "result = launch('train:train', store='runs/a', replicas=2, rounds=3, sync_every=2).wait()\n"
        "print(result.status)"
    )
    quiet = code.replace("runs/a", "runs/b").replace(".wait()", ".wait(progress=False)")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in (code, quiet)])
    drawn: list[str] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined, unused-ignore]
        def process_message(self, msg, cell, cell_index):  # type: ignore[no-untyped-def]
            if msg["msg_type"] == "update_display_data":
                drawn.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown, silent = ([each for each in cell.outputs if each.output_type == "display_data"] for cell in notebook.cells)
    assert len(shown) == 1 and not silent
    (panel,) = shown
    assert "completed" in panel.data["text/plain"] and "3/3 outer steps" in panel.data["text/plain"]
    assert "<pre" in panel.data["text/html"] and "\x1b" not in panel.data["text/plain"]
    assert len(drawn) > 1 and "completed" not in drawn[0] and len(set(drawn)) == len(drawn)
    printed = ["".join(each.text for each in cell.outputs if each.get("name") == "stdout") for cell in notebook.cells]
    assert printed == ["completed\n"] * 2
