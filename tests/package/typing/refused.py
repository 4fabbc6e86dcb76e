"""What users misspell, and type checkers refuse: every line with a mark must be an error, no other line may be one."""

from diloco_orchestrator import LocalProcessExecutor, Run, RunResult, launch, plan_launch, pull, verify


def train(ctx: int, more: str) -> None: ...


launch("m:f", store="x", replica=4)  # refused
launch("m:f", store="x", rounds="three")  # refused
launch("m:f", store="x", quorum="most")  # refused
launch("m:f", store="x", guard={"min_step": 3})  # refused
launch("m:f", "x", replicas=4)  # refused
launch("m:f", store="x", pin="always")  # refused
launch(train, store="x")  # refused
plan_launch("m:f", "x", executor=LocalProcessExecutor(), round=3)  # refused
run: Run = launch("m:f", store="x")
result: RunResult = run  # refused
run.wait(timeout="1 min")  # refused
run.stauts()  # refused
count: str = pull("x", "y")  # refused
print(verify("x").agreed)  # refused
LocalProcessExecutor(grace="10")  # refused
