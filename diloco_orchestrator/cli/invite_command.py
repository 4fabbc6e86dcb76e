"""`diloco invite` makes a link for a machine without an account; `diloco revoke` ends what a replica's links allow."""

import base64
import re

import click

from diloco_orchestrator.cli.shared import json_option, reader_of, say, stamp, url_argument

_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_replica = click.option("--replica", type=click.IntRange(min=0), required=True, metavar="N", help="An invited replica.")


@click.command()
@url_argument
@_replica
@click.option("--expires", default="24h", show_default=True, metavar="TIME", help="After which it ends: 90m, 24h, 7d.")
@click.option("--role", metavar="ARN", help="Assume this role for its credentials.  [default: a federation token]")
@click.option(
    "--credentials-last", "last", metavar="TIME",
    help="How long temporary credentials (15m at least) or signed requests are valid: the machine has to join while "
    "the first ones are; whoever supervises the run renews them.  [default: as the link, at most 12h of a role, 36h of "
    "a user, 7d on R2 and of requests]",
)  # fmt: skip
@click.option("--own-credentials", is_flag=True, help="Mint none: the machine that joins has its own, or needs none.")
@click.option(
    "--presigned", is_flag=True,
    help="Sign its requests one by one, where the store mints no credentials (S3, GCS, Azure): whoever supervises the "
    "run signs those for what is new every few seconds.",
)  # fmt: skip
@json_option
def invite(
    url: str,
    replica: int,
    expires: str,
    role: str | None,
    last: str | None,
    own_credentials: bool,
    presigned: bool,
    as_json: bool,
) -> None:
    """Print a link to replica N of the run in URL, for a machine without an account: `diloco join LINK`.

    The run was launched with `--invited`, and names N there. The link is a secret: send it to one person. It runs only
    code whose digest it names, with temporary credentials that read the run and create objects of replica N alone.
    They are renewed in the bucket, for the machine alone, while somebody supervises the run (`launch`, `attach`).
    """
    from diloco_orchestrator.errors import ConfigError
    from diloco_orchestrator.join.grants import create_grant
    from diloco_orchestrator.join.invitations import check_may_invite, create_invitation
    from diloco_orchestrator.join.link import Link
    from diloco_orchestrator.join.temporary_credentials import longest_s, mint
    from diloco_orchestrator.join.windows import LONGEST_S, Windows
    from diloco_orchestrator.protocol.signatures import to_text
    from diloco_orchestrator.store.open_store import options_elsewhere
    from diloco_orchestrator.store.signers import signer_of

    if own_credentials and (role is not None or last is not None):
        raise click.UsageError("--own-credentials mints none: leave --role and --credentials-last out.")
    lasts_s = _seconds_of("--expires", expires)
    last_s = lasts_s if last is None else _seconds_of("--credentials-last", last)
    log = reader_of(url).log
    if presigned and (role is not None or own_credentials):
        raise click.UsageError("--presigned mints no credentials: leave --role and --own-credentials out.")
    lent_s = min(lasts_s, last_s, LONGEST_S if presigned else longest_s(log.store.url, role))
    check_may_invite(log, replica)
    run = log.run
    if run.signed_by is None or run.code_sha256 is None:
        raise ConfigError(f"{log.store.url} has no code that another machine could run.")
    signer = signer_of(log.store.url, {}) if presigned else None
    credentials = None if own_credentials or presigned else mint(log.store, replica, lent_s, role)
    where = options_elsewhere(log.store.url, {})
    ours = stamp()
    user, invitation = create_invitation(log, replica, lasts_s, ours)
    if credentials is not None:
        create_grant(log.store, invitation, 1, credentials, lent_s, role, ours)
    requests = b"" if signer is None else Windows(log.store, signer, ours).open(invitation, lent_s).to_bytes()
    link = Link(
        url=log.store.url,
        endpoint_url=where.get("endpoint_url", ""),
        region_name=where.get("region_name", ""),
        run_sha256=log.run_sha256,
        code_sha256=run.code_sha256,
        signed_by=run.signed_by.key,
        replica_id=replica,
        seed=to_text(user.seed),
        credentials=credentials and credentials.reads,
        requests=base64.urlsafe_b64encode(requests).decode(),
        not_after=invitation.not_after,
    )
    say(as_json, {"link": link.text(), "replica": replica, "not_after": link.not_after}, link.text())


@click.command()
@url_argument
@_replica
@json_option
def revoke(url: str, replica: int, as_json: bool) -> None:
    """Revoke all links to replica N of the run in URL, and end the attempt that runs by one of them."""
    from diloco_orchestrator.join import invitations

    found = invitations.revoke(reader_of(url).log, replica, stamp())
    words = (
        f"{found} links are revoked. Whoever supervises the run launches the replica's next attempt, from which on no "
        "key of theirs counts. Temporary credentials and signed requests go on to read, and to create objects of this "
        "replica, until they end."
        if found
        else f"replica {replica} has no link."
    )
    say(as_json, {"revoked": found}, words)


def _seconds_of(option: str, text: str) -> float:
    """The seconds that a text such as 90m, 24h or 7d means. Raises `click.UsageError` for another text."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text.strip())
    if found is None:
        raise click.UsageError(f"{option} {text}: write a number and m, h or d, such as 90m, 24h or 7d.")
    return int(found[1]) * _SECONDS[found[2]]
