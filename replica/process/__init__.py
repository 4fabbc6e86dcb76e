"""The process of one attempt: claim, heartbeat, output, exit record."""
