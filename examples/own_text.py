"""The demo's language model on a folder of your own text, by `launch` instead of `diloco demo --text`.

python examples/own_text.py FOLDER STORE        # 200 kB of text at least, in two files or more
"""

import sys

from transformers import AutoModelForCausalLM

from diloco_orchestrator import launch

if __name__ == "__main__":
    folder, store = sys.argv[1:]
    run = launch(
        "diloco_orchestrator.demo.workload:train",
        store=store,
        replicas=2,
        rounds=2,
        sync_every=10,
        args={"text": folder},
    )
    result = run.wait()
    first, last = result.metrics[0].heldout, result.metrics[-1].heldout
    print(f"held-out loss {first:.2f} -> {last:.2f} nats per byte")
    model = AutoModelForCausalLM.from_pretrained(result.snapshot)
    print(f"{result.snapshot} holds {sum(p.numel() for p in model.parameters())} parameters")
    assert last < first
