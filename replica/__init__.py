"""The code of each replica's process: one attempt, its training loop, its part in the rounds."""

if __name__ == "replica":  # imported by the short name
    from diloco_orchestrator.import_names import give_short_name

    give_short_name(__name__)
